"""Tests of AlphaZero: search by the game's rules, targets of both sides, and loss in float64."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import entr

import episodes
import trained
from speedyzero_jax.agents.alphazero import LOSS_POLICY, LOSS_VALUE, TARGET_ENTROPY, AlphaZero
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.run import batch_pipeline
from trained import KEY, linear

RULES_3 = RULES["TicTacToe"]
TINY = (
  "agent=alphazero", "env.game=TicTacToe", "env.frame_stack=1", "network.channels=3",
  "network.blocks=1", "network.hidden=4", "search.simulations=64", "actor.random_steps=0",
  "loss.value_coefficient=0.7", "search.sampled_moves=2", "search.dirichlet_fraction=0.1",
)  # fmt: skip
LANES = 32


@functools.cache
def agent_of(algorithm="gumbel", share=0.0):
  config = loader.load(
    [], [*TINY, f"search.algorithm={algorithm}", f"loss.search_value_weight={share}"]
  )
  return AlphaZero(config, RULES_3.shape, np.uint8, 9)


@functools.cache
def _searching(algorithm):
  return jax.jit(functools.partial(agent_of(algorithm).search, explore=algorithm == "puct"))


def searched(algorithm, params, boards, key=KEY):
  """Actions and policies for boards, by Gumbel search without noise, or PUCT with it.

  There are at most 32 boards, so that each search compiles once.
  """
  padded = np.resize(boards, (LANES, *RULES_3.shape))
  found = _searching(algorithm)(params, padded, key)
  return np.asarray(found.action)[: len(boards)], np.asarray(found.action_weights)[: len(boards)]


def nothing():
  """Parameters that are all 0: uniform policies and values of 0."""
  return jax.tree.map(np.zeros_like, trained.random_params(agent_of(), 0))


def board_after(*actions):
  board = np.zeros((1, *RULES_3.shape), np.uint8)
  for action in actions:
    board, _ = RULES_3.step(board, np.array([action]))
  return board


# --- search


@pytest.mark.parametrize("algorithm", ["gumbel", "puct"])
def test_a_threat_is_blocked(algorithm):
  """X holds 0 and 1 and threatens 2; O has the center and is to move. If the sign of values did
  not alternate, Gumbel search would choose 3 and PUCT 5."""
  boards = board_after(0, 4, 1)
  action, policy = searched(algorithm, nothing(), boards)
  assert action[0] == 2
  again = searched(algorithm, nothing(), boards, jax.random.key(5))[1]
  assert (policy == again).all() == (algorithm == "gumbel")


@pytest.mark.parametrize("algorithm", ["gumbel", "puct"])
def test_illegal_moves_are_never_played_nor_targets(algorithm):
  agent = agent_of(algorithm)
  params = trained.random_params(agent, 3)
  env = make_env(EnvConfig(game="TicTacToe"), LANES, 1, training=True)
  shown = env.reset()
  for i in range(20):
    key = jax.random.fold_in(KEY, i)
    action, policy = searched(algorithm, params, shown.frame, key)
    legal, going = RULES_3.legal(shown.frame), ~shown.terminated
    assert np.isfinite(policy).all()
    np.testing.assert_allclose(policy.sum(-1), 1, rtol=1e-5)
    assert not policy[going][~legal[going]].any()
    shown = env.step(action)  # raises ValueError for an illegal one


def test_puct_samples_at_first_and_then_plays_the_most_visited():
  boards = np.repeat(np.concatenate([board_after(0), board_after(0, 8)]), LANES // 2, axis=0)
  action, policy = searched("puct", nothing(), boards)
  most = policy[np.arange(LANES), action] == policy.max(-1)
  assert not most[: LANES // 2].all() and most[LANES // 2 :].all()


def two_moves_left():
  """O is to move; 5 wins at once, and 8 leads to a draw, so Q is exactly 1 and 0."""
  return board_after(0, 3, 2, 1, 6, 4, 7)


def played(settings, boards, explore):
  """`act` with a uniform prior and values of 0 from the network."""
  agent = AlphaZero(loader.load([], [*TINY, *settings]), RULES_3.shape, np.uint8, 9)
  lanes = len(boards)
  inputs = ActInputs(boards[:, None], np.zeros(lanes, bool), np.arange(lanes), ())
  act = jax.jit(functools.partial(agent.act, explore=explore))
  return jax.device_get(act(Variables(nothing(), ()), inputs, KEY, 0.0))


def test_self_play_stores_the_search_and_differs_between_games():
  settings = "search.c_visit=10", "search.c_scale=0.2"
  boards = np.concatenate([two_moves_left(), *[board_after()] * (LANES - 1)])
  found = played(settings, boards, explore=True)
  policy, value = found.columns["search_policy"][0], found.columns["search_value"][0]
  assert not np.delete(policy, [5, 8]).any()
  # Danihelka et al. 2022, section 3.4, for Q in [0, 1]: both moves have half of the visits.
  np.testing.assert_allclose(np.log(policy[5] / policy[8]), (10 + 32) * 0.2 * (1 - 0.5), rtol=1e-4)
  np.testing.assert_allclose(value, (0 + 32 * 1 + 32 * 0) / 65, rtol=1e-4)
  assert len(set(found.action[1:].tolist())) > 4  # by Gumbel noise


def test_puct_visits_by_its_constants_and_noise():
  settings = [
    "search.algorithm=puct", "search.c1=2", "search.c2=20", "search.dirichlet_alpha=0.1",
    "search.dirichlet_fraction=1",
  ]  # fmt: skip
  boards = np.repeat(two_moves_left(), LANES, axis=0)
  visits = played(settings, boards, explore=False).diagnostics["visits"] * 64
  n, q = np.zeros(2), np.zeros(2)  # Q in [0, 1], 0 if unvisited
  for total in range(1, 65):
    bonus = 0.5 * np.sqrt(total) / (1 + n) * (2 + np.log((total + 20 + 1) / 20))
    best = np.argmax(q + bonus)
    n[best], q[best] = n[best] + 1, (1, 0.5)[best]
  assert 10 < n[1] < 30
  np.testing.assert_allclose(visits[:, [5, 8]], n[None].repeat(LANES, 0), atol=1.01)
  noisy = 64 * played(settings, boards, explore=True).columns["search_policy"][:, 8]
  assert noisy.min() < n[1] - 5 and noisy.max() > n[1] + 5  # the noise favors one of both


def test_passes_end_go_only_if_they_win():
  """White, to move after a pass, wins an empty board by komi; Black would lose it."""
  rules = RULES["Go9"]
  settings = "env.game=Go9", "search.max_considered=82", "search.simulations=128"
  agent = AlphaZero(loader.load([], [*TINY, *settings]), rules.shape, np.uint8, 82)
  boards = [np.zeros((1, *rules.shape), np.uint8)]
  for action in (81, 40, 30, 81):
    boards.append(rules.step(boards[-1], np.array([action]))[0])
  params = jax.tree.map(np.zeros_like, trained.random_params(agent, 0))
  search = jax.jit(functools.partial(agent.search, explore=False))
  found = search(params, np.concatenate([boards[1], boards[4]]), KEY)
  assert found.action[0] == 81 and found.action[1] != 81
  assert found.action_weights[1, 81] < 1e-2 < found.action_weights[1, 0]
  assert not found.action_weights[1, [30, 40]].any()


def test_few_moves_are_considered_if_so_configured():
  found = played(["search.max_considered=1"], board_after(), explore=False)
  assert found.diagnostics["visits"].max() == 1


def test_the_network_sees_stones_and_not_their_ages():
  """Planes of Go count the moves since a stone was placed, up to 161."""
  agent = AlphaZero(loader.load([], [*TINY, "env.game=Go9"]), RULES["Go9"].shape, np.uint8, 82)
  boards = np.random.default_rng(0).integers(0, 90, (2, *RULES["Go9"].shape)).astype(np.uint8)
  params = trained.random_params(agent, 0)
  outputs = [agent._network.apply(params, board) for board in (boards, np.minimum(boards, 1))]
  jax.tree.map(np.testing.assert_array_equal, *outputs)


# --- targets


def games():
  """Rewards of games: wins of either side, draws, and truncated games; an open one is the last."""
  make = episodes.Episode
  won = [make([0.0] * (n - 1) + [1.0], "terminated") for n in (5, 6, 7, 8, 9)]
  drawn, cut = make([0.0] * 9, "terminated"), [make([0.0] * n, "truncated") for n in (1, 4, 8)]
  return [won[1], drawn, cut[0], *won[2:], cut[2], won[0], cut[1], make([0.0] * 3, "open")]


def recorded():
  """A replay of `games()`, and each move's outcome for its player; None if it is unknown."""
  agent = agent_of()
  rng, played = np.random.default_rng(2), games()
  replay = trained.make_replay(agent, 1, 200, 1)
  slots = episodes.recorded(agent.schema, 0, played, rng)
  board = slots["frame"]
  board[:] = rng.random(board.shape) < 0.25
  board[..., 1] *= 1 - board[..., 0]
  # Policies over legal moves; at the end of a game anything.
  legal = RULES_3.legal(board)
  policy = rng.random((len(legal), 9)) * legal + np.where(legal.any(-1, keepdims=True), 0, 1 / 9)
  slots["search_policy"][:] = policy / policy.sum(-1, keepdims=True)
  replay.append(slots)
  outcomes, start = {}, 0
  for game in played:
    for i in range(len(game.rewards)):
      # The last mover won or drew; those who moved an odd number of moves before it did not.
      last = game.rewards[-1] * (1 if (len(game.rewards) - 1 - i) % 2 == 0 else -1)
      if game.end != "open":
        outcomes[start + i] = last if game.end == "terminated" else None
    start += game.slots
  return replay, slots, outcomes


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_value_targets_are_outcomes_for_the_player_to_move_mixed_with_search_values(share):
  replay, slots, expected = recorded()
  agent = agent_of(share=share)
  selection = replay.select(2000)
  assert set(selection.time.tolist()) == expected.keys()  # finished games, every move of them
  arrays, _ = agent.assemble(replay, selection, 0)
  known = np.array([expected[t] is not None for t in selection.time])
  np.testing.assert_array_equal(arrays["value_mask"], known)
  outcomes = np.array([expected[t] for t in selection.time[known]])
  wanted = (1 - share) * outcomes + share * slots["search_value"][selection.time[known]]
  np.testing.assert_allclose(arrays["value"][known], wanted, rtol=1e-6)
  assert set(outcomes) == {-1.0, 0.0, 1.0}
  assert arrays["loss_mask"].all()
  policies = slots["search_policy"][selection.time]
  np.testing.assert_array_equal(arrays["search_policy"], policies)
  counts = np.bincount(selection.time)[sorted(expected)]
  assert counts.min() > 0.4 * counts.mean() and counts.max() < 1.8 * counts.mean()  # uniform


# --- the loss


def test_the_first_policy_is_uniform_and_the_first_value_0():
  agent, boards = agent_of(), np.concatenate([board_after(), board_after(0, 4)])
  logits, value = jax.jit(lambda key: agent._network.apply(agent.init(key).params, boards))(KEY)
  assert not logits.any() and not value.any()


def batch_of():
  replay, _, expected = recorded()
  agent = agent_of()
  time = np.resize(sorted(expected), 32)
  selection = Selection(np.zeros(32, np.int32), time, np.ones(32))
  arrays, _ = agent.assemble(replay, selection, 0)
  return batch_pipeline._with_frames(agent, replay, arrays, selection)


def network(params, board):
  """The network in float64: logits and values."""
  p = jax.tree.map(np.float64, params)

  def conv(layer, x):
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    patches = [padded[:, i : i + 3, j : j + 3] for i in range(3) for j in range(3)]
    return np.concatenate(patches, -1) @ layer["kernel"].reshape(-1, 3) + layer["bias"]

  x = conv(p["conv"], board.astype(float))
  block = p["blocks"][0]
  x = x + conv(block["conv2"], np.maximum(conv(block["conv1"], np.maximum(x, 0)), 0))
  x = np.maximum(x, 0).reshape(len(x), -1)
  value = np.tanh(linear(p["value"], np.maximum(linear(p["hidden"], x), 0)))
  return linear(p["policy"], x), value[:, 0]


def reference(params, batch):
  """The loss and its terms, in float64; half of the boards are reflected."""
  board, policy, terms = batch["frames"][:, 0].copy(), batch["search_policy"].copy(), []
  for i, key in enumerate(jax.random.split(trained.KEY, len(board))):
    if jax.random.bernoulli(key):
      board[i], policy[i] = board[i, :, ::-1], policy[i].reshape(3, 3)[:, ::-1].ravel()
  logits, value = network(params, board)
  value = np.where(RULES_3.over(board), 0, value)
  legal = RULES_3.legal(board)
  for row, allowed, target in zip(logits, legal, policy, strict=True):
    if not allowed.any():  # random boards: a game that was over before; all moves are alike
      terms.append(np.log(9))
      continue
    kept = row[allowed]
    log_p = kept - kept.max() - np.log(np.exp(kept - kept.max()).sum())
    terms.append(-(target[allowed] * log_p).sum())
  cross_entropy = (batch["loss_mask"] * np.array(terms)).mean()
  error = (batch["value_mask"] * (batch["value"] - value) ** 2).mean()
  return cross_entropy + 0.7 * error, cross_entropy, error


def start():
  return jax.tree.map(lambda x: 0.3 * x, trained.random_params(agent_of(), 4))


@functools.cache
def gradient():
  return trained.gradient(agent_of(), devices=2)


def test_loss_and_gradient_on_two_devices():
  batch = batch_of()
  found = gradient()(start(), batch)
  _, cross_entropy, error = reference(start(), batch)
  np.testing.assert_allclose(found.metrics[LOSS_POLICY], cross_entropy, rtol=1e-4)
  np.testing.assert_allclose(found.metrics[LOSS_VALUE], error, rtol=1e-4)
  entropy = (batch["loss_mask"] * entr(batch["search_policy"]).sum(-1)).mean()
  np.testing.assert_allclose(found.metrics[TARGET_ENTROPY], entropy, rtol=1e-4)
  trained.assert_gradient(start(), found.of_params, lambda params: reference(params, batch)[0])


def test_masked_samples_have_no_gradient():
  batch, masked = batch_of(), np.arange(32) % 3 == 0
  masks = {
    name: np.where(masked, 0, batch[name]).astype(np.float32)
    for name in ("loss_mask", "value_mask")
  }
  other = {
    "frames": np.where(masked[:, None, None, None, None], 1, batch["frames"]).astype(np.uint8),
    "value": np.where(masked, 5, batch["value"]).astype(np.float32),
    "search_policy": np.where(masked[:, None], 0.5, batch["search_policy"]).astype(np.float32),
  }
  trained.assert_masked(functools.partial(gradient(), start()), batch, masks, other)
