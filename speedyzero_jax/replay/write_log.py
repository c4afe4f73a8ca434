"""The order in which cells were written, for copies of the frames that follow it."""

import numpy as np


class WriteLog:
  """Numbers every write of a cell, and remembers at least the latest write of each.

  Args:
    cells: flat cells of the store.
  """

  def __init__(self, cells: int):
    self._cell = np.zeros(2 * cells, np.int64)
    self._number = np.zeros(2 * cells, np.int64)  # ascending
    self._used = 0
    self.count = 0  # writes so far

  def append(self, cell: np.ndarray) -> None:
    """Records writes of distinct flat cells [n], in this order."""
    if self._used + len(cell) > len(self._cell):
      self._forget()
    place = slice(self._used, self._used + len(cell))
    self._cell[place], self._number[place] = cell, self.count + np.arange(len(cell))
    self._used += len(cell)
    self.count += len(cell)

  def _forget(self) -> None:
    """Drops writes of cells that were written again since; frees half of the room or more."""
    cell, order = self._cell[: self._used], np.arange(self._used)
    latest = np.zeros(len(self._cell) // 2, np.int64)
    latest[cell] = order  # for repeated cells the last one counts
    kept = np.flatnonzero(latest[cell] == order)
    self._used = len(kept)
    self._cell[: self._used], self._number[: self._used] = self._cell[kept], self._number[kept]

  def since(self, number: int, n: int) -> tuple[int, np.ndarray]:
    """Up to n writes from number `number` (from 0) on: the next number, and flat cells.

    Writes of cells that were written again may be left out; a reader that has reached `count` has
    seen every cell.
    """
    begin = int(np.searchsorted(self._number[: self._used], number))
    end = min(begin + n, self._used)
    return (int(self._number[end - 1]) + 1 if end > begin else number), self._cell[begin:end].copy()
