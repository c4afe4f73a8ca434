"""FIFO queue of trajectories: consecutive windows of each lane, used once or for several epochs."""

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore

_Window = tuple[int, int]  # lane and first slot


class TrajectoryQueue:
  """Selects windows of `length` slots, and the slot after them, in order of completion.

  Window i of a lane consists of slots i * length .. (i+1) * length; its last slot is the first one
  of window i + 1. Windows may span several episodes. Lanes with complete windows take turns.

  Evicted windows are skipped. The oldest windows are also skipped if there are more than the
  learner will use: the end of an episode is a slot but no agent step, so lanes fill more windows
  than there are agent steps for, and the queue would grow and its windows become stale.

  Windows leave the queue in blocks of `block`, each returned `epochs` times, each time in a random
  order. Selections of a part of a block are PPO's minibatches.

  Args:
    store: of the slots; a lane must have room for two windows and a stack.
    length: T, slots per window.
    stack: S, frames in an observation; those of a window's first slot must be stored, too.
    pace: windows that the learner uses per agent step, at most 1/T; inf: skip only evicted ones.
    replayed: windows added to a block per window in it, drawn uniformly from the stored windows
      that have left the queue.
  """

  def __init__(
    self,
    store: LaneStore,
    length: int,
    *,
    stack: int = 1,
    pace: float = math.inf,
    block: int = 1,
    epochs: int = 1,
    replayed: float = 0.0,
  ):
    self._store, self._length, self._stack, self._pace = store, length, stack, pace
    self._block, self._epochs, self._replayed = block, epochs, replayed
    self._next = np.zeros(store.lanes, np.int64)  # start of each lane's next window
    self._blocks = 0  # number of blocks that have left the queue
    self._planned: list[_Window] = []  # to be selected before the next block
    self._pending: Counter[_Window] = Counter()  # selected, but not trained on yet
    self._turn = np.arange(store.lanes)  # order in which lanes are visited
    self._skipped = 0  # number of windows

  def _complete(self) -> np.ndarray:
    """Number of complete windows of each lane, [L]."""
    return np.maximum(self._store.head - 1 - self._next, 0) // self._length

  def _take(self, n: int) -> list[_Window]:
    """Takes the next n windows from the queue, or all complete ones if there are fewer."""
    complete = self._complete()
    taken: list[_Window] = []
    while len(taken) < n and complete.any():
      for lane in self._turn[complete[self._turn] > 0][: n - len(taken)].tolist():
        taken.append((lane, int(self._next[lane])))
        complete[lane] -= 1
        self._next[lane] += self._length
        self._turn = np.append(self._turn[self._turn != lane], lane)
    return taken

  def _oldest(self) -> np.ndarray:
    """Index in its lane of the oldest window whose frames are all stored, [L]."""
    tail = self._store.tail
    return -(-np.where(tail > 0, tail + self._stack - 1, 0) // self._length)

  def _evicted(self) -> np.ndarray:
    """Number of evicted windows at the front of each lane's queue, [L]."""
    return np.maximum(self._oldest() - self._next // self._length, 0)

  def _surplus(self, skipped: int) -> int:
    """Number of windows to skip in addition to the `skipped` ones."""
    store = self._store
    if not store.num_transitions:
      return 0
    filled = store.head.sum() / self._length - store.lanes  # a lane's last may be incomplete
    return math.floor(max(filled - store.num_transitions * self._pace - skipped, 0))

  def _due(self) -> tuple[int, int]:
    """Number of complete windows left to train on, and number of windows to skip before them."""
    evicted, complete = self._evicted(), self._complete()
    left, lost = int(np.maximum(complete - evicted, 0).sum()), int(evicted.sum())
    surplus = min(self._surplus(self._skipped + lost), left)
    return left - surplus, lost + surplus

  def _skip(self, spare: int) -> None:
    """Skips evicted and surplus windows, of which at most `spare` are complete."""
    evicted, complete = self._evicted(), self._complete()
    lost = np.minimum(evicted, complete)
    allowed = np.diff(np.minimum(np.cumsum(lost), spare), prepend=0)
    skip = np.where(allowed == lost, evicted, allowed)
    self._next += skip * self._length
    self._skipped += int(skip.sum())
    surplus = min(self._surplus(self._skipped), spare - int(allowed.sum()))
    self._skipped += len(self._take(surplus))

  def _samples(self, blocks: int) -> int:
    """Number of selections that the next `blocks` blocks provide."""

    def replayed(blocks: int) -> int:
      return math.floor(blocks * self._block * self._replayed)

    extra = replayed(self._blocks + blocks) - replayed(self._blocks)
    return self._epochs * (blocks * self._block + extra)

  def _plan(self, windows: Sequence[_Window], rng: np.random.Generator) -> None:
    """Plans the selections from a block of windows, with replayed ones added."""
    count = self._samples(1) // self._epochs - len(windows)
    windows = [*windows, *self._drawn(count, rng)] if count else windows
    self._blocks += 1
    for _ in range(self._epochs):
      order = rng.permutation(len(windows)) if len(windows) > 1 else [0]
      self._planned += [windows[i] for i in order]

  def _drawn(self, n: int, rng: np.random.Generator) -> list[_Window]:
    """Draws n windows, with replacement, from the stored ones that have left the queue."""
    # The last consumed window of a lane is stored, unless `select` skipped fewer windows than were
    # evicted.
    oldest = np.minimum(self._oldest(), self._next // self._length - 1)
    stored = np.where(self._next > 0, self._next // self._length - oldest, 0)
    end = np.cumsum(stored)
    place = rng.integers(end[-1], size=n)
    lane = np.searchsorted(end, place, side="right")
    time = (oldest[lane] + place - (end - stored)[lane]) * self._length
    return list(zip(lane.tolist(), time.tolist(), strict=True))

  @property
  def count(self) -> int:
    """Number of windows that can be selected, without complete ones that will be skipped."""
    return len(self._planned) + self._samples(self._due()[0] // self._block)

  def ready(self, n: int) -> bool:
    """Whether `select(n)` can be called."""
    return self.count >= n

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """No-op: complete windows are derived from the heads."""

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """Selects the next n windows. Raises ValueError if fewer are complete.

    Once `ready` has returned True, there are always n windows: if later appends evict windows or
    make them surplus, fewer are skipped.
    """
    blocks, complete = 0, int(self._complete().sum())
    while len(self._planned) + self._samples(blocks) < n:
      blocks += 1
    if complete < blocks * self._block:
      most = len(self._planned) + self._samples(complete // self._block)
      raise ValueError(f"requested {n} trajectories, only {most} are complete")
    if blocks:
      self._skip(complete - blocks * self._block)
      taken = self._take(blocks * self._block)
      for begin in range(0, len(taken), self._block):
        self._plan(taken[begin : begin + self._block], rng)
    chosen, self._planned = self._planned[:n], self._planned[n:]
    self._pending.update(chosen)
    lane, time = np.array(chosen, np.int64).reshape(n, 2).T
    return Selection(lane.astype(np.int32), time, np.ones(n))

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """Records that the windows were trained on."""
    self._pending.subtract(zip(selection.lane.tolist(), selection.time.tolist(), strict=True))
    tail = self._store.tail  # evicted windows are dropped, as `update` is not called for them
    left = {w: count for w, count in self._pending.items() if count > 0 and w[1] >= tail[w[0]]}
    self._pending = Counter(left)

  def stats(self, learner_step: int) -> dict[str, float]:
    """Returns the number of complete windows not yet used, and of windows skipped."""
    queued, to_skip = map(float, self._due())
    return {"queued_trajectories": queued, "skipped_trajectories": self._skipped + to_skip}

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the position in each lane, the order of lanes, planned windows and counters.

    Windows that are selected but not trained on are selected again after a restart.
    """
    # Skip windows in the copy only: a caller of `ready` may rely on the original.
    saved = copy.copy(self)
    saved._next = self._next.copy()
    saved._skip(int(self._complete().sum()))
    planned = [(self._blocks, 0), *self._pending.elements(), *self._planned]
    return {
      "queue_next": saved._next,
      "queue_turn": saved._turn.copy(),
      "queue_skipped": np.array([saved._skipped], np.int64),
      "queue_planned": np.array(planned, np.int64),  # the first row has the number of blocks
    }

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict`."""
    self._next, self._turn = state["queue_next"].copy(), state["queue_turn"].copy()
    self._skipped = int(state["queue_skipped"][0])
    (self._blocks, _), *self._planned = ((a, b) for a, b in state["queue_planned"].tolist())
