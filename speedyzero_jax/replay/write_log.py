"""The order in which cells were written, for those who keep a copy of the frames elsewhere and ask what is new."""

import numpy as np


class WriteLog:
  """Numbers every write of a cell; remembers the latest of each cell at least, whichever lanes are written more often.

  Args:
    cells: flat cells of the store.
  """

  def __init__(self, cells: int):
    self._cell = np.zeros(2 * cells, np.int64)
    self._number = np.zeros(2 * cells, np.int64)  # ascending
    self._used = 0
    self.count = 0  # writes so far

  def append(self, cell: np.ndarray) -> None:
    """Flat cells [n], each of them once, were written, in this order."""
    if self._used + len(cell) > len(self._cell):
      self._forget()
    place = slice(self._used, self._used + len(cell))
    self._cell[place], self._number[place] = cell, self.count + np.arange(len(cell))
    self._used += len(cell)
    self.count += len(cell)

  def _forget(self) -> None:
    """Drops the writes whose cells were written again since: half of the room, or more."""
    cell, order = self._cell[: self._used], np.arange(self._used)
    latest = np.zeros(len(self._cell) // 2, np.int64)
    latest[cell] = order  # of a cell named twice the last counts
    kept = np.flatnonzero(latest[cell] == order)
    self._used = len(kept)
    self._cell[: self._used], self._number[: self._used] = self._cell[kept], self._number[kept]

  def since(self, number: int, n: int) -> tuple[int, np.ndarray]:
    """Up to n writes from `number` (from 0) on: the number to go on from, and flat cells.

    Writes of cells that were written again since may be left out; whoever goes on to `count` has seen every cell.
    """
    begin = int(np.searchsorted(self._number[: self._used], number))
    end = min(begin + n, self._used)
    return (int(self._number[end - 1]) + 1 if end > begin else number), self._cell[begin:end].copy()
