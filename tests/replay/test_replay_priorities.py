"""Priorities in the replay: whose they are, how they follow what is found, and how old they get."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_replay import (
  CONFIG,
  DISCOUNT,
  LANES,
  STACK,
  TD,
  UNROLL,
  assert_same,
  eligible,
  make_replay,
  play,
  slots,
)

from speedyzero_jax.config.schema import ReplayConfig


@given(
  capacity=st.integers(7, 30),
  seed=st.integers(0, 2**32 - 1),
  end=st.sampled_from([0.02, 0.15, 0.5]),
)
def test_exactly_the_eligible_transitions_are_in_the_tree(capacity, seed, end):
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed, end)
  for step in range(12):
    play(replay, stream, rng, step, longest=7)
    expected = eligible(stream, capacity)
    np.testing.assert_array_equal(replay.state_dict()["priority"] > 0, expected)
    assert replay.num_eligible == expected.sum()
    assert replay.num_transitions == stream.transitions
    np.testing.assert_array_equal(replay.heads, stream.heads)


def test_new_transitions_enter_at_the_current_maximum():
  replay, stream = make_replay(40), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 10))
  priority = replay.state_dict()["priority"]
  assert set(priority[priority > 0]) == {1.0}
  everyone = np.flatnonzero(priority)
  replay.set_priorities(
    np.zeros(len(everyone), int), everyone, np.linspace(-3, 2, len(everyone)), step=1
  )
  expected = (np.abs(np.linspace(-3, 2, len(everyone))) + CONFIG.min_priority) ** CONFIG.alpha
  np.testing.assert_allclose(replay.state_dict()["priority"][everyone], expected, rtol=1e-6)
  replay.append(stream.segment(0, 1))
  priority = replay.state_dict()["priority"]
  assert priority[everyone[-1] + 1] == priority.max() == pytest.approx(3.01**0.7)
  replay.set_priorities(
    np.zeros(1, int), np.array([0]), np.array([0.5]), step=0
  )  # older weights: refused
  np.testing.assert_array_equal(replay.state_dict()["priority"], priority)


def test_priorities_of_what_cannot_be_sampled_are_not_set():
  replay, stream = make_replay(10), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append_many([stream.segment(0, 10), stream.segment(1, 4)])
  replay.append(stream.segment(0, 2))
  before = replay.state_dict()
  lane, time = (
    np.array([0, 0, 0, 1]),
    np.array([0, 2, 11, 1]),
  )  # evicted, no stack, too new, too new
  replay.set_priorities(lane, time, np.full(4, 9.0), step=50)
  replay.write_values(lane[:1], time[:1], np.full(1, 9.0), step=50)
  replay.write_search(
    lane[:1], time[:1], np.full((1, 3), 9.0), np.full(1, 9.0), np.full(1, 9.0), step=50
  )
  replay.refresh_priorities(lane[:1], time[:1], 50)
  assert_same(replay.state_dict(), before)


def test_priorities_of_every_size_that_settings_allow_stay_in_the_tree():
  config = ReplayConfig(alpha=10, min_priority=1e-12, td_steps=TD)
  replay, stream = make_replay(30, config=config), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 20))
  count = replay.num_eligible
  lane, time = np.zeros(count, int), np.arange(count)
  error = np.logspace(-11, 8, count, dtype=np.float32)
  replay.set_priorities(lane, time, error, 1)
  expected = (error.astype(np.float64) + 1e-12) ** 10
  np.testing.assert_allclose(replay.state_dict()["priority"][:count], expected, rtol=1e-6)
  assert replay._eligible.holds(lane, time).all()


def test_sampling_follows_priorities():
  replay, stream = make_replay(40, seed=3), reference.Stream(LANES, 0, end_probability=0.2)
  rng = np.random.default_rng(1)
  for step in range(12):
    play(replay, stream, rng, step)
  lane, time = slots(stream, 40)
  replay.set_priorities(lane, time, rng.normal(size=len(lane)) ** 3, step=20)
  priority = replay.state_dict()["priority"]
  draws = 100_000
  got_lane, got_time, probability = replay.sample(draws)
  key = {slot: i for i, slot in enumerate(zip(lane, time, strict=True))}
  index = np.array([key[slot] for slot in zip(got_lane, got_time, strict=True)])
  p = priority / priority.sum()
  np.testing.assert_allclose(probability, p[index], rtol=1e-12)
  count = np.bincount(index, minlength=len(p))
  assert not count[p == 0].any()
  expected = draws * p[p > 0]
  assert ((count[p > 0] - expected) ** 2 / expected).sum() < len(expected) + 5 * np.sqrt(
    2 * len(expected)
  )


@given(
  capacity=st.integers(7, 30),
  seed=st.integers(0, 2**32 - 1),
  value_target=st.sampled_from(["bootstrap", "search"]),
)
def test_refreshed_priorities_equal_brute_force(capacity, seed, value_target):
  """After values change anywhere, the priorities that rest on them are those of the stored values."""
  rng = np.random.default_rng(seed)
  config = ReplayConfig(alpha=0.7, min_priority=0.01, td_steps=TD, age_interval=0)
  replay = make_replay(capacity, config=config, value_target=value_target)
  stream = reference.Stream(LANES, seed)
  for step in range(8):
    play(replay, stream, rng, step)
  lane, time = slots(stream, capacity)
  stamp = {key: stream.slot(*key).policy_step for key in zip(lane, time, strict=True)}
  replay.refresh_priorities(lane, time, 8)
  for step in range(8, 14):
    start, n = int(rng.integers(len(lane))), int(rng.integers(1, 6))
    block = slice(start, start + n)
    values, searched = rng.normal(size=(2, len(lane[block]))).astype(np.float32)
    if value_target == "search":  # as a reanalyse sweep does
      policy = np.full((len(values), reference.NUM_ACTIONS), 1 / reference.NUM_ACTIONS)
      replay.write_search(lane[block], time[block], policy, searched, values, step)
    replay.write_values(lane[block], time[block], values, step)
    replay.refresh_priorities(lane[block], time[block], step)
    for i, key in enumerate(zip(lane[block], time[block], strict=True)):
      slot = stream.slot(*key)
      slot.value, stamp[key] = float(values[i]), step
      if value_target == "search":
        slot.search_value = float(searched[i])
  state = replay.state_dict()
  for i, (l, t) in enumerate(zip(lane, time, strict=True)):
    if not stream.eligible(l, t, capacity, STACK, UNROLL, TD):
      assert state["priority"][i] == 0
      continue
    episode, place = stream.find(l, t)
    slot = episode.slots[place]
    z = (
      slot.search_value
      if value_target == "search"
      else reference.n_step(episode, place, TD, DISCOUNT, field="value")
    )
    np.testing.assert_allclose(state["priority"][i], (abs(slot.value - z) + 0.01) ** 0.7, rtol=1e-5)
    end = min(place + TD, len(episode.slots) - 1)
    alone = value_target == "search" or (
      episode.ending == "terminated" and end == len(episode.slots) - 1
    )
    rests_on = stamp[l, t] if alone else min(stamp[l, t], stamp[l, episode.slots[end].time])
    assert state["priority_step"][i] == rests_on


def test_a_refresh_does_not_lean_on_searches_older_than_its_values():
  """With search values as targets but no sweep that searches, the n-step return stands in, so the bound holds."""
  config = ReplayConfig(alpha=1.0, min_priority=0.01, td_steps=TD, age_interval=0)
  replay = make_replay(20, config=config, value_target="search")
  stream = reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 12, step=0))
  lane, time = np.zeros(12, int), np.arange(12)
  values = np.linspace(-1, 1, 12, dtype=np.float32)
  replay.write_values(lane, time, values, step=30)
  replay.refresh_priorities(lane, time, 30)
  for t, value in enumerate(values):
    stream.slot(0, t).value = float(value)
  state, (episode, _) = replay.state_dict(), stream.find(0, 0)
  expected = [
    abs(slot.value - reference.n_step(episode, i, TD, DISCOUNT, field="value")) + 0.01
    for i, slot in enumerate(episode.slots)
    if stream.eligible(0, i, 20, STACK, UNROLL, TD)
  ]
  np.testing.assert_allclose(state["priority"][: len(expected)], expected, rtol=1e-5)
  assert (
    len(expected) == replay.num_eligible and (state["priority_step"][: len(expected)] == 30).all()
  )


@pytest.mark.parametrize("value_target", ["bootstrap", "search"])
def test_without_reanalysis_a_refreshed_priority_is_what_training_would_find(value_target):
  """Training takes what is stored, which no refresh changes; and the bound holds."""
  config = ReplayConfig(alpha=1.0, min_priority=0.01, td_steps=TD, age_interval=12)
  replay, stream = (
    make_replay(60, config=config, schedule="off", value_target=value_target),
    reference.Stream(LANES, 3),
  )
  for lane in range(LANES):
    replay.append(stream.segment(lane, 50, step=0))
  lane, time = slots(stream, 60)
  values = np.random.default_rng(0).normal(size=len(lane)).astype(np.float32)
  replay.write_values(lane, time, values, step=30)
  replay.refresh_priorities(lane, time, 30)
  target = replay.make_batch(lane, time, np.ones(len(lane)), learner_step=30).targets.value[:, 0]
  state, held = replay.state_dict(), eligible(stream, 60)
  np.testing.assert_allclose(
    state["priority"][held], (np.abs(values - target) + 0.01)[held], rtol=1e-4
  )
  assert held.sum() > 50 and (state["priority_step"][held] == 30).all()
  assert replay.stats(31)["priority_age_max"] == 1


@settings(max_examples=25)
@given(
  seed=st.integers(0, 2**32 - 1),
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
        replay.write_values(
          lane, time, rng.normal(size=block), max(0, step - int(rng.integers(stale + 1)))
        )
        replay.refresh_priorities(lane, time, step)
    if step < 40:
      play(replay, stream, rng, max(0, step - int(rng.integers(stale + 1))))
    if stream.transitions:
      live = replay.state_dict()
      assert replay.oldest_step("refresh") == live["slot_value_step"].min() >= step - max_age
      assert replay.stats(step)["priority_age_max"] <= max_age
  assert replay.oldest_step("reanalyse") < 60 - max_age  # the other sweep did not run


def test_without_refresh_priorities_age():
  replay, stream = make_replay(40), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 21, step=3))
  replay.set_priorities(np.zeros(4, int), np.arange(4), np.ones(4), step=9)
  stats = replay.stats(learner_step=10)
  assert stats["eligible"] == 16
  assert stats["priority_age_max"] == 7
  assert stats["priority_age_mean"] == (4 * 1 + 12 * 7) / 16
  assert stats["target_age_max"] == stats["target_age_mean"] == 7
  replay.append(stream.segment(0, 30, step=3))
  stats = replay.stats(learner_step=10)
  assert (stats["collected"], stats["transitions"], stats["slots"]) == (51, 40, 40)


def test_a_transition_does_not_inherit_the_priority_of_the_one_it_evicts():
  replay, stream = make_replay(12), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 12))
  replay.set_priorities(np.zeros(12, int), np.arange(12), np.arange(12.0), step=1)
  largest = replay.state_dict()["priority"].max()
  replay.append(stream.segment(0, 12))
  priority = replay.state_dict()["priority"]
  assert set(priority[priority > 0]) == {largest}
