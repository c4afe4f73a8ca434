"""Tests of the environments' conventions with the real envpool."""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from env_steps import play, stacked
from same import assert_same
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env, scores

BREAKOUT = EnvConfig(game="Breakout", frame_size=32)
NOOP, FIRE = 0, 1


def test_shapes_types_and_first_frames():
  env = batched_env.make_env(BREAKOUT, 3, 0, training=True)
  assert (env.num_lanes, env.num_actions) == (3, 4)
  assert (env.frame_shape, env.frame_dtype) == ((32, 32, 3), np.uint8)
  first = env.reset()
  assert first.frame.shape == (3, 32, 32, 3) and first.frame.dtype == np.uint8
  assert first.frame.std() > 10
  assert first.first.all() and not first.reward.any()
  assert not (first.terminated | first.truncated | first.game_over).any()
  step = env.step(np.array([0, 1, 2]))
  assert not step.first.any()
  for shown in (first, step):
    assert shown.reward.dtype == np.float32 and shown.reward.shape == (3,)
    for flag in (shown.first, shown.terminated, shown.truncated, shown.game_over):
      assert flag.dtype == bool and flag.shape == (3,)
  grey = dataclasses.replace(BREAKOUT, grayscale=True)
  assert batched_env.make_env(grey, 1, 0, training=True).frame_shape == (32, 32, 1)


@pytest.mark.parametrize("training", [True, False])
def test_against_envpool_driven_by_hand(training):
  """Frames are envpool's, transposed; ends, first frames and rewards follow lives and game over."""
  import envpool

  lanes, cap = 3, 90
  env = batched_env.make_env(BREAKOUT, lanes, 5, training=training, max_episode_steps=cap)
  raw = envpool.make_gymnasium(
    "Breakout-v5",
    num_envs=lanes,
    env_seed=env._pool.config["env_seed"],
    img_height=32,
    img_width=32,
    gray_scale=False,
    stack_num=1,
    frame_skip=4,
    noop_max=30,
    use_fire_reset=False,
    episodic_life=training,
    repeat_action_probability=0.0,
    max_episode_steps=cap,
  )
  rng = np.random.default_rng(1)
  shown, (obs, info) = env.reset(), raw.reset()
  kinds: set[str] = set()
  for _ in range(200):
    np.testing.assert_array_equal(shown.frame, np.moveaxis(obs, 1, -1))
    np.testing.assert_array_equal(info["env_id"], np.arange(lanes))
    ended, before = shown.terminated | shown.truncated, info
    action = rng.integers(4, size=lanes)
    shown, (obs, reward, _, _, info) = env.step(action), raw.step(action)
    np.testing.assert_array_equal(shown.reward, reward)
    np.testing.assert_array_equal(shown.first, ended)
    assert not shown.reward[shown.first].any()
    assert not (shown.first & (shown.terminated | shown.truncated)).any()
    assert not (shown.terminated & shown.truncated).any()
    steps = info["elapsed_step"] - before["elapsed_step"]
    assert (steps[~shown.first] == 1).all()
    for lane in range(lanes):
      if shown.first[lane]:
        kinds.add("new game" if info["elapsed_step"][lane] == 0 else "next life")
        continue
      over, at_cap = bool(info["terminated"][lane]), info["elapsed_step"][lane] == cap
      lost_life = training and 0 < info["lives"][lane] < before["lives"][lane]
      assert shown.terminated[lane] == (over or lost_life)
      assert shown.truncated[lane] == (at_cap and not over and not lost_life)
      assert shown.game_over[lane] == (over or (lost_life and at_cap))
      kinds |= {"lost life"} if lost_life and not at_cap else set()
      kinds |= {"truncated"} if shown.truncated[lane] else set()
  assert kinds == (
    {"new game", "next life", "lost life", "truncated"} if training else {"new game", "truncated"}
  )


def test_a_cap_on_a_lost_life_is_terminal_and_ends_the_game():
  shown = stacked(play(batched_env.make_env(BREAKOUT, 1, 4, training=True), 80))
  lost = int(np.flatnonzero(shown.terminated[:, 0])[0])
  assert not shown.game_over[lost, 0]
  env = batched_env.make_env(BREAKOUT, 1, 4, training=True, max_episode_steps=lost)
  last = play(env, lost)[-1]
  assert last.terminated[0] and not last.truncated[0] and last.game_over[0]
  assert env._lives[0] == 4 and env.step(np.array([NOOP])).first[0] and env._lives[0] == 5


def test_without_episodic_life_a_lost_life_ends_nothing():
  whole = dataclasses.replace(BREAKOUT, episodic_life=False)
  lives, games = (
    stacked(play(batched_env.make_env(config, 1, 4, training=True), 80))
    for config in (BREAKOUT, whole)
  )
  lost = int(np.flatnonzero(lives.terminated[:, 0])[0])
  assert not games.terminated[: lost + 2].any() and not games.first[1 : lost + 2].any()


def test_no_fire_is_pressed_for_the_agent():
  shown = stacked(
    play(batched_env.make_env(BREAKOUT, 2, 0, training=True), 150, np.array([NOOP, FIRE]))
  )
  assert not shown.terminated[:, 0].any() and shown.terminated[:, 1].any()  # no ball, no life lost


def test_fire_is_pressed_if_asked_for():
  config = dataclasses.replace(BREAKOUT, fire_reset=True)
  shown = stacked(play(batched_env.make_env(config, 1, 0, training=True), 70, np.array([NOOP])))
  assert shown.terminated[:, 0].sum() == 2  # each ball is lost, the second one too


def test_fire_is_pressed_for_every_life_of_an_evaluated_game():
  config = dataclasses.replace(BREAKOUT, fire_reset=True)
  shown = stacked(play(batched_env.make_env(config, 1, 0, training=False), 200, np.array([NOOP])))
  end = int(np.flatnonzero(shown.terminated[:, 0])[0])  # five balls, of 15 steps and more each
  assert 5 * 15 < end < 199 and shown.game_over[end, 0]
  begins = np.flatnonzero(shown.first[:, 0])
  assert begins[0] == 0 and begins[5] == end + 1 and (np.diff(begins[:6]) >= 15).all()


def test_an_evaluated_game_that_reaches_the_cap_as_a_life_is_lost_is_truncated():
  config = dataclasses.replace(BREAKOUT, fire_reset=True)
  shown = stacked(play(batched_env.make_env(config, 1, 0, training=True), 60, np.array([NOOP])))
  lost = int(np.flatnonzero(shown.terminated[:, 0])[0])
  env = batched_env.make_env(config, 1, 0, training=False, max_episode_steps=lost)
  last = play(env, lost, np.array([NOOP]))[-1]
  assert last.truncated[0] and not last.terminated[0] and not last.game_over[0]


@pytest.mark.parametrize(("noop_max", "different"), [(30, True), (1, False)])
def test_noops_before_the_first_frame(noop_max, different):
  config = EnvConfig(game="MsPacman", frame_size=48, noop_max=noop_max)  # its start screen moves
  frames = batched_env.make_env(config, 4, 0, training=True).reset().frame
  assert (len(np.unique(frames, axis=0)) > 1) == different


def test_a_step_of_four_frames_is_two_steps_of_two():
  """So the skip repeats the action, sums the rewards, and takes the maximum over the last two
  frames only."""
  four = batched_env.make_env(BREAKOUT, 2, 0, training=False)
  two = batched_env.make_env(dataclasses.replace(BREAKOUT, frame_skip=2), 2, 0, training=False)
  assert_same(four.reset(), two.reset())
  rng, total = np.random.default_rng(0), 0.0
  for _ in range(60):
    action = rng.integers(4, size=2)
    whole, half, rest = four.step(action), two.step(action), two.step(action)
    np.testing.assert_array_equal(whole.frame, rest.frame)
    np.testing.assert_array_equal(whole.reward, half.reward + rest.reward)
    total += whole.reward.sum()
  assert total > 0


def test_sticky_actions():
  def frames(sticky, action):
    config = dataclasses.replace(BREAKOUT, sticky_actions=sticky)
    return stacked(
      play(batched_env.make_env(config, 1, 0, training=True), 20, np.array([action]))
    ).frame

  assert (frames(0.0, 2) != frames(0.0, 3)).any()
  np.testing.assert_array_equal(
    frames(1.0, 2), frames(1.0, 3)
  )  # the emulator never takes the new action


def area_resize(image, size):
  """Mean over the area each pixel covers: the closed form of cv2.INTER_AREA when shrinking."""

  def shrink(x):  # along the first axis: differences of its integral
    edges = np.linspace(0, len(x), size + 1)
    whole = np.minimum(edges.astype(int), len(x) - 1)
    integral = np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis=0)])
    part = (edges - whole)[:, None, None]
    return np.diff(integral[whole] + part * x[whole], axis=0) * (size / len(x))

  return shrink(shrink(image.astype(np.float64)).swapaxes(0, 1)).swapaxes(0, 1)


@pytest.mark.parametrize("game, rom", [("Breakout", "breakout"), ("MsPacman", "ms_pacman")])
def test_against_a_plain_emulator(game, rom):
  """NoFrameskip-v4 semantics written out on ALE itself, with the no-ops found by comparing
  frames."""
  # Where only a part of what is pinned is at hand it can't be compared; the gate has it all.
  ale_py = (
    importlib.import_module("ale_py") if "CI" in os.environ else pytest.importorskip("ale_py")
  )
  env = batched_env.make_env(EnvConfig(game=game), 1, 0, training=True)
  ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
  ale = ale_py.ALEInterface()
  ale.setFloat("repeat_action_probability", 0.0)
  ale.loadROM(ale_py.roms.get_rom_path(rom))
  actions = ale.getMinimalActionSet()
  assert env.num_actions == len(actions)

  def close(image, frame):
    return np.abs(area_resize(image, 96) - frame).max() <= 1

  def no_ops(frame, ram):
    for _ in range(30):
      ale.act(0)
      if (ale.getRAM() == ram).all():
        return close(ale.getScreenRGB(), frame)
    return False

  # White box: the RAM says where in the no-ops the emulator stands, frames alone may repeat
  rams = []

  def spy(call):
    def called(*args):
      out = call(*args)
      rams.append(out[-1]["ram"][0])
      return out

    return called

  env._pool.reset, env._pool.step = spy(env._pool.reset), spy(env._pool.step)
  rng, ends = np.random.default_rng(0), 0
  ale.reset_game()
  shown, lives = env.reset(), ale.lives()
  assert no_ops(shown.frame[0], rams[-1])
  for _ in range(250):
    action = int(rng.integers(len(actions)))
    shown = env.step(np.array([action]))
    if shown.first[0]:
      if ale.game_over():
        ale.reset_game()
      assert no_ops(shown.frame[0], rams[-1])
      lives = ale.lives()
      continue
    screens, reward = [], 0.0
    for _ in range(4):
      reward += ale.act(actions[action])
      screens.append(ale.getScreenRGB())
      if ale.game_over():
        break
    assert shown.reward[0] == reward
    assert shown.game_over[0] == ale.game_over()
    assert shown.terminated[0] == (ale.game_over() or 0 < ale.lives() < lives)
    if not ale.game_over():
      assert close(np.maximum(screens[-2], screens[-1]), shown.frame[0])
    lives, ends = ale.lives(), ends + int(shown.terminated[0])
  assert ends > 0


@pytest.mark.parametrize("game", ["Breakout", "CartPole", "Catch", "MemoryCatch"])
def test_same_seed_same_run_whatever_the_threads(game):
  def of(threads):
    return EnvConfig(game=game, frame_size=16, threads=threads)

  one, four = (
    stacked(play(batched_env.make_env(of(threads), 4, 11, training=True), 60)) for threads in (1, 4)
  )
  assert_same(one, four)
  assert one.terminated.any()  # restarts included


@pytest.mark.parametrize("game", ["CartPole", "Catch"])
def test_seeds_and_lanes_differ(game):
  config = EnvConfig(game=game, frame_size=48)

  def frames(lanes, seed):
    env = batched_env.make_env(config, lanes, seed, training=True)
    return stacked(play(env, 40, np.ones(lanes, int))).frame

  wide = frames(4, 0)
  np.testing.assert_array_equal(
    wide[:, :2], frames(2, 0)
  )  # a lane does not depend on how many there are
  others = frames(4, 1)
  for i in range(4):
    assert all((wide[:, i] != wide[:, j]).any() for j in range(i))
    assert all(
      (wide[:, i] != others[:, j]).any() for j in range(4)
    )  # nor do neighboring seeds share lanes


def test_refused_actions_step_nothing():
  env, twin = (batched_env.make_env(BREAKOUT, 2, 0, training=True) for _ in range(2))
  env.reset(), twin.reset()
  for action in ([0], [0, 1, 2], [[0, 1]], [0, 4], [-1, 0], 0, []):
    with pytest.raises(ValueError, match="action"):
      env.step(np.array(action))
  good = np.array([1, 3])
  for dtype in (np.int64, np.int32, np.uint8):
    assert_same(env.step(good.astype(dtype)), twin.step(good))


def test_frames_stay_after_further_steps():
  env = batched_env.make_env(BREAKOUT, 2, 0, training=True)
  shown = play(env, 3)[-1]
  kept = shown.frame.copy()
  for _ in range(50):
    env.step(np.array([1, 2]))
  np.testing.assert_array_equal(shown.frame, kept)


@pytest.mark.parametrize(
  ("game", "suggestion"),
  [
    ("ms_pacman", "did you mean MsPacman?"),
    ("ALE/Pong-v5", "did you mean Pong?"),
    ("QbertNoFrameskip-v4", "did you mean Qbert?"),
    ("spaceinvader", "did you mean SpaceInvaders?"),
    ("cart-pole", "did you mean CartPole?"),
    (
      "xyzzy",
      "available: Catch, MemoryCatch, DecoyCatch, CartPole, TicTacToe, ConnectFour, Go9,",
    ),
  ],
)
def test_unknown_games(game, suggestion):
  with pytest.raises(ValueError, match=f"unknown game '{game}'; {re.escape(suggestion)}"):
    batched_env.make_env(EnvConfig(game=game), 1, 0, training=True)


def test_known_games():
  for game in (*batched_env.VECTOR_GAMES, *scores.atari100k_games(), "Venture"):
    batched_env.check_game(game)
  assert set(scores.atari100k_games()) < batched_env._atari_games()


def test_training_reward():
  raw = np.array([-7.0, -0.5, 0.0, 0.25, 400.0], np.float32)
  clipped = batched_env.training_reward(EnvConfig(clip_rewards=True), raw)
  np.testing.assert_array_equal(clipped, [-1, -1, 0, 1, 1])
  kept = batched_env.training_reward(EnvConfig(clip_rewards=False), raw)
  np.testing.assert_array_equal(kept, raw)
  assert clipped.dtype == kept.dtype == np.float32


def test_envpool_is_imported_late_and_without_its_other_families():
  code = """
import sys
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env
assert "envpool.registration" not in sys.modules
env = batched_env.make_env(EnvConfig(frame_size=16), 2, 0, training=True)
assert env.reset().frame.shape == (2, 16, 16, 3)
assert "envpool.toy_text" not in sys.modules and "matplotlib" not in sys.modules
import envpool
assert len(envpool.make_gymnasium("Catch-v0", num_envs=2).reset()[0]) == 2
"""
  root = pathlib.Path(batched_env.__file__).parents[2]
  subprocess.run(
    [sys.executable, "-c", code], check=True, cwd=root, env={"PYTHONPATH": str(root)}, timeout=60
  )
