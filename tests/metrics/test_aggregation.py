"""Tests of counters, means and episode statistics, and of combining learners' values."""

import threading
import time

import numpy as np

from clock import Clock
from speedyzero_jax.metrics import aggregation, names


def test_amounts_are_counted_per_second_and_per_learner_step_since_the_line_before():
  clock = Clock()
  counters = aggregation.Counters(clock)
  counters.add("time/act", 5.0)
  counters.restart(10)  # what came before belongs to no step
  clock.now += 2.0
  counters.add("a_per_second", 3)
  counters.add("time/train", 1.0)
  counters.add("time/train", 1.0)
  assert counters.rates(2.5) == {}
  assert counters.rates(1.0) == {"a_per_second": 1.5}
  clock.now += 2.0
  assert counters.take(10) == {}  # no step
  assert counters.take(14) == {"time/act": 0.0, "time/train": 0.5, "a_per_second": 0.75}
  clock.now += 1.0
  counters.add("b_per_learner_step", 4.0)
  zeros = {"time/act": 0.0, "time/train": 0.0, "a_per_second": 0.0}
  assert counters.take(16) == zeros | {"b_per_learner_step": 2.0}


def test_games_are_summarized():
  stats, episode = aggregation.EpisodeStats(window=2), aggregation.Episode
  assert stats.summary() == {names.EPISODES: 0}
  for game in (episode(3.0, 3), episode(4.0, 4), episode(2.0, 1)):
    stats.record(game)
  assert stats.summary() == {
    names.EPISODES: 3,
    names.EPISODE_RETURN: 3.0,  # of the last two: 4 and 2
    names.EPISODE_RETURN_LAST: 2.0,
    names.EPISODE_RETURN_BEST: 4.0,
    names.EPISODE_LENGTH: 2.5,
  }


def test_means_and_their_exceptions_by_name():
  means = aggregation.RunningMeans()
  means.add({"losses/x": 1.0, "a_min": 0.2, "a_max": 5, "a_last": 1, "own/x": float("nan")})
  means.add({"losses/x": 4.0, "a_min": 0.1, "a_max": 9, "a_last": 2, "own/x": 1.0})
  means.add({"losses/x": np.float32(4.0), "a_max": 7})
  means.add({"b_max": 1.0, "b_min": float("nan")})
  means.add({"b_max": float("nan"), "b_min": 1.0})
  taken = means.take()
  assert all(np.isnan(taken.pop(name)) for name in ("own/x", "b_max", "b_min"))
  assert taken == {"losses/x": 3.0, "a_min": 0.1, "a_max": 9.0, "a_last": 2.0}
  assert means.take() == {}


class Slow(dict):
  """Lets other threads run between a read and the write that follows it."""

  def get(self, *args):
    value = super().get(*args)
    time.sleep(0.001)
    return value


def test_counts_of_many_threads_add_up():
  counters, name = aggregation.Counters(), "a_per_learner_step"
  counters._totals = Slow()
  threads = [threading.Thread(target=counters.add, args=(name, 1)) for _ in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert counters.take(1) == {name: 8}


def test_values_of_learners_combine_as_their_names_say():
  first = {
    names.ENV_STEPS: 100, "losses/any": 1.5, "learner/gradient_norm": 2.0, "replay/transitions": 30,
    "replay/bytes": 10, "replay/bytes_per_transition": 10, "replay/some_age_mean": 4.0,
    "replay/some_age_max": 9.0, "some/states_per_second": 5.0, "some/states_per_learner_step": 2.0,
    names.LEARNER_STEPS_PER_SECOND: 8.0, names.wait("refresher"): 0.25, names.POLICY_LAG: 8.0,
    names.present("actor"): 1, names.CHECKPOINT_STEP: 4,
    names.EPISODES: 1, names.EPISODE_RETURN_LAST: 1.0, names.EPISODE_RETURN_BEST: 1.0,
    "unknown": 1.0,
  }  # fmt: skip
  second = {name: 3 * value for name, value in first.items()} | {"only/here": 7.0}
  shared = aggregation.shared_values(first)
  local = {
    "losses/any", "learner/gradient_norm", names.LEARNER_STEPS_PER_SECOND, names.CHECKPOINT_STEP,
    names.EPISODE_RETURN_LAST,
  }  # fmt: skip
  assert first.keys() - shared.keys() == local
  combined = aggregation.combine_learners([shared, aggregation.shared_values(second)])
  sums = {
    names.ENV_STEPS, "replay/transitions", "replay/bytes", "some/states_per_second",
    "some/states_per_learner_step", names.present("actor"), names.EPISODES,
  }  # fmt: skip
  largest = {"replay/some_age_max", names.wait("refresher"), names.EPISODE_RETURN_BEST}
  factors = dict.fromkeys(shared, 2) | dict.fromkeys(sums, 4) | dict.fromkeys(largest, 3)
  expected = {name: factor * first[name] for name, factor in factors.items()}
  assert combined == expected | {"only/here": 7.0}
  assert type(combined[names.ENV_STEPS]) is int
  lag = names.POLICY_LAG_MAX
  assert np.isnan(aggregation.combine_learners([{lag: 1.0}, {lag: float("nan")}])[lag])
