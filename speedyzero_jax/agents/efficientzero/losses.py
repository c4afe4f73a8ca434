"""Value encoding, augmentation and the unrolled loss of EfficientZero, as pure functions.

Sources: MuZero (Schrittwieser et al. 2020), appendix F, for the value encoding; EfficientZero (Ye
et al. 2021) for the loss.
"""

from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from speedyzero_jax.agents.efficientzero import metric_names
from speedyzero_jax.agents.efficientzero.config import LossConfig
from speedyzero_jax.agents.efficientzero.networks import Network
from speedyzero_jax.ops.td import inverse_transform, transform

# --- value encoding


def two_hot(x: jax.Array, support: int) -> jax.Array:
  """Scalars [...] -> probabilities [..., 2*support+1] on the two atoms next to h(x), clipped."""
  y = jnp.clip(transform(x), -support, support)
  low = jnp.floor(y)
  share = (y - low)[..., None]
  index = (low + support).astype(jnp.int32)
  atoms = 2 * support + 1
  high = jnp.minimum(index + 1, atoms - 1)
  return jax.nn.one_hot(index, atoms) * (1 - share) + jax.nn.one_hot(high, atoms) * share


def decode(logits: jax.Array) -> jax.Array:
  """Logits [..., 2*support+1] -> scalars [...], h^-1 of the expectation over atoms."""
  support = logits.shape[-1] // 2
  atoms = jnp.arange(-support, support + 1, dtype=jnp.float32)
  return inverse_transform(jnp.sum(jax.nn.softmax(logits) * atoms, axis=-1))


# --- observations


def stack_frames(frames: jax.Array, stack: int) -> jax.Array:
  """Frames [B, S+K, H, W, C], oldest first -> observations [B, K+1, H, W, S*C].

  Observation k ends with frame S-1+k.
  """
  states = frames.shape[1] - stack + 1
  return jnp.concatenate([frames[:, i : i + states] for i in range(stack)], axis=-1)


def normalize(observation: jax.Array) -> jax.Array:
  """Converts uint8 images to float32 in [0, 1], and vectors to float32."""
  if observation.dtype == jnp.uint8:
    return observation.astype(jnp.float32) / 255
  return observation.astype(jnp.float32)


def augment(keys: jax.Array, observation: jax.Array, shift: int, intensity: float) -> jax.Array:
  """Applies a random shift (edge-padded) and random brightness.

  Args:
    keys: [N], one per observation, so that augmentation does not depend on sharding.
    observation: [N, H, W, C], uint8 or float.
    shift: maximum shift, pixels; ignored for vectors.
    intensity: scale s of the factor 1 + s*clip(normal, -2, 2) (DrQ; Yarats et al. 2020).

  Returns:
    float32 [N, H, W, C], normalized.
  """
  height, width = observation.shape[1:3]

  def one(key: jax.Array, image: jax.Array) -> jax.Array:
    shift_key, intensity_key = jax.random.split(key)
    if shift and height > 1:
      y, x = jax.random.randint(shift_key, (2,), -shift, shift + 1)
      rows = jnp.clip(jnp.arange(height) + y, 0, height - 1)
      columns = jnp.clip(jnp.arange(width) + x, 0, width - 1)
      image = image[rows[:, None], columns]
    image = normalize(image)
    if intensity:
      image = image * (1 + intensity * jnp.clip(jax.random.normal(intensity_key), -2, 2))
    return image

  return jax.vmap(one)(keys, observation)


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


# --- loss


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
  frame_stack: int,
  horizon: int,
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
    frame_stack: S.
    horizon: model steps between resets of the value prefix.
    observe: representation of the actual observations, for the consistency loss.

  Returns:
    The weighted mean loss [], metrics by name, and the errors |v(s_t) - z_t| [B] for priorities.
  """
  size, steps = batch.action.shape
  support = network.config.support
  observations = stack_frames(batch.frames, frame_stack)
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
  _, prefix_logits = network.value_prefix(imagined, carry, True, horizon)
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
    real = jax.lax.stop_gradient(network.consistency.project(observe(later), True))
    real = jnp.swapaxes(real.reshape(size, steps, -1), 0, 1)
    projected = network.consistency.project(imagined.reshape(-1, *imagined.shape[2:]), True)
    predicted = network.consistency.predict(projected, True).reshape(steps, size, -1)
    consistency_loss = _negative_cosine(predicted, real) * batch.consistency_mask.T

  heads_loss = config.value_coefficient * value_loss + config.policy_coefficient * policy_loss
  recurrent_loss = (
    heads_loss[1:]
    + config.value_prefix_coefficient * prefix_loss
    + config.consistency_coefficient * consistency_loss
  )  # fmt: skip
  per_sample = heads_loss[0] / (steps if scale_output else 1) + jnp.mean(recurrent_loss, axis=0)
  log_policy = jax.nn.log_softmax(policy_logits[0])
  td_error = jnp.abs(decode(value_logits[0]) - batch.value[:, 0])
  metrics = {
    metric_names.LOSS_VALUE: jnp.mean(value_loss),
    metric_names.LOSS_VALUE_PREFIX: jnp.mean(prefix_loss),
    metric_names.LOSS_POLICY: jnp.mean(policy_loss),
    metric_names.LOSS_CONSISTENCY: jnp.mean(consistency_loss),
    metric_names.POLICY_ENTROPY: -jnp.mean(jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1)),
    metric_names.TD_ERROR: jnp.mean(td_error),
  }
  return jnp.mean(batch.weight * per_sample), metrics, td_error
