import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.replay.sum_tree import SumTree, importance_weights


@given(size=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), updates=st.integers(1, 12))
def test_tree_is_a_list_with_a_total_and_a_maximum(size, seed, updates):
  rng = np.random.default_rng(seed)
  tree, expected = SumTree(size), np.zeros(size)
  for _ in range(updates):
    m = int(rng.integers(0, 2 * size))
    leaf, priority = (
      rng.integers(0, size, m),
      rng.integers(0, 1000, m).astype(float),
    )  # integers: sums are exact
    tree.set(leaf, priority)
    for l, p in zip(leaf, priority, strict=True):  # of duplicates the last counts
      expected[l] = p
    np.testing.assert_array_equal(tree.get(np.arange(size)), expected)
    assert tree.total == expected.sum()
    assert tree.max == expected.max()


def test_many_updates_leave_no_drift():
  rng = np.random.default_rng(0)
  tree = SumTree(100)
  for _ in range(300):
    tree.set(rng.integers(0, 100, 30), 10.0 ** rng.uniform(-12, 12, 30))
  leaves = np.arange(100)
  tree.set(leaves, np.full(100, 1e-9))
  fresh = SumTree(100)
  fresh.set(leaves, np.full(100, 1e-9))
  assert tree.total == fresh.total
  np.testing.assert_allclose(tree.total, 1e-7, rtol=1e-12)


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
  """A generator stub that always draws the largest number below 1."""

  def random(self, n):
    return np.full(n, np.nextafter(1.0, 0.0))


def test_a_draw_at_the_very_edge_never_lands_on_a_zero():
  rng = np.random.default_rng(0)
  for size in (3, 5, 9, 100):
    tree = SumTree(size)
    priority = np.where(np.arange(size) < size // 2, 10.0 ** rng.uniform(-8, 8, size), 0.0)
    tree.set(np.arange(size), priority)
    leaf, _ = tree.sample(4, _Edge())
    assert (priority[leaf] > 0).all()


def test_sampling_an_empty_tree_is_refused():
  with pytest.raises(ValueError, match="zero"):
    SumTree(5).sample(3, np.random.default_rng(0))


@pytest.mark.parametrize(
  "leaf, priority",
  [
    ([0, 1], [1.0, -1e-9]),
    ([0, 1], [1.0, np.nan]),
    ([0], [np.inf]),
    ([0, 5], [1.0, 1.0]),
    ([-1], [1.0]),
    ([0, 1], [1.0]),
  ],
)
def test_bad_updates_are_refused_and_change_nothing(leaf, priority):
  tree = SumTree(5)
  tree.set(np.arange(5), np.arange(5.0))
  with pytest.raises(ValueError):
    tree.set(np.array(leaf), np.array(priority))
  np.testing.assert_array_equal(tree.get(np.arange(5)), np.arange(5.0))
  assert tree.total == 10.0


def test_importance_weights():
  p = np.array([0.5, 0.25, 0.125])
  np.testing.assert_allclose(importance_weights(p, 1.0), [2, 4, 8])
  np.testing.assert_allclose(importance_weights(p, 0.5), [2**0.5, 2, 8**0.5], rtol=1e-6)
  np.testing.assert_allclose(importance_weights(p, 0.0), np.ones(3))


def test_importance_weights_undo_the_sampling_bias():
  """With beta 1, the weighted mean over draws is the plain mean over all transitions."""
  rng = np.random.default_rng(0)
  priority, x = rng.uniform(0.1, 1, 50), rng.normal(size=50)
  tree = SumTree(50)
  tree.set(np.arange(50), priority)
  leaf, probability = tree.sample(400_000, rng)
  np.testing.assert_allclose(
    (importance_weights(probability, 1.0) / 50 * x[leaf]).mean(), x.mean(), atol=0.01
  )


def test_rounding_never_leads_into_a_subtree_of_zeros():
  """Numbers for which the largest draw, less the left half, rounds to all of the right half."""
  ulp = 2.0**-52
  tree = SumTree(4)
  tree.set(np.arange(4), np.array([1.5 * ulp, 0.0, 1 + 2 * ulp, 0.0]))
  leaf, probability = tree.sample(1, _Edge())
  assert leaf.tolist() == [2]
  assert probability[0] > 0


def test_importance_weights_of_shards_are_those_of_one():
  """Shards of other sizes and totals, drawn from equally often: weighted by p^-beta their means are the whole's."""
  rng = np.random.default_rng(0)
  priority, x = rng.random(60) ** 2 + 0.01, rng.normal(size=60)
  total = weights = 0.0
  for part in (slice(0, 12), slice(12, 60)):
    tree = SumTree(len(x[part]))
    tree.set(np.arange(tree.size), priority[part])
    leaf, probability = tree.sample(200_000, rng)
    weight = importance_weights(probability, 1.0)
    total, weights = total + (weight * x[part][leaf]).sum(), weights + weight.sum()
  np.testing.assert_allclose(total / weights, x.mean(), atol=0.01)
