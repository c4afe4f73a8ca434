"""Tests of the unrolled loss and its gradients against plain loops."""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.agents.efficientzero import losses, metric_names
from speedyzero_jax.agents.efficientzero.config import LossConfig
from trained import h, log_softmax

_B, _K, _S, _A, _SUPPORT, _HORIZON, _D = 3, 5, 2, 4, 2, 2, 6
_FRAME = (2, 1, 3)
_CONFIG = LossConfig(
  unroll_steps=_K, value_coefficient=0.3, value_prefix_coefficient=0.7,
  policy_coefficient=1.3, consistency_coefficient=1.9, shift=0, intensity=0.0,
)  # fmt: skip


class Linear:
  """A stand-in for the network: matrices instead of layers, a running sum instead of the LSTM."""

  def __init__(self, weights):
    self.config = SimpleNamespace(support=_SUPPORT)
    self.consistency = SimpleNamespace(project=self._project, predict=self._predict_projection)
    self.weights = weights

  def represent(self, observation, train):
    assert train
    return (observation.reshape(observation.shape[0], -1) @ self.weights["root"])[:, None, None, :]

  def observe(self, observation):
    # With weights of its own: tests can tell the gradients from each other.
    return (observation.reshape(observation.shape[0], -1) @ self.weights["real"])[:, None, None, :]

  def dynamics(self, state, action, train):
    assert train
    return state @ self.weights["dynamics"] + action[:, None, None, None] * 0.1

  def initial_carry(self, batch):
    return jnp.full((batch, _D), 0.25)

  def value_prefix(self, states, carry, train):
    assert train
    sums = []
    for k, state in enumerate(states):
      carry = (carry if k % _HORIZON else self.initial_carry(len(state))) + state[:, 0, 0]
      sums.append(carry @ self.weights["prefix"])
    return carry, jnp.stack(sums)

  def predict(self, state, train):
    assert train
    return state[:, 0, 0] @ self.weights["value"], state[:, 0, 0] @ self.weights["policy"]

  def _project(self, state, train):
    assert train
    return state[:, 0, 0] @ self.weights["project"]

  def _predict_projection(self, projection, train):
    assert train
    return projection @ self.weights["predict"]


def _weights():
  rng = np.random.default_rng(7)
  pixels, atoms = _S * math.prod(_FRAME), 2 * _SUPPORT + 1
  shapes = {
    "root": (pixels, _D), "dynamics": (_D, _D), "prefix": (_D, atoms), "value": (_D, atoms),
    "policy": (_D, _A), "project": (_D, 4), "predict": (4, 4),
  }  # fmt: skip
  weights = {
    name: rng.normal(size=shape).astype(np.float32) / math.sqrt(shape[0])
    for name, shape in shapes.items()
  }
  return weights | {"real": weights["root"].copy()}


def _batch():
  rng = np.random.default_rng(11)
  f32 = np.float32

  def mask(*shape):
    return rng.integers(0, 2, shape).astype(f32)

  return losses.LearnerBatch(
    frames=rng.integers(0, 256, (_B, _S + _K) + _FRAME).astype(np.uint8),
    action=rng.integers(0, _A, (_B, _K)).astype(np.int32),
    weight=rng.uniform(0.1, 1, _B).astype(f32),
    value=rng.normal(size=(_B, _K + 1)).astype(f32) * 3,
    value_prefix=rng.normal(size=(_B, _K)).astype(f32),
    policy=rng.dirichlet(np.ones(_A), (_B, _K + 1)).astype(f32),
    value_mask=mask(_B, _K + 1),
    prefix_mask=mask(_B, _K),
    policy_mask=mask(_B, _K + 1),
    consistency_mask=mask(_B, _K),
  )


@functools.partial(jax.jit, static_argnums=2)
def _loss(weights, batch, config=_CONFIG):
  keys = jax.random.split(jax.random.key(0), _B)
  network: Any = Linear(weights)
  with jax.default_matmul_precision("float32"):
    return losses.unrolled_loss(network, batch, keys, config, observe=network.observe)


def _two_hot(x):
  y = min(max(h(x), -_SUPPORT), _SUPPORT)
  p = np.zeros(2 * _SUPPORT + 1)
  low = min(math.floor(y), _SUPPORT - 1)
  p[low + _SUPPORT], p[low + 1 + _SUPPORT] = low + 1 - y, y - low
  return p


def _reference(batch, w, config):
  """The loss computed sample by sample and step by step, in float64."""
  w = {name: x.astype(np.float64) for name, x in w.items()}
  terms: dict[str, list] = {"value": [], "value_prefix": [], "policy": [], "consistency": []}
  total, entropies, errors = 0.0, [], []
  for b in range(_B):

    def observed(t, b=b):
      stack = np.concatenate([batch.frames[b, t + i] for i in range(_S)], axis=-1)
      return stack.reshape(-1) / 255 @ w["root"]

    def heads(state, k, b=b):
      log_value, log_policy = log_softmax(state @ w["value"]), log_softmax(state @ w["policy"])
      value = -_two_hot(batch.value[b, k]) @ log_value * batch.value_mask[b, k]
      policy = -batch.policy[b, k] @ log_policy * batch.policy_mask[b, k]
      terms["value"].append(value)
      terms["policy"].append(policy)
      return (
        config.value_coefficient * value + config.policy_coefficient * policy,
        log_value,
        log_policy,
      )

    state = observed(0)
    sample, log_value, log_policy = heads(state, 0)
    mean_atom = np.exp(log_value) @ np.arange(-_SUPPORT, _SUPPORT + 1)
    errors.append((mean_atom, batch.value[b, 0]))
    entropies.append(-np.exp(log_policy) @ log_policy)
    for k in range(1, _K + 1):
      state = state @ w["dynamics"] + 0.1 * batch.action[b, k - 1]
      if (k - 1) % _HORIZON == 0:
        carry = np.full(_D, 0.25)
      carry = carry + state
      prefix = (
        -_two_hot(batch.value_prefix[b, k - 1])
        @ log_softmax(carry @ w["prefix"])
        * batch.prefix_mask[b, k - 1]
      )
      predicted, real = state @ w["project"] @ w["predict"], observed(k) @ w["project"]
      cosine = predicted @ real / np.linalg.norm(predicted) / np.linalg.norm(real)
      consistency = -cosine * batch.consistency_mask[b, k - 1]
      terms["value_prefix"].append(prefix)
      terms["consistency"].append(consistency)
      recurrent = (
        config.value_prefix_coefficient * prefix + config.consistency_coefficient * consistency
      )
      sample += (heads(state, k)[0] + recurrent) / _K
    total += batch.weight[b] * sample / _B
  return (
    total,
    {name: np.mean(values) for name, values in terms.items()},
    np.mean(entropies),
    errors,
  )


def test_the_loss_is_the_weighted_sum_taken_step_by_step():
  batch, weights = _batch(), _weights()
  loss, ours, td_error = _loss(weights, batch)
  total, terms, entropy, errors = _reference(batch, weights, _CONFIG)
  np.testing.assert_allclose(loss, total, rtol=1e-5)
  for name, expected in terms.items():
    np.testing.assert_allclose(ours[f"losses/{name}"], expected, rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(ours[metric_names.POLICY_ENTROPY], entropy, rtol=1e-5)
  policy = np.asarray(batch.policy)
  of_targets = -(policy * np.log(policy)).sum(-1) * batch.policy_mask
  np.testing.assert_allclose(ours[metric_names.TARGET_ENTROPY], of_targets.mean(), rtol=1e-5)
  for error, (mean_atom, target) in zip(np.asarray(td_error), errors, strict=True):
    # |v - z| = error for v on one side of z; h of that v is the mean atom.
    assert min(abs(h(target + error) - mean_atom), abs(h(target - error) - mean_atom)) < 1e-5


def test_masks_hide_their_targets_entirely():
  batch, weights = _batch(), _weights()
  loss, *_ = _loss(weights, batch)
  garbled = batch._replace(
    value=np.where(batch.value_mask == 0, 77, batch.value).astype(np.float32),
    value_prefix=np.where(batch.prefix_mask == 0, -77, batch.value_prefix).astype(np.float32),
    policy=np.where(batch.policy_mask[..., None] == 0, 5, batch.policy).astype(np.float32),
  )
  np.testing.assert_array_equal(_loss(weights, garbled)[0], loss)
  none = batch._replace(
    **{name: np.zeros_like(x) for name, x in batch._asdict().items() if name.endswith("_mask")}
  )
  assert _loss(weights, none)[0] == 0


def test_the_cosine_of_bfloat16_vectors_is_as_exact_as_of_float32_ones():
  x, y = jax.random.normal(jax.random.key(0), (2, 50, 64), jnp.bfloat16)
  exact = losses._negative_cosine(x.astype(jnp.float32), y.astype(jnp.float32))
  np.testing.assert_allclose(losses._negative_cosine(x, y), exact, rtol=1e-6)


def test_without_its_coefficient_consistency_is_never_computed():
  weights, config = _weights(), dataclasses.replace(_CONFIG, consistency_coefficient=0.0)
  loss, terms, _ = _loss(
    {name: w for name, w in weights.items() if name not in ("real", "project")}, _batch(), config
  )
  assert terms[metric_names.LOSS_CONSISTENCY] == 0
  np.testing.assert_allclose(loss, _reference(_batch(), weights, config)[0], rtol=1e-5)


def _gradients(batch, w, config):
  """Backpropagation by hand, one sample after another, in float64.

  EfficientZero's release scales the loss by 1/K and, when the gradient of a state that g returned
  is complete, with those of all its heads, halves it. MuZero's pseudocode gives recurrent terms
  1/K and scales what passes through g into the state before.
  """
  w = {name: x.astype(np.float64) for name, x in w.items()}
  grads = {name: np.zeros_like(x) for name, x in w.items()}
  released = config.gradient_scaling == "efficientzero"
  scale = config.state_gradient

  def cross_entropy(name, x, target, factor):
    """Adds the gradient of a head's kernel; returns that of its input."""
    logits = (np.exp(log_softmax(x @ w[name])) - target) * factor
    grads[name] += np.outer(x, logits)
    return w[name] @ logits

  for b in range(_B):
    views = [
      np.concatenate(batch.frames[b, t : t + _S], axis=-1).reshape(-1) / 255 for t in range(_K + 1)
    ]
    states, carries = [views[0] @ w["root"]], []
    for k in range(_K):
      states.append(states[k] @ w["dynamics"] + 0.1 * batch.action[b, k])
      before = carries[-1] if k % _HORIZON else np.full(_D, 0.25)
      carries.append(before + states[-1])
    above, through_carry = np.zeros(_D), np.zeros(_D)
    for k in range(_K, -1, -1):
      factor = batch.weight[b] / _B / (_K if k or released else 1)
      state, grad = states[k], above
      value, policy = _two_hot(batch.value[b, k]), batch.policy[b, k]
      masks = config.value_coefficient * batch.value_mask[b, k], batch.policy_mask[b, k]
      grad = grad + cross_entropy("value", state, value, factor * masks[0])
      grad = grad + cross_entropy(
        "policy", state, policy, factor * config.policy_coefficient * masks[1]
      )
      if k:
        own = config.value_prefix_coefficient * batch.prefix_mask[b, k - 1] * factor
        prefix = cross_entropy(
          "prefix", carries[k - 1], _two_hot(batch.value_prefix[b, k - 1]), own
        )
        through_carry = prefix + (through_carry if k % _HORIZON else 0)
        real = views[k] @ w["root"] @ w["project"]
        projected = state @ w["project"]
        predicted = projected @ w["predict"]
        size, unit = np.linalg.norm(predicted), real / np.linalg.norm(real)
        direction = predicted / size
        down = (unit - direction * (direction @ unit)) / size
        down *= -factor * config.consistency_coefficient * batch.consistency_mask[b, k - 1]
        grads["predict"] += np.outer(projected, down)
        down = w["predict"] @ down
        grads["project"] += np.outer(state, down)
        grad = grad + through_carry + w["project"] @ down
        if released:
          grad = grad * scale
        grads["dynamics"] += np.outer(states[k - 1], grad)
        above = w["dynamics"] @ grad * (1 if released else scale)
      else:
        grads["root"] += np.outer(views[0], grad)
  return grads


@pytest.mark.parametrize("scaling", ["muzero", "efficientzero"])
def test_every_module_has_the_gradient_of_the_named_scaling(scaling):
  config = dataclasses.replace(_CONFIG, gradient_scaling=scaling, state_gradient=0.4)
  batch, weights = _batch(), _weights()
  ours = jax.jit(jax.grad(lambda w: _loss(w, batch, config)[0]))(weights)
  assert not ours.pop("real").any()
  for name, grad in ours.items():
    expected = _gradients(batch, weights, config)[name]
    np.testing.assert_allclose(grad, expected, rtol=1e-3, atol=1e-6, err_msg=name)


def test_roots_and_next_observations_are_shifted():
  def seen(shift):
    """The root's and the next observations."""
    shown = []

    class Watching(Linear):
      def represent(self, observation, train):
        shown.append(observation)
        return super().represent(observation, train)

      def observe(self, observation):
        shown.append(observation)
        return super().observe(observation)

    network: Any = Watching(_weights())
    config = dataclasses.replace(_CONFIG, shift=shift)
    keys = jax.random.split(jax.random.key(0), _B)
    losses.unrolled_loss(network, _batch(), keys, config, observe=network.observe)
    return shown

  for fixed, shifted in zip(seen(0), seen(1), strict=True):
    assert (fixed != shifted).any()


def test_every_view_is_augmented_by_itself_and_by_its_samples_key():
  batch = _batch()._replace(frames=np.full((_B, _S + _K) + _FRAME, 200, np.uint8))
  config = dataclasses.replace(_CONFIG, intensity=0.1)
  keys = jax.random.split(jax.random.key(0), _B)

  @jax.jit
  def factors(batch, keys):
    """The brightness factor of each view: of the root [B], of the next observations [B, K]."""
    seen = []

    class Watching(Linear):
      def represent(self, observation, train):
        seen.append(observation[:, 0, 0, 0] / (200 / 255))
        return super().represent(observation, train)

      def observe(self, observation):
        seen.append(observation[:, 0, 0, 0] / (200 / 255))
        return super().observe(observation)

    network: Any = Watching(_weights())
    losses.unrolled_loss(network, batch, keys, config, observe=network.observe)
    return seen[0], seen[1].reshape(-1, _K)

  root, following = factors(batch, keys)
  drawn = [
    f for f in np.concatenate([root, following.ravel()]).tolist() if abs(f - 1) < 0.199
  ]  # the rest is clipped
  assert len(set(drawn)) == len(drawn) > _B * _K / 2  # no two views share a draw
  for b in range(_B):  # each sample alone, with its key, sees the same
    alone = factors(jax.tree.map(lambda x, b=b: x[b : b + 1], batch), keys[b : b + 1])
    np.testing.assert_array_equal(alone[0][0], root[b])
    np.testing.assert_array_equal(alone[1][0], following[b])
