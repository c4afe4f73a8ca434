"""What the tests of roles, checkpoints and whole runs share: one small configuration, and plain stand-ins for parts."""

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import Blueprint
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import BatchedEnv
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.run import experiment as training_module
from speedyzero_jax.run.experiment import Training
from speedyzero_jax.types import EnvStep, SearchResult
from speedyzero_jax.workers.learner import Learner, LearnerState

# One set of shapes, so that every program compiles once for all files (and stays in the compilation cache).
OVERRIDES = (
  "env.frame_stack=2", "network.channels=8", "network.reduced_channels=4", "network.head_hidden=8",
  "network.lstm_hidden=8", "network.projection_hidden=8", "network.projection_out=8", "network.prediction_hidden=8",
  "search.simulations=2", "search.max_considered=2", "actor.lanes=3", "actor.random_steps=40",
  "actor.weights_interval=2", "reanalyse.schedule=sweep", "reanalyse.max_age=8", "reanalyse.weights_interval=3",
  "reanalyse.block=32", "refresh.max_age=6", "refresh.weights_interval=2", "refresh.block=32",
  "optim.warmup_steps=4", "learner.batch_size=8",
  "learner.steps=12", "learner.tail_steps=2", "loss.unroll_steps=2", "learner.devices=1", "loss.td_steps=3",
  "evaluation.episodes=2", "evaluation.at_end=false", "run.env_steps=150", "run.mode=lockstep",
  "run.checkpoint_interval=4", "run.log_interval=3",
)  # fmt: skip


def config(*overrides: str):
  """The tiny configuration of Catch, with `key=value` changes."""
  return loader.load(["quickstart"], [*OVERRIDES, *overrides])


class FakeEnv(BatchedEnv):
  """Random episodes that depend on nothing but the seed, the lane and the actions taken; remembers what it showed."""

  num_actions = 3
  frame_shape = (2, 1, 2)
  frame_dtype = np.dtype(np.uint8)

  def __init__(self, lanes: int, seed: int = 0):
    self.num_lanes, self._seed = lanes, seed
    self.shown: list[EnvStep] = []

  def reset(self) -> EnvStep:
    self._state = [zlib.crc32(bytes([lane]), self._seed) for lane in range(self.num_lanes)]
    no = np.zeros(self.num_lanes, bool)
    self.shown = [EnvStep(self._frames(), np.zeros(self.num_lanes, np.float32), ~no, no, no, no)]
    return self.shown[-1]

  def step(self, action: np.ndarray) -> EnvStep:
    assert (
      action.shape == (self.num_lanes,) and action.min() >= 0 and action.max() < self.num_actions
    )
    ended = self.shown[-1].terminated | self.shown[-1].truncated
    taken = np.where(ended, 0, action)
    self._state = [
      zlib.crc32(bytes([a]), state) for a, state in zip(taken.tolist(), self._state, strict=True)
    ]
    dice = np.array([state % 12 for state in self._state])
    terminated, truncated = (dice < 2) & ~ended, (dice == 2) & ~ended
    reward = np.array([state // 12 % 7 - 3.0 for state in self._state], np.float32)
    step = EnvStep(
      self._frames(),
      np.where(ended, 0, reward).astype(np.float32),
      ended,
      terminated,
      truncated,
      dice == 1,
    )
    self.shown.append(step._replace(game_over=step.game_over & terminated))
    return self.shown[-1]

  def close(self) -> None:
    pass

  def _frames(self) -> np.ndarray:
    return np.array([list(state.to_bytes(4, "little")) for state in self._state], np.uint8).reshape(
      -1, 2, 1, 2
    )


class FakeInference(Inference):
  """Says of every root what a checksum of its frames (and, for the action, the key) says."""

  devices = 1

  def __init__(self, *, explore: bool = True):
    self._explore = explore
    self.temperatures: list[float] = []

  def search(self, variables, frames, key, temperature, *, explore):  # type: ignore[override]
    assert explore == self._explore
    self.temperatures.append(temperature)
    policy, search_value, value = of_stacks(frames)
    salt = int(np.asarray(jax.random.key_data(key)).sum())
    action = np.array(
      [(zlib.crc32(stack.tobytes()) + salt) % policy.shape[1] for stack in frames], np.int32
    )
    return SearchResult(action[:, None], policy[:, None], search_value[:, None], value[:, None])


def of_stacks(stacks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Policy [B, 3], search value [B] and value [B] that `FakeInference` gives to stacks of frames [B, S, H, W, C]."""
  crc = np.array([zlib.crc32(stack.tobytes()) for stack in stacks])
  policy = np.stack([crc % 5, crc % 7, crc % 11 + 1], axis=1).astype(np.float32)
  return (
    policy / policy.sum(1, keepdims=True),
    (crc % 1000).astype(np.float32),
    (crc % 997).astype(np.float32),
  )


@contextlib.contextmanager
def training(config: Config, folder: Path, *, resume_step: int | None = None) -> Iterator[Training]:
  """A `Training` in this folder, closed at the end; resumed if `resume_step` (the newest checkpoint's) is given."""
  with Reporter(config, folder, "tiny", resume_step) as reporter:
    opened = Training(config, folder, reporter, resume=resume_step is not None)
    try:
      yield opened
    finally:
      opened.close()


def share_compiled(patch: pytest.MonkeyPatch) -> None:
  """Lets all runs of one network and learner share their compiled functions: tracing takes longer than a tiny run."""
  patch.setattr(training_module, "Learner", _learner)

  def inference(config: Config, blueprint: Blueprint, mesh: Mesh, **_: Any) -> Inference:
    return _inference(_numeric(config), blueprint, mesh)

  patch.setattr(training_module, "Inference", inference)


def _numeric(config: Config) -> Config:
  """Without what compiled functions do not look at."""
  default = Config()
  return dataclasses.replace(
    config, run=default.run, refresh=default.refresh, reanalyse=default.reanalyse, actor=default.actor,
    evaluation=default.evaluation, replay=dataclasses.replace(config.replay, frames="auto"),
    profile=default.profile, learner=dataclasses.replace(config.learner, steps=1, tail_steps=0),
  )  # fmt: skip


def _learner(config: Config, *rest: Any, **_: Any) -> Learner:
  return _make_learner(_numeric(config), *rest)


class _SharedLearner(Learner):
  """Traces initialisation and its shapes once."""

  def __init__(self, *args: Any):
    super().__init__(*args)
    self._initial: dict[bytes, LearnerState] = {}
    self._abstract = super().abstract()

  def init(self, key: jax.Array) -> LearnerState:
    name = np.asarray(jax.random.key_data(key)).tobytes()
    if name not in self._initial:
      self._initial[name] = super().init(key)
    return jax.tree.map(jnp.copy, self._initial[name])  # the copy will be donated

  def abstract(self) -> LearnerState:
    return self._abstract


@functools.cache
def _make_learner(config: Config, *rest: Any) -> Learner:
  return _SharedLearner(config, *rest)


@functools.cache
def _inference(config: Config, blueprint: Blueprint, mesh: Mesh) -> Inference:
  return Inference(config, blueprint, mesh)
