"""Tiny configuration of Catch, experiments built from it, and a deterministic fake env and agent.

`config` and `experiment` are for tests of large components. `FakeEnv` and `ChecksumAgent` are for
tests that compare results of an actor or a task with values computed from the frames alone.
"""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from speedyzero_jax.agents.base import ActOutput, Variables
from speedyzero_jax.agents.efficientzero import agent as efficientzero
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import BatchedEnv
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.run import build, factories
from speedyzero_jax.run.experiment import ALONE, Experiment, Membership
from speedyzero_jax.types import EnvStep
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner

# One set of shapes for all tests, so that every program compiles once and stays in the cache.
OVERRIDES = (
  "env.frame_stack=2", "network.channels=8", "network.reduced_channels=4", "network.head_hidden=8",
  "network.lstm_hidden=8", "network.projection_hidden=8", "network.projection_out=8",
  "network.prediction_hidden=8", "search.simulations=2", "search.max_considered=2",
  "actor.lanes=3", "actor.random_steps=40", "actor.weights_interval=2",
  "reanalyse.schedule=sweep", "reanalyse.max_age=8", "reanalyse.weights_interval=3",
  "reanalyse.block=32", "refresh.max_age=6", "refresh.weights_interval=2", "refresh.block=32",
  "optim.warmup_steps=4", "learner.batch_size=8", "learner.steps=12", "learner.tail_steps=2",
  "learner.devices=1", "loss.unroll_steps=2", "loss.td_steps=3", "evaluation.episodes=2",
  "evaluation.at_end=false", "run.env_steps=150", "run.mode=lockstep", "run.checkpoint_interval=4",
  "run.log_interval=3",
)  # fmt: skip


@functools.cache
def config(*overrides: str) -> Config:
  """The tiny configuration of Catch, with `key=value` overrides."""
  return loader.load(["quickstart"], [*OVERRIDES, *overrides])


def experiment(
  folder: Path,
  *overrides: str,
  resume_step: int | None = None,
  membership: Membership = ALONE,
  shared: bool = True,
) -> contextlib.AbstractContextManager[Experiment]:
  """Builds a tiny run in this folder.

  Args:
    folder: the run folder.
    overrides: `key=value` overrides of the tiny configuration.
    resume_step: learner step of the newest checkpoint, to resume from it; None for a new run.
    membership: place among learner processes.
    shared: whether to reuse compiled programs of earlier experiments with the same shapes and
      losses, since tracing takes longer than a tiny run. Compilation is not reported then.
  """
  made = config(*overrides)
  programs = sharing(*_keys(made)) if shared else contextlib.nullcontext()
  return built(made, folder, programs, resume_step, membership)


@contextlib.contextmanager
def built(
  made: Config,
  folder: Path,
  programs: contextlib.AbstractContextManager[Any],
  resume_step: int | None,
  membership: Membership = ALONE,
) -> Iterator[Experiment]:
  """Builds a run with `run.build.build` while `programs` is entered; closes it on exit."""
  with MetricsLogger(made, folder, membership.exchange_metrics) as logger:
    with programs:
      resume = resume_step is not None
      opened = build.build(made, folder, logger, resume=resume, membership=membership)
    with contextlib.closing(opened):
      yield opened


def sharing(learning: Config, acting: Config) -> contextlib.AbstractContextManager[Any]:
  """Makes `build` reuse the `Learner` and the `Inference` made earlier for equal keys."""
  return mock.patch.multiple(
    build,
    Learner=lambda config, agent, mesh, **_: shared_learner(learning, mesh),
    Inference=lambda agent, mesh, **_: shared_inference(acting, mesh),
  )


def _keys(made: Config) -> tuple[Config, Config]:
  """Keys for `sharing`: configurations with equal programs have equal keys."""
  own, defaults = made.agent, type(made.agent)()
  # This schedule has all tasks; programs do not depend on when they run.
  tasks = dataclasses.replace(defaults.reanalyse, schedule="batch", explore=own.reanalyse.explore)
  every = dataclasses.replace(own, reanalyse=tasks, refresh=defaults.refresh)
  steps = dataclasses.replace(made.learner, steps=1, tail_steps=0, prefetch=1)
  learning = Config(agent=every, env=made.env, optim=made.optim, learner=steps)
  return learning, Config(agent=every, env=made.env)


class SharedLearner(Learner):
  """Learner that caches its initial state for each key."""

  @functools.cache  # noqa: B019
  def _initial(self, key: bytes):
    return super().init(jax.random.wrap_key_data(np.frombuffer(key, np.uint32)))

  def init(self, key):
    # A copy, since the state is donated.
    return jax.tree.map(jnp.copy, self._initial(np.asarray(jax.random.key_data(key)).tobytes()))


@functools.cache
def shared_learner(config: Config, mesh: Mesh) -> Learner:
  return SharedLearner(config, factories.make_agent(config), mesh)


@functools.cache
def shared_inference(config: Config, mesh: Mesh) -> Inference:
  return Inference(factories.make_agent(config), mesh)


class FakeEnv(BatchedEnv):
  """Episodes that depend only on seed, lane and actions; records all steps in `shown`."""

  num_actions = 3
  frame_shape = (2, 1, 2)
  frame_dtype = np.dtype(np.uint8)

  def __init__(self, lanes: int, seed: int = 0):
    self.num_lanes, self._seed = lanes, seed
    self.shown: list[EnvStep] = []
    self.closed = False

  def reset(self) -> EnvStep:
    self._state = [zlib.crc32(bytes([lane]), self._seed) for lane in range(self.num_lanes)]
    no = np.zeros(self.num_lanes, bool)
    self.shown = [EnvStep(self._frames(), np.zeros(self.num_lanes, np.float32), ~no, no, no, no)]
    return self.shown[-1]

  def step(self, action: np.ndarray) -> EnvStep:
    assert action.shape == (self.num_lanes,)
    assert action.min() >= 0 and action.max() < self.num_actions
    ended = self.shown[-1].terminated | self.shown[-1].truncated
    taken = np.where(ended, 0, action).tolist()
    self._state = [zlib.crc32(bytes([a]), s) for a, s in zip(taken, self._state, strict=True)]
    dice = np.array([state % 12 for state in self._state])
    terminated, truncated = (dice < 2) & ~ended, (dice == 2) & ~ended
    reward = np.array([state // 12 % 7 - 3.0 for state in self._state], np.float32)
    reward = np.where(ended, 0, reward).astype(np.float32)
    over = (dice == 1) & terminated
    self.shown.append(EnvStep(self._frames(), reward, ended, terminated, truncated, over))
    return self.shown[-1]

  def close(self) -> None:
    self.closed = True

  def _frames(self) -> np.ndarray:
    rows = [list(state.to_bytes(4, "little")) for state in self._state]
    return np.array(rows, np.uint8).reshape(-1, *self.frame_shape)


def checksums(stacks, xp=np):
  """Hashes stacks of frames [B, S, H, W, C] to [B] below 2**16; `xp` is numpy or jax.numpy."""
  flat = stacks.reshape(stacks.shape[0], -1).astype(xp.uint32)
  place = xp.arange(1, flat.shape[1] + 1, dtype=xp.uint32)
  mixed = (flat + 1) * (place * xp.uint32(2654435761) + xp.uint32(40503))
  return (mixed ^ (mixed >> 15)).sum(1, dtype=xp.uint32) % 65521


def of_stacks(stacks, xp=np):
  """`ChecksumAgent`'s policy [B, 3], search value [B] and value [B] for stacks [B, S, ...]."""
  crc = checksums(stacks, xp)
  policy = xp.stack([crc % 5, crc % 7, crc % 11 + 1], axis=1).astype(xp.float32)
  policy = policy / policy.sum(1, keepdims=True)
  return policy, (crc % 1000).astype(xp.float32), (crc % 997).astype(xp.float32)


class ChecksumAgent(efficientzero.EfficientZero):
  """EfficientZero with a single number as network, added to values computed by hashing frames.

  Storage, tasks, targets and selection are real. Actions depend on the frames and, when exploring,
  on the key, the lane and the progress.
  """

  def __init__(
    self, config, shape=FakeEnv.frame_shape, dtype=FakeEnv.frame_dtype, actions=FakeEnv.num_actions
  ):
    with mock.patch.object(efficientzero, "NetworkDef"):  # takes a second to create
      super().__init__(config, shape, dtype, actions)

  def init(self, key=None, number: float = 0.0) -> Variables:
    shapes = {"b": (2,), "of_loss": (3,), "w": (2, 3)}
    params = {name: jnp.full(shape, number, jnp.float32) for name, shape in shapes.items()}
    return Variables(params, {"n": jnp.zeros((), jnp.int32)})

  def published(self, variables):
    return variables._replace(params={name: variables.params[name] for name in ("b", "w")})

  def act(self, variables, inputs, key, progress, *, explore):
    policy, search_value, value = of_stacks(inputs.frames, jnp)
    salt = jax.random.key_data(key).sum() % 1000 + (1000 * progress).astype(jnp.uint32)
    salt += inputs.lane.astype(jnp.uint32)
    action = (checksums(inputs.frames, jnp) + explore * salt) % policy.shape[1]
    number = variables.params["w"][0, 0]
    columns = {"policy": policy, "search_value": search_value + number, "value": value + number}
    return ActOutput(action.astype(jnp.int32), columns, (), {})

  def _searched(self, variables, inputs, key):
    frames = inputs["frames"]
    states = range(frames.shape[1] - self._stack + 1)
    seen = [of_stacks(frames[:, k : k + self._stack], jnp) for k in states]
    policy, search_value, value = (jnp.stack(part, 1) for part in zip(*seen, strict=True))
    number = variables.params["w"][0, 0]
    searched = search_value + number
    if "known_action" in inputs:  # so that known edges leave traces
      searched = (searched + inputs["known_action"] + inputs["known_qvalue"]) % 1000
    return {"policy": policy, "search_value": searched, "value": value + number}

  def _values(self, variables, inputs, key):
    return {"value": self._searched(variables, inputs, key)["value"]}


@functools.cache
def checksum_parts(*overrides: str) -> tuple[ChecksumAgent, Inference]:
  """A `ChecksumAgent` of the tiny configuration with overrides, and its compiled programs."""
  made = config(*overrides)
  agent = ChecksumAgent(made)
  return agent, Inference(agent)
