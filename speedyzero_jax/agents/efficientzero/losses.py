"""The unrolled loss of EfficientZero (Ye et al. 2021), as a pure function."""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import entr

from speedyzero_jax.agents.efficientzero import metric_names
from speedyzero_jax.agents.efficientzero.config import LossConfig
from speedyzero_jax.agents.efficientzero.networks import Network
from speedyzero_jax.agents.efficientzero.observations import augment, stack_frames
from speedyzero_jax.ops.value_encoding import decode, two_hot


class LearnerBatch(NamedTuple):
  """Input of the loss; for targets and masks see `targets.Targets`."""

  frames: chex.Array  # [B, S+K, H, W, C] frames t-S+1 .. t+K, padded at the ends of the episode
  action: chex.Array  # [B, K]
  weight: chex.Array  # [B] float32, normalized importance weights
  value: chex.Array  # [B, K+1]
  value_prefix: chex.Array  # [B, K]
  policy: chex.Array  # [B, K+1, A]
  value_mask: chex.Array
  prefix_mask: chex.Array
  policy_mask: chex.Array
  consistency_mask: chex.Array


def _negative_cosine(x: jax.Array, y: jax.Array) -> jax.Array:
  x, y = x.astype(jnp.float32), y.astype(jnp.float32)
  norms = jnp.sqrt(jnp.sum(x * x, -1) + 1e-10) * jnp.sqrt(jnp.sum(y * y, -1) + 1e-10)
  return -jnp.sum(x * y, -1) / norms


def unrolled_loss(
  network: Network,
  batch: LearnerBatch,
  keys: jax.Array,
  config: LossConfig,
  *,
  observe: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
  """Computes the loss of a batch and updates the network's batch-norm statistics.

  With CE the cross-entropies against the targets of time t + k after k model steps, the loss is

    L = L_0 + 1/K sum_{k=1..K} [L_k + c_r CE(prefix_k) - c_s cos_k]
    L_k = c_v CE(value_k) + c_p CE(policy_k)

  where cos_k is SimSiam's cosine between the predicted projection of the imagined state and the
  projection (without gradient) of the actual observation. The gradient into the hidden state is
  scaled at each model step. With `gradient_scaling=efficientzero`, L_0 has weight 1/K, too. See
  also docs/speedyzero.md.

  All K+1 states pass through the heads as one batch, whereas EfficientZero applies the heads step
  by step. So batch norm normalizes roots and imagined states alike, as its running statistics do in
  the search.

  Args:
    network: bound to the parameters to train.
    batch: one device's shard.
    keys: [B], for augmentation.
    config: coefficients, augmentation and gradient scaling.
    observe: representation of the actual observations, for the consistency loss.

  Returns:
    The weighted mean loss [], metrics by name, and the errors |v(s_t) - z_t| [B] for priorities.
  """
  size, steps = batch.action.shape
  support = network.config.support
  observations = stack_frames(batch.frames, batch.frames.shape[1] - steps)
  view_keys = jax.vmap(lambda key: jax.random.split(key, steps + 1))(keys)  # [B, K+1]

  root = augment(view_keys[:, 0], observations[:, 0], config.shift, config.intensity)
  states = [network.represent(root, True)]
  scale_output = config.gradient_scaling == "efficientzero"
  for k in range(steps):
    state = states[-1] if scale_output else optax.scale_gradient(states[-1], config.state_gradient)
    state = network.dynamics(state, batch.action[:, k], True)
    states.append(optax.scale_gradient(state, config.state_gradient) if scale_output else state)
  imagined = jnp.stack(states[1:])  # [K, B, ...]
  carry = network.initial_carry(size)
  _, prefix_logits = network.value_prefix(imagined, carry, True)
  value_logits, policy_logits = network.predict(jnp.concatenate(states), True)
  value_logits = value_logits.reshape(steps + 1, size, -1)
  policy_logits = policy_logits.reshape(steps + 1, size, -1)

  # All losses are [K+1, B] or [K, B].
  value, prefix = two_hot(batch.value.T, support), two_hot(batch.value_prefix.T, support)
  value_loss = optax.losses.softmax_cross_entropy(value_logits, value) * batch.value_mask.T
  prefix_loss = optax.losses.softmax_cross_entropy(prefix_logits, prefix) * batch.prefix_mask.T
  policy = jnp.swapaxes(batch.policy, 0, 1)
  policy_loss = optax.losses.softmax_cross_entropy(policy_logits, policy) * batch.policy_mask.T
  consistency_loss = jnp.zeros((steps, size))
  if config.consistency_coefficient:
    later = observations[:, 1:].reshape(size * steps, *observations.shape[2:])
    later = augment(view_keys[:, 1:].reshape(-1), later, config.shift, config.intensity)
    target = jax.lax.stop_gradient(network.consistency.project(observe(later), True))
    target = jnp.swapaxes(target.reshape(size, steps, -1), 0, 1)
    projected = network.consistency.project(imagined.reshape(-1, *imagined.shape[2:]), True)
    predicted = network.consistency.predict(projected, True).reshape(steps, size, -1)
    consistency_loss = _negative_cosine(predicted, target) * batch.consistency_mask.T

  heads_loss = config.value_coefficient * value_loss + config.policy_coefficient * policy_loss
  recurrent_loss = (
    heads_loss[1:]
    + config.value_prefix_coefficient * prefix_loss
    + config.consistency_coefficient * consistency_loss
  )  # fmt: skip
  per_sample = heads_loss[0] / (steps if scale_output else 1) + jnp.mean(recurrent_loss, axis=0)
  td_error = jnp.abs(decode(value_logits[0]) - batch.value[:, 0])
  metrics = {
    metric_names.LOSS_VALUE: jnp.mean(value_loss),
    metric_names.LOSS_VALUE_PREFIX: jnp.mean(prefix_loss),
    metric_names.LOSS_POLICY: jnp.mean(policy_loss),
    metric_names.LOSS_CONSISTENCY: jnp.mean(consistency_loss),
    metric_names.TARGET_ENTROPY: jnp.mean(jnp.sum(entr(policy), axis=-1) * batch.policy_mask.T),
    metric_names.POLICY_ENTROPY: jnp.mean(jnp.sum(entr(jax.nn.softmax(policy_logits[0])), axis=-1)),
    metric_names.TD_ERROR: jnp.mean(td_error),
  }
  return jnp.mean(batch.weight * per_sample), metrics, td_error
