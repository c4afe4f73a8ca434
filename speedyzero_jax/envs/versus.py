"""Board games against an opponent, for evaluation."""

import numpy as np

from speedyzero_jax.envs.opponents import Opponent, play_at_random
from speedyzero_jax.envs.rules import Rules, flip
from speedyzero_jax.types import EnvStep


class VersusEnv:
  """L games with the interface and conventions of `BatchedEnv`. Rewards are the agent's.

  Every game starts with `opening` random moves, the same in lanes 2k and 2k+1; then the agent moves
  first in even lanes. Frames show the board from the agent's perspective.
  """

  def __init__(self, rules: Rules, lanes: int, seed: int, opponent: Opponent, opening: int = 0):
    self._rules, self._opponent, self._opening = rules, opponent, opening
    self._at_random = play_at_random(rules)
    self._rng = np.random.default_rng(seed)
    self._second = np.arange(lanes) % 2 == 1
    self.num_lanes, self.num_actions = lanes, rules.num_actions
    self.frame_shape, self.frame_dtype = rules.shape, np.dtype(np.uint8)

  def reset(self) -> EnvStep:
    """Returns the first frame of every lane."""
    self._board = np.zeros((self.num_lanes, *self.frame_shape), np.uint8)
    return self._show(np.ones(self.num_lanes, bool), np.zeros(self.num_lanes))

  def step(self, action: np.ndarray) -> EnvStep:
    """Makes the agent's and the opponent's moves; see `BatchedEnv.step`."""
    ended = self._ended
    self._board, won = self._move(self._board, action, ~ended)
    return self._show(ended, won)

  def close(self) -> None:
    """Does nothing."""

  def _show(self, first: np.ndarray, won: np.ndarray) -> EnvStep:
    """Begins new games in lanes `first`, makes the opponent's moves and returns the result."""
    board = self._board
    if first.any():
      board = np.where(first[:, None, None, None], self._openings(), board)
    reply = self._opponent(board, self._rng)
    replying = (~first | self._second) & ~self._rules.over(board)
    replied, lost = self._move(board, reply, replying)
    self._board = np.where(replying[:, None, None, None], replied, board)
    ended = self._rules.over(self._board)
    self._ended = ended
    reward = (won - np.where(replying, lost, 0)).astype(np.float32)
    by_agent = (ended & ~replying)[:, None, None, None]  # after its move the opponent is next
    frame = np.where(by_agent, flip(self._board), self._board)
    return EnvStep(frame, reward, first, ended, np.zeros_like(ended), ended)

  def _openings(self) -> np.ndarray:
    lanes = self.num_lanes
    board = np.zeros((-(-lanes // 2), *self.frame_shape), np.uint8)
    for _ in range(self._opening):
      action = self._at_random(board, self._rng)
      board, _ = self._move(board, action, np.ones(len(board), bool))
    return np.repeat(board, 2, axis=0)[:lanes]

  def _move(
    self, board: np.ndarray, action: np.ndarray, moving: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Calls `Rules.step`. Raises ValueError for an illegal action in a game that is `moving`."""
    legal = self._rules.legal(board)[np.arange(len(board)), action]
    if np.any(moving & ~legal):
      raise ValueError(f"illegal moves in games {np.flatnonzero(moving & ~legal).tolist()}")
    return self._rules.step(board, action)
