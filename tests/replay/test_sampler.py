"""Tests of prioritized sampling: eligibility, priorities, and the sweeps' bound on their ages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage import SEEDS

import reference
from same import assert_same
from speedyzero_jax.config.schema import PriorityConfig
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import SequenceSampler, importance_weights
from speedyzero_jax.replay.sum_tree import SumTree
from speedyzero_jax.types import Slots
from tiny_replay import (
  ALPHA,
  LANES,
  MIN_PRIORITY,
  STACK,
  eligible,
  make_agent,
  make_replay,
  play,
  set_priorities,
  slots,
  write,
)


@settings(max_examples=30)
@given(capacity=st.integers(7, 30), seed=SEEDS, end=st.sampled_from([0.02, 0.15, 0.5]))
def test_exactly_the_eligible_transitions_are_in_the_tree(capacity, seed, end):
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed, end)
  for step in range(12):
    play(replay, stream, rng, step, longest=7)
    expected = eligible(stream, capacity)
    np.testing.assert_array_equal(replay.state_dict()["priority"] > 0, expected)
    assert replay.selector.count == expected.sum()
    assert replay.num_transitions == stream.transitions
    np.testing.assert_array_equal(replay.heads, stream.heads)


@settings(max_examples=30)
@given(
  capacity=st.integers(12, 40), stride=st.integers(1, 6), seed=SEEDS,
  end=st.sampled_from([0.02, 0.15, 0.5]),
)  # fmt: skip
def test_exactly_the_stored_sequences_are_in_the_tree(capacity, stride, seed, end):
  after = 5

  def selector(store):
    sizes = {"stride": stride, "stack": STACK, "lookahead": after}
    return SequenceSampler(store, PriorityConfig(), **sizes)

  rng, stream = np.random.default_rng(seed), reference.Stream(LANES, seed, end)
  sizes = {"lanes": LANES, "capacity": capacity, "frame_stack": STACK, "rng_seed": 0}
  replay = Replay(make_agent().schema, selector, **sizes)
  for step in range(12):
    play(replay, stream, rng, step, longest=7)
    starts = {
      (lane, slot.time): episode.slots[0].time
      for lane, episodes in enumerate(stream.episodes)
      for episode in episodes
      for slot in episode.slots
    }
    expected = [
      t % stride == 0
      and t + after < stream.heads[lane]
      and max(t - STACK + 1, starts[lane, t]) >= stream.heads[lane] - capacity
      for lane, t in stream.live(capacity)
    ]
    np.testing.assert_array_equal(replay.state_dict()["priority"] > 0, expected)
    assert replay.selector.count == sum(expected)


def test_new_transitions_enter_at_the_current_maximum():
  replay, stream = make_replay(40), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 10))
  priority = replay.state_dict()["priority"]
  assert set(priority[priority > 0]) == {1.0}
  time = np.flatnonzero(priority)
  error = np.linspace(-3, 2, len(time))
  set_priorities(replay, np.zeros(len(time), int), time, error, step=1)
  expected = (np.abs(error) + MIN_PRIORITY) ** ALPHA
  np.testing.assert_allclose(replay.state_dict()["priority"][time], expected, rtol=1e-6)
  replay.append(stream.play(0, 1))
  priority = replay.state_dict()["priority"]
  assert priority[time[-1] + 1] == priority.max() == pytest.approx(3.01**0.7)
  set_priorities(replay, np.zeros(1, int), time[:1], np.array([0.5]), step=0)  # older: refused
  np.testing.assert_array_equal(replay.state_dict()["priority"], priority)


def test_a_transition_does_not_inherit_the_priority_of_the_one_it_evicts():
  replay, stream = make_replay(12), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 12))
  set_priorities(replay, np.zeros(12, int), np.arange(12), np.arange(12.0), step=1)
  largest = replay.state_dict()["priority"].max()
  replay.append(stream.play(0, 12))
  priority = replay.state_dict()["priority"]
  assert set(priority[priority > 0]) == {largest}


def test_priorities_of_what_cannot_be_sampled_are_not_set():
  replay, stream = make_replay(10), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(Slots.concatenate([stream.play(0, 10), stream.play(1, 4)]))
  replay.append(stream.play(0, 2))
  before = replay.state_dict()
  # Evicted, without its stack, too new, too new.
  lane, time = np.array([0, 0, 0, 1]), np.array([0, 2, 11, 1])
  set_priorities(replay, lane, time, np.full(4, 9.0), step=50)
  write(replay, "refresh", lane[:1], time[:1], 50, value=np.full(1, 9.0))
  assert_same(replay.state_dict(), before)


def test_priorities_of_every_size_that_settings_allow_stay_in_the_tree():
  replay = make_replay(30, "priority.alpha=10", "priority.min_priority=1e-12")
  replay.append(reference.Stream(LANES, 0, end_probability=0.0).play(0, 20))
  count = replay.selector.count
  lane, time = np.zeros(count, int), np.arange(count)
  error = np.logspace(-11, 8, count, dtype=np.float32)
  set_priorities(replay, lane, time, error, 1)
  expected = (error.astype(np.float64) + 1e-12) ** 10
  np.testing.assert_allclose(replay.state_dict()["priority"][:count], expected, rtol=1e-6)
  assert replay.selector.eligible(lane, time).all()


def test_sampling_follows_priorities():
  replay, stream = make_replay(40, seed=3), reference.Stream(LANES, 0, end_probability=0.2)
  rng = np.random.default_rng(1)
  for step in range(12):
    play(replay, stream, rng, step)
  lane, time = slots(stream, 40)
  set_priorities(replay, lane, time, rng.normal(size=len(lane)) ** 3, step=20)
  p = replay.state_dict()["priority"]
  p /= p.sum()
  draws = 100_000
  drawn = replay.select(draws)
  key = {slot: i for i, slot in enumerate(zip(lane, time, strict=True))}
  index = np.array([key[slot] for slot in zip(drawn.lane, drawn.time, strict=True)])
  np.testing.assert_allclose(drawn.probability, p[index], rtol=1e-12)
  count, expected = np.bincount(index, minlength=len(p)), draws * p
  assert not count[p == 0].any()
  chi2 = ((count - expected)[p > 0] ** 2 / expected[p > 0]).sum()
  freedom = (p > 0).sum()
  assert chi2 < freedom + 5 * np.sqrt(2 * freedom)


def test_without_refresh_priorities_age():
  replay, stream = make_replay(40), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 21, step=3))
  set_priorities(replay, np.zeros(4, int), np.arange(4), np.ones(4), step=9)
  stats = replay.stats(learner_step=10)
  assert replay.selector.count == 16 and stats["priority_age_max"] == 7
  assert stats["priority_age_mean"] == (4 * 1 + 12 * 7) / 16


@settings(max_examples=12)
@given(
  seed=SEEDS,
  capacity=st.integers(20, 80),
  block=st.integers(16, 50),
  max_age=st.integers(8, 30),
  stale=st.integers(0, 5),
)
def test_the_quota_bounds_the_age_of_every_value_and_priority(
  seed, capacity, block, max_age, stale
):
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity, lanes=3), reference.Stream(3, seed)
  credit = 0
  for step in range(60):
    if stream.transitions:
      credit += replay.quota("refresh", block, max_age, stale)
      while credit >= block:
        credit -= block
        lane, time = replay.next_block("refresh", block)
        assert lane.shape == time.shape == (block,)
        weights = max(0, step - int(rng.integers(stale + 1)))
        write(replay, "refresh", lane, time, weights, value=rng.normal(size=block))
    if step < 40:
      play(replay, stream, rng, max(0, step - int(rng.integers(stale + 1))))
    if stream.transitions:
      live = replay.state_dict()["slot_value_step"]
      assert replay.oldest_step("value_step") == live.min() >= step - max_age
      assert replay.stats(step)["priority_age_max"] <= max_age
  assert replay.oldest_step("policy_step") < 60 - max_age  # the other sweep did not run


def weights_of(p, beta):
  return importance_weights(p, PriorityConfig(beta_start=0.0, beta_end=2 * beta), 0.5)


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_the_mean_importance_weight_does_not_depend_on_the_batch_size(beta):
  """Heavy-tailed priorities, as those of value errors on Atari are."""
  rng = np.random.default_rng(0)
  size = 20_000
  tree = SumTree(size)
  tree.set(np.arange(size), (rng.pareto(1.5, size) + 1e-6) ** 0.6)
  means = {
    batch: np.mean(
      [weights_of(tree.sample(batch, rng)[1], beta).mean() for _ in range(8000 // batch)]
    )
    for batch in (256, 2048)
  }
  np.testing.assert_allclose(means[2048], means[256], rtol=0.1)


@pytest.mark.parametrize(
  ("batch", "sizes"), [(1, [1]), (300, [300]), (400, [200, 200]), (600, [300, 300])]
)
def test_importance_weights_are_normalized_in_groups_of_equal_sizes(batch, sizes):
  p = np.random.default_rng(1).uniform(0.1, 1, batch)
  groups = np.split(p**-0.7, np.cumsum(sizes)[:-1])
  expected = np.concatenate([group / group.max() for group in groups])
  np.testing.assert_allclose(weights_of(p, 0.7), expected, rtol=1e-6)
