"""The weights store: who gets which version, and that versions are copies."""

import functools
import threading
import time

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero.networks import Variables
from speedyzero_jax.agents.efficientzero.reanalyse import examine
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import DivergedError, Version, WeightsStore


def _variables(number):
  params, stats = np.full((2, 3), number, np.float32), np.full(3, -number, np.float32)
  return Variables(params={"w": params}, batch_stats={"m": stats})


def _on_mesh(variables, devices):
  sharding = NamedSharding(make_mesh(jax.devices()[:devices]), PartitionSpec())
  return jax.device_put(jax.tree.map(np.copy, variables), sharding)


def _is(version, step, number):
  assert version.step == step
  jax.tree.map(np.testing.assert_array_equal, version.variables, _variables(number))


def _donate(variables):
  """What the learner's next step does to its own buffers: writes new numbers into them."""
  result = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 + 1e9, tree), donate_argnums=0)(
    variables
  )
  jax.block_until_ready(result)
  assert all(x.is_deleted() for x in jax.tree.leaves(variables))


@hypothesis.given(
  intervals=st.dictionaries(
    st.sampled_from(["actor", "reanalyser", "refresher"]), st.integers(1, 9), min_size=1
  ),
  steps=st.integers(0, 30),
)
def test_each_subscriber_has_the_latest_multiple_of_its_interval(intervals, steps):
  store = WeightsStore(intervals, jax.devices()[0], _variables(0))
  for step in range(1, steps + 1):
    store.publish(step, _variables(step))
  for name, interval in intervals.items():
    newest = steps // interval * interval
    _is(store.latest(name), newest, newest)


def test_a_version_once_taken_does_not_change():
  store = WeightsStore({"actor": 2}, jax.devices()[0], _variables(0))
  store.publish(2, _variables(2))
  held = store.latest("actor")
  store.publish(4, _variables(4))
  _is(held, 2, 2)
  _is(store.latest("actor"), 4, 4)


def test_subscribers_due_together_share_one_copy_and_others_cost_none(monkeypatch):
  store = WeightsStore(
    {"actor": 2, "refresher": 2, "reanalyser": 3}, jax.devices()[0], _variables(0)
  )
  copies, to_device = [], store.to_device

  def counted(variables):
    copies.append(variables)
    return to_device(variables)

  monkeypatch.setattr(store, "to_device", counted)
  for step, total in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 3), (6, 4)):
    store.publish(step, _variables(step))
    assert len(copies) == total
  assert store.latest("actor").variables is store.latest("reanalyser").variables


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("target", [0, 2, 7])
def test_copies_outlive_the_learners_buffers_and_live_on_one_device(devices, target):
  device = jax.devices()[target]
  initial, published = _on_mesh(_variables(1), devices), _on_mesh(_variables(5), devices)
  store = WeightsStore({"actor": 5, "reanalyser": 10}, device, initial)
  _donate(initial)
  store.publish(5, published)
  _donate(published)
  _is(store.latest("actor"), 5, 5)
  _is(store.latest("reanalyser"), 0, 1)
  for name in ("actor", "reanalyser"):
    assert {d for x in jax.tree.leaves(store.latest(name).variables) for d in x.devices()} == {
      device
    }


def test_a_host_array_changed_later_changes_no_version():
  variables = _variables(3)
  store = WeightsStore({"actor": 1}, jax.devices()[0], variables)
  variables.params["w"] += 1
  _is(store.latest("actor"), 0, 3)


def test_a_snapshot_brings_back_every_version():
  intervals = {"actor": 2, "reanalyser": 5}
  store = WeightsStore(intervals, jax.devices()[0], _variables(0))
  for step in range(1, 8):
    store.publish(step, _variables(step))
  snapshot = store.snapshot()
  store.publish(10, _variables(10))
  assert {name: version.step for name, version in snapshot.items()} == {"actor": 6, "reanalyser": 5}

  other = WeightsStore(intervals, jax.devices()[1], _variables(99))
  other.restore(snapshot)
  _is(other.latest("actor"), 6, 6)
  _is(other.latest("reanalyser"), 5, 5)
  assert jax.tree.leaves(other.latest("actor").variables)[0].devices() == {jax.devices()[1]}
  other.publish(8, _variables(8))
  _is(other.latest("actor"), 8, 8)
  _is(other.latest("reanalyser"), 5, 5)


def test_restored_versions_are_copies():
  stored = _on_mesh(_variables(4), 1)
  store = WeightsStore({"actor": 1}, jax.devices()[0], _variables(0))
  store.restore({"actor": Version(4, stored)})
  _donate(stored)
  _is(store.latest("actor"), 4, 4)


def test_strangers_are_refused_and_change_nothing():
  store = WeightsStore({"actor": 1, "reanalyser": 1}, jax.devices()[0], _variables(2))
  with pytest.raises(KeyError):
    store.latest("evaluator")
  with pytest.raises(KeyError):
    store.restore({"actor": Version(9, _variables(9))})
  for name in ("actor", "reanalyser"):
    _is(store.latest(name), 0, 2)


def test_publishing_computes_on_nothing_but_copies():
  # Were the copy lazy or a view, the sum below would see the numbers of the step after.
  state = _on_mesh(_variables(0), 2)
  step = jax.jit(lambda tree: jax.tree.map(lambda x: x + jnp.sign(x + 0.5), tree), donate_argnums=0)
  store = WeightsStore({"actor": 1}, jax.devices()[0], state)
  held = []
  for k in range(1, 6):
    state = step(state)
    store.publish(k, state)
    held.append(store.latest("actor"))
  totals = [
    functools.reduce(lambda a, x: a + float(x.sum()), jax.tree.leaves(v.variables.params), 0.0)
    for v in held
  ]
  assert totals == [6.0 * k for k in range(1, 6)]


def test_newer_versions_are_waited_for():
  store = WeightsStore({"actor": 2, "reanalyser": 4}, jax.devices()[0], _variables(0))
  _is(store.wait_newer("actor", -1, 0.0), 0, 0)
  begin = time.monotonic()
  assert store.wait_newer("actor", 0, 0.05) is None and time.monotonic() - begin >= 0.05
  got = []
  threads = [
    threading.Thread(
      target=lambda name=name: got.append(store.wait_newer(name, 0, 20.0)), daemon=True
    )
    for name in ("actor", "reanalyser")
  ]
  for thread in threads:
    thread.start()
  for step in (1, 2):
    store.publish(step, _variables(step))
  threads[0].join(10)
  (version,) = got
  _is(version, 2, 2)  # the other still waits: nothing was meant for it
  store.publish(4, _variables(4))
  threads[1].join(10)
  _is(got[1], 4, 4)
  _is(store.wait_newer("actor", 2, 0.0), 4, 4)
  with pytest.raises(
    ValueError, match=r"nobody subscribes as 'evaluator'; there are actor, reanalyser"
  ):
    store.wait_newer("evaluator", -1, 0.0)


@pytest.mark.parametrize("wrong", ["policy", "search_value", "value"])
def test_weights_that_say_nothing_finite_have_diverged(wrong):
  """Finite ones may do so too, and before the training step notices."""

  class Diverged(tiny.FakeInference):
    def search(self, *args, **kwargs):
      said = super().search(*args, **kwargs)
      return said._replace(**{wrong: getattr(said, wrong) * np.float32(np.nan)})

    def value(self, variables, frames):  # type: ignore[override]
      return np.full((len(frames), 1), np.inf, np.float32)

  version, inference, env = Version(7, _variables(0)), Diverged(), tiny.FakeEnv(3)
  actor = Actor(tiny.config(), env, inference, jax.random.key(0), EpisodeStats(3))
  frames = np.zeros((2, 2, *env.frame_shape), np.uint8)
  for look in (
    lambda: actor.step(version, budget=9, progress=0.0, random=False),
    lambda: examine(inference, version, frames, search=True, key=jax.random.key(0), explore=True),
    lambda: examine(inference, version, frames, search=False, key=jax.random.key(0), explore=True),
  ):
    with pytest.raises(DivergedError, match="learner step 7 gave values that are not finite"):
      look()
