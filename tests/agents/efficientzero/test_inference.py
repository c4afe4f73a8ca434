"""Windows of frames give what their states give one by one, from running statistics; and the model fits the search."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.inference import Inference, make_recurrent_fn
from speedyzero_jax.agents.efficientzero.networks import Variables, make_blueprint
from speedyzero_jax.config.schema import Config, EnvConfig, NetworkConfig, SearchConfig
from speedyzero_jax.workers.learner import make_mesh

_B, _N, _S, _A = 2, 3, 3, 4
_CONFIG = Config(
  env=EnvConfig(frame_stack=_S),
  network=NetworkConfig(
    channels=4, downsample=1, blocks=0, reduced_channels=2, head_hidden=4, lstm_hidden=4, value_prefix_horizon=2,
    support=5, projection_hidden=4, projection_out=4, prediction_hidden=4,
  ),
  search=SearchConfig(algorithm="gumbel", simulations=5, max_considered=3),
)  # fmt: skip
_BLUEPRINT = make_blueprint(
  _CONFIG.network, (4, 4, 2 * _S), _A, axis_name="data"
)  # as the learner's: unused here
_KEY = jax.random.key(0)


@functools.cache
def _inference():
  return Inference(_CONFIG, _BLUEPRINT)


@functools.cache
def _variables():
  """Nothing zero or one in them, so that values, policies and rewards differ from state to state."""
  rng = np.random.default_rng(1)

  def number(path, x):
    return ((path[-1].key in ("scale", "var")) + rng.uniform(-0.7, 0.7, x.shape)).astype(x.dtype)

  return jax.tree.map_with_path(number, jax.eval_shape(_BLUEPRINT.init, _KEY))


@functools.cache
def _windows():
  frames = np.random.default_rng(2).integers(0, 256, (_B, _S - 1 + _N, 4, 4, 2)).astype(np.uint8)
  frames.flags.writeable = False
  return frames


def _singles():
  """(window, state, its own stack of frames [1, S, ...]) for every state."""
  return [(b, n, _windows()[b : b + 1, n : n + _S]) for b in range(_B) for n in range(_N)]


def test_the_values_of_a_window_are_those_of_its_states():
  values = _inference().value(_variables(), _windows())
  assert values.shape == (_B, _N) and values.dtype == np.float32
  assert (
    len(np.unique(np.round(values, 4))) == _B * _N
  )  # all different: no state can be taken for another
  for b, n, stack in _singles():
    np.testing.assert_allclose(
      _inference().value(_variables(), stack), [[values[b, n]]], rtol=1e-4, atol=1e-5
    )


def test_the_search_of_a_window_is_that_of_its_states():
  search = functools.partial(_inference().search, explore=False)
  result = search(_variables(), _windows(), _KEY, 1.0)
  assert result.action.shape == result.search_value.shape == result.value.shape == (_B, _N)
  assert result.action.dtype == np.int32 and result.policy.shape == (_B, _N, _A)
  np.testing.assert_allclose(np.sum(result.policy, -1), 1, rtol=1e-5)
  np.testing.assert_allclose(
    result.value, _inference().value(_variables(), _windows()), rtol=1e-5, atol=1e-6
  )
  assert np.abs(result.search_value - result.value).max() > 1e-3  # it looked further than the root
  for b, n, stack in _singles():
    single = search(
      _variables(), stack, jax.random.key(9), 1.0
    )  # without exploration no key matters
    for ours, theirs in zip(result, single, strict=True):
      np.testing.assert_allclose(ours[b, n], theirs[0, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("batch", [4, 3])  # shares of equal size, and one that is short
def test_devices_that_share_the_windows_find_the_same(batch):
  mesh = make_mesh(jax.devices()[:2])
  shared = Inference(_CONFIG, _BLUEPRINT, mesh)
  frames = np.concatenate([_windows(), 255 - _windows()])[:batch]
  variables = jax.device_put(_variables(), NamedSharding(mesh, PartitionSpec()))
  values = shared.value(variables, frames)
  np.testing.assert_allclose(values, _inference().value(_variables(), frames), rtol=1e-4, atol=1e-5)
  assert len(values.sharding.device_set) == 2 or batch == 3
  ours = shared.search(variables, jnp.asarray(frames), _KEY, 1.0, explore=False)
  theirs = _inference().search(_variables(), frames, _KEY, 1.0, explore=False)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4), ours, theirs)


def test_devices_that_share_the_windows_explore_apart():
  mesh = make_mesh(jax.devices()[:2])
  variables = jax.device_put(_variables(), NamedSharding(mesh, PartitionSpec()))
  search, same = (
    Inference(_CONFIG, _BLUEPRINT, mesh).search,
    np.concatenate([_windows(), _windows()]),
  )
  first, second = np.split(np.asarray(search(variables, same, _KEY, 1.0, explore=True).action), 2)
  assert (first != second).any()


def test_exploration_depends_on_the_key():
  def actions(key):
    return np.asarray(
      _inference().search(_variables(), _windows(), jax.random.key(key), 1.0, explore=True).action
    )

  np.testing.assert_array_equal(actions(1), actions(1))
  assert any((actions(1) != actions(key)).any() for key in range(2, 8))


def test_a_value_is_the_decoded_head_on_the_newest_stack():
  values = _inference().value(_variables(), _windows())
  network = _BLUEPRINT.bind(_variables())
  for b, n, stack in _singles()[:2]:
    observation = np.concatenate(list(stack[0]), axis=-1)[None] / np.float32(
      255
    )  # oldest frame first
    logits, _ = network.predict(network.represent(jnp.asarray(observation), False), False)
    np.testing.assert_allclose(values[b, n], losses.decode(logits)[0], rtol=1e-4, atol=1e-5)


def test_running_statistics_are_used():
  values = np.asarray(_inference().value(_variables(), _windows()))
  # Another state in the same batch changes nothing, as it would if the batch were normalised by itself.
  other = _windows().copy()
  other[1] = 255 - other[1]
  changed = np.asarray(_inference().value(_variables(), other))
  np.testing.assert_array_equal(changed[0], values[0])
  assert (changed[1] != values[1]).all()
  shifted = Variables(
    _variables().params, jax.tree.map(lambda x: x + 0.2, _variables().batch_stats)
  )
  assert (np.abs(_inference().value(shifted, _windows()) - values) > 1e-4).all()


def test_frames_are_divided_by_255_only_if_they_are_bytes():
  bytes_, numbers = _windows(), _windows().astype(np.float32) / 255
  values = _inference().value(_variables(), bytes_)
  np.testing.assert_allclose(
    _inference().value(_variables(), numbers), values, rtol=1e-4, atol=1e-5
  )


def test_the_recurrent_function_steps_state_carry_and_prefix():
  network, recurrent = _BLUEPRINT.bind(_variables()), jax.jit(make_recurrent_fn(_BLUEPRINT))
  state = jnp.asarray(np.random.default_rng(4).uniform(size=(3, 4, 4, 4)), jnp.float32)
  carry, states, prefixes = network.initial_carry(3), [], []
  last = state
  for action in np.array([[0, 3, 1], [2, 2, 0]], np.int32):
    step = recurrent(_variables(), last, carry, action)
    states.append(network.dynamics(last, jnp.asarray(action), False))
    np.testing.assert_allclose(step.state, states[-1], rtol=1e-4, atol=1e-5)
    value, policy = network.predict(states[-1], False)
    np.testing.assert_allclose(step.value, losses.decode(value), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(step.policy_logits, policy, rtol=1e-4, atol=1e-5)
    last, carry = step.state, step.carry
    prefixes.append(step.value_prefix)
  # Two steps one by one are one unroll of two, as the loss does it.
  unrolled, logits = network.value_prefix(jnp.stack(states), network.initial_carry(3), False, 2)
  np.testing.assert_allclose(np.stack(prefixes), losses.decode(logits), rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), carry, unrolled)


def test_what_devices_share_can_be_lowered_and_costs_each_its_part():
  mesh = make_mesh(jax.devices()[:2])
  variables, frames = jax.device_put(_variables(), NamedSharding(mesh, PartitionSpec())), _windows()
  whole = _inference().value.lower(_variables(), frames).compile().cost_analysis()["flops"]
  part = (
    Inference(_CONFIG, _BLUEPRINT, mesh)
    .value.lower(variables, frames)
    .compile()
    .cost_analysis()["flops"]
  )
  assert 0.4 < part / whole < 0.7
