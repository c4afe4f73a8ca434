"""Opponents for board games: random play, minimax, and plain Monte-Carlo tree search."""

import functools
from collections.abc import Callable

import numpy as np

from speedyzero_jax.envs.rules import Rules

# (boards [L, H, W, planes] from the opponent's perspective, generator) -> actions [L]. Actions are
# legal unless the game is over.
Opponent = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def play_at_random(rules: Rules) -> Opponent:
  """Uniformly random legal moves; in Go it passes only if there is no other."""

  def play(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    legal = rules.legal(board)
    if rules.passes:
      legal[:, -1] &= ~legal[:, :-1].any(axis=-1)
    return np.argmax(legal * (1 - rng.random(legal.shape)), axis=-1)  # 1 - x is positive

  return play


def play_minimax(rules: Rules) -> Opponent:
  """Perfect play, random among the best moves. Visits all positions, so only for tic-tac-toe."""

  @functools.cache
  def values(board: bytes) -> np.ndarray:
    """Value [A] of every action for the player to move; -inf where illegal."""
    state = np.frombuffer(board, np.uint8).reshape(rules.shape)
    value = np.full(rules.num_actions, -np.inf)
    legal = np.flatnonzero(rules.legal(state))
    after, reward = rules.step(np.repeat(state[None], len(legal), axis=0), legal)
    for action, next_state, won in zip(legal, after, reward, strict=True):
      reply = values(next_state.tobytes()).max()
      value[action] = won if np.isinf(reply) else -reply
    return value

  def play(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    value = np.stack([values(b.tobytes()) for b in board])
    best = value == value.max(axis=-1, keepdims=True)
    return np.argmax(best * (1 - rng.random(best.shape)), axis=-1)

  return play


def play_mcts(rules: Rules, rollouts: int) -> Opponent:
  """UCT: tree search with UCB1 and random rollouts (Kocsis and Szepesvari 2006)."""
  at_random = play_at_random(rules)

  def outcome(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Outcomes of random rollouts [L], for the player to move."""
    sign, active = np.ones(len(board)), ~rules.over(board)
    while active.any():
      board, _ = rules.step(board, at_random(board, rng))
      sign[active] *= -1
      active = ~rules.over(board)
    return sign * rules.outcome(board)

  def play(board: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    tree = _Tree(rules, board, rollouts + 1)
    for _ in range(rollouts):
      leaf, path = tree.descend(rng)
      tree.back_up(path, outcome(leaf, rng))
    return np.argmax(tree.visits[:, 0], axis=-1)

  return play


class _Tree:
  """Search trees of L games, which grow by one node per descent. Node 0 is the root."""

  def __init__(self, rules: Rules, board: np.ndarray, nodes: int):
    games, actions = len(board), rules.num_actions
    self._rules, self._games, self._size = rules, np.arange(games), 1
    self._board = np.zeros((games, nodes, *rules.shape), np.uint8)
    self._board[:, 0] = board
    self._child = np.zeros((games, nodes, actions), np.int32)  # 0: not expanded
    self.visits = np.zeros((games, nodes, actions))
    self._total = np.zeros((games, nodes, actions))  # sum of outcomes for the player to move

  def descend(self, rng: np.random.Generator) -> tuple[np.ndarray, list[tuple]]:
    """Selects and adds one leaf per game.

    Returns the leaves' boards [L] (terminal boards where the game ends first), and for each depth
    the games that moved, and the indices (game, node, action) of the edges.
    """
    games, node = self._games, np.zeros_like(self._games)
    path, board = [], self._board[:, 0]
    moving = ~self._rules.over(board)
    while moving.any():
      action = self._choose(node, self._rules.legal(board), rng)
      cells = games, node, action
      path.append((moving, cells))
      known = self._child[cells]
      next_board, _ = self._rules.step(board, action)
      new = moving & (known == 0)
      self._child[games[new], node[new], action[new]] = self._size
      self._board[games[new], self._size] = next_board[new]
      node = np.where(moving, np.where(new, self._size, known), node)
      board = self._board[games, node]
      moving = moving & ~new & ~self._rules.over(board)
    self._size += 1
    return board, path

  def _choose(self, node: np.ndarray, legal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Legal actions with the highest upper confidence bound; unvisited ones first, at random."""
    visits, total = self.visits[self._games, node], self._total[self._games, node]
    least = np.maximum(visits, 1)
    spread = np.log(np.maximum(visits.sum(-1, keepdims=True), 1))
    bound = np.where(visits > 0, total / least + np.sqrt(2 * spread / least), np.inf)
    best = legal & (bound == np.where(legal, bound, -np.inf).max(-1, keepdims=True))
    return np.argmax(best * (1 - rng.random(best.shape)), axis=-1)

  def back_up(self, path: list[tuple], outcome: np.ndarray) -> None:
    """Backs up outcomes [L], given for the players to move at the leaves."""
    for moved, cells in reversed(path):
      outcome = np.where(moved, -outcome, outcome)
      self.visits[cells] += moved
      self._total[cells] += np.where(moved, outcome, 0)
