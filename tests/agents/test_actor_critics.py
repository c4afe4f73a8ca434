"""Tests of the losses of IMPALA and PPO against float64 references, and of their actions."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

import episodes
import trained
from speedyzero_jax.agents import impala, ppo
from speedyzero_jax.agents.actor_critic import ENTROPY, LOSS_POLICY, LOSS_VALUE, RECONSTRUCTION
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.types import Slots
from trained import KEY, gathered, largest, linear, log_softmax

_T, _STACK, _DISCOUNT, _LAMBDA, _BATCH, _ACTIONS = 7, 2, 0.9, 0.8, 8, 3
_RHO, _C, _RHO_PG, _CLIP, _VALUE, _ENTROPY, _DECODED = 1.3, 0.9, 1.1, 0.3, 0.6, 0.2, 0.4
_REWARD = 0.5
_TINY = (
  "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}", "actor.lanes=2",
  "network.hidden=4", "network.layers=1", f"loss.unroll_length={_T}", "network.lstm_hidden=3",
  f"loss.value_coefficient={_VALUE}", f"loss.entropy_coefficient={_ENTROPY}",
  f"loss.reward_scale={_REWARD}", "actor.random_steps=0", "actor.weights_interval=1",
  f"learner.batch_size={_BATCH}",
)  # fmt: skip
_IMPALA = (
  "agent=impala", f"loss.vtrace_lambda={_LAMBDA}", f"loss.rho_bar={_RHO}", f"loss.c_bar={_C}",
  f"loss.rho_bar_pg={_RHO_PG}",
)  # fmt: skip
_PPO = (
  "agent=ppo", f"loss.gae_lambda={_LAMBDA}", f"loss.clip={_CLIP}", "loss.minibatches=1",
  "loss.epochs=1",
)  # fmt: skip
_VARIANTS = {
  "impala": (
    *_IMPALA,
    "network.core=lstm",
    f"loss.reconstruction_coefficient={_DECODED}",
  ),
  "ppo": _PPO,
  "clipped value": (*_PPO, "loss.clip_value=true", "loss.normalize_advantages=false"),
  "appo": (*_PPO, "loss.advantages=vtrace", "loss.synchronous=false"),
}


class _Trajectory(NamedTuple):
  slots: Slots  # of its lane, from time 0
  time: np.ndarray  # [T+1]
  acted: np.ndarray  # [T] bool, counted in the loss


@functools.cache
def _agent(variant):
  return trained.make(_ACTIONS, *_TINY, *_VARIANTS[variant])


@functools.cache
def _params(variant):
  return trained.random_params(_agent(variant), 4)


@functools.cache
def _gradient(variant, devices=2):
  return trained.gradient(_agent(variant), devices)


@functools.cache
def _batch(variant):
  """Trajectories of two lanes with episode ends at all positions, under a random policy.

  The first device's share has fewer actions than the second one's.
  """
  agent, rng, stored = _agent(variant), np.random.default_rng(7), []
  replay = trained.make_replay(agent, 2, 400, _STACK)
  for lane in range(2):
    stored.append(episodes.recorded(agent.schema, lane, episodes.every_end(8, rng), rng))
    replay.append(stored[-1])
  selection = replay.select(_BATCH)
  batch = gathered(agent, replay, selection)
  ends, mask = batch["acted_mask"] == 0, batch["acted_mask"].copy()
  mask[:3, 2:] = 0
  found = []
  for lane, time, acted in zip(selection.lane, selection.time, mask > 0, strict=True):
    found.append(_Trajectory(stored[lane], np.arange(time, time + _T + 1), acted))
  assert ends.any() and batch["discount"].min() == 0
  return batch | {"acted_mask": mask}, found


# --- the loss, from the slots as they were stored


def _network(params, x, first, state):
  """Logits and values of consecutive slots, and decoded observations, in float64."""
  p = jax.tree.map(np.float64, params)
  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  decoded = x
  if "decoder" in p:
    hidden = np.maximum(linear(p["decoder"]["linear"], features), 0)
    decoded = linear(p["decoder"]["layers"][0], hidden)
  if "core" in p:
    features, _ = trained.lstm(p["core"], features, first, state)
  return linear(p["policy"], features), linear(p["value"], features)[..., 0], decoded


def _vtrace(slots, time, acted, ratio, value, clips):
  """Targets and advantages by Espeholt et al.'s recursion, backwards over the window."""
  rho, c, rho_pg = clips
  target, advantage, later = np.zeros(_T), np.zeros(_T), value[-1]
  for i in reversed(range(_T)):
    if not acted[i]:
      target[i] = later = value[i]
      continue
    discount = 0 if slots["terminated"][time[i + 1]] else _DISCOUNT
    reward = _REWARD * slots["reward"][time[i]]
    delta = min(rho, ratio[i]) * (reward + discount * value[i + 1] - value[i])
    trace = discount * _LAMBDA * min(c, ratio[i]) * (later - value[i + 1])
    mixed = _LAMBDA * later + (1 - _LAMBDA) * value[i + 1]
    advantage[i] = min(rho_pg, ratio[i]) * (reward + discount * mixed - value[i])
    target[i] = later = value[i] + delta + trace
  return target, advantage


def _gae(slots, time, acted, value):
  """Sums of (discount * lambda)^k times temporal differences, over each slot's episode."""
  total = np.zeros(_T)
  for i in range(_T):
    for k in range(i, _T):
      if not acted[k]:
        break
      alive = 0.0 if slots["terminated"][time[k + 1]] else _DISCOUNT
      delta = _REWARD * slots["reward"][time[k]] + alive * value[k + 1] - value[k]
      total[i] += (_DISCOUNT * _LAMBDA) ** (k - i) * delta
  return value[:-1] + total, total


def _reference(variant):
  """The loss of parameters, with fixed targets and advantages, and its terms by metric."""
  parts, is_impala = [], variant == "impala"
  for slots, time, acted in _batch(variant)[1]:
    x = np.stack([episodes.observation(slots, t, _STACK) for t in time])
    x = x, slots["first"][time], slots["core"][time[0]] if is_impala else None
    chosen = np.arange(_T), np.maximum(slots["action"][time[:-1]], 0)
    log_mu = log_softmax(np.float64(slots["logits"][time[:-1]]))[chosen]
    logits, value, _ = _network(_params(variant), *x)
    ratio = np.exp(log_softmax(logits[:-1])[chosen] - log_mu)
    old = np.float64(slots["value"][time]) if not is_impala else value
    if is_impala or variant == "appo":
      clips = (_RHO, _C, _RHO_PG) if is_impala else (1, 1, 1)
      returns = _vtrace(slots, time, acted, ratio, value, clips)
    else:
      returns = _gae(slots, time, acted, old)
    parts.append((x, acted, chosen, log_mu, old[:-1], *returns))
  advantages = np.concatenate([part[-1][part[1]] for part in parts])
  normalized = variant in ("ppo", "appo")
  shift, scale = (advantages.mean(), advantages.std()) if normalized else (0, 1)

  def terms(params):
    found = []
    for x, acted, chosen, log_mu, old, target, advantage in parts:
      logits, value, decoded = (y[:-1] for y in _network(params, *x))
      log_pi = log_softmax(logits)
      ratio, a = np.exp(log_pi[chosen] - log_mu), (advantage - shift) / scale
      gain = np.minimum(ratio * a, ratio.clip(1 - _CLIP, 1 + _CLIP) * a)
      gain = log_pi[chosen] * advantage if is_impala else gain
      error = (target - value) ** 2
      if variant == "clipped value":
        error = np.maximum(error, (target - old - (value - old).clip(-_CLIP, _CLIP)) ** 2)
      entropy = -(np.exp(log_pi) * log_pi).sum(-1)
      wrong = ((decoded - x[0][:-1]) ** 2).sum(-1)  # 0 without a decoder
      divergence, outside = ratio - 1 - np.log(ratio), np.abs(ratio - 1) > _CLIP
      each = -gain, error / 2, entropy, wrong / 2, divergence, outside
      found.append(np.stack(each, axis=-1)[acted])
    return np.concatenate(found).mean(0)

  names = LOSS_POLICY, LOSS_VALUE, ENTROPY, RECONSTRUCTION, ppo.DIVERGENCE, ppo.CLIPPED
  metrics = dict(zip(names, terms(_params(variant)), strict=True))
  for name in (ppo.DIVERGENCE, ppo.CLIPPED) if is_impala else ():
    del metrics[name]
  if not is_impala:
    del metrics[RECONSTRUCTION]
  return lambda params: terms(params) @ (1, _VALUE, -_ENTROPY, _DECODED, 0, 0), metrics


@pytest.mark.parametrize("variant", _VARIANTS)
def test_loss_and_gradient_on_two_devices(variant):
  found = _gradient(variant)(_params(variant), _batch(variant)[0])
  loss, metrics = _reference(variant)
  np.testing.assert_allclose(found.loss, loss(_params(variant)), rtol=1e-4)
  scale = 1e-3 * max(1.0, largest(found.of_params) / 10)
  trained.assert_gradient(_params(variant), found.of_params, loss, rtol=2e-3, atol=scale)
  for name, value in metrics.items():
    np.testing.assert_allclose(found.metrics[name], value, rtol=1e-3, err_msg=name)
  assert 0.1 < metrics.get(ppo.CLIPPED, 0.5) < 1


def test_the_divergence_is_finite_where_an_action_has_become_impossible():
  params = jax.tree.map(lambda x: x, _params("ppo"))
  params["policy"]["kernel"] = 1e3 * params["policy"]["kernel"]
  found = _gradient("ppo")(params, _batch("ppo")[0])
  assert 110 < found.metrics[ppo.DIVERGENCE] < np.inf  # exp(-110) is 0 in float32


@pytest.mark.parametrize("variant", ["impala", "ppo"])
def test_masked_trajectories_and_ends_have_no_gradient(variant):
  batch = _batch(variant)[0]
  masked = np.arange(_BATCH) % 3 == 0
  mask = batch["acted_mask"] * ~masked[:, None]
  hidden = mask == 0
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "stack": np.where(masked[:, None, None], 1000, batch["stack"]).astype(np.int32),
    "reward": np.where(hidden, 5, batch["reward"]).astype(np.float32),
    "logits": np.where(hidden[..., None], 7 * batch["logits"], batch["logits"]),
    "action": np.where(hidden, 2, batch["action"]).astype(np.int32),
  }
  for name in {"state", "value"} & batch.keys():
    other[name] = np.where(masked[:, None], 8, batch[name]).astype(np.float32)
  gradient = functools.partial(_gradient(variant), _params(variant))
  trained.assert_masked(gradient, batch, {"acted_mask": mask}, other)


def test_one_device_does_as_two():
  """Includes the mean and deviation of advantages."""
  batch, params = _batch("ppo")[0], _params("ppo")
  one, two = (_gradient("ppo", devices)(params, batch) for devices in (1, 2))
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), one, two)


def test_trajectories_evicted_before_they_are_gathered_count_for_nothing():
  agent = _agent("impala")
  shortest = _STACK + agent.lookahead
  replay = trained.make_replay(agent, 2, shortest, _STACK)
  columns = {c.name: np.zeros((shortest, *c.shape), c.dtype) for c in agent.schema.columns}
  opening = columns | {"first": np.arange(shortest) == 0}
  replay.append(Slots.concatenate([Slots.of_lane(lane, 0, opening) for lane in range(2)]))
  selection = replay.select(4)
  replay.append(Slots.of_lane(1, shortest, columns))
  batch = gathered(agent, replay, selection)
  np.testing.assert_array_equal(batch["acted_mask"].all(1), selection.lane == 0)
  assert not batch["acted_mask"][selection.lane == 1].any()
  gone = Selection(np.ones(2, np.int32), np.zeros(2, np.int64), np.ones(2))
  batch, info = agent.assemble(replay, gone, 50)
  assert not batch["acted_mask"].any() and not info


# --- acting


def test_actions_follow_the_stored_logits():
  agent, params, lanes = _agent("ppo"), _params("ppo"), 3000
  stack = np.random.default_rng(0).normal(size=(1, _STACK, 1, 1, 2)).astype(np.float32)
  inputs = ActInputs(stack.repeat(lanes, 0), np.zeros(lanes, bool), np.arange(lanes), ())
  act = jax.jit(agent.act, static_argnames="explore")
  explored, greedy = (
    jax.device_get(act(Variables(params, ()), inputs, KEY, 0.0, explore=e)) for e in (True, False)
  )
  logits, value, _ = _network(params, stack.reshape(1, -1), None, None)
  for out in (explored, greedy):
    np.testing.assert_allclose(out.columns["logits"], logits.repeat(lanes, 0), rtol=1e-4)
    np.testing.assert_allclose(out.columns["value"], value.repeat(lanes), rtol=1e-4)
  frequency = np.bincount(explored.action, minlength=_ACTIONS) / lanes
  np.testing.assert_allclose(frequency, np.exp(log_softmax(logits))[0], atol=0.04)
  np.testing.assert_array_equal(greedy.action, logits.argmax())


def test_a_subclass_may_store_more_columns():
  class Own(impala.Impala):
    def act(self, *arguments, explore):
      out = super().act(*arguments, explore=explore)
      return out._replace(columns=out.columns | {"own": out.columns["logits"][:, 0]})

  config = loader.load([], [*_TINY, *_IMPALA, "learner.steps=100"])
  own = Own(config, (1, 1, 2), np.float32, _ACTIONS, Column("own", "float32"))
  inputs = ActInputs(np.zeros((1, _STACK, 1, 1, 2), np.float32), np.ones(1, bool), np.zeros(1), ())
  act = functools.partial(own.act, explore=True)
  columns = jax.eval_shape(act, jax.eval_shape(own.init, KEY), inputs, KEY, 0.0).columns
  assert columns.keys() == {"logits", "own"}
