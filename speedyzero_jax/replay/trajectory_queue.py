"""A FIFO queue of trajectories: consecutive windows of each lane, each trained on once."""

import copy
import math
from collections.abc import Mapping

import numpy as np

from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore

QUEUED, SKIPPED = "queued_trajectories", "skipped_trajectories"


class TrajectoryQueue:
  """Returns windows of `length` slots, and the slot after them, in order of completion.

  Windows of a lane are contiguous: window i is slots i * length .. (i+1) * length, the last of
  which is the first of window i + 1. They cross episode boundaries. Lanes with complete windows
  take turns.

  Evicted windows are skipped. So are the oldest ones when there are more than the learner will
  take: an episode's end is a slot but no agent step, so lanes fill more windows than agent steps
  account for, and the queue would grow and its windows age.

  Args:
    store: of the slots; a lane has room for two windows and a stack.
    length: T, slots per window.
    stack: S, frames in an observation; those of a window's first slot must be stored too.
    pace: windows that the learner takes per agent step, at most 1/T; inf: skip evicted ones only.
  """

  def __init__(self, store: LaneStore, length: int, *, stack: int = 1, pace: float = math.inf):
    self._store, self._length, self._stack, self._pace = store, length, stack, pace
    self._next = np.zeros(store.lanes, np.int64)  # start of each lane's next window
    self._pending: set[tuple[int, int]] = set()  # (lane, start) of those selected, not trained on
    self._turn = np.arange(store.lanes)  # order in which lanes are visited
    self._skipped = 0  # windows

  def _complete(self) -> np.ndarray:
    """Number of complete windows of each lane, [L]."""
    return np.maximum(self._store.head - 1 - self._next, 0) // self._length

  def _take(self, n: int) -> tuple[list[int], list[int]]:
    """Lanes and first slots of the next n windows, or of all that are complete."""
    complete = self._complete()
    lanes: list[int] = []
    times: list[int] = []
    while len(lanes) < n and complete.any():
      for lane in self._turn[complete[self._turn] > 0][: n - len(lanes)].tolist():
        lanes.append(lane)
        times.append(int(self._next[lane]))
        complete[lane] -= 1
        self._next[lane] += self._length
        self._turn = np.append(self._turn[self._turn != lane], lane)
    return lanes, times

  def _evicted(self) -> np.ndarray:
    """Number of each lane's next windows that are evicted, [L]."""
    store = self._store
    behind = np.where(store.tail > 0, store.tail + self._stack - 1, 0) - self._next
    return -(-np.maximum(behind, 0) // self._length)

  def _surplus(self, skipped: int) -> int:
    """Number of windows to skip besides so many already skipped."""
    store = self._store
    if not store.num_transitions:
      return 0
    filled = store.head.sum() / self._length - store.lanes  # each lane's last may be incomplete
    return math.floor(max(filled - store.num_transitions * self._pace - skipped, 0))

  def _due(self) -> tuple[int, int]:
    """Windows left to train on, and windows to skip before."""
    evicted, complete = self._evicted(), self._complete()
    left, lost = int(np.maximum(complete - evicted, 0).sum()), int(evicted.sum())
    surplus = min(self._surplus(self._skipped + lost), left)
    return left - surplus, lost + surplus

  def _skip(self, spare: int) -> None:
    """Skips evicted and surplus windows, at most `spare` of them complete ones."""
    evicted, complete = self._evicted(), self._complete()
    losing = np.minimum(evicted, complete)
    lose = np.diff(np.minimum(np.cumsum(losing), spare), prepend=0)
    skip = np.where(lose == losing, evicted, lose)
    self._next += skip * self._length
    self._skipped += int(skip.sum())
    surplus = min(self._surplus(self._skipped), spare - int(lose.sum()))
    self._skipped += len(self._take(surplus)[0])

  @property
  def count(self) -> int:
    """Complete windows in all lanes, without those that are to be skipped."""
    return self._due()[0]

  def ready(self, n: int) -> bool:
    return self.count >= n

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """No-op: complete windows are counted from the heads."""

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """The next n windows. Raises ValueError if fewer are complete.

    After `ready` returned True there are always n: where appends have since evicted windows or made
    them surplus, fewer are skipped.
    """
    complete = int(self._complete().sum())
    if complete < n:
      raise ValueError(f"requested {n} trajectories, only {complete} are complete")
    self._skip(complete - n)
    lanes, times = self._take(n)
    self._pending.update(zip(lanes, times, strict=True))
    return Selection(np.array(lanes, np.int32), np.array(times, np.int64), np.ones(n))

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """Records that the windows were trained on."""
    self._pending -= set(zip(selection.lane.tolist(), selection.time.tolist(), strict=True))
    self._pending = {(l, time) for l, time in self._pending if time >= self._store.tail[l]}

  def stats(self, learner_step: int) -> dict[str, float]:
    """Complete windows not yet used, and windows skipped."""
    queued, to_skip = self._due()
    return {QUEUED: float(queued), SKIPPED: float(self._skipped + to_skip)}

  def state_dict(self) -> dict[str, np.ndarray]:
    """The position in each lane, the order of the lanes, and the number of skipped windows.

    Windows selected but not trained on are selected again after a restart.
    """
    saved = copy.copy(self)  # windows are skipped in it only: `ready` may have counted on them
    saved._next = self._next.copy()
    saved._skip(int(self._complete().sum()))
    for lane, time in self._pending:
      saved._next[lane] = min(saved._next[lane], time)
    return {
      "queue_next": saved._next,
      "queue_turn": saved._turn.copy(),
      "queue_skipped": np.array([saved._skipped], np.int64),
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict`."""
    self._next, self._turn = state["queue_next"].copy(), state["queue_turn"].copy()
    self._skipped = int(state["queue_skipped"][0])
