"""Tests of acting and of tasks on windows of frames: one result per state, running statistics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from speedyzero_jax.agents.base import AXIS, ActInputs, Variables
from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.agent import EfficientZero
from speedyzero_jax.agents.efficientzero.networks import initial_carry
from speedyzero_jax.ops import value_encoding
from speedyzero_jax.workers.inference import Inference, steps_of
from speedyzero_jax.workers.weights import publication

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
def _inference(*overrides):
  return Inference(_agent(*overrides))


@functools.cache
def _variables():
  """Variables other than 0 and 1, so that values, policies and rewards differ between states."""
  rng = np.random.default_rng(1)

  def number(path, x):
    return ((path[-1].key in ("scale", "var")) + rng.uniform(-0.7, 0.7, x.shape)).astype(x.dtype)

  return jax.tree.map_with_path(number, jax.eval_shape(_agent().init, _KEY))


@functools.cache
def _windows():
  frames = np.random.default_rng(2).integers(0, 256, (_B, _S - 1 + _N, 4, 4, 2)).astype(np.uint8)
  frames.flags.writeable = False
  return frames


@functools.cache
def _stacks():
  """The frame stack of every state, [B * N, S, ...]."""
  return np.concatenate([_windows()[b : b + 1, n : n + _S] for b in range(_B) for n in range(_N)])


@functools.cache
def _publication():
  return publication(_agent())


def _values(frames, variables=None):
  inputs = {"frames": frames, **steps_of(0, len(frames))}
  variables = _publication()(variables or _variables())
  return _inference().tasks["bootstrap"](variables, inputs, _KEY)["value"]


def _search(explore=False, key=_KEY, step=0, *overrides):
  program = _inference(f"reanalyse.explore={explore}", *overrides).tasks["reanalyse"]
  inputs = {"frames": _windows(), **steps_of(step, _B)}
  return jax.device_get(program(_publication()(_variables()), inputs, key))


def _act(frames, explore, key=_KEY, progress=_PROGRESS, *overrides):
  n = len(frames)
  inputs = ActInputs(frames, np.zeros(n, bool), np.arange(n, dtype=np.int32), ())
  variables = _publication()(_variables())
  return _inference(*overrides).act(variables, inputs, key, progress, explore=explore)


def _close(ours, theirs, rtol=1e-3, atol=1e-4):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), ours, theirs)


def test_results_of_a_window_are_those_of_its_states_and_of_acting_in_them():
  values, found = np.asarray(_values(_windows())), _search()
  assert values.shape == found["search_value"].shape == (_B, _N)
  assert found["policy"].shape == (_B, _N, _A)
  assert len(np.unique(np.round(values, 4))) == _B * _N  # no state can be taken for another
  np.testing.assert_allclose(found["policy"].sum(-1), 1, rtol=1e-5)
  _close(found["value"], values, 1e-5, 1e-6)
  assert np.abs(found["search_value"] - found["value"]).max() > 1e-3  # it looked beyond the root
  _close(_values(_stacks()), values.reshape(-1, 1), 1e-4, 1e-5)
  # Without exploration no key matters.
  acted = _act(_stacks(), explore=False, key=jax.random.key(9))
  _close(acted.columns, {name: x.reshape(_B * _N, *x.shape[2:]) for name, x in found.items()})
  assert acted.action.dtype == jnp.int32 and (acted.action < _A).all()


@pytest.mark.parametrize("change", ["env.discount=0.5", "network.value_prefix_horizon=1"])
def test_the_search_has_the_configured_discount_and_horizon(change):
  found = _search(False, _KEY, 0, change)["search_value"]
  assert (found != _search()["search_value"]).any()


@pytest.mark.parametrize("explore", [True, False])
def test_the_noise_of_reanalysis_is_a_choice(explore):
  found = [_search(explore, jax.random.key(key))["search_value"] for key in (1, 2)]
  assert (found[0] != found[1]).any() == explore


def test_reanalysis_has_its_own_simulations_and_uses_known_edges_state_by_state():
  own = ("reanalyse.schedule=sweep", "reanalyse.reuse=true", "reanalyse.explore=false")
  known_action = np.array([[-1, 2, 0], [1, -1, -1]], np.int32)

  def searched(qvalue, *overrides):
    program = _inference(*own, *overrides).tasks["reanalyse"]
    edges = {"known_action": known_action, "known_qvalue": np.full((_B, _N), qvalue, np.float32)}
    inputs = {"frames": _windows(), **steps_of(0, _B), **edges}
    return jax.device_get(program(_publication()(_variables()), inputs, _KEY))

  low, high = searched(-50.0), searched(50.0)
  known = known_action >= 0
  np.testing.assert_array_equal(low["policy"][~known], high["policy"][~known])
  chosen = [np.take_along_axis(x["policy"], known_action[..., None], 2)[known] for x in (low, high)]
  assert (chosen[0] < chosen[1]).all()
  assert (low["search_value"] != high["search_value"])[known].all()
  fewer = searched(50.0, "reanalyse.simulations=1")
  assert (fewer["policy"] != high["policy"]).any()


def test_the_share_of_the_uniform_policy_follows_acting_and_reanalysis_by_stages():
  stages = "search.temperatures=1,1", "search.temperature_stages=0.5", "learner.steps=100"
  shares = "search.uniform_fraction=0.1,0.9", "search.uniform_fraction=0.1,0.1"
  stacks = _windows()[:, :_S]
  for progress, same in ((0.49, True), (0.5, False)):
    acted = [_act(stacks, True, _KEY, np.float32(progress), *stages, u).columns for u in shares]
    searched = [_search(True, _KEY, round(100 * progress), *stages, u) for u in shares]
    for few, many in (acted, searched):
      assert np.allclose(few["policy"], many["policy"], atol=1e-5) == same


def test_the_temperature_follows_the_progress_by_stages():
  """At a temperature close to 0, the most visited actions are chosen, whatever the key."""
  stages = ("search.algorithm=puct", "search.dirichlet_fraction=0", "search.c1=100")
  stages += ("search.temperatures=5,1e-6", "search.temperature_stages=0.5")
  stacks = np.repeat(_windows()[:1, :_S], 60, axis=0)
  actions = {
    share: set(_act(stacks, True, _KEY, np.float32(share), *stages).action.tolist())
    for share in (0.0, 0.49, 0.5, 1.0)
  }
  assert len(actions[0.0]) > 1 and actions[0.0] == actions[0.49]
  assert len(actions[0.5]) == 1 and actions[0.5] == actions[1.0]


def test_running_statistics_are_used():
  values = np.asarray(_values(_windows()))
  # Another state in the batch would change a normalization by the batch itself.
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
  newest = np.concatenate(list(_stacks()[0]), axis=-1)[None] / np.float32(255)  # oldest first

  @jax.jit
  def both(variables):
    network, last, carry, steps = (
      agent.network_def.bind(variables),
      start,
      initial_carry(own, 3),
      [],
    )
    folded = agent.network_def.fold(variables)
    expected = []
    for action in actions:
      steps.append(agent._recurrent(folded, last, carry, action))
      state = network.dynamics(last, action, False)
      value, policy = network.predict(state, False)
      expected.append((state, value_encoding.decode(value), policy))
      last, carry = steps[-1].state, steps[-1].carry
    # Two steps one by one are one unroll of two, as the loss does it.
    states = jnp.stack([state for state, *_ in expected])
    unrolled, logits = network.value_prefix(states, initial_carry(own, 3), False)
    root = value_encoding.decode(network.predict(network.represent(newest, False), False)[0])
    return steps, expected, unrolled, value_encoding.decode(logits), root

  steps, expected, carry, prefixes, root = both(_variables())
  for step, of_network in zip(steps, expected, strict=True):
    _close((step.state, step.value, step.policy_logits), of_network, 1e-4, 1e-5)
  _close(np.stack([step.value_prefix for step in steps]), prefixes, 1e-4, 1e-5)
  _close(steps[-1].carry, carry, 1e-4, 1e-5)
  _close(_values(_windows())[0, 0], root[0], 1e-4, 1e-5)  # the decoded head on the newest stack


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_consistency_targets_use_the_chosen_statistics(statistics):
  agent, rng = _agent(f"loss.consistency_statistics={statistics}"), np.random.default_rng(3)
  config = tiny.config(*_OVERRIDES).agent.loss
  steps, f32 = config.unroll_steps, np.float32
  ones = {"value": steps + 1, "policy": steps + 1, "prefix": steps, "consistency": steps}
  batch = losses.LearnerBatch(
    frames=rng.integers(0, 256, (_B, _S + steps, 4, 4, 2)).astype(np.uint8),
    action=rng.integers(0, _A, (_B, steps)).astype(np.int32),
    weight=np.ones(_B, f32),
    value=np.zeros((_B, steps + 1), f32),
    value_prefix=np.zeros((_B, steps), f32),
    policy=np.full((_B, steps + 1, _A), 1 / _A, f32),
    **{f"{name}_mask": np.ones((_B, count), f32) for name, count in ones.items()},
  )

  @jax.jit
  @functools.partial(jax.vmap, in_axes=(None, 0), axis_name=AXIS)
  def losses_of(variables, keys):
    """By the agent, and with the network as it is, not folded."""
    network, other = (agent.network_def.bind(variables) for _ in range(2))
    _, expected, _ = losses.unrolled_loss(
      network,
      batch,
      keys,
      config,
      observe=functools.partial(other.represent, train=statistics == "batch"),
    )
    _, output = agent.loss(*variables, {}, batch._asdict() | {"own": batch.value}, keys)
    return output.metrics, expected

  ours, expected = losses_of(_variables(), jax.random.split(_KEY, (1, _B)))
  for name, x in ours.items():
    np.testing.assert_allclose(x, expected[name], rtol=1e-4, err_msg=name)
