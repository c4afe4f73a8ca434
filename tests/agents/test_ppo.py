"""PPO's loss in float64, the use of its trajectories, and whole runs."""

import functools

import jax
import numpy as np
import pytest

import trained
from speedyzero_jax.agents import ppo
from speedyzero_jax.agents.actor_critic import ENTROPY
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.ops.vtrace import vtrace
from trained import RATE, largest
from trajectories import gathered, log_softmax, network, observation, recorded, returns

_T, _STACK, _DISCOUNT, _LAMBDA, _BATCH, _ACTIONS = 7, 2, 0.9, 0.8, 8, 3
_CLIP, _VALUE, _ENTROPY = 0.3, 0.6, 0.2
_TINY = (
  "agent=ppo", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.unroll_length={_T}", "loss.minibatches=1",
  f"loss.gae_lambda={_LAMBDA}", f"loss.clip={_CLIP}", f"loss.value_coefficient={_VALUE}",
  f"loss.entropy_coefficient={_ENTROPY}", "loss.epochs=1", "actor.random_steps=0",
  "actor.weights_interval=1", "actor.lanes=2", f"learner.batch_size={_BATCH}",
)  # fmt: skip
_VARIANTS = {
  "gae": (),
  "clipped value": ("loss.clip_value=true", "loss.normalise_advantages=false"),
  "vtrace": ("loss.advantages=vtrace", "loss.synchronous=false"),
}


@functools.cache
def _learner(variant="gae", devices=1):
  return trained.make_learner(*trained.make(_ACTIONS, *_TINY, *_VARIANTS[variant]), devices)


@functools.cache
def _params():
  return trained.random_params(trained.make(_ACTIONS, *_TINY)[1], 4)


@functools.cache
def _batch():
  """A batch, and the (lane, time) of its trajectories with the segments they lie in."""
  _, agent = trained.make(_ACTIONS, *_TINY)
  replay, stored = recorded(agent, _STACK)
  selection = replay.select(_BATCH)
  return gathered(agent, replay, selection), selection, stored


def _step(learner, batch):
  state, result = trained.step(learner, trained.restored(learner, _params()), batch)
  return state.variables.params, result


# --- the loss, from the segments as they were stored


def test_the_clipped_loss_of_a_fixed_vector():
  ratio, advantage = np.array([0.5, 1.5, 1.5, 0.5]), np.array([1.0, 1, -1, -1])
  found = ppo.clipped_loss(ratio, advantage, 0.2)
  np.testing.assert_allclose(found, [-0.5, -1.2, 1.5, 0.8], rtol=1e-6)
  np.testing.assert_allclose(np.mean(found), 0.15, rtol=1e-6)


def _vtrace(segment, slots, ratio, value):
  """Targets and advantages; the recursion has its own tests."""
  ended = segment.terminated[slots[1:]]
  discount = np.where(ended, 0, _DISCOUNT)
  ratio = np.where(segment.action[slots[:-1]] < 0, 0, ratio)
  found = vtrace(segment.reward[slots[:-1]], discount, value, ratio, lambda_=_LAMBDA)
  return np.float64(found.targets), np.float64(found.advantages)


def _reference(variant):
  """The loss as a function of parameters, targets and advantages being fixed."""
  _, selection, stored = _batch()
  parts = []
  for lane, time in zip(selection.lane, selection.time, strict=True):
    segment, slots = stored[lane], np.arange(time, time + _T + 1)
    x = np.stack([observation(segment, slot, _STACK) for slot in slots])
    acted = segment.action[slots[:-1]] >= 0
    chosen = np.arange(_T), np.maximum(segment.action[slots[:-1]], 0)
    log_mu = log_softmax(np.float64(segment.extra["logits"][slots[:-1]]))[chosen]
    old = np.float64(segment.extra["value"][slots])
    if variant == "vtrace":
      logits, value = network(_params(), x)
      ratio = np.exp(log_softmax(logits[:-1])[chosen] - log_mu)
      target, advantage = _vtrace(segment, slots, ratio, value)
    else:
      advantage = returns(segment, slots, old, _DISCOUNT, _LAMBDA)
      target = old[:-1] + advantage
    parts.append((x[:-1], acted, chosen, log_mu, old[:-1], target, advantage))
  advantages = np.concatenate([part[-1][part[1]] for part in parts])
  shift, scale = (0, 1) if variant == "clipped value" else (advantages.mean(), advantages.std())

  def loss(params):
    terms = []
    for x, acted, chosen, log_mu, old, target, advantage in parts:
      logits, value = network(params, x)
      log_pi = log_softmax(logits)
      ratio = np.exp(log_pi[chosen] - log_mu)
      a = (advantage - shift) / scale
      gain = np.minimum(ratio * a, ratio.clip(1 - _CLIP, 1 + _CLIP) * a)
      error = (target - value) ** 2
      if variant == "clipped value":
        error = np.maximum(error, (target - old - (value - old).clip(-_CLIP, _CLIP)) ** 2)
      entropy = -(np.exp(log_pi) * log_pi).sum(-1)
      terms.append((-gain + _VALUE / 2 * error - _ENTROPY * entropy)[acted])
    return np.concatenate(terms).mean()

  return loss


@pytest.mark.parametrize("variant", _VARIANTS)
def test_loss_and_gradient(variant):
  after, result = _step(_learner(variant), _batch()[0])
  loss = _reference(variant)
  assert 0.1 < result.metrics[ppo.CLIPPED] < 0.95
  np.testing.assert_allclose(result.metrics[names.LOSS_TOTAL], loss(_params()), rtol=1e-4)
  trained.assert_gradient(_params(), after, loss, rate=RATE, rtol=2e-3, atol=1e-3)


def test_masked_trajectories_and_ends_have_no_gradient():
  batch, _, _ = _batch()
  learner, masked = _learner(), np.arange(_BATCH) % 3 == 0
  ends = batch["acted_mask"] == 0
  mask = batch["acted_mask"] * ~masked[:, None]
  after, _ = _step(learner, batch | {"acted_mask": mask})
  hidden = masked[:, None] | ends
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "stack": np.where(masked[:, None, None], 1000, batch["stack"]).astype(np.int32),
    "reward": np.where(hidden, 5, batch["reward"]).astype(np.float32),
    "logits": np.where(hidden[..., None], 7 * batch["logits"], batch["logits"]),
    "value": np.where(masked[:, None], 8, batch["value"]).astype(np.float32),
    "action": np.where(hidden, 2, batch["action"]).astype(np.int32),
    "acted_mask": mask,
  }
  again, _ = _step(learner, batch | other)
  assert ends.any() and largest(after, _params()) > 1e-3
  assert largest(after, again) == 0
  nothing, result = _step(learner, batch | {"acted_mask": 0 * mask})
  assert result.metrics[names.LOSS_TOTAL] == 0 and largest(nothing, _params()) == 0


def test_two_devices_do_as_one():
  """Also in the mean and deviation of advantages, of which the first device has fewer."""
  batch, _, _ = _batch()
  mask = batch["acted_mask"].copy()
  mask[:3, 2:] = 0
  (one, alone), (two, both) = (
    _step(_learner(devices=devices), batch | {"acted_mask": mask}) for devices in (1, 2)
  )
  assert largest(one, _params()) > 1e-3
  assert largest(one, two) < 1e-6 * max(np.abs(x).max() for x in jax.tree.leaves(one))
  for name, value in alone.metrics.items():
    np.testing.assert_allclose(value, both.metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
  assert alone.metrics[ENTROPY] > 0


# --- whole runs


def _config(*overrides):
  return loader.load(
    ["ppo"],
    ["network.hidden=8", "loss.unroll_length=5", "loss.minibatches=2", "loss.epochs=3",
     "actor.lanes=4", "actor.weights_interval=6", "learner.batch_size=2", "learner.steps=60",
     "run.env_steps=300", "replay.capacity=0", "learner.devices=1", *overrides],
  )  # fmt: skip


@pytest.mark.parametrize("mode", ["lockstep", "async"])
def test_blocks_are_collected_with_the_weights_of_the_block_before(tmp_path, mode):
  """All lanes step together, so the weights behind each slot are known beforehand."""

  def acted_with(run):
    store = run.replay.store
    return [store["step"][lane, : store.head[lane]] for lane in range(store.lanes)]

  steps = trained.run(_config(f"run.mode={mode}"), tmp_path, after=acted_with)
  for lane in steps:
    used = np.arange(10 * 5)  # later ones may come while the last weights are published
    block = np.maximum(used - 1, 0) // 5  # that the slot's frame completes
    np.testing.assert_array_equal(lane[used], 6 * block)
