"""Tests of the small games: Catch and its variants, and CartPole."""

import numpy as np
import pytest

from env_steps import play, stacked
from same import assert_same
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env


def test_catch():
  env = batched_env.make_env(EnvConfig(game="Catch"), 6, 0, training=True)
  assert (env.num_actions, env.frame_shape, env.frame_dtype) == (3, (1, 1, 50), np.float32)
  rng, shown, outcomes = np.random.default_rng(0), env.reset(), set()
  for t in range(1, 60):
    board = shown.frame.reshape(6, 10, 5)
    paddle = board[:, -1].argmax(1)
    action = rng.integers(3, size=6)
    was_first, shown = shown.first, env.step(action)
    assert (shown.first == (t % 10 == 0)).all()  # nine steps, then one that restarts
    ends = t % 10 == 9
    assert (
      (shown.terminated == ends).all()
      and (shown.game_over == ends).all()
      and not shown.truncated.any()
    )
    now = shown.frame.reshape(6, 10, 5)
    if shown.first.all():
      assert (now[:, -1].argmax(1) == 2).all() and (now[:, 0].sum(1) == 1).all()
    else:
      moved = np.clip(paddle + action - 1, 0, 4)
      if ends:
        ball = board[:, :-1].sum(1).argmax(1)
        np.testing.assert_array_equal(shown.reward, np.where(moved == ball, 1, -1))
        outcomes |= set(shown.reward.tolist())
      else:
        np.testing.assert_array_equal(now[:, -1].argmax(1), moved)
        assert (now[:, t % 10].sum(1) == 1).all()  # the ball falls one row a step
    if not ends:
      assert not shown.reward.any()
    assert was_first.all() or not was_first.any()
  assert outcomes == {-1.0, 1.0}


def test_memory_catch_is_catch_without_the_ball_after_the_first_frame():
  rng = np.random.default_rng(0)
  plain, hiding = (
    batched_env.make_env(EnvConfig(game=game), 6, 0, training=True)
    for game in ("Catch", "MemoryCatch")
  )
  assert_same(plain.reset(), hiding.reset())
  for _ in range(60):
    action = rng.integers(3, size=6)
    whole, shown = plain.step(action), hiding.step(action)
    board = whole.frame.reshape(6, 10, 5).copy()
    board[~whole.first, :-1] = 0
    np.testing.assert_array_equal(shown.frame.reshape(6, 10, 5), board)
    assert_same(whole._replace(frame=shown.frame), shown)


def test_rewards_of_events_replace_those_of_decoy_catch_in_training():
  config, rng = (
    EnvConfig(game="DecoyCatch", event_rewards=(2.0, -0.5, 0.125)),
    np.random.default_rng(0),
  )
  weighted, own = (batched_env.make_env(config, 6, 0, training=t) for t in (True, False))
  assert_same(weighted.reset(), own.reset())
  seen = set()
  for _ in range(90):
    action = rng.integers(3, size=6)
    got, plain = weighted.step(action), own.step(action)
    for frame, reward, score in zip(
      got.frame.reshape(6, 10, 5), got.reward, plain.reward, strict=True
    ):
      cells = np.flatnonzero(frame[-1])  # of the paddle and a ball that has landed
      decoy = 0.125 if np.diff(cells).tolist() == [1] else 0.0
      assert reward == {1: 2.0, 0: 0.0, -1: decoy - 0.5}[score]
      seen.add(float(reward))
    assert_same(plain._replace(reward=got.reward), got)
  assert seen == {2.0, 0.0, -0.5, -0.375}
  np.testing.assert_array_equal(batched_env.training_reward(config, got.reward), got.reward)


@pytest.mark.parametrize(
  ("game", "reported"), [("Catch", "no events"), ("DecoyCatch", "catch, miss, decoy")]
)
def test_rewards_of_events_that_a_game_does_not_report(game, reported):
  config = EnvConfig(game=game, event_rewards=(1.0, 2.0))
  with pytest.raises(ValueError, match=f"event_rewards: {game} reports {reported}; got 2 numbers"):
    batched_env.make_env(config, 1, 0, training=False)


def test_memory_catch_gives_a_policy_without_memory_a_fifth_at_most():
  """Each of the 3**5 policies of the paddle's column ends in one column per first action. Only that
  action can depend on the ball: at most three of five columns are reached."""
  policies, first = np.meshgrid(np.arange(3**5), np.arange(3), indexing="ij")
  policy = policies.ravel()[:, None] // 3 ** np.arange(5) % 3  # the action in each column
  lanes = len(policy)
  env = batched_env.make_env(EnvConfig(game="MemoryCatch"), lanes, 0, training=True)
  shown = env.reset()
  ball = shown.frame.reshape(lanes, 10, 5)[:, 0].argmax(1)
  assert np.bincount(ball, minlength=5).min() > 0.8 * lanes / 5
  shown = env.step(first.ravel())
  while not shown.terminated.all():
    column = shown.frame.reshape(lanes, 10, 5)[:, -1].argmax(1)
    action = policy[np.arange(lanes), column]
    shown = env.step(action)
  reached = np.clip(column + action - 1, 0, 4)
  np.testing.assert_array_equal(shown.reward, np.where(reached == ball, 1, -1))
  columns = [len(set(row)) for row in reached.reshape(-1, 3)]
  assert max(columns) == 3  # 3/5 caught, 2/5 missed


def test_cartpole_ends_by_a_fall_or_by_its_own_cap():
  config = EnvConfig(game="CartPole")
  env = batched_env.make_env(config, 2, 0, training=True)
  assert (env.num_actions, env.frame_shape, env.frame_dtype) == (2, (1, 1, 4), np.float32)
  shown = env.reset()
  for t in range(1, 503):  # lane 0 balances, lane 1 always pushes to the left
    _, _, angle, speed = shown.frame[0, 0, 0]
    shown = env.step(np.array([int(angle + 0.5 * speed > 0), 0]))
    assert (
      shown.truncated[0] == (t == 500) and not shown.terminated[0] and shown.first[0] == (t == 501)
    )
    assert shown.reward[0] == (t != 501)
    fallen = np.abs(shown.frame[1, 0, 0, 2]) > np.radians(12)
    assert shown.terminated[1] == fallen and shown.game_over[1] == fallen and not shown.truncated[1]


def test_a_cap_on_a_fall_is_a_fall():
  config, left = EnvConfig(game="CartPole"), np.zeros(1, int)
  shown = stacked(play(batched_env.make_env(config, 1, 0, training=True), 20, left))
  fall = int(np.flatnonzero(shown.terminated)[0])
  for cap, truncated in ((fall - 1, True), (fall, False)):
    last = play(
      batched_env.make_env(config, 1, 0, training=True, max_episode_steps=cap), cap, left
    )[-1]
    assert last.truncated[0] == truncated and last.terminated[0] == last.game_over[0] == (
      not truncated
    )
