import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from test_lanes import fill, make_store

from speedyzero_jax.agents.efficientzero.targets import (
  TargetSpec,
  bootstrap_times,
  compute_targets,
  n_step_values,
)

SPECS = st.builds(
  TargetSpec,
  unroll_steps=st.integers(1, 6),
  value_prefix_horizon=st.integers(1, 7),
  td_steps=st.integers(1, 6),
  age_interval=st.sampled_from([0, 1, 3, 10]),
  discount=st.sampled_from([0.5, 0.9, 1.0]),
  value_target=st.sampled_from(["bootstrap", "search", "mixed"]),
  mixed_start=st.just(5),
  mixed_newest=st.sampled_from([0, 4, 15]),
)


def arguments(spec, learner_step):
  return {
    "unroll": spec.unroll_steps,
    "prefix_horizon": spec.value_prefix_horizon,
    "td_steps": spec.td_steps,
    "age_interval": spec.age_interval,
    "discount": spec.discount,
    "value_target": spec.value_target,
    "mixed_start": spec.mixed_start,
    "mixed_newest": spec.mixed_newest,
    "learner_step": learner_step,
  }


def filled(capacity, seed, end=0.15):
  """A store and its stream, with bootstrap values of their own."""
  stream, store = reference.Stream(2, seed, end), make_store(2, capacity)
  fill(store, stream, seed)
  live = stream.live(capacity)
  for l, t in live:
    slot = stream.slot(l, t)
    slot.bootstrap = float(np.float32(stream.rng.normal()))
    store.bootstrap[l, t % capacity] = slot.bootstrap
  lane, time = (np.array(x) for x in zip(*live, strict=True))
  return stream, store, lane, time


@given(
  spec=SPECS,
  capacity=st.integers(2, 16),
  seed=st.integers(0, 2**32 - 1),
  end=st.sampled_from([0.02, 0.15, 0.6]),
  learner_step=st.sampled_from([0, 4, 5, 9]),
)
def test_targets_equal_brute_force(spec, capacity, seed, end, learner_step):
  stream, store, lane, time = filled(capacity, seed, end)
  got = compute_targets(store, lane, time, spec, learner_step)._asdict()
  expected = [
    reference.targets(stream, l, t, **arguments(spec, learner_step))
    for l, t in zip(lane, time, strict=True)
  ]
  for name, array in got.items():
    assert array.dtype == np.float32
    np.testing.assert_allclose(
      array, [e[name] for e in expected], rtol=1e-5, atol=1e-6, err_msg=name
    )


@given(spec=SPECS, capacity=st.integers(2, 16), seed=st.integers(0, 2**32 - 1))
def test_bootstrap_times_are_the_only_values_that_matter(spec, capacity, seed):
  """Values elsewhere may be anything; the value at a bootstrap time enters with weight discount^m, unless terminal."""
  _, store, lane, time = filled(capacity, seed)
  at = bootstrap_times(store, lane, time, spec)
  z = n_step_values(store, store.bootstrap, lane, time, spec)
  for i in range(len(lane)):
    poisoned = np.full_like(store.bootstrap, np.nan)
    row = np.full_like(at[i], lane[i])
    poisoned[row, at[i] % capacity] = store.bootstrap[row, at[i] % capacity]
    np.testing.assert_array_equal(
      n_step_values(store, poisoned, lane[[i]], time[[i]], spec)[0], z[i]
    )


def hand_made(ending):
  """One episode of 4 frames with rewards 1, 2, 4, values 10, 20, 30, 40 and search values 11, 21, 31, 41."""
  store = make_store(1, 20)
  stream = reference.Stream(1, 0, end_probability=0.0)
  s = stream.segment(0, 4)
  last = np.array([False, False, False, True])
  s = s._replace(
    terminated=last & (ending == "terminated"),
    truncated=last & (ending == "truncated"),
    action=np.array([0, 1, 2, 1 if ending == "open" else -1], np.int32),
    reward=np.array([1, 2, 4, 8], np.float32),
    value=np.array([10, 20, 30, 40], np.float32),
    search_value=np.array([11, 21, 31, 41], np.float32),
  )
  store.append([s])
  return store


@pytest.mark.parametrize(
  "ending, value, value_mask, prefix, prefix_mask, policy_mask, consistency_mask",
  [
    (
      "terminated",
      [9.5, 4, 4, 0, 0, 0],
      [1] * 6,
      [1, 3, 7, 7, 7],
      [1] * 5,
      [1, 1, 1, 0, 0, 0],
      [1, 1, 1, 0, 0],
    ),
    (
      "truncated",
      [9.5, 14, 24, 40, 0, 0],
      [1, 1, 1, 1, 0, 0],
      [1, 3, 7, 0, 0],
      [1, 1, 1, 0, 0],
      [1, 1, 1, 0, 0, 0],
      [1, 1, 1, 0, 0],
    ),
    (
      "open",
      [9.5, 14, 24, 40, 0, 0],
      [1, 1, 1, 1, 0, 0],
      [1, 3, 7, 15, 0],
      [1, 1, 1, 1, 0],
      [1, 1, 1, 1, 0, 0],
      [1, 1, 1, 0, 0],
    ),
  ],
)
def test_worked_example(
  ending, value, value_mask, prefix, prefix_mask, policy_mask, consistency_mask
):
  """Two-step returns with discount 1/2, worked by hand."""
  spec = TargetSpec(
    unroll_steps=5, value_prefix_horizon=5, td_steps=2, age_interval=0, discount=0.5
  )
  got = compute_targets(hand_made(ending), np.array([0]), np.array([0]), spec, 0)
  np.testing.assert_array_equal(got.value_mask[0], value_mask)
  np.testing.assert_array_equal(got.value_prefix[0], prefix)
  np.testing.assert_array_equal(got.prefix_mask[0], prefix_mask)
  np.testing.assert_array_equal(got.policy_mask[0], policy_mask)
  np.testing.assert_array_equal(got.consistency_mask[0], consistency_mask)
  # 1 + 2/2 + 30/4, then 2 + 4/2 + 40/4 (0 if terminal), then 4 + 40/2 (0 if terminal)
  np.testing.assert_array_equal(got.value[0], value)


def test_the_prefix_starts_anew_every_horizon_steps_even_when_absorbing():
  spec = TargetSpec(
    unroll_steps=5, value_prefix_horizon=2, td_steps=2, age_interval=0, discount=0.5
  )
  got = compute_targets(hand_made("terminated"), np.array([0]), np.array([0]), spec, 0)
  np.testing.assert_array_equal(got.value_prefix[0], [1, 3, 4, 4, 0])
  np.testing.assert_array_equal(got.prefix_mask[0], np.ones(5))


def test_old_data_gets_shorter_returns():
  """Four transitions collected since: n = 3 - 4 // 2 = 1."""
  spec = TargetSpec(
    unroll_steps=1, value_prefix_horizon=5, td_steps=3, age_interval=2, discount=0.5
  )
  store = hand_made("open")
  got = compute_targets(store, np.array([0, 0]), np.array([0, 2]), spec, 0)
  np.testing.assert_array_equal(got.value[0], [1 + 20 / 2, 2 + 30 / 2])
  # One transition further back of the two newest: age 2, n = 2, and the lane's head is nearer than that.
  np.testing.assert_array_equal(got.value[1], [4 + 40 / 2, 40])


def test_mixed_value_targets():
  spec = TargetSpec(
    unroll_steps=3,
    value_prefix_horizon=5,
    td_steps=1,
    age_interval=0,
    discount=1.0,
    value_target="mixed",
    mixed_start=10,
    mixed_newest=2,
  )
  store = hand_made("open")
  time = np.array([0, 2])  # four and two transitions old
  late = compute_targets(store, np.zeros(2, int), time, spec, 10)
  early = compute_targets(store, np.zeros(2, int), time, spec, 9)
  np.testing.assert_array_equal(late.value[0], [11, 21, 31, 41])
  np.testing.assert_array_equal(late.value[1], early.value[1])
  np.testing.assert_array_equal(early.value[0], [21, 32, 44, 40])
