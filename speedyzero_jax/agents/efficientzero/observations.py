"""Observations from stored frames: stacking and augmentation."""

import jax
import jax.numpy as jnp

from speedyzero_jax.ops.torsos import normalize


def stack_frames(frames: jax.Array, stack: int) -> jax.Array:
  """Frames [B, S+K, H, W, C], oldest first -> observations [B, K+1, H, W, S*C].

  Observation k ends with frame S-1+k.
  """
  states = frames.shape[1] - stack + 1
  return jnp.concatenate([frames[:, i : i + states] for i in range(stack)], axis=-1)


def augment(keys: jax.Array, observation: jax.Array, shift: int, intensity: float) -> jax.Array:
  """Applies a random shift (edge-padded) and random brightness.

  Vectors (H = 1) are only normalized.

  Args:
    keys: [N], one per observation, so that augmentation does not depend on sharding.
    observation: [N, H, W, C], uint8 or float.
    shift: maximum shift, pixels.
    intensity: scale s of the factor 1 + s*clip(normal, -2, 2) (DrQ; Yarats et al. 2020).

  Returns:
    float32 [N, H, W, C], normalized.
  """
  height, width = observation.shape[1:3]
  if height == 1:
    return normalize(observation)

  def one(key: jax.Array, image: jax.Array) -> jax.Array:
    shift_key, intensity_key = jax.random.split(key)
    if shift:
      y, x = jax.random.randint(shift_key, (2,), -shift, shift + 1)
      rows = jnp.clip(jnp.arange(height) + y, 0, height - 1)
      columns = jnp.clip(jnp.arange(width) + x, 0, width - 1)
      image = image[rows[:, None], columns]
    image = normalize(image)
    if intensity:
      image = image * (1 + intensity * jnp.clip(jax.random.normal(intensity_key), -2, 2))
    return image

  return jax.vmap(one)(keys, observation)
