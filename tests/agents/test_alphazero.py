"""AlphaZero: the search by the true rules, targets of both sides, the loss against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import episodes
import trained
from speedyzero_jax.agents.alphazero import LOSS_POLICY, LOSS_VALUE, AlphaZero
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.envs.rules import RULES
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.run import batch_pipeline
from trained import KEY, largest

RULES_3 = RULES["TicTacToe"]
TINY = (
  "agent=alphazero", "env.game=TicTacToe", "env.frame_stack=1", "network.channels=3",
  "network.blocks=1", "network.hidden=4", "search.simulations=8", "actor.random_steps=0",
  "loss.value_coefficient=0.7", "learner.batch_size=32",
)  # fmt: skip


@functools.cache
def agent_of(*overrides, kind=AlphaZero):
  config = loader.load([], [*trained.SGD, *TINY, *overrides])
  return config, kind(config, RULES_3.shape, np.uint8, 9)


@functools.cache
def learner_of(devices=1):
  return trained.make_learner(*agent_of(), devices)


def board_after(*actions):
  board = np.zeros((1, *RULES_3.shape), np.uint8)
  for action in actions:
    board, _ = RULES_3.step(board, np.array([action]))
  return board


# --- search


class SameSign(AlphaZero):
  """Wrong: as if one player made all moves."""

  def _step(self, params, key, action, board):
    output, after = super()._step(params, key, action, board)
    return output.replace(discount=-output.discount), after


@pytest.mark.parametrize(
  ("algorithm", "kind", "expected"),
  [
    ("gumbel", AlphaZero, 2), ("puct", AlphaZero, 2),
    ("gumbel", SameSign, 3), ("puct", SameSign, 5),
  ],
)  # fmt: skip
def test_a_threat_is_blocked(algorithm, kind, expected):
  """The network knows nothing, X holds 0 and 1 and threatens 2; O has the centre and is to move."""
  _, agent = agent_of("search.simulations=64", f"search.algorithm={algorithm}", kind=kind)
  nothing = jax.tree.map(jnp.zeros_like, agent.init(KEY).params)
  search = jax.jit(functools.partial(agent.search, explore=False))
  found = search(nothing, board_after(0, 4, 1), KEY)
  assert found.action[0] == expected
  again = search(nothing, board_after(0, 4, 1), jax.random.key(5))
  np.testing.assert_array_equal(found.action_weights, again.action_weights)


@pytest.mark.parametrize("algorithm", ["gumbel", "puct"])
@pytest.mark.parametrize("explore", [True, False])
def test_illegal_moves_are_never_played_nor_targets(algorithm, explore):
  config, agent = agent_of(f"search.algorithm={algorithm}", "search.simulations=16")
  params, lanes = trained.random_params(agent, 3), 32
  act = jax.jit(agent.act, static_argnames="explore")
  env = make_env(config.env, lanes, 1, training=True)
  shown, key = env.reset(), KEY
  for i in range(20):
    inputs = ActInputs(shown.frame[:, None], shown.first, np.arange(lanes), ())
    out = act(Variables(params, ()), inputs, jax.random.fold_in(key, i), 0.5, explore=explore)
    policy = np.asarray(out.columns["search_policy"])
    legal, going = RULES_3.legal(shown.frame), ~shown.terminated
    assert np.isfinite(policy).all()
    np.testing.assert_allclose(policy.sum(-1), 1, rtol=1e-5)
    assert not policy[going & ~shown.terminated][~legal[going]].any()
    shown = env.step(np.asarray(out.action))  # raises ValueError for an illegal one


def test_puct_samples_at_first_and_then_plays_the_most_visited():
  _, agent = agent_of("search.algorithm=puct", "search.sampled_moves=2", "search.simulations=24")
  nothing = jax.tree.map(jnp.zeros_like, agent.init(KEY).params)
  boards = np.repeat(np.concatenate([board_after(0), board_after(0, 8)]), 64, axis=0)
  found = jax.jit(functools.partial(agent.search, explore=True))(nothing, boards, KEY)
  most = found.action_weights[np.arange(128), found.action] == found.action_weights.max(-1)
  assert not most[:64].all() and most[64:].all()


# --- targets


def games():
  """Rewards of games: wins of either side, draws, and games cut short; an open one last."""
  make = episodes.Episode
  won = [make([0.0] * (n - 1) + [1.0], "terminated") for n in (5, 6, 7, 8, 9)]
  drawn, cut = make([0.0] * 9, "terminated"), [make([0.0] * n, "truncated") for n in (1, 4, 8)]
  return [won[1], drawn, cut[0], *won[2:], cut[2], won[0], cut[1], make([0.0] * 3, "open")]


def recorded():
  """A replay of them, and of each move the outcome for who made it; None if it is unknown."""
  _, agent = agent_of()
  rng, played = np.random.default_rng(2), games()
  replay = Replay(
    agent.schema, agent.make_selector, lanes=1, capacity=200, frame_stack=1, rng_seed=0
  )
  segment = episodes.segment(agent.schema, 0, played, rng)
  segment.frame[:] = rng.random(segment.frame.shape) < 0.25
  segment.frame[..., 1] *= 1 - segment.frame[..., 0]
  # Policies over legal moves; at the end of a game anything.
  legal = RULES_3.legal(segment.frame)
  policy = rng.random((len(legal), 9)) * legal + np.where(legal.any(-1, keepdims=True), 0, 1 / 9)
  segment.extra["search_policy"][:] = policy / policy.sum(-1, keepdims=True)
  replay.append(segment)
  outcomes, start = {}, 0
  for game in played:
    for i in range(len(game.rewards)):
      # The last mover won or drew; those who moved an odd number of moves before it did not.
      last = game.rewards[-1] * (1 if (len(game.rewards) - 1 - i) % 2 == 0 else -1)
      if game.end != "open":
        outcomes[start + i] = last if game.end == "terminated" else None
    start += game.slots
  return replay, segment, outcomes


def test_outcomes_are_those_of_the_player_to_move():
  replay, segment, expected = recorded()
  _, agent = agent_of()
  selection = replay.select(2000)
  assert set(selection.time.tolist()) == expected.keys()  # finished games, every move of them
  arrays, _ = agent.assemble(replay, selection, 0)
  known = np.array([expected[t] is not None for t in selection.time])
  np.testing.assert_array_equal(arrays["outcome_mask"], known)
  wanted = [expected[t] for t in selection.time[known]]
  np.testing.assert_array_equal(arrays["outcome"][known], wanted)
  assert set(wanted) == {-1.0, 0.0, 1.0}
  assert arrays["loss_mask"].all()
  policies = segment.extra["search_policy"][selection.time]
  np.testing.assert_array_equal(arrays["search_policy"], policies)
  counts = np.bincount(selection.time)[sorted(expected)]
  assert counts.min() > 0.4 * counts.mean() and counts.max() < 1.8 * counts.mean()  # uniform


def test_evicted_samples_are_masked():
  _, agent = agent_of()
  replay = Replay(
    agent.schema, agent.make_selector, lanes=1, capacity=20, frame_stack=1, rng_seed=0
  )
  segment = episodes.segment(agent.schema, 0, games()[:2], np.random.default_rng(0))
  replay.append(segment)
  selection = replay.select(64)
  more = episodes.segment(agent.schema, 0, games()[:1], np.random.default_rng(0))
  replay.append(more.map(lambda x: x, len(segment.frame)))
  arrays, _ = agent.assemble(replay, selection, 0)
  tail = replay.tails[0]
  np.testing.assert_array_equal(arrays["loss_mask"], selection.time >= tail)
  np.testing.assert_array_equal(arrays["outcome_mask"], selection.time >= tail)
  assert 0 < arrays["loss_mask"].sum() < 64


# --- the loss


def batch_of():
  replay, _, expected = recorded()
  _, agent = agent_of()
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

  def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

  x = conv(p["conv"], board.astype(float))
  block = p["blocks"][0]
  x = x + conv(block["conv2"], np.maximum(conv(block["conv1"], np.maximum(x, 0)), 0))
  x = np.maximum(x, 0).reshape(len(x), -1)
  value = np.tanh(linear(p["value"], np.maximum(linear(p["hidden"], x), 0)))
  return linear(p["policy"], x), value[:, 0]


def reference(params, batch):
  """The loss and its terms, in float64."""
  board = batch["frames"][:, 0]
  logits, value = network(params, board)
  value = np.where(RULES_3.over(board), 0, value)
  legal, policy, terms = RULES_3.legal(board), batch["search_policy"], []
  for row, allowed, target in zip(logits, legal, policy, strict=True):
    if not allowed.any():  # random boards: a game that was over before; all moves are alike
      terms.append(np.log(9))
      continue
    kept = row[allowed]
    log_p = kept - kept.max() - np.log(np.exp(kept - kept.max()).sum())
    terms.append(-(target[allowed] * log_p).sum())
  cross_entropy = (batch["loss_mask"] * np.array(terms)).mean()
  error = (batch["outcome_mask"] * (batch["outcome"] - value) ** 2).mean()
  return cross_entropy + 0.7 * error, cross_entropy, error


def start():
  _, agent = agent_of()
  return jax.tree.map(lambda x: 0.3 * x, trained.random_params(agent, 4))


def stepped(batch, devices=1):
  learner = learner_of(devices)
  return trained.step(learner, trained.restored(learner, start()), batch)


def test_loss_and_gradient():
  batch = batch_of()
  state, result = stepped(batch)
  _, cross_entropy, error = reference(start(), batch)
  np.testing.assert_allclose(result.metrics[LOSS_POLICY], cross_entropy, rtol=1e-4)
  np.testing.assert_allclose(result.metrics[LOSS_VALUE], error, rtol=1e-4)
  trained.assert_gradient(
    start(), state.variables.params, lambda params: reference(params, batch)[0]
  )


def test_masked_samples_have_no_gradient():
  batch, masked = batch_of(), np.arange(32) % 3 == 0
  masks = {
    name: np.where(masked, 0, batch[name]).astype(np.float32)
    for name in ("loss_mask", "outcome_mask")
  }
  state, _ = stepped(batch | masks)
  other = {
    "frames": np.where(masked[:, None, None, None, None], 1, batch["frames"]).astype(np.uint8),
    "outcome": np.where(masked, 5, batch["outcome"]).astype(np.float32),
    "search_policy": np.where(masked[:, None], 0.5, batch["search_policy"]).astype(np.float32),
  }
  again, _ = stepped(batch | other | masks)
  assert largest(state.variables.params, start()) > 1e-3
  assert largest(state.variables.params, again.variables.params) == 0
  nothing, _ = stepped(batch | {name: 0 * mask for name, mask in masks.items()})
  assert largest(nothing.variables.params, start()) == 0


def test_two_devices_do_as_one():
  (one, alone), (two, both) = (stepped(batch_of(), devices) for devices in (1, 2))
  assert largest(one.variables.params, two.variables.params) < 1e-6
  for name, value in alone.metrics.items():
    np.testing.assert_allclose(value, both.metrics[name], rtol=1e-5, err_msg=name)
