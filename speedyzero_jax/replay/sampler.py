"""Which transitions may be sampled, with which priority, and from when that priority is.

Keeps the sum tree in step with a growing, evicting LaneStore. Must not know what a priority is computed from.
"""

import numpy as np

from speedyzero_jax.replay.staleness import NEVER, Stamps
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.replay.sum_tree import SumTree


class Eligible:
  """The eligible transitions of a store and their priorities.

  A transition is *eligible* when an action was taken in its state, all frames of the state's stack are stored, and its
  targets are as good as they will get: its episode has ended, or `lookahead` further slots are there.

  Args:
    store: what they live in.
    stack: frames in an observation.
    lookahead: slots after a state that its targets are made from.
    alpha: exponent of the priorities.
    min_priority: added to every |TD error|.
  """

  def __init__(
    self, store: LaneStore, *, stack: int, lookahead: int, alpha: float, min_priority: float
  ):
    self._store, self._stack, self._lookahead = store, stack, lookahead
    self._alpha, self._min_priority = alpha, min_priority
    self._tree = SumTree(
      store.lanes * store.capacity
    )  # priority ** alpha of eligible transitions, 0 elsewhere
    self._stamps = Stamps(
      (store.lanes, store.capacity)
    )  # of the priorities of eligible transitions
    self.count = 0  # of eligible transitions

  def holds(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Whether the transitions out of these stored slots are eligible, bool."""
    return self._tree.get(self._store.flat(lane, time)) > 0

  def update(self, lane: np.ndarray, old_head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Takes in that lanes [m] grew from `old_head` [m]. What enters gets the current maximum priority.

    Returns (lane, time) of what entered; `stamp` is to follow.
    """
    store = self._store
    head, tail = store.head[lane], store.tail[lane]
    # What can have changed: slots too close to the old head, new slots, and those whose stack was just evicted.
    recent = np.maximum(tail, old_head - self._lookahead)
    near_head = recent[:, None] + np.arange(max(int((head - recent).max()), 1))
    near_tail = tail[:, None] + np.arange(self._stack - 1)
    time = np.concatenate([near_head, near_tail], axis=1)
    valid = np.concatenate([near_head < head[:, None], near_tail < recent[:, None]], axis=1)
    row, _ = np.nonzero(valid)
    lane, time, is_new = lane[row], time[valid], time[valid] >= old_head[row]
    leaf = self._store.flat(lane, time)
    was = self._tree.get(leaf) > 0  # for new slots: whether the one they evicted was eligible
    now = self._may_be_sampled(lane, time)
    enters, leaves = now & (is_new | ~was), was & ~now
    changed = enters | leaves
    self._tree.set(leaf[changed], np.where(enters[changed], self._tree.max or 1.0, 0.0))
    self._stamps.set(leaf[leaves], NEVER)
    self.count += int(now.sum()) - int(was.sum())
    return lane[enters], time[enters]

  def _may_be_sampled(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    store = self._store
    cell = store.cell(time)
    last = store.last(lane, time)
    complete = (store.action[lane, last % store.capacity] < 0) | (time + self._lookahead <= last)
    stacked = (
      np.maximum(time - self._stack + 1, store.episode_start[lane, cell]) >= store.tail[lane]
    )
    return (store.action[lane, cell] >= 0) & complete & stacked

  def stamp(self, lane: np.ndarray, time: np.ndarray, step: np.ndarray) -> None:
    """Says that the priorities of these transitions are as old as learner steps [m]."""
    self._stamps.set(self._store.flat(lane, time), step)

  def score(
    self, lane: np.ndarray, time: np.ndarray, td_error: np.ndarray, step: np.ndarray
  ) -> None:
    """Priorities |td_error| + min_priority found with weights of learner steps [m].

    Of transitions no longer eligible they are dropped; a priority found with newer weights is kept.
    """
    leaf = self._store.flat(lane, time)
    keep = (self._tree.get(leaf) > 0) & (step >= take(self._stamps.step, leaf))
    error = np.abs(td_error[keep]).astype(
      np.float64
    )  # as float32 its power may be too large or, worse, 0
    self._tree.set(leaf[keep], (error + self._min_priority) ** self._alpha)
    self._stamps.set(leaf[keep], step[keep])

  def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws in proportion to priority ** alpha: lane [n] int32, time [n] int64, probability [n] float64.

    Raises ValueError if nothing is eligible.
    """
    leaf, probability = self._tree.sample(n, rng)
    lane, cell = leaf // self._store.capacity, leaf % self._store.capacity
    return lane.astype(np.int32), self._store.time_of(lane, cell), probability

  def ages(self, learner_step: int) -> tuple[float, float]:
    """Mean and maximum age of all priorities, learner steps; 0 if there are none."""
    return self._stamps.ages(learner_step)

  def export(self) -> dict[str, np.ndarray]:
    """What `load` needs, for all live slots: `priority` float64 and `priority_step` int32."""
    store = self._store
    leaves = self._tree.leaves.reshape(store.lanes, store.capacity)
    return {
      "priority": store.newest(leaves, store.tail),
      "priority_step": store.newest(self._stamps.step, store.tail),
    }

  def load(
    self, lane: np.ndarray, time: np.ndarray, priority: np.ndarray, step: np.ndarray
  ) -> None:
    """Restores what `export` gave of the same slots into a new object."""
    leaf = self._store.flat(lane, time)
    self._tree.set(leaf, priority)
    self._stamps.set(leaf, np.where(priority > 0, step, NEVER))
    self.count = int((priority > 0).sum())
