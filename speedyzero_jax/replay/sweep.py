"""Sweeps over the whole replay: order of recomputation, and the rate that bounds the age.

See also `workers/sweeper.py`, which schedules the blocks.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np

STRETCH = 16  # adjacent cells visited together; a partly filled stretch costs as much as a full one


class Sweep:
  """Visits all cells in use cyclically, in stretches of adjacent cells, least recent first.

  The stretches in use form a queue. A visited stretch moves to the back, and a new one enters at
  the back, since its values were just computed by the actor. So between two visits of a stretch,
  every other stretch is visited at most once, regardless of appends. A block whose results are lost
  is visited again one pass later. A slot keeps its old stamp until its result is written, so ages
  are never underestimated.
  """

  def __init__(self, lanes: int, capacity: int, stretch: int = STRETCH):
    self.stretch = stretch
    self._per_lane = -(-capacity // stretch)
    self._used = np.zeros(lanes, np.int64)  # cells in use
    self._queue: deque[int] = deque()  # lane * stretches per lane + index in the lane

  def grow(self, used: np.ndarray) -> None:
    """Updates the number of cells in use in each lane, [lanes]."""
    before, after = -(-self._used // self.stretch), -(-used // self.stretch)
    for lane in np.flatnonzero(after > before).tolist():
      self._queue.extend(lane * self._per_lane + np.arange(before[lane], after[lane]))
    self._used = used

  def next_block(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next n cells to recompute: lane [n] int64, cell [n] int64.

    Whole stretches are taken, so n must be at least one stretch; cells are repeated to fill n.
    Raises ValueError if no cell is in use.
    """
    if not self._queue:
      raise ValueError("next_block: the replay is empty")
    count = min(n // self.stretch, len(self._queue))
    stretches = np.array([self._queue[i] for i in range(count)])
    self._queue.rotate(-count)
    lane, position = stretches // self._per_lane, stretches % self._per_lane
    cell = position[:, None] * self.stretch + np.arange(self.stretch)
    cell = np.minimum(cell, self._used[lane, None] - 1)
    return np.resize(np.repeat(lane, self.stretch), n), np.resize(cell, n)

  def quota(self, n: int, max_age: int, delay: int = 0) -> int:
    """Number of states to recompute per learner step so that no stamp exceeds `max_age`.

    The caller adds this number to a credit in every learner step, and visits a block of n states
    whenever the credit reaches n. `delay` is the maximum age of the weights when a block is started
    (or a slot appended), plus the maximum duration of a block, in learner steps. A pass and one
    extra block must fit into max_age - delay - 1 steps, so `max_age` must be at least delay + 2.
    """
    blocks_in_pass = -(-len(self._queue) // (n // self.stretch))
    return -(-(blocks_in_pass + 1) * n // (max_age - delay - 1))

  def state(self) -> np.ndarray:
    """Returns the queue for a checkpoint, int64."""
    return np.array(self._queue, np.int64)

  def load(self, queue: Iterable[int], used: np.ndarray) -> None:
    """Restores the result of `state`, with the number of cells in use [lanes]."""
    self._queue, self._used = deque(int(stretch) for stretch in queue), used
