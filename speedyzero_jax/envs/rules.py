"""Rules of two-player board games, for NumPy arrays or, as a model for tree search, JAX arrays.

A board [..., H, W, 2k] describes a state from the perspective of the player to move. Planes come in
pairs, the player's first and the opponent's second; the first pair shows the stones, 0 or 1 of any
dtype. Row 0 is the top. Frames of these games have this format.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

Array = Any  # NumPy or JAX; functions return the kind of array that they receive

_NONE = -1000  # less than any number of a cell


@dataclasses.dataclass(frozen=True)
class Rules(abc.ABC):
  """Interface of a game's rules."""

  passes: ClassVar[bool] = False  # whether the last action passes

  height: int
  width: int

  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of a board."""
    return self.height, self.width, 2

  @property
  def num_actions(self) -> int:
    """Number of actions, A."""
    return self.height * self.width + self.passes

  @property
  def reflection(self) -> np.ndarray:
    """Action [A] that has the effect of each action after a reflection of columns."""
    cells = self._cells[:, ::-1].ravel()
    return np.append(cells, cells.size) if self.passes else cells

  @property
  def max_moves(self) -> int:
    """Maximum length of a game."""
    return self.height * self.width

  @property
  @abc.abstractmethod
  def longest_opening(self) -> int:
    """Number of random moves after which both players still get a turn."""

  @abc.abstractmethod
  def legal(self, board: Array) -> Array:
    """Legal actions [..., A] bool; none when the game is over."""

  @abc.abstractmethod
  def over(self, board: Array) -> Array:
    """Whether the game has ended, [...] bool."""

  @abc.abstractmethod
  def outcome(self, board: Array) -> Array:
    """Outcome of a finished game for the player to move, -1, 0 or 1; 0 if it is not over [...]."""

  def moves(self, board: Array) -> Array:
    """Number of moves made so far [...]."""
    return (board[..., :2] > 0).sum((-3, -2, -1))

  def step(self, board: Array, action: Array) -> tuple[Array, Array]:
    """Applies legal actions [...]. Finished games keep their boards and have reward 0.

    Returns the boards from the opponent's perspective, and the rewards [...] of the players who
    moved, which are the outcomes.
    """
    xp, over, after = board.__array_namespace__(), self.over(board), self._play(board, action)
    reward = xp.where(over, 0, -self.outcome(after)).astype(np.float32)
    return xp.where(over[..., None, None, None], board, after), reward

  @abc.abstractmethod
  def _play(self, board: Array, action: Array) -> Array:
    """The board from the opponent's perspective after a legal action [...] of an open game."""

  @functools.cached_property
  def _cells(self) -> np.ndarray:
    """Indices of the cells [H, W]."""
    cells = np.arange(self.height * self.width, dtype=np.int32)
    return cells.reshape(self.height, self.width)


def flip(board: Array) -> Array:
  """Boards from the perspective of the other player."""
  return board.reshape(*board.shape[:-1], -1, 2)[..., ::-1].reshape(board.shape)


@dataclasses.dataclass(frozen=True)
class InARow(Rules):
  """Players alternately place a stone; `connect` in a row win, a full board is a draw."""

  connect: int
  gravity: bool  # stones fall to the lowest empty row; an action is a column, otherwise a cell

  @property
  def num_actions(self) -> int:
    return self.width if self.gravity else self.height * self.width

  @property
  def reflection(self) -> np.ndarray:
    return np.arange(self.width)[::-1] if self.gravity else super().reflection

  @property
  def longest_opening(self) -> int:
    return 2 * self.connect - 3

  def legal(self, board: Array) -> Array:
    empty = ~_taken(board)
    cells = empty[..., 0, :] if self.gravity else empty.reshape(*empty.shape[:-2], -1)
    return cells & ~self.over(board)[..., None]

  def over(self, board: Array) -> Array:
    return (self.outcome(board) < 0) | _taken(board).all((-2, -1))

  def outcome(self, board: Array) -> Array:
    return -self._row(board[..., 1] > 0).astype(np.int32)  # the opponent moved last

  def _play(self, board: Array, action: Array) -> Array:
    xp = board.__array_namespace__()
    if self.gravity:
      column = xp.take_along_axis(_taken(board), action[..., None, None], axis=-1)
      action = (self.height - 1 - column.sum((-2, -1))) * self.width + action
    own = (board[..., 0] > 0) | (self._cells == action[..., None, None])
    return xp.stack([board[..., 1], own.astype(board.dtype)], axis=-1)

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


@dataclasses.dataclass(frozen=True)
class Go(Rules):
  """Go with area scoring, as in envpool's pgx. The last action passes; two passes end the game.

  Suicide is illegal, as is capturing back in a ko at once. A stone that restores an earlier
  position loses the game. After two moves per cell the game is scored.

  The planes of a board are the last eight positions, newest first, and the number of moves so far,
  in the plane of Black. Older positions are not part of the board, so their repetition is not
  detected here; envpool detects it.
  """

  passes: ClassVar[bool] = True

  komi: float  # added to the area of White, who moves second

  @property
  def shape(self) -> tuple[int, int, int]:
    return self.height, self.width, 18

  @property
  def max_moves(self) -> int:
    return 2 * self.height * self.width

  @property
  def longest_opening(self) -> int:
    return 8  # random play does not pass

  def moves(self, board: Array) -> Array:
    return board[..., 0, 0, 16:].sum(-1).astype(np.int32)

  def legal(self, board: Array) -> Array:
    xp = board.__array_namespace__()
    own, other, numbers = self._groups(board)
    empty, several = ~(own | other), numbers[0] != -numbers[1]  # liberties
    open_ = _beside(empty | (own & several) | (other & ~several))
    cells = (empty & open_ & ~self._ko(board)).reshape(*empty.shape[:-2], -1)
    actions = xp.concatenate([cells, xp.ones_like(cells[..., :1])], axis=-1)
    return actions & ~self.over(board)[..., None]

  def over(self, board: Array) -> Array:
    moves, (passed, twice, repeated) = self.moves(board), self._repetitions(board)
    return (passed & twice & (moves > 1)) | repeated | (moves >= self.max_moves)

  def outcome(self, board: Array) -> Array:
    xp = board.__array_namespace__()
    own, other, numbers = self._groups(board)
    empty = ~(own | other)
    # Empty cells of a region without any stone beside it are counted for both.
    area = (own | (empty & (numbers[1] == 0))) * 1.0 - (other | (empty & (numbers[0] == 0)))
    komi = xp.where(self.moves(board) % 2 == 0, self.komi, -self.komi)  # Black moves at 0, 2, ...
    won = (area.sum((-2, -1)) > komi) | self._repetitions(board)[2]
    return xp.where(self.over(board), xp.where(won, 1, -1), 0)

  def _play(self, board: Array, action: Array) -> Array:
    xp = board.__array_namespace__()
    own, other, numbers = self._groups(board)
    action = action[..., None, None]
    captured = other & (numbers[0] == action) & (numbers[1] == -action)
    after = xp.stack([own | (self._cells == action), other & ~captured], axis=-1)
    moves = self.moves(board)[..., None] + 1
    moves = moves * (moves % 2 == np.array([1, 0]))  # Black moved last after an odd number
    moves = xp.broadcast_to(moves[..., None, None, :], after.shape)
    planes = [plane.astype(board.dtype) for plane in (after, board[..., :14], moves)]
    return flip(xp.concatenate(planes, axis=-1))

  def _repetitions(self, board: Array) -> tuple[Array, Array, Array]:
    """Whether the position equals the last one, the one before, or, after a stone, any earlier."""
    positions = board[..., :16].reshape(*board.shape[:-1], 8, 2)
    same = (positions == positions[..., :1, :]).all((-4, -3, -1))
    return same[..., 1], same[..., 2], ~same[..., 1] & same[..., 2:].any(-1)

  def _ko(self, board: Array) -> Array:
    """The cell of a stone that was just captured, alone, by a stone among enemies [..., H, W]."""
    own, other, own_before, other_before = (board[..., i] > 0 for i in range(4))
    captured = own_before & ~own
    placed = other & ~other_before & ~_beside(~own_before)
    ko = (captured.sum((-2, -1)) == 1) & placed.any((-2, -1))
    return captured & ko[..., None, None]

  def _groups(self, board: Array) -> tuple[Array, Array, Array]:
    """Returns own and opponent's stones [..., H, W], and two numbers per cell [2, ..., H, W].

    These are the last liberty of a stone's chain and minus the first, or whether own and opponent's
    stones are beside an empty cell's region.
    """
    xp = board.__array_namespace__()
    own, other = board[..., 0] > 0, board[..., 1] > 0
    color = own * 1 - other
    empty, same = color == 0, _around(color) == color
    liberties = xp.stack([xp.where(empty, cells, _NONE) for cells in (self._cells, -self._cells)])
    numbers = xp.where(empty, _around(xp.stack([own, other]) * 1), _around(liberties)).max(0)

    def spread(numbers: Array) -> Array:
      return xp.maximum(numbers, xp.where(same[:, None], _around(numbers), _NONE).max(0))

    return own, other, _repeat(spread, numbers)


def _around(cells: Array) -> Array:
  """The four neighbors [4, ..., H, W] of cells [..., H, W]; `_NONE` beyond the edge."""
  xp = cells.__array_namespace__()
  x = xp.pad(cells, [(0, 0)] * (cells.ndim - 2) + [(1, 1)] * 2, constant_values=_NONE)
  return xp.stack([x[..., :-2, 1:-1], x[..., 2:, 1:-1], x[..., 1:-1, :-2], x[..., 1:-1, 2:]])


def _beside(cells: Array) -> Array:
  """Whether a neighbor is one of `cells` [..., H, W] bool."""
  return (_around(cells * 1) > 0).any(0)


def _repeat(update: Callable[[Array], Array], x: Array) -> Array:
  """Repeats an update until nothing changes."""
  if not isinstance(x, np.ndarray):
    import jax

    changed = jax.lax.while_loop(
      lambda pair: (pair[0] != pair[1]).any(),
      lambda pair: (pair[1], update(pair[1])),
      (x, update(x)),
    )
    return changed[1]
  while ((after := update(x)) != x).any():
    x = after
  return x


RULES: dict[str, Rules] = {
  "TicTacToe": InARow(height=3, width=3, connect=3, gravity=False),
  "ConnectFour": InARow(height=6, width=7, connect=4, gravity=True),
  "Go9": Go(height=9, width=9, komi=7.5),
}
