"""A FIFO queue of trajectories: consecutive windows of each lane, each trained on once."""

from collections.abc import Mapping

import numpy as np

from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore

QUEUED, SKIPPED = "queued_trajectories", "skipped_trajectories"


class TrajectoryQueue:
  """Returns windows of `length` slots, and the slot after them, in order of completion.

  Windows of a lane are contiguous: window i is slots i * length .. (i+1) * length, the last of
  which is the first of window i + 1. They cross episode boundaries. Lanes with complete windows
  take turns; evicted windows are skipped.

  Args:
    store: of the slots.
    length: T, slots per window.
  """

  def __init__(self, store: LaneStore, length: int):
    if store.capacity < 2 * length + 1:
      raise ValueError(
        f"capacity must be at least {2 * length + 1} slots per lane (two trajectories), "
        f"got {store.capacity}"
      )
    self._store, self._length = store, length
    self._next = np.zeros(store.lanes, np.int64)  # start of each lane's next window
    self._turn = np.arange(store.lanes)  # order in which lanes are visited
    self.skipped = 0  # windows evicted before they were trained on

  def _complete(self) -> np.ndarray:
    """Number of complete windows of each lane, [L]."""
    behind = np.maximum(self._store.tail - self._next, 0)
    lost = -(-behind // self._length)
    self.skipped += int(lost.sum())
    self._next += lost * self._length
    return np.maximum(self._store.head - 1 - self._next, 0) // self._length

  @property
  def count(self) -> int:
    """Complete windows in all lanes."""
    return int(self._complete().sum())

  def ready(self, n: int) -> bool:
    """Whether n windows are complete."""
    return self.count >= n

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """No-op: complete windows are counted from the heads."""

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """The next n windows. Raises ValueError if fewer are complete."""
    complete = self._complete()
    if complete.sum() < n:
      raise ValueError(f"requested {n} trajectories, only {complete.sum()} are complete")
    lanes: list[int] = []
    times: list[int] = []
    while len(lanes) < n:
      for lane in self._turn.copy():
        if complete[lane] and len(lanes) < n:
          lanes.append(int(lane))
          times.append(int(self._next[lane]))
          complete[lane] -= 1
          self._next[lane] += self._length
          self._turn = np.append(self._turn[self._turn != lane], lane)
    return Selection(np.array(lanes, np.int32), np.array(times, np.int64), np.ones(n))

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """No-op: trajectories have no priority."""

  def stats(self, learner_step: int) -> dict[str, float]:
    """Complete windows not yet used, and windows lost to eviction."""
    return {QUEUED: float(self.count), SKIPPED: float(self.skipped)}

  def state_dict(self) -> dict[str, np.ndarray]:
    """The position in each lane, and the order of the lanes."""
    return {"queue_next": self._next.copy(), "queue_turn": self._turn.copy()}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict`. Raises ValueError if it is of other lanes."""
    if state["queue_next"].shape != self._next.shape:
      raise ValueError(
        f"state has {len(state['queue_next'])} lanes, this replay has {len(self._next)}"
      )
    self._next, self._turn = state["queue_next"].copy(), state["queue_turn"].copy()
