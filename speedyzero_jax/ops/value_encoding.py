"""Encoding of values: MuZero's transform h, and two-hot distributions over the integers.

Source: MuZero (Schrittwieser et al. 2020), appendix F.
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = Any  # numpy or jax
_EPSILON = 0.001  # of `transform`


def transform(x: Array) -> Array:
  """h(x) = sign(x)(sqrt(|x|+1)-1) + 0.001x (Pohlen et al. 2018), as in MuZero and R2D2."""
  xp = x.__array_namespace__()
  return xp.sign(x) * (xp.sqrt(xp.abs(x) + 1) - 1) + _EPSILON * x


def inverse_transform(y: Array) -> Array:
  """Inverse of h, in a form that is accurate near zero in float32."""
  xp = y.__array_namespace__()
  y_abs = xp.abs(y)
  # u = sqrt(|x|+1)-1 is a root of eps*u^2 + (1+2*eps)*u - |y| = 0; then |x| = u*(u+2).
  b = 1 + 2 * _EPSILON
  u = 2 * y_abs / (b + xp.sqrt(b * b + 4 * _EPSILON * y_abs))
  return xp.sign(y) * u * (u + 2)


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
