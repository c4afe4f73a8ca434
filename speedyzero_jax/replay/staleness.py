"""From when what cells hold is: a learner step each, of which the oldest and the mean are known at any time.

Must not know what the cells are, nor what was computed.
"""

from collections import Counter

import numpy as np

NEVER = np.iinfo(np.int32).max  # stamp of a cell that holds nothing: never the oldest


class Stamps:
  """Learner steps of cells. Keeps count of each step, so that no question takes a look at all cells.

  Args:
    shape: of the cells; everything else takes flat indices into it.
  """

  def __init__(self, shape: tuple[int, ...]):
    self.step = np.full(shape, NEVER, np.int32)  # to be read only
    self._flat = self.step.reshape(-1)
    self._count: Counter[int] = (
      Counter()
    )  # cells of each step; there are few different ones, as sweeps go round

  def set(self, cell: np.ndarray, step: np.ndarray | int) -> None:
    """Stamps cells [m] with one step, or [m]; NEVER: they hold nothing. Of a cell named twice the last counts."""
    step = np.asarray(step, np.int32)  # raises before anything is touched
    before, order = self._flat[cell], -1 - np.arange(len(cell), dtype=np.int32)
    self._flat[cell] = order
    counts = self._flat[cell] == order  # each cell once
    self._flat[cell] = step
    self._add(before[counts], -1)
    self._add(self._flat[cell[counts]], 1)

  def _add(self, steps: np.ndarray, sign: int) -> None:
    for step, count in zip(
      *(x.tolist() for x in np.unique_counts(steps[steps != NEVER])), strict=True
    ):
      self._count[step] += sign * count
      if not self._count[step]:
        del self._count[step]

  def oldest(self) -> int:
    """Raises ValueError if no cell holds anything."""
    return min(self._count)

  def ages(self, now: int) -> tuple[float, float]:
    """Mean and maximum of now - step, in learner steps; 0 if no cell holds anything."""
    cells = self._count.total()
    if not cells:
      return 0.0, 0.0
    return now - sum(step * count for step, count in self._count.items()) / cells, float(
      now - self.oldest()
    )
