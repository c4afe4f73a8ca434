"""Tests of evaluation on scripted environments: whole episodes, raw rewards, actions."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import tiny
from speedyzero_jax.agents.base import ActOutput
from speedyzero_jax.workers import evaluator
from speedyzero_jax.workers.evaluator import evaluate
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import Version

AGENT, INFERENCE = tiny.checksum_parts()


@pytest.fixture
def envs(monkeypatch):
  """The environments created by evaluation."""
  made = []

  def make_env(config, lanes, seed, **settings):
    made.append(tiny.FakeEnv(lanes, seed))
    made[-1].seed, made[-1].settings = seed, settings
    return made[-1]

  monkeypatch.setattr(evaluator, "make_env", make_env)
  monkeypatch.setattr(evaluator, "MAX_LANES", 4)
  return made


def play(episodes, *overrides, seed=5, game="Catch", **kwargs):
  config = tiny.config(*overrides)
  config = dataclasses.replace(config, env=dataclasses.replace(config.env, game=game))
  version = Version(77, AGENT.init())
  return evaluate(config, AGENT, INFERENCE, version, episodes=episodes, seed=seed, **kwargs)


def expected(made, episodes):
  """Return, length and truncation of each lane's first episode."""
  rows = []
  for env in made:
    for lane in range(env.num_lanes):
      ends = [bool(step.terminated[lane] or step.truncated[lane]) for step in env.shown]
      end = ends.index(True)
      total = sum(float(step.reward[lane]) for step in env.shown[: end + 1])
      rows.append((total, end, bool(env.shown[end].truncated[lane])))
  return rows[:episodes]


@pytest.mark.parametrize(("episodes", "lanes"), [(1, [1]), (4, [4]), (11, [4, 4, 4])])
def test_plays_whole_episodes_with_raw_rewards(envs, episodes, lanes):
  result = play(episodes)
  assert [env.num_lanes for env in envs] == lanes
  returns, lengths, capped = zip(*expected(envs, episodes), strict=True)
  assert result.returns == list(returns) and result.lengths == list(lengths)
  assert result.capped == sum(capped)
  assert (result.episodes, result.step, result.game, result.seed) == (episodes, 77, "Catch", 5)
  statistics = np.mean(returns), np.median(returns), np.std(returns)
  assert (result.mean, result.median, result.std) == pytest.approx(statistics)
  settings = {"training": False, "max_episode_steps": 9}
  assert all(env.closed and env.settings == settings for env in envs)
  assert len({env.seed for env in envs}) == len(envs)  # no episode is played twice
  if episodes == 11:
    assert max(map(abs, returns)) > 1 and 0 < result.capped < 11  # the cases did occur


def test_a_step_that_only_begins_the_next_life_does_not_count(envs, monkeypatch):
  step = tiny.FakeEnv.step

  def second_life(env, action):
    env.shown[-1] = step(env, action)._replace(first=np.full(env.num_lanes, len(env.shown) == 3))
    return env.shown[-1]

  monkeypatch.setattr(tiny.FakeEnv, "step", second_life)
  lengths = play(4).lengths
  assert lengths == [end - (end >= 2) for _, end, _ in expected(envs, 4)] and max(lengths) > 2


def test_actions_are_those_of_the_agent_without_exploration(envs):
  play(3)
  (env,) = envs
  again = tiny.FakeEnv(3, env.seed)
  step, stack = again.reset(), None
  for shown in env.shown[1:]:
    new = np.repeat(step.frame[:, None], 2, axis=1)
    if stack is not None:
      new[~step.first, 0] = stack[~step.first, 1]
    stack = new
    step = again.step((tiny.checksums(stack) % 3).astype(np.int32))
    np.testing.assert_array_equal(step.frame, shown.frame)


@pytest.mark.parametrize(
  ("episodes", "training_lanes", "lanes"),
  [(6, 12, [0, 2, 4, 6, 8, 10]), (6, 3, [0, 0, 1, 1, 2, 2]), (4, 4, [0, 1, 2, 3]), (1, 5, [0])],
)
def test_exploration_is_that_of_all_training_lanes(
  envs, monkeypatch, episodes, training_lanes, lanes
):
  used = []

  def act(variables, inputs, *_, **__):
    used.append(np.asarray(inputs.lane).tolist())
    return ActOutput(np.zeros(len(inputs.lane), np.int32), {}, inputs.core, {})

  monkeypatch.setattr(INFERENCE, "act", act)
  play(episodes, f"actor.lanes={training_lanes}", "evaluation.explore=true")
  rounds = [env.num_lanes for env in envs]
  firsts = [used[sum(len(env.shown) - 1 for env in envs[:i])] for i in range(len(rounds))]
  assert [lane for first in firsts for lane in first][:episodes] == lanes


class CountingAgent(tiny.ChecksumAgent):
  """Its recurrent state counts steps and decides the action."""

  def initial_core(self, n):
    return np.zeros(n, np.int32)

  def act(self, variables, inputs, key, progress, *, explore):
    return ActOutput(inputs.core % self.schema.num_actions, {}, inputs.core + 1, {})


def test_the_recurrent_state_continues_from_step_to_step(envs):
  agent = CountingAgent(tiny.config())
  version = Version(0, agent.init())
  evaluate(tiny.config(), agent, Inference(agent), version, episodes=3, seed=5)
  (env,) = envs
  again = tiny.FakeEnv(3, env.seed)
  again.reset()
  for count, shown in enumerate(env.shown[1:]):
    np.testing.assert_array_equal(again.step(np.full(3, count % 3)).frame, shown.frame)


@pytest.mark.parametrize(
  ("game", "given", "cap"),
  [
    ("Catch", 7, 9),
    ("CartPole", 27000, 500),
    ("CartPole", 7, 7),
  ],
)
def test_the_cap_reported_is_that_of_the_game_or_the_one_given(envs, game, given, cap):
  result = play(1, f"evaluation.max_episode_steps={given}", game=game)
  assert result.max_episode_steps == envs[0].settings["max_episode_steps"] == cap


def test_seeds_decide(envs):
  a, b, c = play(4), play(4), play(4, seed=6)
  assert a == b and a.returns != c.returns


def test_stopping_ends_it_and_closes_the_environment(envs):
  left = iter([False, True])
  assert play(3, should_stop=lambda: next(left)) is None
  assert [env.closed for env in envs] == [True]


@pytest.mark.parametrize("explore", [False, True])
def test_exploration_has_a_new_key_in_every_step_and_is_reproducible(envs, monkeypatch, explore):
  calls, act = [], INFERENCE.act

  def recorded(variables, inputs, key, progress, *, explore):
    calls.append((explore, float(progress), *jax.random.key_data(key).tolist()))
    return act(variables, inputs, key, progress, explore=explore)

  monkeypatch.setattr(INFERENCE, "act", recorded)
  results = [play(6, f"evaluation.explore={explore}") for _ in range(2)]
  assert results[0] == results[1] and results[0].explore == explore
  assert {call[:2] for call in calls} == {(explore, 1.0)}  # as at the end of training
  first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
  assert first == second and len(set(first)) == len(first)


def test_the_file_holds_the_result_and_replaces_an_older_one(envs, tmp_path):
  result, path = play(2), tmp_path / "evaluation.json"
  path.write_text("an older one")
  result.write(path)
  assert json.loads(path.read_text()) == dataclasses.asdict(result)
  assert list(tmp_path.iterdir()) == [path]


def test_atari_is_normalized_by_human_and_random_play(envs):
  result = play(3, game="Breakout")
  assert result.human_normalized == pytest.approx((result.mean - 1.7) / (30.5 - 1.7))
  assert play(3).human_normalized is None  # Catch has no published scores
