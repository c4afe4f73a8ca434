"""Tests of the weights store: versions of each subscriber, and independence of copies."""

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import Version, WeightsStore


def _variables(number):
  params, stats = np.full((2, 3), number, np.float32), np.full(3, -number, np.float32)
  return Variables(params={"w": params}, batch_stats={"m": stats})


def _replicated(devices):
  return NamedSharding(make_mesh(jax.devices()[:devices]), PartitionSpec())


def _on_mesh(variables, devices):
  return jax.device_put(jax.tree.map(np.copy, variables), _replicated(devices))


def _store(device=0, number=0, **intervals):
  where = SingleDeviceSharding(jax.devices()[device])
  return WeightsStore(intervals, where, _variables(number))


def _is(version, step, number):
  assert version.step == step
  jax.tree.map(np.testing.assert_array_equal, version.variables, _variables(number))


_overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 1e9, tree), donate_argnums=0)


def _donate(variables):
  """Simulates the learner's next step, which writes new numbers into its own buffers."""
  jax.block_until_ready(_overwrite(variables))
  assert all(x.is_deleted() for x in jax.tree.leaves(variables))


@hypothesis.given(
  intervals=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 9), min_size=1),
  steps=st.integers(0, 30),
)
def test_each_subscriber_has_the_latest_multiple_of_its_interval(intervals, steps):
  store = _store(**intervals)
  for step in range(1, steps + 1):
    store.publish(step, _variables(step))
  for name, interval in intervals.items():
    newest = steps // interval * interval
    _is(store.latest(name), newest, newest)


def test_a_version_once_taken_does_not_change_and_subscribers_share_it():
  store = _store(actor=2, other=4)
  store.publish(2, _variables(2))
  held = store.latest("actor")
  store.publish(4, _variables(4))
  _is(held, 2, 2)
  assert store.latest("actor").variables is store.latest("other").variables


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("replicas", [0, 1, 2, 4])
def test_copies_outlive_the_learners_buffers_and_have_the_stores_sharding(devices, replicas):
  where = _replicated(replicas) if replicas else SingleDeviceSharding(jax.devices()[7])
  initial = _on_mesh(_variables(1), devices)
  published, restored = (_on_mesh(_variables(number), devices) for number in (5, 9))
  store = WeightsStore({"actor": 5, "slow": 10}, where, initial)
  _donate(initial)
  store.publish(5, published)
  _donate(published)
  _is(store.latest("actor"), 5, 5)
  _is(store.latest("slow"), 0, 1)
  for name in ("actor", "slow"):
    leaves = jax.tree.leaves(store.latest(name).variables)
    assert all(x.sharding == where for x in leaves)
  store.restore({name: Version(9, restored) for name in ("actor", "slow")})
  _donate(restored)
  _is(store.latest("slow"), 9, 9)


def test_weights_of_a_larger_mesh_are_not_moved():
  variables = _on_mesh(_variables(3), 4)
  store = WeightsStore({"actor": 1}, _replicated(2), variables, publish=lambda given: given)
  pairs = zip(*map(jax.tree.leaves, (variables, store.latest("actor").variables)), strict=True)
  for given, held in pairs:
    there = {shard.device: shard.data.unsafe_buffer_pointer() for shard in given.addressable_shards}
    for shard in held.addressable_shards:
      assert shard.data.unsafe_buffer_pointer() == there[shard.device]


def test_a_host_array_changed_later_changes_no_version():
  variables = _variables(3)
  store = WeightsStore({"actor": 1}, _replicated(1), variables)
  variables.params["w"] += 1
  _is(store.latest("actor"), 0, 3)


def test_a_snapshot_brings_back_every_version():
  store, other = _store(actor=2, slow=5), _store(1, 99, actor=2, slow=5)
  for step in range(1, 8):
    store.publish(step, _variables(step))
  snapshot = store.snapshot()
  store.publish(10, _variables(10))
  other.restore(snapshot)
  _is(other.latest("actor"), 6, 6)
  _is(other.latest("slow"), 5, 5)
  assert jax.tree.leaves(other.latest("actor").variables)[0].devices() == {jax.devices()[1]}
  other.publish(8, _variables(8))
  _is(other.latest("actor"), 8, 8)
  _is(other.latest("slow"), 5, 5)


def test_unknown_subscribers_are_refused_and_change_nothing():
  store = _store(number=2, actor=1, slow=1)
  with pytest.raises(ValueError, match="evaluator"):
    store.latest("evaluator")
  with pytest.raises(KeyError):
    store.restore({"actor": Version(9, _variables(9))})
  for name in ("actor", "slow"):
    _is(store.latest(name), 0, 2)
