"""A first-in, first-out queue of trajectories: consecutive windows of each lane, trained on once."""

import math
from collections.abc import Mapping

import numpy as np

from speedyzero_jax.replay.replay import Selection
from speedyzero_jax.replay.storage import LaneStore

QUEUED, SKIPPED = "queued_trajectories", "skipped_trajectories"


class TrajectoryQueue:
  """Hands out windows of `length` slots, and the slot after them, in the order they are completed.

  Windows of a lane follow each other without a gap: window i is slots i * length .. (i+1) * length,
  the last of which is the first of window i + 1. They cross the ends of episodes. A lane is visited
  again after all others with a complete window.

  Windows are skipped if the ring has evicted them, and, oldest first, if lanes fill more of them
  than the learner is going to take: the end of an episode is a slot, but no agent step. Otherwise
  the queue would grow and its windows age.

  Args:
    store: of the slots.
    length: T, slots per window.
    stack: S, frames in an observation; those of a window's first slot must be stored too.
    pace: windows that the learner takes per agent step, at most 1/T; inf: none is too many.
  """

  def __init__(
    self, store: LaneStore, length: int, *, stack: int = 1, pace: float = math.inf
  ):
    if store.capacity < 2 * length + stack:
      raise ValueError(
        f"capacity must be at least {2 * length + stack} slots per lane (two trajectories), "
        f"got {store.capacity}"
      )
    self._store, self._length, self._stack, self._pace = store, length, stack, pace
    self._next = np.zeros(store.lanes, np.int64)  # start of each lane's next window
    self._settled = self._next.copy()  # start of the oldest that is neither trained on nor skipped
    self._turn = np.arange(store.lanes)  # order in which lanes are visited
    self._skipped = 0  # windows

  def _complete(self) -> np.ndarray:
    """Complete windows of each lane, [L]."""
    return np.maximum(self._store.head - 1 - self._next, 0) // self._length

  def _take(self, n: int) -> tuple[list[int], list[int]]:
    """Lanes and first slots of the next n windows, or of all that are complete."""
    complete, lanes, times = self._complete(), [], []
    while len(lanes) < min(n, len(lanes) + complete.sum()):
      for lane in self._turn[complete[self._turn] > 0][: n - len(lanes)].tolist():
        lanes.append(lane)
        times.append(int(self._next[lane]))
        complete[lane] -= 1
        self._next[lane] += self._length
        self._turn = np.append(self._turn[self._turn != lane], lane)
    return lanes, times

  def _skip(self) -> None:
    """Skips windows that are evicted or too many."""
    store, before = self._store, self._next.copy()
    behind = np.where(store.tail > 0, store.tail + self._stack - 1, 0) - self._next
    lost = -(-np.maximum(behind, 0) // self._length)
    self._next += lost * self._length
    self._skipped += int(lost.sum())
    if store.num_transitions:
      # One window of each lane may be incomplete.
      filled = store.head.sum() / self._length - store.lanes
      spare = filled - store.num_transitions * self._pace - self._skipped
      self._skipped += len(self._take(math.floor(max(spare, 0)))[0])
    self._settled = np.where(self._settled == before, self._next, self._settled)

  @property
  def count(self) -> int:
    """Complete windows in all lanes."""
    self._skip()
    return int(self._complete().sum())

  def ready(self, n: int) -> bool:
    """Whether n windows are complete."""
    return self.count >= n

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """Nothing to do: complete windows are counted from the heads."""

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """The next n windows. Raises ValueError if fewer are complete.

    Those evicted since `ready` was true are among them, so that its answer holds.
    """
    complete = self._complete().sum()
    if complete < n:
      raise ValueError(f"{n} trajectories are wanted, {complete} are complete")
    lanes, times = self._take(n)
    return Selection(np.array(lanes, np.int32), np.array(times, np.int64), np.ones(n))

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """The windows were trained on."""
    np.maximum.at(self._settled, selection.lane, selection.time + self._length)

  def stats(self, learner_step: int) -> dict[str, float]:
    """Complete windows that wait, and windows skipped so far."""
    return {QUEUED: float(self.count), SKIPPED: float(self._skipped)}

  def state_dict(self) -> dict[str, np.ndarray]:
    """The position in each lane, the order of the lanes, and windows skipped.

    What was handed out and not trained on will be handed out again.
    """
    return {
      "queue_next": self._settled.copy(),
      "queue_turn": self._turn.copy(),
      "queue_skipped": np.array([self._skipped], np.int64),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict`. Raises ValueError if it is of other lanes."""
    if state["queue_next"].shape != self._next.shape:
      raise ValueError(
        f"state has {len(state['queue_next'])} lanes, this replay has {len(self._next)}"
      )
    self._next, self._settled = state["queue_next"].copy(), state["queue_next"].copy()
    self._turn, self._skipped = state["queue_turn"].copy(), int(state["queue_skipped"][0])
