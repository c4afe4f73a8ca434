"""Rules of two-player board games, for NumPy arrays or, as a model for tree search, JAX arrays.

A board [..., H, W, 2] is the complete state from the perspective of the player to move: that
player's stones and the opponent's, 0 or 1 of any dtype. Row 0 is the top. envpool's frames of these
games have this format.
"""

import dataclasses
from typing import Any

import numpy as np

Array = Any  # NumPy or JAX; functions return the kind of array that they receive


@dataclasses.dataclass(frozen=True)
class Rules:
  """Players alternately place a stone; `connect` in a row win, a full board is a draw."""

  height: int
  width: int
  connect: int
  gravity: bool  # stones fall to the lowest empty row; an action is a column, otherwise a cell

  @property
  def num_actions(self) -> int:
    return self.width if self.gravity else self.height * self.width

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of a board."""
    return self.height, self.width, 2

  def legal(self, board: Array) -> Array:
    """Legal actions [..., A] bool; none when the game is over."""
    empty = ~_taken(board)
    cells = empty[..., 0, :] if self.gravity else empty.reshape(*empty.shape[:-2], -1)
    return cells & ~self.over(board)[..., None]

  def over(self, board: Array) -> Array:
    """Whether the game has ended, [...] bool."""
    return self.lost(board) | _taken(board).all((-2, -1))

  def lost(self, board: Array) -> Array:
    """Whether the opponent, who moved last, has won, [...] bool."""
    return self._row(board[..., 1] > 0)

  def step(self, board: Array, action: Array) -> tuple[Array, Array]:
    """Applies legal actions [...].

    Finished games keep their boards and have reward 0.

    Returns:
      The boards from the opponent's perspective, and the rewards [...] of the players who moved: 1
      for a win, otherwise 0.
    """
    xp = board.__array_namespace__()
    if self.gravity:
      column = xp.take_along_axis(_taken(board), action[..., None, None], axis=-1)
      action = (self.height - 1 - column.sum((-2, -1))) * self.width + action
    cells = np.arange(self.height * self.width).reshape(self.height, self.width)
    own = (board[..., 0] > 0) | (cells == action[..., None, None])
    after = xp.stack([board[..., 1], own.astype(board.dtype)], axis=-1)
    over = self.over(board)
    won = self._row(own) & ~over
    return xp.where(over[..., None, None, None], board, after), won.astype(np.float32)

  def _row(self, stones: Array) -> Array:
    """Whether stones [..., H, W] bool contain `connect` in a row, [...]."""
    result: Array = False
    for s, down, right in (
      (stones, 0, 1),
      (stones, 1, 0),
      (stones, 1, 1),
      (stones[..., ::-1], 1, 1),
    ):
      rows = self.height - (self.connect - 1) * down
      columns = self.width - (self.connect - 1) * right
      line: Array = True
      for i in range(self.connect):
        line &= s[..., i * down : i * down + rows, i * right : i * right + columns]
      result |= line.any((-2, -1))
    return result


def _taken(board: Array) -> Array:
  return (board > 0).any(-1)


RULES = {
  "TicTacToe": Rules(height=3, width=3, connect=3, gravity=False),
  "ConnectFour": Rules(height=6, width=7, connect=4, gravity=True),
}
