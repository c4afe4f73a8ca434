"""Shared types: the output of environments and the experience that actors append.

Dimensions: L lanes (environments stepped together), B batch, K unroll steps, A actions, S frames in
a stack. A frame is one unstacked observation: uint8 [H, W, C] for images, float32 [1, 1, D] for
vectors.

Each lane is an endless stream of frames. A *slot* is one frame of it, at absolute time t >= 0.
Transition (action[t], reward[t]) leads from slot t to slot t + 1, unless slot t is the last frame
of its episode. The slot after an episode's last frame is the first frame of the next episode.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

Params = Any  # a pytree of arrays


class EnvStep(NamedTuple):
  """Output of `Env.step`; arrays are [L, ...]."""

  frame: np.ndarray  # [L, H, W, C] the frame after the action
  reward: np.ndarray  # [L] float32, raw reward of the action; 0 where `first`
  first: np.ndarray  # [L] bool, the frame starts an episode; the action was ignored, no transition
  terminated: np.ndarray  # [L] bool, the episode ends in a terminal state (life lost, game over)
  truncated: np.ndarray  # [L] bool, the episode ends at a step limit; bootstrap from its value
  game_over: np.ndarray  # [L] bool, the game itself is over, not just a life


class Env(Protocol):
  """L copies of a game, stepped together; see `BatchedEnv` for the conventions."""

  num_lanes: int
  num_actions: int
  frame_shape: tuple[int, int, int]
  frame_dtype: np.dtype

  def reset(self) -> EnvStep: ...
  def step(self, action: np.ndarray) -> EnvStep: ...
  def close(self) -> None: ...


# Columns common to all agents, in the order of `Segment`.
BASE_COLUMNS = ("frame", "first", "terminated", "truncated", "action", "reward", "step")


class Segment(NamedTuple):
  """Consecutive slots of one lane, appended by an actor. Frame i of n belongs to slot start + i.

  The columns and their dtypes are those of the replay's `Schema`.
  """

  lane: int
  start: int  # absolute time of the first slot
  frame: np.ndarray  # [n, H, W, C]
  first: np.ndarray  # [n] bool, the frame starts an episode
  terminated: np.ndarray  # [n] bool, the frame ends its episode; its value is 0
  truncated: np.ndarray  # [n] bool, the frame ends its episode; bootstrap from its value
  action: np.ndarray  # [n] int32, taken after the frame; -1 where the frame ends an episode
  reward: np.ndarray  # [n] float32, received for `action`; clipped if configured
  step: np.ndarray  # [n] int32, learner step of the weights that chose the action
  extra: dict[str, np.ndarray]  # [n, ...] each, the agent's columns by name

  def arrays(self) -> dict[str, np.ndarray]:
    """Returns all columns by name."""
    return {name: getattr(self, name) for name in BASE_COLUMNS} | self.extra

  @classmethod
  def of(cls, lane: int, start: int, arrays: dict[str, np.ndarray]) -> "Segment":
    """Makes a segment from its columns by name."""
    extra = {name: array for name, array in arrays.items() if name not in BASE_COLUMNS}
    return cls(lane, start, **{name: arrays[name] for name in BASE_COLUMNS}, extra=extra)

  def map(self, function: Callable[[np.ndarray], np.ndarray], start: int) -> "Segment":
    """Returns a segment that starts at `start`, with `function` applied to each column."""
    return self.of(self.lane, start, {k: function(x) for k, x in self.arrays().items()})
