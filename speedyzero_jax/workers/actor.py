"""The actor: steps a batch of environments (lanes), searches each state, and hands over segments.

Knows nothing of replay, pacing or threads: `step` does one step of all lanes and returns what came of it.
"""

import zlib
from typing import NamedTuple

import jax
import numpy as np

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import BatchedEnv, training_reward
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.types import EnvStep, Segment
from speedyzero_jax.workers.weights import Version, fetched


class FrameStacker:
  """The last S frames of every lane; an episode's first frame fills its whole stack (EfficientZero)."""

  def __init__(self, stack: int):
    self._stack = stack
    self._frames: np.ndarray | None = None

  def push(self, step: EnvStep) -> np.ndarray:
    """Adds what the lanes show; returns [L, S, H, W, C], oldest first."""
    new = np.repeat(step.frame[:, None], self._stack, axis=1)
    if self._frames is not None:
      going_on = ~step.first
      new[going_on, :-1] = self._frames[going_on, 1:]
    self._frames = new
    return new


class ActorState(NamedTuple):
  """What an actor needs to go on as if it had never stopped: its actions, from which its environments are replayed."""

  actions: np.ndarray  # [T, L] int16, every action handed to the environments since they were made
  frames_crc: int  # of the frames shown last, to notice that a replay went another way
  start: np.ndarray  # [L] int64, slots of the environments' first frames


class Actor:
  """Collects exactly the agent steps it is asked for.

  Args:
    config: of the run.
    env: freshly made; the actor resets and owns it.
    inference: shared compiled functions.
    key: randomness of the search.
    stats: returns of finished games go here.
    lane_offset: number of this actor's first lane in the replay.
    start: [L], slots of the environments' first frames: the replay's heads, if it holds slots of others. None: 0.
  """

  def __init__(
    self,
    config: Config,
    env: BatchedEnv,
    inference: Inference,
    key: jax.Array,
    stats: EpisodeStats,
    *,
    lane_offset: int = 0,
    start: np.ndarray | None = None,
  ):
    self._config, self._env, self._inference, self._key, self.stats = (
      config,
      env,
      inference,
      key,
      stats,
    )
    self._lanes = lane_offset + np.arange(env.num_lanes)
    self._actions: list[np.ndarray] = []
    self._stacker = FrameStacker(config.env.frame_stack)
    self._start = (
      np.zeros(env.num_lanes, np.int64) if start is None else np.asarray(start, np.int64)
    )
    self._slot = self._start.copy()  # absolute time of the frames shown now
    self._show(env.reset())

  @property
  def observation_bytes(self) -> int:
    """Of what a search of all lanes is handed."""
    return self._stacked.nbytes

  def step(
    self, version: Version, *, budget: int, progress: float, random: bool, last: bool = True
  ) -> tuple[list[Segment], int]:
    """Plays one action in every lane, fewer if the budget ends.

    Args:
      version: weights to act with.
      budget: agent steps that may still be taken, at least 1. When it ends with this call, every lane is closed: its
        last frame becomes the truncated end of its episode.
      progress: share of training done, for the temperature.
      random: play uniformly at random instead of searching (the first steps of a run).
      last: whether the budget is all there is. If not, its end closes no lane but those it does not reach.

    Returns:
      One segment per lane and the number of agent steps in them. Steps in which a lane only resets do not count.
    """
    shown, stacked = self._shown, self._stacked
    ended = shown.terminated | shown.truncated
    acting = ~ended
    if acting.sum() > budget:
      acting &= np.cumsum(acting) <= budget
    count = int(acting.sum())
    action, policy, search_value, value = self._decide(version, stacked, progress, random)
    self._actions.append(action.astype(np.int16))
    following = self._env.step(np.where(ended, 0, action))
    reward = training_reward(self._config.env, following.reward)

    cut = ~ended & ~acting  # lanes beyond the budget end here
    segments = [
      self._segment(
        i, shown, cut[i], int(action[i]) if acting[i] else -1, float(reward[i]) if acting[i] else 0.0, policy[i],
        search_value[i], value[i], version.step,
      )
      for i in range(len(self._lanes))
    ]  # fmt: skip
    self._slot += 1
    self._show(following)
    if count == budget and last:
      for i, end in zip(
        np.flatnonzero(acting), self._close(acting, version, progress, random), strict=True
      ):
        segments[i] = _join(segments[i], end)
    return segments, count

  def _decide(
    self, version: Version, stacked: np.ndarray, progress: float, random: bool
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    lanes, actions = len(self._lanes), self._env.num_actions
    key = jax.random.fold_in(
      self._key, int(self._slot.max())
    )  # new with every step, whoever took those before
    if random:
      rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
      action = rng.integers(actions, size=lanes)
      if self._actions:
        action = np.where(
          rng.random(lanes) * self._config.actor.random_hold < 1, action, self._actions[-1]
        )
      zeros = np.zeros(lanes, np.float32)
      return action, np.full((lanes, actions), 1 / actions, np.float32), zeros, zeros
    temperature = temperature_at(self._config, progress)
    result = fetched(
      version, self._inference.search(version.variables, stacked, key, temperature, explore=True)
    )
    return result.action[:, 0], result.policy[:, 0], result.search_value[:, 0], result.value[:, 0]

  def close(self, version: Version, *, progress: float, random: bool) -> list[Segment]:
    """The frames shown now, as the truncated ends of all lanes' episodes: this actor takes no further step."""
    self.finished.clear()
    return self._close(np.ones(len(self._lanes), bool), version, progress, random)

  def _close(
    self, acted: np.ndarray, version: Version, progress: float, random: bool
  ) -> list[Segment]:
    """The frames shown now, as the ends of their lanes, where the last action led to one."""
    _, policy, search_value, value = self._decide(version, self._stacked, progress, random)
    return [
      self._segment(
        i, self._shown, not (self._shown.terminated[i] or self._shown.truncated[i]), -1, 0.0, policy[i],
        search_value[i], value[i], version.step,
      )
      for i in np.flatnonzero(acted)
    ]  # fmt: skip

  def _segment(
    self, i: int | np.integer, shown: EnvStep, cut: bool | np.bool_, action: int, reward: float, policy: np.ndarray,
    search_value: float, value: float, step: int,
  ) -> Segment:  # fmt: skip
    return Segment(
      lane=int(self._lanes[i]),
      start=int(self._slot[i]),
      frame=shown.frame[i : i + 1],
      first=shown.first[i : i + 1],
      terminated=shown.terminated[i : i + 1],
      truncated=shown.truncated[i : i + 1] | cut,
      action=np.array([action], np.int32),
      reward=np.array([reward], np.float32),
      policy=policy[None],
      search_value=np.array([search_value], np.float32),
      value=np.array([value], np.float32),
      step=np.array([step], np.int32),
    )

  def _show(self, step: EnvStep) -> None:
    self._shown = step
    self._stacked = self._stacker.push(step)
    self.finished: list[Episode] = self.stats.update(step)  # games that ended with this step

  def state(self) -> ActorState:
    """For a checkpoint."""
    shape = (len(self._actions), len(self._lanes))
    actions = np.stack(self._actions) if self._actions else np.zeros(shape, np.int16)
    return ActorState(actions, zlib.crc32(self._shown.frame.tobytes()), self._start.copy())

  def restore(self, state: ActorState) -> None:
    """Replays a fresh actor's environments to where another one stood (about 3,000 agent steps a second and core).

    Raises:
      RuntimeError: the environments went another way (another envpool or another machine).
    """
    for action in state.actions:
      ended = self._shown.terminated | self._shown.truncated
      self._show(self._env.step(np.where(ended, 0, action).astype(np.int32)))
    self._actions = list(state.actions)
    self._start = state.start.copy()
    self._slot = self._start + len(state.actions)
    if zlib.crc32(self._shown.frame.tobytes()) != state.frames_crc:
      raise RuntimeError(
        "replaying the environments' actions led to other frames than when they were recorded"
      )


def _join(a: Segment, b: Segment) -> Segment:
  """Two neighbouring segments as one."""
  arrays = [np.concatenate(pair) for pair in zip(a[2:], b[2:], strict=True)]
  return Segment(a.lane, a.start, *arrays)


def temperature_at(config: Config, progress: float) -> float:
  """Temperature of sampled actions at this share of training (EfficientZero's stages)."""
  stage = int(np.searchsorted(config.agent.search.temperature_stages, progress, side="right"))
  return config.agent.search.temperatures[stage]
