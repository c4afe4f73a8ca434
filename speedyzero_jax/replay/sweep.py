"""Whole-replay sweeps: the order of recomputation, and the rate needed for a bound on age."""

from collections import deque
from collections.abc import Iterable

import numpy as np

STRETCH = 16  # cells visited together; a partly filled stretch costs as much as a full one


class Sweep:
  """Visits the cells of all lanes cyclically, in stretches of neighbours, longest unvisited first.

  The stretches in use form a queue: a visited stretch moves to the back, and a new one enters at
  the back, since its slots are fresh from the actor. So between two visits of a stretch every other
  one is visited at most once, whatever is appended meanwhile, and a block whose results are lost is
  visited again one pass later. A slot keeps its old stamp until its result is written, so ages are
  never understated.
  """

  def __init__(self, lanes: int, capacity: int, stretch: int = STRETCH):
    self.lanes, self.capacity, self.stretch = lanes, capacity, stretch
    self._per_lane = -(-capacity // stretch)
    self._queue: deque[int] = deque()  # lane * stretches per lane + index in the lane

  def __len__(self) -> int:
    """Number of stretches in use."""
    return len(self._queue)

  def grow(self, lane: int, used_before: int, used: int) -> None:
    """Records that a lane uses `used` cells, `used_before` before."""
    positions = range(-(-used_before // self.stretch), -(-used // self.stretch))
    self._queue.extend(lane * self._per_lane + position for position in positions)

  def next_block(self, n: int, used: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next n cells to recompute: lane [n] int64, cell [n] int64, with repetitions to fill n.

    Args:
      n: number of states, at least one stretch; whole stretches are taken.
      used: [lanes], cells in use.

    Raises:
      ValueError: n is below one stretch, or no cell is in use.
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
    """States to recompute per learner step, in blocks of n, to bound the age of stamps.

    The caller adds this number to a credit every learner step, and visits a block whenever the
    credit reaches n. A pass must fit into the steps that `delay` leaves: the maximum age of the
    weights when a block is started (or a slot appended), plus the maximum duration of a block. One
    more step is lost between the learner's step and the work, and one more block to the phase of
    the credit.

    Args:
      n: states per block.
      max_age: bound, learner steps.
      delay: learner steps.

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
    """The queue, int64, for a checkpoint."""
    return np.array(self._queue, np.int64)

  def load(self, queue: Iterable[int]) -> None:
    """Restores `state`."""
    self._queue = deque(int(stretch) for stretch in queue)
