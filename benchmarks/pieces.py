"""Pieces of the package behind a small interface, for speed.py, replay.py and peers.

Apart from `witness/` this is the only module of the benchmarks that imports the package.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from common import ROOT

sys.path.insert(0, str(ROOT))  # a clone works without being installed

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from speedyzero_jax.agents.efficientzero.inference import Inference

from speedyzero_jax.agents.efficientzero.reanalyse import BatchReanalyser
from speedyzero_jax.config import loader
from speedyzero_jax.config.checks import VECTOR_GAMES
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run import batch_pipeline
from speedyzero_jax.run.builders import Game, enable_compilation_cache, make_replay
from speedyzero_jax.run.profiler import search_cost
from speedyzero_jax.system import memory
from speedyzero_jax.system.costs import cost_of, peak_flops
from speedyzero_jax.types import LearnerBatch, Segment
from speedyzero_jax.workers.learner import Learner, make_mesh
from speedyzero_jax.workers.weights import REANALYSER, WeightsStore

memory.keep_freed()  # as a run does

__all__ = ["enable_compilation_cache", "peak_flops"]
Frame = tuple[int, int, int]  # H, W, C
_EPISODE = 500  # mean length of random episodes, slots


def load(
  parser: argparse.ArgumentParser, presets: Sequence[str], settings: Sequence[str]
) -> Config:
  """The configuration given on a command line; an invalid one ends the program."""
  try:
    return loader.load(presets, settings)
  except loader.ConfigError as error:
    parser.error(str(error))


def atari_frame(parser: argparse.ArgumentParser, config: Config) -> Frame:
  """Shape of an Atari game's frames; another game ends the program."""
  env = config.env
  if env.game in VECTOR_GAMES:
    parser.error(f"env.game: {env.game} has vector observations, an Atari game is needed")
  return env.frame_size, env.frame_size, 1 if env.grayscale else 3


def dtype_of(config: Config) -> str:
  """The network's dtype."""
  return config.agent.network.dtype


def unroll_steps(config: Config) -> int:
  """K: a sample has K + 1 states."""
  return config.agent.loss.unroll_steps


def _noise(config: Config, frame: Frame, actions: int) -> LearnerBatch:
  """A random batch."""
  rng, size = np.random.default_rng(0), config.learner.batch_size
  steps = unroll_steps(config)
  states, ones = (size, steps + 1), np.ones((size, steps), np.float32)
  return LearnerBatch(
    frames=rng.integers(0, 256, (size, config.env.frame_stack + steps, *frame), dtype=np.uint8),
    action=rng.integers(0, actions, (size, steps)).astype(np.int32),
    weight=rng.random(size).astype(np.float32),
    value=rng.normal(size=states).astype(np.float32),
    value_prefix=rng.normal(size=(size, steps)).astype(np.float32),
    policy=rng.dirichlet(np.ones(actions), states).astype(np.float32),
    value_mask=np.ones(states, np.float32),
    prefix_mask=ones,
    policy_mask=np.ones(states, np.float32),
    consistency_mask=ones,
  )


class Training:
  """A learner with a random batch.

  Args:
    config: of the run.
    frame: shape of the game's frames.
    actions: number of actions.
    devices: that share the batch.
    from_host: put the batch on the devices in every step, and fetch the result.
  """

  def __init__(
    self,
    config: Config,
    frame: Frame,
    actions: int,
    devices: Sequence[jax.Device],
    from_host: bool = False,
  ):
    observation = (*frame[:2], frame[2] * config.env.frame_stack)
    self.learner = Learner(config, observation, actions, make_mesh(devices))
    self._state = self.learner.init(jax.random.key(0))
    self._batch: Any = _noise(config, frame, actions)
    self._from_host, self._key = from_host, jax.random.key(1)
    if not from_host:
      self._batch = self.learner.put(self._batch)

  @property
  def variables(self) -> Any:
    return self._state.variables

  def step(self) -> None:
    """One update; blocks until it is done."""
    batch = self.learner.put(self._batch) if self._from_host else self._batch
    self._state, result = self.learner.step(self._state, batch, self._key)
    if self._from_host:
      jax.device_get(result)
    jax.block_until_ready(self._state)

  def flops(self) -> float:
    """FLOPs of a step on one device, by XLA's count."""
    return cost_of(self.learner.lower(self._state, self._batch, self._key)).flops


class Model:
  """Search and value of a network that was just initialised."""

  def __init__(self, config: Config, frame: Frame, actions: int, devices: Sequence[jax.Device]):
    observation = (*frame[:2], frame[2] * config.env.frame_stack)
    self._config, mesh = config, make_mesh(devices)
    learner = Learner(config, observation, actions, mesh)
    self._blueprint = learner.blueprint
    self.variables = learner.init(jax.random.key(0)).variables
    self.inference = Inference(config, learner.blueprint, mesh)
    self._arguments = (jax.random.key(0), 1.0)

  def search(self, frames: np.ndarray) -> Any:
    """Searches each state of the windows [B, S-1+states, H, W, C]; results are in host memory."""
    found = self.inference.search(self.variables, frames, *self._arguments, explore=True)
    return jax.device_get(found)

  def value(self, frames: np.ndarray) -> np.ndarray:
    """The network's values of the states, in host memory."""
    return jax.device_get(self.inference.value(self.variables, frames))

  def search_flops(self, frames: np.ndarray) -> float:
    """FLOPs of a search on one device, by XLA's count."""
    lowered = self.inference.search.lower(self.variables, frames, *self._arguments, explore=True)
    roots = -(-len(frames) // self.inference.devices)
    return search_cost(lowered, self._config, self._blueprint, self.variables, roots).flops


def empty_replay(config: Config, frame: Frame, actions: int) -> Replay:
  """The replay of a run with this configuration."""
  game = Game(frame, np.dtype(np.uint8), actions)
  return make_replay(config, game, make_mesh(jax.local_devices()), lambda _: None, seed=0)


def segment(
  lane: int,
  start: int,
  columns: dict[str, np.ndarray],
  policy: np.ndarray,
  value: np.ndarray,
) -> Segment:
  """Slots with these base columns (frame, first, terminated, action, reward, step).

  `policy` and `value` are the search's, the latter also stands for the network's value.
  """
  truncated = np.zeros(len(value), bool)
  agent = {"policy": policy, "search_value": value, "value": value}
  return Segment.of(lane, start, {**columns, "truncated": truncated, **agent})


class Player:
  """Random experience, in the order in which actors would append it."""

  def __init__(self, lanes: int, frame: Frame, actions: int):
    self.rng = np.random.default_rng(0)
    self._heads, self._open = [0] * lanes, [False] * lanes
    self._frame, self._actions = frame, actions

  def segments(self, n: int, step: int) -> list[Segment]:
    """The next n slots of each lane, with weights of learner step `step`."""
    return [self._segment(lane, n, step) for lane in range(len(self._heads))]

  def _segment(self, lane: int, n: int, step: int) -> Segment:
    rng, start = self.rng, self._heads[lane]
    end = rng.random(n) < 1 / _EPISODE
    begins, self._open[lane] = not self._open[lane], not end[-1]
    self._heads[lane] += n
    columns = {
      "frame": rng.integers(0, 256, (n, *self._frame), np.uint8),
      "first": np.concatenate([[begins], end[:-1]]),
      "terminated": end,
      "action": np.where(end, -1, rng.integers(0, self._actions, n)).astype(np.int32),
      "reward": rng.normal(size=n).astype(np.float32),
      "step": np.full(n, step, np.int32),
    }
    policy = rng.random((n, self._actions), np.float32)
    return segment(lane, start, columns, policy, rng.normal(size=n).astype(np.float32))


def filled_replay(config: Config, frame: Frame, actions: int) -> tuple[Replay, Player, int]:
  """A full replay with varied priorities, and the learner step, 100."""
  replay = empty_replay(config, frame, actions)
  player = Player(config.actor.lanes, frame, actions)
  slots = config.replay.capacity
  capacity = slots // config.actor.lanes
  chunk = max(capacity // 100, 1)
  for step in range(-(-capacity // chunk)):
    replay.append_many(player.segments(chunk, step))
  for _ in range(20):
    lane, at, _ = replay.sample(max(slots // 20, 1))
    replay.set_priorities(lane, at, player.rng.exponential(size=len(lane)), 100)
  return replay, player, 100


def batch_drawing(config: Config, replay: Replay, model: Model | None) -> Callable[[], Any]:
  """Draws and assembles a batch with its frames; with a model, reanalysed first."""
  reanalyse = None
  if model is not None:
    everywhere = NamedSharding(make_mesh(jax.local_devices()), PartitionSpec())
    weights = WeightsStore({REANALYSER: 1}, everywhere, model.variables)
    reanalyse = BatchReanalyser(config, model.inference, weights, jax.random.key(0))
  return lambda: batch_pipeline.draw(config, replay, reanalyse, 0)


def environment(config: Config, lanes: int, steps: int = 20) -> Callable[[], Any]:
  """Plays `steps` random agent steps in each lane of the training environment."""
  env = make_env(config.env, lanes, 0, training=True)
  rng = np.random.default_rng(0)
  actions = rng.integers(0, env.num_actions, (steps, lanes)).astype(np.int32)
  env.reset()

  def play() -> None:
    for action in actions:
      env.step(action)

  return play
