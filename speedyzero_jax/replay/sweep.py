"""Whole-replay sweeps: the order of recomputation, and the rate needed for a bound on age."""

from collections import deque
from collections.abc import Iterable

import numpy as np

STRETCH = 16  # cells visited together; a partly filled stretch costs as much as a full one


class Sweep:
  """Visits the cells of all lanes cyclically, in stretches of neighbors, longest unvisited first.

  The stretches in use form a queue: a visited stretch moves to the back, and a new one enters at
  the back, since its slots are fresh from the actor. So between two visits of a stretch every other
  one is visited at most once, whatever is appended meanwhile, and a block whose results are lost is
  visited again one pass later. A slot keeps its old stamp until its result is written, so ages are
  never understated.
  """

  def __init__(self, lanes: int, capacity: int, stretch: int = STRETCH):
    self.stretch = stretch
    self._per_lane = -(-capacity // stretch)
    self._used = np.zeros(lanes, np.int64)  # cells
    self._queue: deque[int] = deque()  # lane * stretches per lane + index in the lane

  def __len__(self) -> int:
    """Number of stretches in use."""
    return len(self._queue)

  def grow(self, used: np.ndarray) -> None:
    """Receives the number of cells in use in each lane, [lanes]."""
    before, after = -(-self._used // self.stretch), -(-used // self.stretch)
    for lane in np.flatnonzero(after > before).tolist():
      self._queue.extend(lane * self._per_lane + np.arange(before[lane], after[lane]))
    self._used = used

  def next_block(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The next n cells to recompute: lane [n] int64, cell [n] int64, with repetitions to fill n.

    n is at least one stretch; whole stretches are taken. Raises ValueError if no cell is in use.
    """
    if not self._queue:
      raise ValueError("next_block: the buffer is empty")
    count = min(n // self.stretch, len(self._queue))
    chosen = np.array([self._queue[i] for i in range(count)])
    self._queue.rotate(-count)
    lane, position = chosen // self._per_lane, chosen % self._per_lane
    cell = position[:, None] * self.stretch + np.arange(self.stretch)
    cell = np.minimum(cell, self._used[lane, None] - 1)
    return np.resize(np.repeat(lane, self.stretch), n), np.resize(cell, n)

  def quota(self, n: int, max_age: int, delay: int = 0) -> int:
    """States to recompute per learner step, in blocks of n, to bound the age of stamps.

    The caller adds this number to a credit every learner step, and visits a block whenever the
    credit reaches n. A pass must fit into the steps that `delay` leaves: the maximum age of the
    weights when a block is started (or a slot appended), plus the maximum duration of a block. One
    more step is lost between the learner's step and the work, and one more block to the phase of
    the credit: so `max_age` must be at least delay + 2.
    """
    blocks_in_pass = -(-len(self) // (n // self.stretch))
    return -(-(blocks_in_pass + 1) * n // (max_age - delay - 1))

  def state(self) -> np.ndarray:
    """The queue, int64, for a checkpoint."""
    return np.array(self._queue, np.int64)

  def load(self, queue: Iterable[int], used: np.ndarray) -> None:
    """Restores `state`, with the cells in use [lanes]."""
    self._queue, self._used = deque(int(stretch) for stretch in queue), used
