"""Tests of exploit and explore: properties, and results for hand-made samples."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.population.selection import Copy, Knob, t_test, truncation

SCORES = st.lists(st.integers(-5, 5).map(float) | st.just(-math.inf), min_size=2, max_size=12)


@given(SCORES, st.floats(0.01, 0.5), st.integers(0, 9))
def test_truncation_replaces_the_worst_by_the_best(scores, share, seed):
  copies = truncation(scores, share, np.random.default_rng(seed))
  replaced, copied = {c.member for c in copies}, {c.source for c in copies}
  limit = max(round(share * len(scores)), 1)
  assert len(replaced) == len(copies) <= limit
  assert not replaced & copied
  ranked = sorted(scores)
  for copy in copies:
    assert -math.inf < scores[copy.source] >= scores[copy.member]
    assert scores[copy.member] <= ranked[limit - 1] and scores[copy.source] >= ranked[-limit]


def test_truncation_draws_among_the_best():
  scores = [float(i) for i in range(10)]
  found = {
    copy for seed in range(40) for copy in truncation(scores, 0.2, np.random.default_rng(seed))
  }
  assert found == {Copy(member, source) for member in (0, 1) for source in (8, 9)}
  # Members without a score are no sources, so every replaced one gets the only other.
  failed = [0.0, -math.inf, -math.inf, -math.inf]
  assert truncation(failed, 0.5, np.random.default_rng(0)) == [Copy(1, 0), Copy(2, 0)]


def test_t_test_copies_only_what_is_significantly_better():
  """Welch: means 0 and 1 of ten with variance 1 have p = 0.02, of ten with variance 9, p = 0.23."""
  base = np.array([-1.5, -1, -0.8, -0.2, -0.1, 0.1, 0.2, 0.8, 1, 1.5])
  base = base / base.std(ddof=1)
  rng = np.random.default_rng(0)
  assert t_test([base, base + 1], 0.05, rng) == [Copy(0, 1)]
  assert t_test([3 * base, 3 * base + 1], 0.05, rng) == []
  assert t_test([[], [1.0]], 0.05, rng) == [Copy(0, 1)]
  assert t_test([[3.0], [5.0]], 0.05, rng) == []
  assert t_test([[9.0] * 10, [500.0] * 10], 0.05, rng) == [Copy(0, 1)]


@given(st.lists(st.lists(st.integers(0, 3).map(float), max_size=6), min_size=2, max_size=8),
       st.integers(0, 9))  # fmt: skip
def test_t_test_copies_sources_before_they_are_replaced(returns, seed):
  replaced = set()
  for copy in t_test(returns, 0.5, np.random.default_rng(seed)):
    assert copy.source not in replaced
    replaced.add(copy.member)


@given(st.floats(1e-6, 1.0), st.floats(1.1, 1e5), st.booleans(), st.integers(0, 99))
def test_knobs_stay_in_their_range(low, ratio, log, seed):
  knob, rng = Knob("x", low, low * ratio, log), np.random.default_rng(seed)
  value = knob.draw(rng)
  for _ in range(3):
    assert knob.low <= value <= knob.high
    value = knob.perturb(value, (0.8, 1.2), rng)


def test_a_knob_is_multiplied_by_one_of_the_factors():
  knob, rng = Knob("x", 0.1, 1.0, False), np.random.default_rng(0)
  found = {round(knob.perturb(0.5, (0.8, 1.2), rng), 6) for _ in range(40)}
  assert found == {0.4, 0.6}
  assert knob.perturb(0.9, (1.2,), rng) == 1.0 and knob.perturb(0.11, (0.8,), rng) == 0.1


def test_a_logarithmic_knob_spreads_over_decades():
  knob, rng = Knob("x", 1e-6, 1e-1, True), np.random.default_rng(0)
  decades = np.log10([knob.draw(rng) for _ in range(2000)])
  assert np.histogram(decades, bins=5, range=(-6, -1))[0].min() > 330  # of 400
