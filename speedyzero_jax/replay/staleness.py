"""Stamps: the learner step of the weights that computed each stored value."""

from collections import Counter

import numpy as np

NEVER = np.iinfo(np.int32).max  # stamp of an empty cell, greater than any learner step


class Stamps:
  """Learner steps of cells, with a histogram that makes oldest and mean step cheap to compute.

  Args:
    shape: of the array of cells; methods take flat indices into it.
  """

  def __init__(self, shape: tuple[int, ...]):
    self.step = np.full(shape, NEVER, np.int32)  # read-only for callers
    self._flat = self.step.reshape(-1)
    self._count: Counter[int] = Counter()  # number of cells by step; few steps are distinct

  def set(self, cell: np.ndarray, step: np.ndarray | int) -> None:
    """Stamps cells [m] with step [m] or []; NEVER empties them. The last of repeated cells wins."""
    steps = np.broadcast_to(step, len(cell))
    cell, index = np.unique(cell[::-1], return_index=True)
    steps = steps[::-1][index]
    self._add(self._flat[cell], -1)
    self._flat[cell] = steps
    self._add(steps, 1)

  def _add(self, steps: np.ndarray, sign: int) -> None:
    steps, counts = np.unique_counts(steps[steps != NEVER])
    for step, count in zip(steps.tolist(), counts.tolist(), strict=True):
      self._count[step] += sign * count
      if not self._count[step]:
        del self._count[step]

  def oldest(self) -> int:
    """Returns the oldest step. Raises ValueError if all cells are empty."""
    return min(self._count)

  def ages(self, now: int) -> tuple[float, float]:
    """Returns mean and maximum of now - step, in learner steps; 0 if all cells are empty."""
    cells = self._count.total()
    if not cells:
      return 0.0, 0.0
    mean = sum(step * count for step, count in self._count.items()) / cells
    return now - mean, float(now - self.oldest())
