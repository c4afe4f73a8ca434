"""Shared types: the output of environments and the experience that actors append.

Dimensions: L lanes (environments stepped together), B batch, K unroll steps, A actions, S frames in
a stack. A frame is one unstacked observation: uint8 [H, W, C] for images, float32 [1, 1, D] for
vectors.

Each lane is an endless stream of frames. A *slot* is one frame of it, at absolute time t >= 0.
Transition (action[t], reward[t]) leads from slot t to slot t + 1, unless slot t is the last frame
of its episode. The slot after an episode's last frame is the first frame of the next episode.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True, eq=False)
class Slots:
  """Slots of one or several lanes, appended by an actor; those of each lane are in order."""

  lane: np.ndarray  # [n] int64
  time: np.ndarray  # [n] int64, absolute
  columns: Mapping[str, np.ndarray]  # [n, ...] each: those of the replay's `Schema`, by name

  @classmethod
  def of_lane(cls, lane: int, start: int, columns: Mapping[str, np.ndarray]) -> "Slots":
    """Makes consecutive slots of a lane from time `start` on."""
    n = len(columns["frame"])
    return cls(np.full(n, lane, np.int64), np.arange(start, start + n), columns)

  @classmethod
  def concatenate(cls, parts: Sequence["Slots"]) -> "Slots":
    """Joins at least one group of slots with the same columns."""
    columns = {name: np.concatenate([p[name] for p in parts]) for name in parts[0].columns}
    lane = np.concatenate([part.lane for part in parts])
    return cls(lane, np.concatenate([part.time for part in parts]), columns)

  def __len__(self) -> int:
    return len(self.lane)

  def __getitem__(self, name: str) -> np.ndarray:
    """Returns a column."""
    return self.columns[name]

  def select(self, index: np.ndarray | slice) -> "Slots":
    """Returns the slots at `index`, an index of arrays [n]."""
    columns = {name: column[index] for name, column in self.columns.items()}
    return Slots(self.lane[index], self.time[index], columns)

  def by_lane(self) -> "Slots":
    """Returns the slots sorted by lane, in order within each lane."""
    if (self.lane[1:] >= self.lane[:-1]).all():
      return self
    return self.select(np.argsort(self.lane, kind="stable"))

  def check_follows(self, heads: np.ndarray) -> None:
    """Raises ValueError unless there are slots, and those of each lane continue from heads [L].

    The slots must be sorted by lane.
    """
    lane, lanes = self.lane, len(heads)
    if not len(lane):
      raise ValueError("at least one slot is required")
    if not 0 <= lane[0] <= lane[-1] < lanes:
      raise ValueError(f"lanes must be in 0..{lanes - 1}, got {lane[0]}..{lane[-1]}")
    begin = np.searchsorted(lane, lane)  # index of the first slot of the same lane
    expected = heads[lane] + np.arange(len(lane)) - begin
    for i in np.flatnonzero(self.time != expected)[:1]:
      raise ValueError(
        f"slots of lane {lane[i]} must continue from the lane's head {heads[lane[i]]}: expected "
        f"slot {expected[i]}, got {self.time[i]}"
      )
