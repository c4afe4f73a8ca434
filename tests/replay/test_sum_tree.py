"""Tests of the sum tree against a list, and of its draws against their probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.replay.sum_tree import SumTree


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), updates=st.integers(1, 12))
def test_tree_is_a_list_with_a_total_and_a_maximum(size, seed, updates):
  rng = np.random.default_rng(seed)
  tree, expected = SumTree(size), np.zeros(size)
  for _ in range(updates):
    m = int(rng.integers(0, 2 * size))
    leaf = rng.integers(0, size, m)
    priority = rng.integers(0, 1000, m).astype(float)  # integers: sums are exact
    tree.set(leaf, priority)
    for l, p in zip(leaf, priority, strict=True):  # of duplicates the last counts
      expected[l] = p
    np.testing.assert_array_equal(tree.get(np.arange(size)), expected)
    assert tree.total == expected.sum()
    assert tree.max == expected.max()


@pytest.mark.parametrize("size", [1, 2, 37, 64])
def test_sampling_frequencies_match_priorities(size):
  rng = np.random.default_rng(size)
  priority = rng.uniform(0, 1, size) ** 3
  priority[rng.random(size) < 0.3] = 0
  priority[size // 2] = 1.0
  tree = SumTree(size)
  tree.set(np.arange(size), priority)
  draws = 200_000
  leaf, probability = tree.sample(draws, rng)
  p = priority / priority.sum()
  np.testing.assert_allclose(probability, p[leaf], rtol=1e-12)
  count = np.bincount(leaf, minlength=size)
  assert not count[p == 0].any()
  expected = p[p > 0] * draws
  chi2 = ((count[p > 0] - expected) ** 2 / expected).sum()
  freedom = max(len(expected) - 1, 0)
  assert chi2 <= freedom + 5 * np.sqrt(2 * freedom)


class _Edge:
  """A generator stub that always draws one number, by default the largest one below 1."""

  def __init__(self, number=1.0 - 2.0**-53):
    self._number = number

  def random(self, n):
    return np.full(n, self._number)


@pytest.mark.parametrize("edge", [_Edge(), _Edge(0.0)])
def test_a_draw_at_the_very_edge_never_lands_on_a_zero(edge):
  rng = np.random.default_rng(0)
  for size in (3, 5, 9, 100):
    for half in (np.arange(size) < size // 2, np.arange(size) >= size // 2):
      tree, priority = SumTree(size), np.where(half, 10.0 ** rng.uniform(-8, 8, size), 0.0)
      tree.set(np.arange(size), priority)
      leaf, _ = tree.sample(4, edge)
      assert (priority[leaf] > 0).all()


@pytest.mark.parametrize(
  "leaf, priority",
  [
    ([0, 1], [1.0, -1e-9]),
    ([0, 1], [1.0, np.nan]),
    ([0], [np.inf]),
  ],
)
def test_bad_updates_are_refused_and_change_nothing(leaf, priority):
  tree = SumTree(5)
  tree.set(np.arange(5), np.arange(5.0))
  with pytest.raises(ValueError):
    tree.set(np.array(leaf), np.array(priority))
  np.testing.assert_array_equal(tree.get(np.arange(5)), np.arange(5.0))
  assert tree.total == 10.0


def test_many_updates_leave_no_drift():
  rng, tree, fresh = np.random.default_rng(0), SumTree(100), SumTree(100)
  for _ in range(300):
    tree.set(rng.integers(0, 100, 30), 10.0 ** rng.uniform(-12, 12, 30))
  for one in (tree, fresh):
    one.set(np.arange(100), np.full(100, 1e-9))
  assert tree.total == fresh.total == pytest.approx(1e-7, rel=1e-12)


def test_rounding_never_leads_into_a_subtree_of_zeros():
  """Numbers for which the largest draw, less the left half, rounds to all of the right half."""
  ulp = 2.0**-52
  tree = SumTree(4)
  tree.set(np.arange(4), np.array([1.5 * ulp, 0.0, 1 + 2 * ulp, 0.0]))
  leaf, probability = tree.sample(1, _Edge())
  assert leaf.tolist() == [2]
  assert probability[0] > 0
