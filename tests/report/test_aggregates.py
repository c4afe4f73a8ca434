"""Tests of aggregates against rliable, scipy and published numbers."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.envs import scores as published
from speedyzero_jax.report import aggregates, scores

# Five seeds of six games, and what rliable 1.2.0 says of them: `get_interval_estimates` with 50,000
# resamples, `create_performance_profile` with 20,000.
SCORES = [
  [3.39, 0.74, 1.17, 0.95, 0.71], [0.49, 0.15, 0.59, 0.19, 0.2], [0.76, 1.85, 0.6, 3.27, 0.51],
  [1.07, 1.27, 0.2, 0.85, 0.09], [0.36, 0.42, 1.22, 0.52, 1.9], [0.74, 0.63, 0.83, 4.6, 0.51],
]  # fmt: skip
RLIABLE = {
  "mean": (1.026, 0.723333, 1.387667),
  "median": (1.138, 0.636, 1.369),
  "IQM": (0.729375, 0.588125, 0.965),
  "optimality gap": (0.332, 0.245333, 0.418667),
}
PROFILE = {0.25: (25 / 30, 22 / 30, 28 / 30), 0.5: (22 / 30, 19 / 30, 26 / 30),
           1: (9 / 30, 5 / 30, 14 / 30), 2: (3 / 30, 0, 6 / 30)}  # fmt: skip


@pytest.mark.parametrize("name", RLIABLE)
def test_aggregates_and_intervals_are_those_of_rliable(monkeypatch, name):
  monkeypatch.setattr(aggregates, "RESAMPLES", 30_000)
  value, low, high = RLIABLE[name]
  found = aggregates.estimate(aggregates.STATISTICS[name], SCORES)
  assert found.value == pytest.approx(value)
  assert found.interval == pytest.approx((low, high), abs=0.03 * (high - low))


def test_performance_profiles_are_those_of_rliable():
  for found, (value, low, high) in zip(
    aggregates.performance_profile(SCORES, list(PROFILE)), PROFILE.values(), strict=True
  ):
    assert found.value == pytest.approx(value)
    assert found.interval == pytest.approx((low, high), abs=1 / 30 + 1e-9)


games = st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4), min_size=1, max_size=6)


@given(games)
def test_games_of_unequal_seeds_count_as_if_repeated_to_equal_numbers(ragged):
  arrays = [np.array(game) for game in ragged]
  equal = np.stack([np.repeat(game, 12 // len(game)) for game in arrays])  # 12 = lcm(1, 2, 3, 4)
  common = np.lcm.reduce([len(game) for game in ragged])
  least = np.stack([np.repeat(game, common // len(game)) for game in arrays])
  near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-6)  # noqa: E731
  assert aggregates.iqm(arrays) == near(scipy.stats.trim_mean(least, 0.25, axis=None))
  assert aggregates.mean(arrays) == near(equal.mean())
  assert aggregates.median(arrays) == near(np.median(equal.mean(1)))
  assert aggregates.optimality_gap(arrays) == near(1 - np.minimum(equal, 1).mean())


def test_one_seed_of_a_game_leaves_no_interval():
  found = aggregates.estimate(aggregates.mean, [[1.0, 2.0], [3.0]])
  assert found == (2.25, None)


@pytest.mark.parametrize(
  ("system", "mean", "median"),
  [("EfficientZero (paper, 100k)", 1.943, 1.090), ("DIAMOND (100k)", 1.459, 0.373)],
)
def test_aggregates_of_published_scores_are_the_published_ones(system, mean, median):
  """Ye et al. 2021, Alonso et al. 2024; their scores are rounded, differently in each paper."""
  found = scores.published(published.atari100k_games())[system]
  assert aggregates.estimate(aggregates.mean, found).value == pytest.approx(mean, abs=0.0015)
  assert aggregates.estimate(aggregates.median, found).value == pytest.approx(median, abs=0.0015)
