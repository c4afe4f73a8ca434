"""Building blocks of benchmarks: parts of the package as in a run, with random experience.

Most benchmarks access the package through this module.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from common import ROOT
from costs import matmul_flops, median_seconds, peak_flops

sys.path.insert(0, str(ROOT))  # a clone works without being installed

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import Agent, Task, Work
from speedyzero_jax.config import loader
from speedyzero_jax.config.agents import agent_module
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config, ReplayConfig
from speedyzero_jax.envs.batched_env import VECTOR_GAMES, make_env
from speedyzero_jax.replay.replay import Replay, Selection
from speedyzero_jax.run import factories
from speedyzero_jax.run.batch_pipeline import PreparedBatch, draw
from speedyzero_jax.run.factories import enable_compilation_cache
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import Program
from speedyzero_jax.types import Slots
from speedyzero_jax.workers.inference import Inference, steps_of
from speedyzero_jax.workers.learner import Learner, make_mesh
from speedyzero_jax.workers.sweeper import make_sweepers, run_task, write_results
from speedyzero_jax.workers.weights import WeightsStore, publication

memory.retain_freed()  # as a run does

__all__ = [
  "Selection", "Slots", "Work", "enable_compilation_cache", "make_sweepers", "median_seconds",
  "peak_flops", "write_results",
]  # fmt: skip
Frame = tuple[int, int, int]  # H, W, C
_EPISODE = 500  # mean length of random episodes, slots
_SLOTS = 4096  # replay capacity if only one batch is drawn


def load(
  parser: argparse.ArgumentParser, presets: Sequence[str], settings: Sequence[str]
) -> Config:
  """Loads a configuration from command-line arguments; exits the program if it is invalid."""
  try:
    return loader.load(presets, settings)
  except ConfigError as error:
    parser.error(str(error))


def atari_frame(parser: argparse.ArgumentParser, config: Config) -> Frame:
  """Frame shape of an Atari game; exits the program for other games."""
  env = config.env
  if env.game in VECTOR_GAMES:
    parser.error(f"env.game: must be an Atari game, but {env.game} has vector observations")
  return env.frame_size, env.frame_size, 1 if env.grayscale else 3


def make_agent(config: Config, frame: Frame, actions: int) -> Agent:
  """Creates the configured agent for a game with this frame shape and number of actions."""
  return agent_module(config.agent.name).make_agent(config, frame, np.uint8, actions)


def empty_replay(config: Config, agent: Agent) -> Replay:
  """Creates the replay of a run with this configuration."""
  return factories.make_replay(
    config, agent, make_mesh(jax.local_devices()), lambda _: None, seed=0
  )


class Player:
  """Generates random experience in the order in which actors would append it."""

  def __init__(self, agent: Agent, lanes: int):
    self.rng = np.random.default_rng(0)
    self._schema, self._heads, self._open = agent.schema, [0] * lanes, [False] * lanes

  def slots(self, n: int, step: int) -> Slots:
    """Generates the next n slots of each lane, with weights of learner step `step`."""
    return Slots.concatenate([self._of_lane(lane, n, step) for lane in range(len(self._heads))])

  def _of_lane(self, lane: int, n: int, step: int) -> Slots:
    rng, schema, start = self.rng, self._schema, self._heads[lane]
    end = rng.random(n) < 1 / _EPISODE
    begins, self._open[lane] = not self._open[lane], not end[-1]
    self._heads[lane] += n
    columns = {
      "frame": rng.integers(0, 256, (n, *schema.frame.shape), np.uint8),
      "first": np.concatenate([[begins], end[:-1]]),
      "terminated": end,
      "truncated": np.zeros(n, bool),
      "action": np.where(end, -1, rng.integers(0, schema.num_actions, n)).astype(np.int32),
      "reward": rng.normal(size=n).astype(np.float32),
      "step": np.full(n, step, np.int32),
    }
    columns |= {x.name: rng.random((n, *x.shape), np.float32) for x in schema.extra}
    return Slots.of_lane(lane, start, columns)


def filled_replay(config: Config, agent: Agent) -> tuple[Replay, Player, int]:
  """Creates a full replay with varied priorities; also returns the player and learner step 100."""
  replay, player = empty_replay(config, agent), Player(agent, config.actor.lanes)
  slots = config.replay.capacity
  chunk = max(slots // config.actor.lanes // 100, 1)
  for step in range(-(-slots // config.actor.lanes // chunk)):
    replay.append(player.slots(chunk, step))
  for _ in range(20):
    selection = replay.select(max(slots // 20, 1))
    replay.update(selection, player.rng.exponential(size=len(selection.lane)), 100)
  return replay, player, 100


class Cost(NamedTuple):
  """Cost of a program."""

  compile_seconds: float
  flops: int  # per call and device


def cost(program: Program, *args: Any) -> Cost:
  """Compiles a program for these arguments and returns its cost."""
  begin = time.perf_counter()
  program.prepare(*args)
  seconds = time.perf_counter() - begin
  return Cost(seconds, matmul_flops(program.function, *args))


class Model:
  """An agent's tasks with a newly initialized network."""

  def __init__(self, agent: Agent, devices: Sequence[jax.Device]):
    mesh = make_mesh(devices)
    self.agent, self.inference = agent, Inference(agent, mesh)
    everywhere, key = NamedSharding(mesh, PartitionSpec()), jax.random.key(0)
    self.weights = WeightsStore(
      agent.subscriptions, everywhere, jax.jit(agent.init)(key), publication(agent)
    )

  def run(self, task: str, frames: np.ndarray) -> dict[str, Any]:
    """Computes results, in host memory, for the n states of each window [B, S-1+n, H, W, C]."""
    version = self.weights.latest(self.agent.tasks[task].subscription)
    return self.inference.compute(version, task, {"frames": frames}, jax.random.key(0))

  def cost(self, task: str, frames: np.ndarray) -> Cost:
    """Compiles a task for such windows and returns its cost."""
    version = self.weights.latest(self.agent.tasks[task].subscription)
    inputs = {"frames": frames, **steps_of(0, len(frames))}
    return cost(self.inference.tasks[task], version.variables, inputs, jax.random.key(0))


def batch_drawing(
  config: Config, agent: Agent, replay: Replay, model: Model | None
) -> Callable[[], PreparedBatch]:
  """Returns a function that draws a batch with frames; a model reanalyzes it first."""

  def execute(works: list[Work], learner_step: int) -> None:
    if model is not None:
      key = jax.random.key(learner_step)
      for work in works:
        run_task(agent.tasks[work.task], model.inference, replay, model.weights, work, key)

  return lambda: draw(agent, replay, config.learner.batch_size, 0, execute, nullcontext)


class Training:
  """A learner with a batch of random experience.

  Args:
    config: the run's configuration.
    agent: the configured agent.
    devices: devices over which the batch is sharded.
    from_host: whether each step transfers the batch to the devices and fetches the result.
  """

  def __init__(
    self, config: Config, agent: Agent, devices: Sequence[jax.Device], from_host: bool = False
  ):
    config = dataclasses.replace(config, replay=ReplayConfig(_SLOTS, "host"))
    replay, _, _ = filled_replay(config, agent)
    self._learner = Learner(config, agent, make_mesh(devices))
    self._state = self._learner.init(jax.random.key(0))
    self._batch = batch_drawing(config, agent, replay, None)().arrays
    self._from_host, self._key = from_host, jax.random.key(1)
    if not from_host:
      self._batch = self._learner.put(self._batch)

  def step(self) -> None:
    """Performs one update and blocks until it is done."""
    batch = self._learner.put(self._batch) if self._from_host else self._batch
    self._state, result = self._learner.step(self._state, batch, self._key)
    if self._from_host:
      jax.device_get(result)
    jax.block_until_ready(self._state)

  def cost(self) -> Cost:
    """Compiles the step, for a batch on the devices, and returns its cost."""
    learner = self._learner
    return cost(learner.update, *learner.arguments(self._state, self._batch, self._key))


def random_results(task: Task, work: Work, rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Random numbers in place of a task's results."""
  return {x.name: rng.random((*work.real.shape, *x.shape), np.float32) for x in task.results}


def environment(config: Config, lanes: int, steps: int) -> Callable[[], Any]:
  """Returns a function that plays `steps` random agent steps in each training environment."""
  env = make_env(config.env, lanes, 0, training=True)
  rng = np.random.default_rng(0)
  actions = rng.integers(0, env.num_actions, (steps, lanes)).astype(np.int32)
  env.reset()

  def play() -> None:
    for action in actions:
      env.step(action)

  return play
