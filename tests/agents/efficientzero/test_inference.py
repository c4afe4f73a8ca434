"""Acting and tasks on windows of frames: each state by itself, from running statistics, on any
devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tiny
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.agent import EfficientZero
from speedyzero_jax.agents.efficientzero.networks import initial_carry
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh

_B, _N, _S, _A = 2, 3, 3, 4
_OVERRIDES = (
  f"env.frame_stack={_S}", "network.channels=4", "network.value_prefix_horizon=2",
  "search.simulations=5", "search.max_considered=3", "reanalyse.schedule=batch",
)  # fmt: skip
_KEY, _PROGRESS = jax.random.key(0), np.float32(0)


@functools.cache
def _agent(*overrides):
  config = tiny.config(*_OVERRIDES, *overrides)
  network = dataclasses.replace(config.agent.network, blocks=0)  # compiles faster
  config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, network=network))
  return EfficientZero(config, (4, 4, 2), np.uint8, _A)


@functools.cache
def _inference(devices=1, *overrides):
  return Inference(_agent(*overrides), make_mesh(jax.devices()[:devices]))


@functools.cache
def _variables(devices=1):
  """Nothing zero or one in them, so that values, policies and rewards differ from state to
  state."""
  rng = np.random.default_rng(1)

  def number(path, x):
    return ((path[-1].key in ("scale", "var")) + rng.uniform(-0.7, 0.7, x.shape)).astype(x.dtype)

  made = jax.tree.map_with_path(number, jax.eval_shape(_agent().init, _KEY))
  mesh = make_mesh(jax.devices()[:devices])
  return jax.device_put(made, NamedSharding(mesh, PartitionSpec())) if devices > 1 else made


@functools.cache
def _windows():
  frames = np.random.default_rng(2).integers(0, 256, (_B, _S - 1 + _N, 4, 4, 2)).astype(np.uint8)
  frames.flags.writeable = False
  return frames


def _values(frames, variables=None, devices=1):
  inference = _inference(devices)
  return inference.tasks["bootstrap"](variables or _variables(devices), frames, _KEY)["value"]


def _search(frames, devices=1, explore=False, key=_KEY):
  inference = _inference(devices, f"reanalyse.explore={explore}")
  return inference.tasks["reanalyse"](_variables(devices), frames, key)


def _act(frames, explore, key=_KEY, progress=_PROGRESS, devices=1, *overrides):
  n = len(frames)
  inputs = ActInputs(frames, np.zeros(n, bool), np.arange(n, dtype=np.int32), ())
  inference = _inference(devices, *overrides)
  return inference.act(_variables(devices), inputs, key, progress, explore=explore)


def _close(ours, theirs, rtol=1e-3, atol=1e-4):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), ours, theirs)


def _singles():
  """(window, state, its own stack of frames [1, S, ...]) for every state."""
  return [(b, n, _windows()[b : b + 1, n : n + _S]) for b in range(_B) for n in range(_N)]


def test_results_of_a_window_are_those_of_its_states_and_of_acting_in_them():
  values, found = _values(_windows()), _search(_windows())
  assert values.shape == found["search_value"].shape == (_B, _N)
  assert found["policy"].shape == (_B, _N, _A)
  assert len(np.unique(np.round(values, 4))) == _B * _N  # no state can be taken for another
  np.testing.assert_allclose(found["policy"].sum(-1), 1, rtol=1e-5)
  _close(found["value"], values, 1e-5, 1e-6)
  assert np.abs(found["search_value"] - found["value"]).max() > 1e-3  # it looked beyond the root
  stacks = np.concatenate([stack for *_, stack in _singles()])
  acted = _act(stacks, explore=False, key=jax.random.key(9))  # without exploration no key matters
  for i, (b, n, stack) in enumerate(_singles()):
    _close(_values(stack), [[values[b, n]]], 1e-4, 1e-5)
    of_state = {name: x[b, n] for name, x in found.items()}
    _close({name: x[i] for name, x in acted.columns.items()}, of_state)
  assert acted.action.dtype == jnp.int32 and (acted.action < _A).all()


def test_devices_that_share_the_windows_find_the_same():
  frames = np.concatenate([_windows(), 255 - _windows()])
  values, found = _values(frames), _search(frames)
  for batch in (4, 3):  # shares of equal size, and one that is short
    shared = _values(frames[:batch], devices=2)
    _close(shared, values[:batch], 1e-4, 1e-5)
    assert len(shared.sharding.device_set) == 2 or batch == 3
    _close(_search(frames[:batch], devices=2), {name: x[:batch] for name, x in found.items()})


def test_devices_explore_apart_and_keys_decide():
  stacks = np.concatenate([stack for *_, stack in _singles()])
  first, second = np.split(
    np.asarray(_act(np.concatenate([stacks] * 2), True, devices=2).action), 2
  )
  assert (first != second).any()
  actions = [np.asarray(_act(stacks, True, jax.random.key(key)).action) for key in (1, 1, 2, 3, 4)]
  np.testing.assert_array_equal(actions[0], actions[1])
  assert any((actions[0] != other).any() for other in actions[2:])


@pytest.mark.parametrize("explore", [True, False])
def test_the_noise_of_reanalysis_is_a_choice(explore):
  found = [_search(_windows(), 1, explore, jax.random.key(key))["search_value"] for key in (1, 2)]
  assert (np.asarray(found[0]) != found[1]).any() == explore


def test_the_temperature_follows_the_progress_by_stages():
  """At a temperature of next to nothing actions are those most visited, whatever the key."""
  stages = ("search.algorithm=puct", "search.dirichlet_fraction=0", "search.c1=100")
  stages += ("search.temperatures=5,1e-6", "search.temperature_stages=0.5")
  stacks = np.repeat(_windows()[:1, :_S], 60, axis=0)
  actions = {
    share: set(_act(stacks, True, _KEY, np.float32(share), 1, *stages).action.tolist())
    for share in (0.0, 0.49, 0.5, 1.0)
  }
  assert len(actions[0.0]) > 1 and actions[0.0] == actions[0.49]
  assert len(actions[0.5]) == 1 and actions[0.5] == actions[1.0]


def test_a_value_is_the_decoded_head_on_the_newest_stack():
  values, agent = _values(_windows()), _agent()

  @jax.jit
  def decoded(variables, observation):
    network = agent.blueprint.bind(variables)
    return losses.decode(network.predict(network.represent(observation, False), False)[0])

  for b, n, stack in _singles()[:2]:
    observation = np.concatenate(list(stack[0]), axis=-1)[None] / np.float32(255)  # oldest first
    found = decoded(_variables(), observation)
    np.testing.assert_allclose(values[b, n], found[0], rtol=1e-4, atol=1e-5)
  # Frames that are not bytes are taken as they are.
  _close(_values(_windows().astype(np.float32) / 255), values, 1e-4, 1e-5)


def test_running_statistics_are_used():
  values = np.asarray(_values(_windows()))
  # Another state in the batch would change a normalisation by the batch itself.
  other = _windows().copy()
  other[1] = 255 - other[1]
  changed = np.asarray(_values(other))
  np.testing.assert_array_equal(changed[0], values[0])
  assert (changed[1] != values[1]).all()
  params, stats = _variables()
  shifted = Variables(params, jax.tree.map(lambda x: x + 0.2, stats))
  assert (np.abs(_values(_windows(), shifted) - values) > 1e-4).all()


def test_the_recurrent_function_steps_state_carry_and_prefix():
  agent, own = _agent(), tiny.config(*_OVERRIDES).agent.network
  start = jnp.asarray(np.random.default_rng(4).uniform(size=(3, 4, 4, 4)), jnp.float32)
  actions = np.array([[0, 3, 1], [2, 2, 0]], np.int32)

  @jax.jit
  def both(variables):
    network, last, carry, steps = agent.blueprint.bind(variables), start, initial_carry(own, 3), []
    folded = agent.blueprint.fold(variables)
    expected = []
    for action in actions:
      steps.append(agent._recurrent(folded, last, carry, action))
      state = network.dynamics(last, action, False)
      value, policy = network.predict(state, False)
      expected.append((state, losses.decode(value), policy))
      last, carry = steps[-1].state, steps[-1].carry
    # Two steps one by one are one unroll of two, as the loss does it.
    states = jnp.stack([state for state, *_ in expected])
    unrolled, logits = network.value_prefix(states, initial_carry(own, 3), False, 2)
    return steps, expected, unrolled, losses.decode(logits)

  steps, expected, carry, prefixes = both(_variables())
  for step, of_network in zip(steps, expected, strict=True):
    _close((step.state, step.value, step.policy_logits), of_network, 1e-4, 1e-5)
  _close(np.stack([step.value_prefix for step in steps]), prefixes, 1e-4, 1e-5)
  _close(steps[-1].carry, carry, 1e-4, 1e-5)


def test_each_device_computes_its_share():
  def flops(devices):
    program = _inference(devices).tasks["bootstrap"]
    function = program.function
    return function.lower(_variables(devices), _windows(), _KEY).compile().cost_analysis()["flops"]

  assert 0.4 < flops(2) / flops(1) < 0.7
