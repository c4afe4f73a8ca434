"""Tests of Gymnasium's environments: conventions of episodes, and errors for unsupported ones."""

import gymnasium
import numpy as np
import pytest

import pages
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs import batched_env, gymnasium_env


class Counter(gymnasium.Env):
  """An environment that shows the number of steps taken and ends after `last` of them."""

  observation_space = gymnasium.spaces.Box(0, 255, (4, 5), np.uint8)
  action_space = gymnasium.spaces.Discrete(3)

  def __init__(self, last=3):
    self.last, self.info = last, {}

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.count, self.base = 0, self.np_random.integers(100)
    return np.full((4, 5), self.base, np.uint8), {}

  def step(self, action):
    self.count += 1
    frame = np.full((4, 5), self.base + self.count, np.uint8)
    events = np.array([self.count, action], bool if action == 1 == self.count else float)
    self.info |= {"events": events, "winner": 1 if action == 1 else None}  # types differ by lane
    return frame, float(action), self.count == self.last, False, self.info


for name, limit in (("Counter-v0", None), ("Limited-v0", 3), ("Short-v0", 2)):
  gymnasium.register(name, Counter, max_episode_steps=limit)


class Empty(Counter):
  observation_space = gymnasium.spaces.Box(0, 1, (0,))


gymnasium.register("Broken-v0", lambda *, last: Counter(last))
gymnasium.register("Empty-v0", Empty)


def make(name, lanes=2, cap=100, seed=0, events=(), training=True):
  config = EnvConfig(game=f"gymnasium:{name}", max_episode_steps=cap, event_rewards=events)
  return batched_env.make_env(config, lanes, seed, training=training)


def test_events_are_rewarded_in_training():
  env, own = (make("Counter-v0", events=(10.0, -1.0), training=t) for t in (True, False))
  env.reset(), own.reset()
  shown = [[each.step(np.array([1, 2])).reward.tolist() for each in (env, own)] for _ in range(5)]
  assert [a for a, _ in shown] == [[9, 8], [19, 18], [29, 28], [0, 0], [9, 8]]
  assert [b for _, b in shown] == [[1, 2], [1, 2], [1, 2], [0, 0], [1, 2]]
  env = make("Counter-v0", events=(1.0,))
  env.reset()
  with pytest.raises(RuntimeError, match=r"env.event_rewards has 1 numbers, but .* shape \(2,\)"):
    env.step(np.array([0, 0]))


@pytest.mark.parametrize(
  ("name", "cap", "length", "terminated"),
  [
    ("Counter-v0", 100, 3, True),
    ("Counter-v0", 2, 2, False),
    ("Short-v0", 100, 2, False),
    ("Limited-v0", 100, 3, True),  # an end at the time limit is an end
  ],
)
def test_episodes_follow_one_another(name, cap, length, terminated):
  env = make(name, cap=cap)
  assert (env.frame_shape, env.frame_dtype, env.num_actions) == ((4, 5, 1), np.uint8, 3)
  shown = [env.reset()] + [env.step(np.array([1, 2])) for _ in range(3 * length + 2)]
  for t, step in enumerate(shown):
    place = t % (length + 1)
    assert step.first.tolist() == [place == 0] * 2
    np.testing.assert_array_equal(step.reward, [0, 0] if place == 0 else [1, 2])
    assert step.terminated.tolist() == [terminated and place == length] * 2
    assert step.truncated.tolist() == [not terminated and place == length] * 2
    assert step.game_over.tolist() == step.terminated.tolist()
    start = shown[t - place].frame.astype(int)
    np.testing.assert_array_equal(step.frame, start + place)
  env.close()


def test_seeds_and_lanes_differ_and_repeat():
  first = [make("Counter-v0", lanes=4, seed=seed).reset().frame for seed in (0, 0, 1)]
  np.testing.assert_array_equal(first[0], first[1])
  assert (first[0] != first[2]).any() and len(np.unique(first[0])) > 1


def test_vectors_are_one_pixel_and_wrong_actions_are_refused():
  env = make("CartPole-v1")
  assert (env.frame_shape, env.frame_dtype) == ((1, 1, 4), np.float32)
  assert env.reset().frame.dtype == np.float32
  assert batched_env.episode_cap("gymnasium:CartPole-v1", 10_000) == 500
  for wrong in (np.array([0, 2]), np.array([0])):
    with pytest.raises(ValueError, match="action must be"):
      env.step(wrong)


@pytest.mark.parametrize("index", [0, 1])
def test_numbers_that_are_not_finite_are_refused(monkeypatch, index):
  env = make("CartPole-v1")
  env.reset()
  parts = [*env._envs.step(np.array([1, 0]))]
  parts[index] = np.float64(parts[index])
  parts[index].flat[0] = np.nan
  monkeypatch.setattr(env._envs, "step", lambda _: parts)
  name = ("observations", "rewards")[index]
  with pytest.raises(ValueError, match=f"gymnasium:CartPole-v1: {name} must be finite"):
    env.step(np.array([1, 0]))


def _exit(self, action):
  raise SystemExit  # ends a process as if it had finished


def _exhaust(self, *_):
  raise MemoryError


def _wrong_shape(self, action):
  return np.zeros((5, 4), np.uint8), 0.0, False, False, {}


@pytest.mark.parametrize(
  ("step", "error", "message"),
  [
    (
      _exit,
      RuntimeError,
      r"Counter-v0 failed: SystemExit: \(.*/test_gymnasium_env.py:\d+\)$",
    ),
    (lambda *_: next(iter(())), RuntimeError, "gymnasium:Counter-v0 failed: StopIteration"),
    (_wrong_shape, RuntimeError, "gymnasium:Counter-v0 failed: ValueError"),
    (_exhaust, MemoryError, "^$"),
  ],
)
def test_an_environment_that_fails_is_named(monkeypatch, step, error, message):
  env = make("Counter-v0")
  env.reset()
  monkeypatch.setattr(Counter, "step", step)
  with pytest.raises(error, match=message):
    env.step(np.array([1, 2]))


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_error_in_close_is_only_logged(monkeypatch, caplog, error):
  def fail(self):
    raise error

  monkeypatch.setattr(Counter, "close", fail)
  gymnasium_env.probe.cache_clear()
  env = make("Counter-v0")  # looks at an environment's spaces and closes it
  for errors in (1, 3, 3):  # closes both lanes, once
    assert caplog.text.count("gymnasium:Counter-v0 failed while it was closed") == errors
    assert caplog.text.count(f"{error.__name__}\n") == errors
    env.close()


def test_exhausted_memory_is_no_usage_error(monkeypatch):
  monkeypatch.setattr(Counter, "__init__", _exhaust)
  with pytest.raises(MemoryError):
    make("Counter-v0")


@pytest.mark.parametrize(
  ("game", "message"),
  [
    ("gymnasium:Nothing-v0", "env.game: can't make gymnasium:Nothing-v0: .*Nothing"),
    ("gymnasium:no_such_module:X-v0", "env.game: can't make .*no_such_module"),
    ("gymnasium:Broken-v0", "env.game: can't make .*TypeError: .*last"),
    ("gymnasium:a:b:c", "env.game: can't make"),
    ("gymnasium:Pendulum-v1", "env.game: .*action space must be Discrete.* got Box"),
    ("gymnasium:Empty-v0", r"env.game: .*observation space must be a Box.* got Box\(.*\(0,\)"),
    ("gymnasium:Taxi-v4", "env.game: .*observation space must be a Box.* got Discrete"),
  ],
)
@pytest.mark.parametrize("preset", ["quickstart", "dqn"])
def test_what_does_not_fit_is_an_error_that_names_it(preset, game, message):
  with pytest.raises(ConfigError, match=message):
    loader.load([preset], [f"env.game={game}"])


def test_the_example_of_the_documentation_is_an_environment(tmp_path, monkeypatch):
  (tmp_path / "corridor.py").write_text(pages.examples()["corridor.py"])
  monkeypatch.syspath_prepend(tmp_path)
  gymnasium_env.probe.cache_clear()
  env = make("corridor:Corridor-v0", lanes=1)
  env.reset()
  steps = [env.step(np.ones(1, np.int64)) for _ in range(9)]
  assert [step.reward[0] for step in steps] == [0] * 8 + [1] and steps[-1].terminated[0]
  loader.load(["quickstart"], ["env.game=gymnasium:corridor:Corridor-v0"])
