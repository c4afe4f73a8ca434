"""Evaluation against scripted environments: whole episodes, raw rewards, one for each lane, the best action."""

import dataclasses
import json
import types

import numpy as np
import pytest
import tiny

from speedyzero_jax.workers import evaluator
from speedyzero_jax.workers.evaluator import Evaluation, evaluate
from speedyzero_jax.workers.weights import Version

CONFIG = tiny.config()


@pytest.fixture
def envs(monkeypatch):
  """The environments that evaluation makes, and with what."""
  made = []

  def make_env(config, lanes, seed, *, training, max_episode_steps):
    env = tiny.FakeEnv(lanes, seed)
    env.close = lambda: made[-1].__setattr__("closed", True)
    made.append(
      types.SimpleNamespace(
        env=env, seed=seed, training=training, cap=max_episode_steps, closed=False
      )
    )
    return env

  monkeypatch.setattr(evaluator, "make_env", make_env)
  return made


def play(episodes, *, config=CONFIG, seed=5, **kwargs):
  inference = tiny.FakeInference(explore=False)
  return evaluate(config, inference, Version(77, None), episodes=episodes, seed=seed, **kwargs)


def expected(made, episodes):
  """Returns, lengths and cappedness of each lane's first episode, from what the environments showed."""
  rows = []
  for one in made:
    shown = one.env.shown
    for lane in range(one.env.num_lanes):
      end = next(t for t, step in enumerate(shown) if step.terminated[lane] or step.truncated[lane])
      rows.append(
        (
          sum(float(step.reward[lane]) for step in shown[: end + 1]),
          end,
          bool(shown[end].truncated[lane]),
        )
      )
  return rows[:episodes]


@pytest.mark.parametrize(("episodes", "lanes"), [(1, [1]), (3, [3]), (4, [4]), (11, [4, 4, 4])])
def test_plays_whole_episodes_with_raw_rewards(envs, monkeypatch, episodes, lanes):
  monkeypatch.setattr(evaluator, "_MAX_LANES", 4)
  result = play(episodes)
  assert [one.env.num_lanes for one in envs] == lanes
  rows = expected(envs, episodes)
  returns = [row[0] for row in rows]
  assert result.returns == returns and result.lengths == [row[1] for row in rows]
  assert result.capped == sum(row[2] for row in rows)
  assert (result.episodes, result.step, result.game, result.seed, result.simulations) == (
    episodes,
    77,
    "Catch",
    5,
    2,
  )
  assert (result.mean, result.median, result.std) == pytest.approx(
    (np.mean(returns), np.median(returns), np.std(returns))
  )
  assert all(
    one.closed and not one.training and one.cap == CONFIG.evaluation.max_episode_steps
    for one in envs
  )
  assert len({one.seed for one in envs}) == len(envs)  # no episode is played twice
  if episodes == 11:
    assert (
      max(map(abs, returns)) > 1 and 0 < result.capped < 11
    )  # what was to be told apart did occur


def test_the_cap_can_be_given(envs):
  assert play(1, max_episode_steps=7).max_episode_steps == envs[0].cap == 7


@pytest.mark.parametrize(("given", "cap"), [(None, 500), (27_000, 500), (7, 7)])
def test_a_cap_of_the_game_itself_is_reported_as_what_it_is(envs, given, cap):
  config = dataclasses.replace(CONFIG, env=dataclasses.replace(CONFIG.env, game="CartPole"))
  config = dataclasses.replace(
    config, evaluation=dataclasses.replace(config.evaluation, max_episode_steps=27_000)
  )
  assert play(1, config=config, max_episode_steps=given).max_episode_steps == envs[0].cap == cap


def test_seeds_decide(envs):
  a, b, c = play(4), play(4), play(4, seed=6)
  assert a == b and a.returns != c.returns


def test_stopping_ends_it_and_closes_the_environment(envs):
  left = [3]

  def should_stop():
    left[0] -= 1
    return left[0] < 0

  assert play(3, should_stop=should_stop) is None
  assert [one.closed for one in envs] == [True]


RESULT = Evaluation(
  game="Breakout", step=5, episodes=2, mean=1.5, median=1.5, std=0.5, human_normalised=None, returns=[1.0, 2.0],
  lengths=[3, 4], capped=1, max_episode_steps=9, simulations=2, seed=0,
)  # fmt: skip


def test_the_file_says_what_was_found(tmp_path):
  path = tmp_path / "evaluation.json"
  path.write_text("an older one")
  RESULT.write(path)
  assert json.loads(path.read_text()) == dataclasses.asdict(RESULT)
  assert list(tmp_path.iterdir()) == [path]
  with pytest.raises(OSError, match="No such file"):
    RESULT.write(tmp_path / "missing" / "evaluation.json")


def test_the_line_says_what_was_found():
  line = str(RESULT)
  assert "Breakout after 5 learner steps, 2 episodes: mean 1.50, median 1.50, std 0.50" in line
  assert "1 ended by the cap of 9 steps" in line and "human" not in line
  normalised = dataclasses.replace(RESULT, human_normalised=0.25, capped=0)
  assert "human-normalised 0.250" in str(normalised) and "cap" not in str(normalised)


def test_atari_is_normalised_by_human_and_random_play(envs):
  config = dataclasses.replace(CONFIG, env=dataclasses.replace(CONFIG.env, game="Breakout"))
  result = play(3, config=config)
  assert result.human_normalised == pytest.approx((result.mean - 1.7) / (30.5 - 1.7))
  assert play(3).human_normalised is None  # nobody's Catch was published
