"""Prioritized sampling of transitions and sequences, with the age of each priority."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from speedyzero_jax.config.schema import PriorityConfig
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import NEVER, LaneStore, put, slots_between, take
from speedyzero_jax.replay.sum_tree import SumTree

_GROUP = 256  # approximate number of samples whose importance weights are normalized together


class PrioritizedSampler:
  """Draws transitions in proportion to priority ** alpha, with replacement (Schaul et al. 2016).

  A transition is *eligible* if an action was taken in its state, the frames of the state's stack
  are stored, and its targets are final: its episode has ended, or `lookahead` further slots are
  stored.

  Args:
    store: of the slots; a lane must have room for `stack + lookahead` slots.
    config: exponents and minima.
    stack: frames of a state.
    lookahead: slots after a transition's first that its targets may use.
    initial_error: maps newly eligible transitions (lane [m], time [m]) to errors [m] and the
      learner steps [m] of the weights that they depend on. With None or NaN in place of an error, a
      transition gets the current maximum priority. By default errors are None, with the steps of
      the weights that acted.
  """

  def __init__(
    self,
    store: LaneStore,
    config: PriorityConfig,
    *,
    stack: int,
    lookahead: int,
    initial_error: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray | None, np.ndarray]]
    | None = None,
  ):
    self._store, self._stack, self._lookahead = store, stack, lookahead
    self._alpha, self._min_priority = config.alpha, config.min_priority
    self._initial_error = initial_error or (
      lambda lane, time: (None, take(store["step"], store.flat(lane, time)))
    )
    self._tree = SumTree(store.lanes * store.capacity)  # priority ** alpha, 0 if ineligible
    self._step = np.full((store.lanes, store.capacity), NEVER, np.int32)  # of the priorities
    self.count = 0  # number of eligible transitions

  def ready(self, n: int) -> bool:
    """Whether any transition is eligible; sampling is with replacement."""
    return self.count > 0

  def eligible(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Whether the transitions of these stored slots are eligible, bool."""
    return self._tree.get(self._store.flat(lane, time)) > 0

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """Updates eligibility after the heads of lanes [m] have moved on from `old_head` [m]."""
    store = self._store
    head, tail = store.head[lane], store.tail[lane]
    # Eligibility may change near the old head, in new slots, and where stacks were just evicted.
    recent = np.maximum(tail, old_head - self._lookahead)
    near_head = recent[:, None] + np.arange(max(int((head - recent).max()), 1))
    near_tail = tail[:, None] + np.arange(self._stack - 1)
    time = np.concatenate([near_head, near_tail], axis=1)
    valid = np.concatenate([near_head < head[:, None], near_tail < recent[:, None]], axis=1)
    row, _ = np.nonzero(valid)
    lane, time, is_new = lane[row], time[valid], time[valid] >= old_head[row]
    leaf = store.flat(lane, time)
    was = self._tree.get(leaf) > 0  # for new slots: eligibility of the evicted slot in the cell
    now = self._eligible(lane, time)
    enters, leaves = now & (is_new | ~was), was & ~now
    error, step = self._initial_error(lane[enters], time[enters])
    changed, priority = enters | leaves, np.zeros(len(leaf))
    priority[enters] = self._tree.max or 1.0
    if error is not None:
      priority[enters] = np.where(np.isnan(error), priority[enters], self._powered(error))
    self._tree.set(leaf[changed], priority[changed])
    put(self._step, leaf[leaves], NEVER)
    put(self._step, leaf[enters], step)
    self.count += int(now.sum()) - int(was.sum())

  def _eligible(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    store = self._store
    cell = store.cell(time)
    last = store.last(lane, time)
    complete = (store.action[lane, last % store.capacity] < 0) | (time + self._lookahead <= last)
    oldest = np.maximum(time - self._stack + 1, store.episode_start[lane, cell])
    return (store.action[lane, cell] >= 0) & complete & (oldest >= store.tail[lane])

  def set_priorities(
    self, lane: np.ndarray, time: np.ndarray, td_error: np.ndarray, step: np.ndarray
  ) -> None:
    """Sets priorities |td_error| + min_priority, computed with weights of learner steps `step` [m].

    Ineligible transitions are ignored, and priorities from newer weights are kept.
    """
    leaf = self._store.flat(lane, time)
    keep = (self._tree.get(leaf) > 0) & (step >= take(self._step, leaf))
    self._tree.set(leaf[keep], self._powered(td_error[keep]))
    put(self._step, leaf[keep], step[keep])

  def _powered(self, error: np.ndarray) -> np.ndarray:
    # In float32 the power could overflow or underflow.
    return (np.abs(error).astype(np.float64) + self._min_priority) ** self._alpha

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """Sets the priorities of the transitions trained on from the errors [B] of a learner step."""
    steps = np.full(len(priority), step, np.int32)
    self.set_priorities(selection.lane, selection.time, priority, steps)

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """Samples n transitions independently. Raises ValueError if none is eligible."""
    leaf, probability = self._tree.sample(n, rng)
    lane, cell = leaf // self._store.capacity, leaf % self._store.capacity
    return Selection(lane.astype(np.int32), self._store.time_of(lane, cell), probability)

  def stats(self, learner_step: int) -> dict[str, float]:
    """Returns mean and maximum age of all priorities, in learner steps."""
    ages = learner_step - self._step[self._step != NEVER]
    return {
      "priority_age_mean": float(ages.mean()) if ages.size else 0.0,
      "priority_age_max": float(ages.max(initial=0)),
    }

  def _live_leaves(self) -> np.ndarray:
    return self._store.flat(*slots_between(self._store.tail, self._store.head))

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns `priority` float64 and `priority_step` int32 of all live slots."""
    leaf = self._live_leaves()
    return {"priority": self._tree.get(leaf), "priority_step": take(self._step, leaf)}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict` into a new sampler."""
    leaf = self._live_leaves()
    priority, step = state["priority"], state["priority_step"]
    self._tree.set(leaf, priority)
    put(self._step, leaf, np.where(priority > 0, step, NEVER))
    self.count = int((priority > 0).sum())


class SequenceSampler(PrioritizedSampler):
  """Draws sequences of a slot and the next `lookahead` slots, which may span several episodes.

  In each lane, slots at multiples of `stride` are eligible once their sequence is complete.
  """

  def __init__(self, store: LaneStore, config: PriorityConfig, *, stride: int, **others: Any):
    """Takes the arguments of `PrioritizedSampler`, and the distance between sequences in slots."""
    super().__init__(store, config, **others)
    self._stride = stride

  def _eligible(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    store = self._store
    oldest = np.maximum(time - self._stack + 1, store.episode_start[lane, store.cell(time)])
    complete = time + self._lookahead < store.head[lane]
    return (time % self._stride == 0) & complete & (oldest >= store.tail[lane])


def importance_weights(
  probability: np.ndarray, config: PriorityConfig, progress: float
) -> np.ndarray:
  """Returns importance weights p^-beta, float32 [B], at most 1 (Schaul et al. 2016, section 3.4).

  They are normalized by the maximum of each group of about 256 consecutive samples, EfficientZero's
  batch size. A larger batch has a larger maximum, so normalizing by it would reduce all weights,
  and with them the effective learning rate. Samples are independent, so groups of (nearly) equal
  sizes are statistically equivalent.
  `progress` is the completed share of training, in [0, 1].
  """
  beta = config.beta_start + progress * (config.beta_end - config.beta_start)
  weight = probability**-beta
  groups = max(round(len(weight) / _GROUP), 1)
  begins = np.arange(groups) * len(weight) // groups
  largest = np.maximum.reduceat(weight, begins)
  weight /= np.repeat(largest, np.diff(begins, append=len(weight)))
  return np.maximum(weight, config.min_weight).astype(np.float32)
