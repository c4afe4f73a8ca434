"""The actor: steps a batch of environments (lanes) with the agent's actions and makes segments."""

import zlib
from typing import Any

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs, ActOutput, Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import training_reward
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.types import Env, EnvStep, Segment
from speedyzero_jax.workers.batched_inference import BatchedInference
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import Version


class FrameStacker:
  """The last S frames of every lane; an episode's first frame fills the whole stack."""

  def __init__(self, stack: int):
    self._stack = stack
    self._frames: np.ndarray | None = None

  def push(self, step: EnvStep) -> np.ndarray:
    """Adds the frames of a step; returns [L, S, H, W, C], oldest first."""
    new = np.repeat(step.frame[:, None], self._stack, axis=1)
    if self._frames is not None:
      continuing = ~step.first
      new[continuing, :-1] = self._frames[continuing, 1:]
    self._frames = new
    return new


class Actor:
  """Steps new environments, which it owns, within a budget of agent steps.

  Its lanes in the replay are those from `lane_offset` on; `start` [L] are the slots of the
  environments' first frames (None: 0). `stats` receives returns of finished games.
  """

  def __init__(
    self,
    config: Config,
    agent: Agent,
    env: Env,
    inference: Inference | BatchedInference,
    key: jax.Array,
    stats: EpisodeStats,
    *,
    lane_offset: int = 0,
    start: np.ndarray | None = None,
  ):
    self._config, self._agent, self._env, self._inference = config, agent, env, inference
    self._key, self.stats = key, stats
    self._lanes = lane_offset + np.arange(env.num_lanes)
    self._actions: list[np.ndarray] = []
    self._stacker = FrameStacker(config.env.frame_stack)
    self._start = np.zeros(env.num_lanes, np.int64) if start is None else start
    self._slot = self._start.copy()  # absolute time of the current frames
    self._core = jax.tree.map(np.asarray, agent.initial_core(env.num_lanes))
    self._show(env.reset())

  def step(
    self, version: Version, *, budget: int, progress: float, random: bool, last: bool = True
  ) -> tuple[list[Segment], int]:
    """Plays one action in every lane, or in fewer when the budget ends.

    Args:
      version: weights to act with.
      budget: agent steps left, at least 1. When it ends with this call, every lane is closed: its
        last frame becomes the truncated end of its episode.
      progress: share of training done.
      random: play uniformly at random (the first steps of a run).
      last: whether the budget is final. If not, its end closes only the lanes not reached.

    Returns one segment per lane, and the number of agent steps in them. Resets are not agent steps.
    """
    shown = self._shown
    ended = shown.terminated | shown.truncated
    acting = ~ended
    if acting.sum() > budget:
      acting &= np.cumsum(acting) <= budget
    count = int(acting.sum())
    decision = self._decide(version, progress, random)
    self._core = decision.core
    self._actions.append(decision.action.astype(np.int16))
    following = self._env.step(np.where(ended, 0, decision.action))
    reward = np.where(acting, training_reward(self._config.env, following.reward), 0.0)
    cut = ~ended & ~acting  # lanes beyond the budget
    action = np.where(acting, decision.action, -1)
    segments = [
      self._segment(i, cut[i], action[i], reward[i], decision, version.step)
      for i in range(len(self._lanes))
    ]
    self._slot += 1
    self._show(following)
    if count == budget and last:
      ends = self._close(acting, version, progress, random)
      for i, end in zip(np.flatnonzero(acting), ends, strict=True):
        segments[i] = _join(segments[i], end)
    return segments, count

  def _decide(self, version: Version, progress: float, random: bool) -> ActOutput:
    # A key per slot, the same for any actor that continues these lanes.
    key = jax.random.fold_in(self._key, int(self._slot.max()))
    if random:
      return self._random_decision(key)
    inputs = ActInputs(self._stacked, self._shown.first, self._lanes.astype(np.int32), self._core)
    return self._inference.decide(version, inputs, key, progress, explore=True)

  def _random_decision(self, key: jax.Array) -> ActOutput:
    lanes = len(self._lanes)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    action = rng.integers(self._env.num_actions, size=lanes)
    if self._actions:
      again = rng.random(lanes) * self._config.actor.random_hold >= 1
      action = np.where(again, self._actions[-1], action)
    columns = {
      column.name: np.full((lanes, *column.shape), column.fill, column.dtype)
      for column in self._agent.schema.extra
    }
    return ActOutput(action, columns, self._core)

  def close_lanes(self, version: Version, *, progress: float, random: bool) -> list[Segment]:
    """The current frames as truncated ends of all lanes' episodes, before the actor stops."""
    self.finished.clear()
    return self._close(np.ones(len(self._lanes), bool), version, progress, random)

  def _close(
    self, acted: np.ndarray, version: Version, progress: float, random: bool
  ) -> list[Segment]:
    """The current frames as ends of the lanes whose last action led to them."""
    decision, ended = self._decide(version, progress, random), self._shown
    return [
      self._segment(
        i, not (ended.terminated[i] or ended.truncated[i]), -1, 0.0, decision, version.step
      )
      for i in np.flatnonzero(acted)
    ]

  def _segment(
    self, i: Any, cut: Any, action: int, reward: float, decision: ActOutput, step: int
  ) -> Segment:
    shown, one = self._shown, slice(i, i + 1)
    return Segment(
      lane=int(self._lanes[i]),
      start=int(self._slot[i]),
      frame=shown.frame[one],
      first=shown.first[one],
      terminated=shown.terminated[one],
      truncated=shown.truncated[one] | cut,
      action=np.array([action], np.int32),
      reward=np.array([reward], np.float32),
      step=np.array([step], np.int32),
      extra={name: column[one] for name, column in decision.columns.items()},
    )

  def _show(self, step: EnvStep) -> None:
    self._shown = step
    self._stacked = self._stacker.push(step)
    self.finished: list[Episode] = self.stats.update(step)  # games that ended with this step

  def close(self) -> None:
    self._env.close()

  def state_dict(self) -> dict[str, np.ndarray]:
    """The state for a checkpoint, with the actions that replay the environments."""
    crc = zlib.crc32(self._shown.frame.tobytes())  # detects a different replay
    core = {f"core_{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(self._core))}
    return {
      "actions": np.array(self._actions, np.int16).reshape(-1, len(self._lanes)),
      "frames_crc": np.array([crc], np.int64),
      "start": self._start.copy(),
      **core,
    }

  def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
    """Replays the environments to the state of `state_dict`, 3,000 steps a second.

    For a new actor, with equal environments and the saved `start`.

    Raises RuntimeError if they showed other frames (another envpool or machine).
    """
    for action in state["actions"]:
      ended = self._shown.terminated | self._shown.truncated
      self._show(self._env.step(np.where(ended, 0, action).astype(np.int32)))
    self._actions = list(state["actions"])
    self._slot = self._start + len(self._actions)
    leaves, structure = jax.tree.flatten(self._core)
    core = [state[f"core_{i}"] for i in range(len(leaves))]
    self._core = jax.tree.unflatten(structure, core)
    if zlib.crc32(self._shown.frame.tobytes()) != state["frames_crc"][0]:
      raise RuntimeError(
        "replaying the environments' actions led to other frames than when they were recorded"
      )


def _join(a: Segment, b: Segment) -> Segment:
  """Two consecutive segments as one."""
  following = b.arrays()
  arrays = {name: np.concatenate([x, following[name]]) for name, x in a.arrays().items()}
  return Segment.of(a.lane, a.start, arrays)
