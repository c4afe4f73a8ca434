"""The order in which cells were written, for those who keep a copy of the frames elsewhere and ask what is new."""

import numpy as np


class WriteLog:
  """Numbers every write of a cell; remembers as many of the latest as there are cells.

  Args:
    cells: flat cells of the store.
  """

  def __init__(self, cells: int):
    self._cell = np.zeros(cells, np.int64)
    self.count = 0  # writes so far

  def append(self, cell: np.ndarray) -> None:
    """Flat cells [n] were written, in this order."""
    kept = cell[-len(self._cell) :]
    place = np.arange(self.count + len(cell) - len(kept), self.count + len(cell)) % len(self._cell)
    self._cell[place] = kept
    self.count += len(cell)

  def since(self, number: int, n: int) -> tuple[int, np.ndarray]:
    """Up to n writes from `number` (from 0) on: the number of the first, and flat cells.

    Of writes too long ago to be remembered nothing is left: their cells have all been written again since.
    """
    number = max(number, self.count - len(self._cell))
    return number, self._cell[np.arange(number, min(number + n, self.count)) % len(self._cell)]
