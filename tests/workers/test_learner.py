"""Tests of the training step: any number of devices, reproducibility, and the reported loss."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from speedyzero_jax.agents.base import AXIS
from speedyzero_jax.agents.efficientzero import metric_names
from speedyzero_jax.agents.efficientzero.agent import EfficientZero
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.workers.learner import Learner, make_mesh

_B, _K, _A, _SUPPORT = 8, 1, 3, 4
_OVERRIDES = (
  "env.game=Catch", "env.frame_stack=2", "network.channels=4", "network.downsample=1",
  "network.reduced_channels=2", "network.head_hidden=4",
  "network.lstm_hidden=4", "network.value_prefix_horizon=1", f"network.support={_SUPPORT}",
  "network.projection_hidden=4", "network.projection_out=4", "network.prediction_hidden=4",
  "optim.name=sgd", "optim.learning_rate=0.02", "optim.momentum=0.9", "optim.weight_decay=0",
  "optim.clip_norm=0", "optim.warmup_steps=0", "optim.decay_steps=0",
  f"learner.batch_size={_B}", f"loss.unroll_steps={_K}",
  "loss.shift=1", "loss.intensity=0.05",
)  # fmt: skip
_KEY = jax.random.key(42)
LOCAL = ("network.batch_norm=local",)


def _config(*overrides):
  config = loader.load([], [*_OVERRIDES, *overrides])
  network = dataclasses.replace(config.agent.network, blocks=0)  # compiles faster
  return dataclasses.replace(config, agent=dataclasses.replace(config.agent, network=network))


@functools.cache
def _agent(*overrides):
  return EfficientZero(_config(*overrides), (4, 4, 1), np.uint8, _A)


@functools.cache
def _learner(devices=1, *overrides):
  return Learner(_config(*overrides), _agent(*overrides), make_mesh(jax.devices()[:devices]))


@functools.cache
def _initial():
  return _learner(2).init(jax.random.key(0))


def _fresh():
  """The state created by `init`, on the host."""
  return _host(_initial())


@functools.cache
def _start():
  """Variables other than 0 and 1, on the host, and the optimizer's first state."""
  rng, fresh = np.random.default_rng(1), _fresh()

  def noise(x):
    return x + rng.uniform(-0.4, 0.4, x.shape).astype(np.float32)

  return jax.tree.map(noise, fresh.variables), (), fresh.opt_state


def _restored(learner, step=0):
  return learner.restore(*_start(), step)


def _batch(seed=0, **changes):
  rng = np.random.default_rng(seed)
  f32 = np.float32

  def mask(*shape):
    return rng.integers(0, 2, shape).astype(f32)

  batch = {
    "frames": rng.integers(0, 256, (_B, 2 + _K, 4, 4, 1)).astype(np.uint8),
    "action": rng.integers(0, _A, (_B, _K)).astype(np.int32),
    # The largest on the last of any number of shards, so that each device needs another's; two are
    # below the floor.
    "weight": np.array([0.5, 0.01, 1.5, 0.7, 1.1, 0.3, 0.02, 4.0], f32),
    "value": rng.normal(size=(_B, _K + 1)).astype(f32) * 3,
    "value_prefix": rng.normal(size=(_B, _K)).astype(f32),
    "policy": rng.dirichlet(np.ones(_A), (_B, _K + 1)).astype(f32),
    "value_mask": mask(_B, _K + 1),
    "prefix_mask": mask(_B, _K),
    "policy_mask": mask(_B, _K + 1),
    "consistency_mask": mask(_B, _K),
  }
  return batch | changes


def _host(tree):
  return jax.tree.map(np.array, tree)


def _run(learner, batches, key=_KEY):
  """The state on the host after steps on these batches, and each step's result."""
  state, results = _restored(learner), []
  for batch in batches:
    state, result = learner.step(state, learner.put(batch), key)
    results.append(learner.fetch(result))
  return state, results


def _same(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, _host(ours), _host(theirs))


def _largest_difference(ours, theirs):
  return max(
    jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), _host(ours), _host(theirs)))
  )


def _norm(tree):
  return math.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))


@functools.cache
def _three_steps(devices, *overrides):
  state, results = _run(_learner(devices, *overrides), [_batch(seed) for seed in range(3)])
  return _host(state), results


def test_the_same_batches_give_the_same_updates_on_any_number_of_devices():
  (one, alone), (several, together) = _three_steps(1), _three_steps(2)
  moved = _largest_difference(one.variables.params, _start()[0].params)
  assert moved > 0.01
  for part in ("params", "batch_stats"):
    assert (
      _largest_difference(getattr(one.variables, part), getattr(several.variables, part)) < 1e-5
    )
  assert one.step == several.step == 3
  for a, b in zip(alone, together, strict=True):
    np.testing.assert_allclose(a.priority, b.priority, rtol=1e-4, atol=1e-4)
    assert a.metrics.keys() == b.metrics.keys()
    for name in a.metrics:
      np.testing.assert_allclose(
        a.metrics[name], b.metrics[name], rtol=1e-4, atol=1e-5, err_msg=name
      )


def test_local_batch_norm_is_another_computation_and_its_statistics_are_averaged():
  (sync, _), (local, _) = _three_steps(2), _three_steps(2, *LOCAL)
  assert _largest_difference(sync.variables.params, local.variables.params) > 1e-3

  first, _ = _run(_learner(2, *LOCAL), [_batch()])
  first_sync, _ = _run(_learner(2), [_batch()])
  at = ("representation", "norm")
  local_norm, sync_norm = (s.variables.batch_stats[at[0]][at[1]] for s in (first, first_sync))
  # A mean of means is the mean; a mean of variances is the variance less that of the means.
  np.testing.assert_allclose(local_norm["mean"], sync_norm["mean"], rtol=1e-5, atol=1e-6)
  assert (np.asarray(local_norm["var"]) < sync_norm["var"]).all()


@pytest.mark.parametrize("overrides", [(), LOCAL])
def test_all_devices_hold_the_same_state(overrides):
  state, _ = _run(_learner(2, *overrides), [_batch(seed) for seed in range(2)])
  for leaf in jax.tree.leaves(state):
    assert leaf.sharding.is_fully_replicated and len(leaf.addressable_shards) == 2
    one, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
    for other in others:
      np.testing.assert_array_equal(one, other)


def _expected_fresh_loss(batch):
  """A fresh network's outputs are uniform: each cross-entropy is the log of the number of atoms."""
  c = _config().agent.loss
  weight = batch["weight"]
  heads = c.value_coefficient * batch["value_mask"] * math.log(2 * _SUPPORT + 1)
  heads = heads + c.policy_coefficient * batch["policy_mask"] * math.log(_A)
  prefix = c.value_prefix_coefficient * batch["prefix_mask"] * math.log(2 * _SUPPORT + 1)
  return np.mean(weight * (heads[:, 0] + (heads[:, 1:] + prefix).sum(1) / _K))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fresh_networks_loss_is_known(devices):
  learner = _learner(devices)
  value = 10 + np.arange(_B * (_K + 1), dtype=np.float32).reshape(_B, _K + 1)
  batch = _batch(consistency_mask=np.zeros((_B, _K), np.float32), value=value)
  state, result = learner.step(learner.restore(*_fresh()), learner.put(batch), _KEY)
  assert state.step == 1
  metrics, priority, _ = learner.fetch(result)
  np.testing.assert_allclose(metrics[names.LOSS_TOTAL], _expected_fresh_loss(batch), rtol=1e-5)
  np.testing.assert_allclose(
    metrics[metric_names.LOSS_VALUE], math.log(9) * batch["value_mask"].mean(), rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics[metric_names.LOSS_VALUE_PREFIX], math.log(9) * batch["prefix_mask"].mean(), rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics[metric_names.LOSS_POLICY], math.log(3) * batch["policy_mask"].mean(), rtol=1e-5
  )
  np.testing.assert_allclose(metrics[metric_names.POLICY_ENTROPY], math.log(3), rtol=1e-5)
  assert metrics[metric_names.LOSS_CONSISTENCY] == 0
  # Its values are 0, so the errors are the targets, in the batch's order on whatever device they
  # were computed.
  np.testing.assert_allclose(priority, 10 + (_K + 1) * np.arange(_B), rtol=1e-5)
  np.testing.assert_allclose(
    metrics[metric_names.TD_ERROR], np.mean(10 + (_K + 1) * np.arange(_B)), rtol=1e-5
  )


def test_heads_move_down_their_gradient():
  """The update is -rate times the slope of the reported loss, where no gradient is halved or
  stopped on its way."""
  learner, batch = _learner(), _batch()
  (variables, _, opt_state), state = _start(), _run(_learner(), [_batch()])[0]
  moved = jax.tree.map(
    lambda new, old: np.asarray(new) - old, state.variables.params, variables.params
  )
  prefix, consistency = moved["value_prefix"], moved["consistency"]
  exact = [
    moved["value"],
    moved["policy"],
    prefix,
    consistency["predict1"],
    consistency["predict2"],
  ]
  chosen = {id(leaf) for leaf in jax.tree.leaves(exact)}
  direction = jax.tree.map(lambda x: x if id(x) in chosen else np.zeros_like(x), moved)
  squared = _norm(direction) ** 2

  def loss(distance):
    params = jax.tree.map(lambda x, d: x + np.float32(distance) * d, variables.params, direction)
    _, result = learner.step(
      learner.restore(variables._replace(params=params), (), opt_state, 0), learner.put(batch), _KEY
    )
    return learner.fetch(result).metrics[names.LOSS_TOTAL]

  slope = (loss(0.25) - loss(-0.25)) / 0.5
  assert slope == pytest.approx(-squared / 0.02, rel=0.02)


def test_a_step_is_a_function_of_state_batch_and_key():
  learner = _learner()
  first, results = _run(learner, [_batch(0), _batch(1)])
  again, same_results = _run(learner, [_batch(0), _batch(1)])
  _same(first, again)
  _same(results, same_results)
  other, _ = _run(learner, [_batch(0), _batch(1)], jax.random.key(43))
  assert (
    _largest_difference(first.variables.params, other.variables.params) > 1e-6
  )  # the augmentation's key
  # The step number is part of the key: the same variables augment otherwise at another step.
  at_zero, at_five = (
    learner.fetch(learner.step(_restored(learner, step), learner.put(_batch()), _KEY)[1]).metrics
    for step in (0, 5)
  )
  assert at_zero[names.LOSS_TOTAL] != at_five[names.LOSS_TOTAL]


def test_a_restored_state_goes_on_bit_for_bit():
  learner = _learner()
  state, _ = _run(learner, [_batch(0), _batch(1)])
  saved = _host(state)
  kept = jax.tree.map(np.copy, saved)
  state, result = learner.step(state, learner.put(_batch(2)), _KEY)
  restored = learner.restore(saved.variables, (), saved.opt_state, int(saved.step))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), restored) == jax.tree.map(
    lambda x: (x.shape, x.dtype), state
  )
  restored, restored_result = learner.step(restored, learner.put(_batch(2)), _KEY)
  _same(state, restored)
  _same(result, restored_result)
  _same(saved, kept)  # what was restored from is not written to


@pytest.mark.parametrize("devices", [1, 2])
def test_a_wish_to_stop_is_reported_with_the_step_and_changes_nothing_else(devices):
  learner = _learner(devices)
  plain, result = learner.step(_restored(learner), learner.put(_batch()), _KEY)
  stopping, last = learner.step(_restored(learner), learner.put(_batch()), _KEY, stop=True)
  result, last = learner.fetch(result), learner.fetch(last)
  assert (result.stopping, last.stopping) == (False, True)
  _same(plain, stopping)
  assert result.metrics == last.metrics


def test_devices_send_each_other_few_messages():
  """Four arrays: interruptions, gradients, batch statistics and metrics."""
  learner = _learner(2, *LOCAL)
  program = (
    learner.update.function.lower(
      _restored(learner), learner.put(_batch()), _KEY, learner._flags[False]
    )
    .compile()
    .as_text()
  )
  operands = re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", program)
  assert sum(names.count("%") for names in operands) == 4


def test_the_wish_of_one_device_is_enough():
  """Each process sets the flags of its own devices; one flag stops all."""
  learner = _learner(2)
  flags = jax.device_put(np.array([False, True]), learner._sharded)
  _, result = learner.update(_restored(learner), learner.put(_batch()), _KEY, flags)
  assert learner.fetch(result).stopping
  one, other = (np.asarray(shard.data) for shard in result.scalars.values.addressable_shards)
  np.testing.assert_array_equal(one, other)


def test_metrics_are_finite_scalars_and_norms_are_those_of_the_update():
  state, results = _run(_learner(), [_batch(0), _batch(1)])
  before, _ = _run(_learner(), [_batch(0)])
  metrics = results[-1].metrics
  assert all(np.isfinite(x) for x in metrics.values())
  assert metrics[names.LEARNING_RATE] == np.float32(0.02)
  params, old = state.variables.params, before.variables.params
  np.testing.assert_allclose(metrics[names.PARAMETER_NORM], _norm(params), rtol=1e-5)
  step = _norm(jax.tree.map(np.subtract, _host(params), _host(old)))
  np.testing.assert_allclose(metrics[names.UPDATE_NORM], step, rtol=1e-4)
  first = results[0].metrics  # before momentum has anything to add
  np.testing.assert_allclose(first[names.UPDATE_NORM], 0.02 * first[names.GRADIENT_NORM], rtol=1e-5)
  assert results[-1].priority.shape == (_B,)


def test_one_batch_can_be_learned():
  learner = _learner()
  ones = {name: np.ones_like(x) for name, x in _batch().items() if name.endswith("_mask")}
  policy = np.eye(_A, dtype=np.float32)[np.random.default_rng(5).integers(0, _A, (_B, _K + 1))]
  batch = _batch(weight=np.ones(_B, np.float32), policy=policy, **ones)
  state, losses = learner.restore(*_fresh()), []
  for _ in range(40):
    state, result = learner.step(state, learner.put(batch), _KEY)
    losses.append(learner.fetch(result).metrics[names.LOSS_TOTAL])
  assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 1.0


def test_the_state_is_laid_out_as_promised():
  learner = _learner(2)
  state, abstract = _initial(), learner.abstract()
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
    lambda x: (x.shape, x.dtype), abstract
  )
  assert all(
    x.is_fully_replicated and len(x.sharding.device_set) == 2 for x in jax.tree.leaves(state)
  )
  assert state.step == 0 and state.step.dtype == np.int32
  batch = _batch()
  for name, ours in learner.put(batch).items():
    assert [shard.data.shape[0] for shard in ours.addressable_shards] == [_B // 2] * 2
    np.testing.assert_array_equal(ours, batch[name])
  assert learner.mesh.axis_names == (AXIS,)
