"""Gymnasium environments: `gymnasium:ID`, or `gymnasium:MODULE:ID` to import a module first.

Observations are uint8 images, or vectors or grids of other dtypes; actions are discrete. Lanes are
stepped sequentially in this process. Gymnasium is imported lazily.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from speedyzero_jax.system.own_code import location
from speedyzero_jax.types import Env, EnvStep

PREFIX = "gymnasium:"
_log = logging.getLogger(__name__)


class GymnasiumEnv:
  """L environments with the interface and conventions of `BatchedEnv`.

  `cap` replaces the environment's own time limit. `event_rewards` [E], if given, are multiplied by
  `info["events"]` [E] of each step to replace the reward. Raises ValueError if the environment
  cannot be created or its spaces are not supported, and RuntimeError if it fails otherwise, or
  reports another number of events; MemoryError is passed on.
  """

  def __init__(
    self, game: str, lanes: int, seed: int, cap: int, event_rewards: tuple[float, ...] = ()
  ):
    from gymnasium import vector

    one = functools.partial(_lane, game, cap, event_rewards)
    self._envs = vector.SyncVectorEnv([one] * lanes, autoreset_mode=vector.AutoresetMode.NEXT_STEP)
    self._seeds = np.random.SeedSequence(seed).generate_state(lanes).tolist()
    self._ended = np.zeros(lanes, bool)
    self._game, self.num_lanes = game, lanes
    self.frame_shape, self.frame_dtype, self.num_actions = probe(game)[:3]

  def reset(self) -> EnvStep:
    """Returns the first frame of every lane. Must be called once, before any step."""
    no = np.zeros(self.num_lanes, bool)
    obs, _ = self._call(self._envs.reset, seed=self._seeds)
    return self._show(obs, np.zeros(self.num_lanes), ~no, no, no)

  def step(self, action: np.ndarray) -> EnvStep:
    """Takes one agent step in every lane; see `BatchedEnv.step`."""
    check_actions(self, action)
    obs, reward, terminated, truncated, _ = self._call(self._envs.step, action)
    return self._show(obs, reward, self._ended, terminated, truncated)

  def close(self) -> None:
    """Closes the environments; errors of theirs are only logged. May be called twice."""
    if not self._envs.closed:
      self._envs.closed = True  # its own method stops at the first error
      for env in self._envs.envs:
        _close(env, self._game)

  def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _attempt(RuntimeError, f"{self._game} failed", method, *args, **kwargs)

  def _show(
    self,
    obs: np.ndarray,
    reward: np.ndarray,
    first: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
  ) -> EnvStep:
    if not np.isfinite(reward).all():
      raise ValueError(f"{self._game}: rewards must be finite, got {reward}")
    frame = obs.reshape(self.num_lanes, *self.frame_shape).astype(self.frame_dtype)
    if not np.isfinite(frame).all():
      raise ValueError(f"{self._game}: observations must be finite")
    self._ended = terminated | truncated
    over, capped = terminated.copy(), truncated & ~terminated
    return EnvStep(frame, reward.astype(np.float32), first, over, capped, over)


def check_actions(env: Env, action: np.ndarray) -> None:
  """Raises ValueError unless there is one action in range for each lane."""
  lanes, actions = env.num_lanes, env.num_actions
  if action.shape != (lanes,) or not 0 <= action.min() <= action.max() < actions:
    raise ValueError(f"action must be [{lanes}] in 0..{actions - 1}, got {action}")


@functools.cache
def probe(game: str) -> tuple[tuple[int, int, int], np.dtype, int, int]:
  """Returns an environment's frame shape [H, W, C] and dtype, number of actions and time limit.

  Vectors of size D have frame shape [1, 1, D]. Without a time limit it is 2^30. Raises
  ValueError as `GymnasiumEnv` does.
  """
  from gymnasium import spaces

  env = _make(game)
  try:
    space, actions = env.observation_space, env.action_space
    if not isinstance(space, spaces.Box) or len(space.shape) not in (1, 2, 3) or 0 in space.shape:
      raise ValueError(f"{game}: observation space must be a Box of rank 1 to 3, got {space}")
    if not isinstance(actions, spaces.Discrete) or actions.start != 0:
      raise ValueError(f"{game}: action space must be Discrete and start at 0, got {actions}")
    sides = (1, 1, *space.shape) if len(space.shape) == 1 else (*space.shape, 1)
    shape = int(sides[0]), int(sides[1]), int(sides[2])
    image = space.dtype == np.uint8 and len(space.shape) > 1
    limit = env.spec.max_episode_steps if env.spec else None
    return shape, np.dtype(np.uint8 if image else np.float32), int(actions.n), int(limit or 2**30)
  finally:
    _close(env, game)


def _make(game: str, cap: int | None = None) -> Any:
  import gymnasium

  name = game.removeprefix(PREFIX)
  return _attempt(ValueError, f"can't make {game}", gymnasium.make, name, max_episode_steps=cap)


def _lane(game: str, cap: int, event_rewards: tuple[float, ...]) -> Any:
  """Makes the environment of one lane.

  It returns no infos, as a vector environment can't merge those of different types. Its reward is
  `info["events"]` @ `event_rewards`, if these are given.
  """
  import gymnasium

  class Lane(gymnasium.Wrapper):
    def reset(self, **options: Any) -> Any:
      return self.env.reset(**options)[0], {}

    def step(self, action: Any) -> Any:
      obs, reward, terminated, truncated, info = self.env.step(action)
      if event_rewards:
        events = np.asarray(info.get("events", ()), float)
        if events.shape != (len(event_rewards),):
          raise ValueError(
            f"env.event_rewards has {len(event_rewards)} numbers, but info['events'] has the shape "
            f"{events.shape}"
          )
        reward = float(events @ event_rewards)
      return obs, reward, terminated, truncated, {}

  return Lane(_make(game, cap))


def _close(env: Any, game: str) -> None:
  try:
    env.close()
  except (Exception, SystemExit):  # what it has played is complete
    _log.exception("%s failed while it was closed", game)


def _attempt(
  kind: type[Exception], problem: str, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
  """Calls an environment's method. If it fails, raises `kind` with a message in one line."""
  try:
    return method(*args, **kwargs)
  except MemoryError:  # has a message of its own
    raise
  except (Exception, SystemExit) as error:  # the latter would end this process as if finished
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    raise kind(f"{problem}: {reason}{location(error)}") from error
