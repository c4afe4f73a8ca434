"""Whole-buffer passes: which slots to recompute next, and how fast to go for a bound on their age.

Used twice: for Priority Refresh (values and priorities) and for sweep reanalysis (policies and search values).
Knows cells and lanes; must not know what is recomputed, nor by whom.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

STRETCH = 16  # cells visited together; a partly filled stretch costs as much as a full one


class Sweep:
  """Visits the cells of all lanes round and round, in stretches of neighbours, the longest unvisited first.

  The stretches in use stand in one queue: a visit moves one to the back, a new one enters at the back (its slots
  are fresh from the actor). So between two visits of a stretch every other one is visited at most once, whatever
  is appended meanwhile, and a block that never comes back is handed out again one pass later. A slot in flight
  keeps its old stamp until its result is written, hence ages read from stamps stay honest.
  """

  def __init__(self, lanes: int, capacity: int, stretch: int = STRETCH):
    self.lanes, self.capacity, self.stretch = lanes, capacity, stretch
    self._per_lane = -(-capacity // stretch)
    self._queue: deque[int] = deque()  # lane * stretches per lane + position in the lane

  def __len__(self) -> int:
    """Stretches in use."""
    return len(self._queue)

  def grow(self, lane: int, used_before: int, used: int) -> None:
    """Tells that a lane now uses `used` cells rather than `used_before`."""
    positions = range(-(-used_before // self.stretch), -(-used // self.stretch))
    self._queue.extend(lane * self._per_lane + position for position in positions)

  def next_block(self, n: int, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next n cells to recompute, (lane [n] int64, cell [n] int64); cells are repeated to fill n exactly.

    Args:
      n: a fixed number of states, at least one stretch; its remainder modulo the stretch is filled by repetition.
      used: [lanes], cells in use.

    Raises:
      ValueError: n is below one stretch, or nothing is in use.
    """
    count = self._stretches(n)
    if not self._queue:
      raise ValueError("next_block: the buffer is empty")
    count = min(count, len(self._queue))
    chosen = np.array([self._queue[i] for i in range(count)])
    self._queue.rotate(-count)
    lane, position = chosen // self._per_lane, chosen % self._per_lane
    cell = position[:, None] * self.stretch + np.arange(self.stretch)
    cell = np.minimum(cell, used[lane, None] - 1)
    return np.resize(np.repeat(lane, self.stretch), n), np.resize(cell, n)

  def quota(self, n: int, max_age: int, delay: int = 0) -> int:
    """States to recompute per learner step, in blocks of n, so that no stamp gets older than max_age learner steps.

    The caller lets credit grow by this number each learner step and takes a block whenever it holds n. A pass must
    fit into the steps left once `delay` is spent: the most learner steps by which weights are stale when a block is
    handed out (or a slot appended) plus the most that a block is in flight. One more step is lost between the
    clock's tick and the work, one more block to the phase of the credit.

    Raises:
      ValueError: max_age is not above delay + 1.
    """
    steps = max_age - delay - 1
    if steps < 1:
      raise ValueError(
        f"max_age must be at least {delay + 2} learner steps with a delay of {delay}, got {max_age}"
      )
    blocks_in_pass = -(-len(self) // self._stretches(n))
    return -(-(blocks_in_pass + 1) * n // steps)

  def _stretches(self, n: int) -> int:
    if n < self.stretch:
      raise ValueError(f"a block must hold at least {self.stretch} states, got {n}")
    return n // self.stretch

  def state(self) -> np.ndarray:
    """The queue, int64."""
    return np.array(self._queue, np.int64)

  def load(self, queue: Iterable[int]) -> None:
    """Restores what `state` gave."""
    self._queue = deque(int(stretch) for stretch in queue)
