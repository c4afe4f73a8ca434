"""The invertible rescaling of values (Pohlen et al. 2018), used by MuZero and R2D2."""

import jax
import jax.numpy as jnp

_EPSILON = 0.001


def transform(x: jax.Array) -> jax.Array:
  """h(x) = sign(x)(sqrt(|x|+1)-1) + 0.001x."""
  return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1) - 1) + _EPSILON * x


def inverse_transform(y: jax.Array) -> jax.Array:
  """Inverse of h, in a form accurate near zero in float32."""
  y_abs = jnp.abs(y)
  # u = sqrt(|x|+1)-1 is a root of eps*u^2 + (1+2*eps)*u - |y| = 0; then |x| = u*(u+2).
  b = 1 + 2 * _EPSILON
  u = 2 * y_abs / (b + jnp.sqrt(b * b + 4 * _EPSILON * y_abs))
  return jnp.sign(y) * u * (u + 2)
