"""Tests of board games: their rules against envpool, and games against opponents."""

import functools
import itertools

import jax
import numpy as np
import pytest

from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env
from speedyzero_jax.envs.opponents import play_at_random, play_mcts, play_minimax
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.envs.versus import VersusEnv

LANES = 32
TTT = RULES["TicTacToe"]
GO = RULES["Go9"]


def played(rules, *actions):
  """The board [1, H, W, 2] after these actions, and their rewards."""
  board, rewards = np.zeros((1, *rules.shape), np.uint8), []
  for action in actions:
    board, reward = rules.step(board, np.array([action]))
    rewards.append(float(reward[0]))
  return board, rewards


@pytest.mark.parametrize(("game", "steps"), [("TicTacToe", 60), ("ConnectFour", 130), ("Go9", 170)])
def test_rules_are_those_of_envpool(game, steps):
  rules = RULES[game]
  step, legal, over = jax.jit(rules.step), jax.jit(rules.legal), jax.jit(rules.over)
  env = batched_env.make_env(EnvConfig(game=game), LANES, 0, training=True)
  assert (env.num_actions, env.frame_shape) == (rules.num_actions, rules.shape)
  rng, shown = np.random.default_rng(0), env.reset()
  board, outcomes = np.zeros((LANES, *rules.shape), np.uint8), []
  np.testing.assert_array_equal(shown.frame, board, strict=True)
  for _ in range(steps):
    ended = shown.terminated
    np.testing.assert_array_equal(over(board), ended)
    # envpool names all moves legal in a position that ended without a winner, and none is made.
    np.testing.assert_array_equal(np.asarray(legal(board))[~ended], env._legal[~ended])
    assert not np.asarray(legal(board))[ended].any()
    action = np.argmax(rng.random(env._legal.shape) * env._legal, axis=-1)
    after, reward = jax.device_get(step(board, action))
    shown = env.step(action)
    board = np.where(ended[:, None, None, None], 0, after)
    np.testing.assert_array_equal(shown.frame, board)
    np.testing.assert_array_equal(shown.reward, np.where(ended, 0, reward))
    np.testing.assert_array_equal(shown.first, ended)
    assert not shown.truncated.any()
    np.testing.assert_array_equal(shown.game_over, shown.terminated)
    outcomes += shown.reward[shown.terminated].tolist()
  for by_numpy, by_jax in (
    (rules.legal(board), legal(board)),
    *zip(rules.step(board, action), step(board, action), strict=True),
  ):
    np.testing.assert_array_equal(by_numpy, by_jax)
  reflected, reflection = board[:, :, ::-1], rules.reflection
  np.testing.assert_array_equal(legal(reflected), legal(board)[:, reflection])
  action = np.argmax(legal(board) * rng.random(legal(board).shape), axis=-1)
  (after, reward), (other, same) = step(board, action), step(reflected, reflection[action])
  np.testing.assert_array_equal(other, after[:, :, ::-1])
  np.testing.assert_array_equal(same, reward)
  assert len(outcomes) > LANES and 1.0 in outcomes
  # Random play rarely fills Connect Four's board. The last move in Go can lose; nothing draws.
  assert {"TicTacToe": 0.0, "ConnectFour": 1.0, "Go9": -1.0}[game] in outcomes


@pytest.mark.parametrize(("game", "count"), [("TicTacToe", 8), ("ConnectFour", 69)])
def test_every_row_wins_and_no_other(game, count):
  """Against an explicit list of all straight lines of cells."""
  rules = RULES[game]
  lines = set()
  for y, x in itertools.product(range(rules.height), range(rules.width)):
    for dy, dx in ((0, 1), (1, 0), (1, 1), (1, -1)):
      line = [(y + i * dy, x + i * dx) for i in range(rules.connect)]
      if all(0 <= a < rules.height and 0 <= b < rules.width for a, b in line):
        lines.add(tuple(line))
  assert len(lines) == count
  rng, over = np.random.default_rng(0), jax.jit(rules.over)
  boards = np.zeros((300, rules.height, rules.width, 2), np.uint8)
  boards[..., 1] = rng.random(boards.shape[:3]) < 0.4
  for board, line in zip(boards, lines, strict=False):
    board[..., 1] = 0
    for cell in line:
      board[(*cell, 1)] = 1
  expected = [any(all(board[(*c, 1)] for c in line) for line in lines) for board in boards]
  np.testing.assert_array_equal(rules.over(boards), expected)  # by numpy, not jax
  assert 0.05 < np.mean(expected[count:]) < 0.95
  np.testing.assert_array_equal(over(boards), expected)


def test_a_game_that_is_over_stays_so():
  board, rewards = played(TTT, 0, 3, 1, 4, 2)
  assert rewards == [0, 0, 0, 0, 1]
  after, reward = TTT.step(board, np.array([8]))
  np.testing.assert_array_equal(after, board)
  assert reward[0] == 0 and TTT.over(board)[0] and not TTT.legal(board).any()


def at(row, column):
  return 9 * row + column


def test_go_is_lost_by_restoring_an_earlier_position():
  """Two kos; Black passes once, so that no ko is recaptured at once, and the cycle closes."""
  black = [(0, 1), (1, 0), (2, 1), (4, 1), (5, 0), (6, 1), (5, 2)]
  white = [(0, 2), (1, 3), (2, 2), (1, 1), (4, 2), (5, 3), (6, 2)]
  shape = [at(*cell) for pair in zip(black, white, strict=True) for cell in pair]
  env = batched_env.make_env(EnvConfig(game="Go9"), 1, 0, training=True)
  env.reset()
  board = np.zeros((1, *GO.shape), np.uint8)
  kos = at(1, 1), at(1, 2), at(5, 1), at(5, 2)
  legal = []
  for action in [*shape, at(1, 2), at(5, 1), 81, at(1, 1), at(5, 2)]:
    legal.append(GO.legal(board)[0, kos])
    np.testing.assert_array_equal(GO.legal(board), env._legal)
    shown = env.step(np.array([action]))
    board, reward = GO.step(board, np.array([action]))
    np.testing.assert_array_equal(shown.frame, board)
    assert (shown.reward, shown.terminated) == (reward, GO.over(board))
  assert [x.tolist() for x in legal[14:16]] == [
    [0, 1, 1, 0],
    [0, 0, 1, 0],
  ]  # the first ko is closed
  assert reward == -1 and shown.terminated and GO.outcome(board) == 1


def test_random_play_passes_in_go_only_if_it_must():
  board = np.zeros((2, *GO.shape), np.uint8)
  board[0, ..., 1] = 1
  board[0, 0, 0, 1] = board[0, 8, 8, 1] = 0  # two eyes, in which stones would be captured
  board[1, ..., 0] = board[0, ..., 1]
  action = play_at_random(GO)(board, np.random.default_rng(0))
  assert action[0] == 81 and action[1] in (0, 80)


def test_games_of_go_against_an_opponent():
  total, shown = outcomes(GO, play_at_random(GO), 4, play_at_random(GO), opening=GO.longest_opening)
  assert shown[0].frame[:, 0, 0, 16:].tolist() == [[8, 0], [0, 9]] * 2  # moves, in Black's plane
  assert set(np.abs(total).tolist()) == {1.0}


def test_illegal_moves_are_refused():
  env = batched_env.make_env(EnvConfig(game="TicTacToe"), 3, 0, training=True)
  env.reset()
  env.step(np.array([4, 0, 0]))
  with pytest.raises(ValueError, match=r"illegal moves in lanes \[0, 2\]"):
    env.step(np.array([4, 1, 0]))
  assert env.step(np.array([0, 1, 2])).frame.sum() == 6


# --- opponents


@functools.cache
def perfect_player():
  return play_minimax(TTT)


def outcomes(rules, opponent, games, play, seed=0, opening=0):
  """Rewards of the first game in each lane, and all steps that the environment returned."""
  env = VersusEnv(rules, games, seed, opponent, opening)
  rng, shown = np.random.default_rng(seed + 1), [env.reset()]
  total, playing = np.zeros(games), np.ones(games, bool)
  while playing.any():
    shown.append(env.step(play(shown[-1].frame, rng)))
    total += np.where(playing, shown[-1].reward, 0)
    playing &= ~shown[-1].terminated
  return total, shown


def test_minimax_draws_against_itself_and_never_loses():
  perfect, random = perfect_player(), play_at_random(TTT)
  assert not outcomes(TTT, perfect, 40, perfect)[0].any()
  against_random = outcomes(TTT, random, 100, perfect)[0]
  assert against_random.min() >= 0 and against_random.mean() > 0.8
  # One reply to a stone in the center or a corner draws, if it is the right kind; others lose.
  rng = np.random.default_rng(0)
  for first, right in ((4, {0, 2, 6, 8}), (0, {4})):
    board, _ = played(TTT, first)
    assert set(perfect(np.repeat(board, 50, axis=0), rng).tolist()) == right


def test_frames_are_the_view_of_the_agent_to_the_end():
  random, winners = play_at_random(TTT), set()
  for step in outcomes(TTT, random, 40, random)[1]:
    for reward, plane in ((1, 0), (-1, 1)):
      ended = step.terminated & (step.reward == reward)
      assert TTT._row(step.frame[ended, ..., plane] > 0).all()
      winners |= {plane} if ended.any() else set()
  assert winners == {0, 1}


def test_plain_tree_search_is_better_with_more_rollouts():
  few, many = (outcomes(TTT, perfect_player(), 40, play_mcts(TTT, n))[0] for n in (5, 100))
  assert few.mean() < -0.8 and many.mean() > -0.6  # minimax never loses
  board, _ = played(TTT, 0, 3, 1, 4)  # both can win at once
  assert play_mcts(TTT, 50)(board, np.random.default_rng(0))[0] == 2


@pytest.mark.parametrize("opening", [0, 3])
def test_games_against_an_opponent(opening):
  """Turns, sides and rewards, derived from the boards alone."""
  games = 31
  total, shown = outcomes(TTT, play_at_random(TTT), games, play_at_random(TTT), 5, opening)
  start = shown[0].frame
  stones = start.sum(axis=(1, 2, 3))
  np.testing.assert_array_equal(stones, opening + np.arange(games) % 2)
  ends = {1.0: 0, -1.0: 0, 0.0: 0}
  for before, after in itertools.pairwise(shown):
    ended = before.terminated
    np.testing.assert_array_equal(after.first, ended)
    added = after.frame.sum(axis=(1, 2, 3)) - before.frame.sum(axis=(1, 2, 3), dtype=int)
    assert set(added[~ended & ~after.terminated].tolist()) <= {2}
    won = TTT.over(after.frame) & (after.reward != 0)
    # Who would move next has lost: after the agent's move that is the opponent.
    mover_lost = added == 1
    np.testing.assert_array_equal((after.reward > 0)[won], mover_lost[won])
    assert after.terminated[won].all()
    for reward in after.reward[after.terminated]:
      ends[float(reward)] += 1
  assert all(ends.values()) and set(total.tolist()) <= {-1.0, 0.0, 1.0}


def test_both_sides_get_the_same_openings():
  env = VersusEnv(TTT, 8, 3, play_at_random(TTT), opening=2)
  first = env.reset().frame[::2]
  own, other = first[..., 0].sum(axis=(1, 2)), first[..., 1].sum(axis=(1, 2))
  assert own.tolist() == other.tolist() == [1] * 4
  pairs = env._openings()
  np.testing.assert_array_equal(pairs[::2], pairs[1::2])
  assert len(np.unique(pairs, axis=0)) > 1


def test_an_opponent_must_move_legally():
  env = VersusEnv(TTT, 2, 0, lambda board, rng: np.zeros(len(board), int))
  env.reset()
  with pytest.raises(ValueError, match="illegal moves in games"):
    env.step(np.array([0, 1]))
