"""Tests of training targets against brute force over episodes and examples worked by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from speedyzero_jax.agents.efficientzero.config import (
  EfficientZeroConfig,
  LossConfig,
  NetworkConfig,
  ReanalyseConfig,
)
from speedyzero_jax.agents.efficientzero.targets import (
  bootstrap_times,
  compute_targets,
  known_edges,
  n_step_values,
)
from speedyzero_jax.config.schema import Config, EnvConfig
from speedyzero_jax.types import Slots
from tiny_replay import fill, make_store, slots


def configured(
  unroll_steps, value_prefix_horizon, td_steps, age_interval, discount, absorbing=True, **reanalyse
):
  loss = LossConfig(
    td_steps=td_steps, age_interval=age_interval, unroll_steps=unroll_steps,
    absorbing_states=absorbing,
  )  # fmt: skip
  network = NetworkConfig(value_prefix_horizon=value_prefix_horizon)
  agent = EfficientZeroConfig(network=network, loss=loss, reanalyse=ReanalyseConfig(**reanalyse))
  return Config(agent, EnvConfig(discount=discount))


SPECS = st.builds(
  dict,
  unroll_steps=st.integers(1, 6),
  value_prefix_horizon=st.integers(1, 7),
  td_steps=st.integers(1, 6),
  age_interval=st.sampled_from([0, 1, 3, 10]),
  discount=st.sampled_from([0.5, 0.9, 1.0]),
  value_target=st.sampled_from(["n_step", "search", "mixed"]),
  mixed_start=st.just(5),
  mixed_newest=st.sampled_from([0, 4, 15]),
)


def arguments(spec, learner_step):
  """Arguments of `reference.targets`."""
  given = spec | {"learner_step": learner_step}
  given["unroll"], given["prefix_horizon"] = (
    given.pop(name) for name in ("unroll_steps", "value_prefix_horizon")
  )
  return given


def filled(capacity, seed, end=0.15):
  """A store and its stream, with random bootstrap values."""
  stream, store = reference.Stream(2, seed, end), make_store(2, capacity)
  fill(store, stream, seed)
  for l, t in stream.live(capacity):
    slot = stream.slot(l, t)
    slot.bootstrap = float(np.float32(stream.rng.normal()))
    store["bootstrap"][l, t % capacity] = slot.bootstrap
  return stream, store, *slots(stream, capacity)


@given(
  spec=SPECS,
  capacity=st.integers(2, 16),
  seed=st.integers(0, 2**32 - 1),
  end=st.sampled_from([0.02, 0.15, 0.6]),
  learner_step=st.sampled_from([0, 4, 5, 9]),
)
def test_targets_equal_brute_force(spec, capacity, seed, end, learner_step):
  stream, store, lane, time = filled(capacity, seed, end)
  got = compute_targets(store, lane, time, configured(**spec), learner_step)._asdict()
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
  """Values elsewhere may be anything; the value at a bootstrap time enters with weight
  discount^m, unless terminal."""
  _, store, lane, time = filled(capacity, seed)
  more = configured(**spec), spec["unroll_steps"]
  at = bootstrap_times(store, lane, time, *more)
  z = n_step_values(store, store["bootstrap"], lane, time, *more)
  for i in range(len(lane)):
    poisoned = np.full_like(store["bootstrap"], np.nan)
    row = np.full_like(at[i], lane[i])
    poisoned[row, at[i] % capacity] = store["bootstrap"][row, at[i] % capacity]
    np.testing.assert_array_equal(
      n_step_values(store, poisoned, lane[[i]], time[[i]], *more)[0], z[i]
    )


@given(
  capacity=st.integers(2, 16),
  after=st.integers(0, 3),
  seed=st.integers(0, 2**32 - 1),
  end=st.sampled_from([0.02, 0.15, 0.6]),
)
def test_known_edges_equal_brute_force(capacity, after, seed, end):
  """Unknown at the end of what is stored, and before the first search of the successor."""
  stream, store, lane, time = filled(capacity, seed, end)
  for l, t in zip(lane, time, strict=True):
    searched = int(stream.rng.integers(2))
    stream.slot(l, t).policy_step = store["policy_step"][l, t % capacity] = searched
  config = configured(3, 5, 2, 0, 0.9)
  actions, qvalues = known_edges(store, lane, time, after, config)
  assert actions.dtype == np.int32 and qvalues.dtype == np.float32
  for i, (l, t) in enumerate(zip(lane, time, strict=True)):
    episode, place = stream.find(l, t)
    for k, (action, qvalue) in enumerate(zip(actions[i], qvalues[i], strict=True)):
      here, following = [*episode.slots[min(place + k, len(episode.slots) - 1) :], None][:2]
      terminal = episode.ending == "terminated" and following is episode.slots[-1]
      if following is None or not (terminal or following.policy_step):
        assert action == -1
        continue
      value = 0 if terminal else following.search_value
      assert (action, qvalue) == (here.action, pytest.approx(here.reward + 0.9 * value, abs=1e-5))


def hand_made(ending):
  """One episode of 4 frames with rewards 1, 2, 4, values 10, 20, 30, 40 and search values 11,
  21, 31, 41."""
  store = make_store(1, 20)
  stream = reference.Stream(1, 0, end_probability=0.0)
  last = np.array([False, False, False, True])
  columns = stream.play(0, 4).columns | {
    "terminated": last & (ending == "terminated"),
    "truncated": last & (ending == "truncated"),
    "action": np.array([0, 1, 2, 1 if ending == "open" else -1], np.int32),
    "reward": np.array([1, 2, 4, 8], np.float32),
    "value": np.array([10, 20, 30, 40], np.float32),
    "search_value": np.array([11, 21, 31, 41], np.float32),
  }
  store.append(Slots.of_lane(0, 0, columns))
  return store


MASKS = ("value_mask", "prefix_mask", "policy_mask", "consistency_mask")


@pytest.mark.parametrize(
  ("ending", "horizon", "absorbing", "value", "prefix", "masks"),
  [
    # 1 + 2/2 + 30/4, then 2 + 4/2 + 40/4 (0 if terminal), then 4 + 40/2 (0 if terminal)
    ("terminated", 5, True, [9.5, 4, 4, 0, 0, 0], [1, 3, 7, 7, 7], "111111 11111 111000 11100"),
    ("truncated", 5, True, [9.5, 14, 24, 40, 0, 0], [1, 3, 7, 0, 0], "111100 11100 111000 11100"),
    ("open", 5, True, [9.5, 14, 24, 40, 0, 0], [1, 3, 7, 15, 0], "111100 11110 111100 11100"),
    # The prefix restarts even in absorbing states.
    ("terminated", 2, True, [9.5, 4, 4, 0, 0, 0], [1, 3, 4, 4, 0], "111111 11111 111000 11100"),
    # As in EfficientZero: the terminal frame itself, of value 0, is trained on.
    ("terminated", 5, False, [9.5, 4, 4, 0, 0, 0], [1, 3, 7, 0, 0], "111100 11100 111000 11100"),
  ],
)
def test_worked_example(ending, horizon, absorbing, value, prefix, masks):
  """Two-step returns with discount 1/2."""
  spec = configured(5, horizon, td_steps=2, age_interval=0, discount=0.5, absorbing=absorbing)
  got = compute_targets(hand_made(ending), np.array([0]), np.array([0]), spec, 0)
  np.testing.assert_array_equal(got.value[0], value)
  np.testing.assert_array_equal(got.value_prefix[0], prefix)
  for name, mask in zip(MASKS, masks.split(), strict=True):
    np.testing.assert_array_equal(getattr(got, name)[0], [*map(int, mask)], err_msg=name)


def test_mixed_value_targets():
  spec = configured(
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
