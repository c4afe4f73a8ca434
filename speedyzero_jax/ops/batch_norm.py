"""Batch norm that passes over the activations twice in training, and twice in its gradient.

Automatic differentiation of mean and variance takes another pass, and twice as many GPU kernels.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.system.platform import platform


class BatchNorm(nnx.BatchNorm):
  """`nnx.BatchNorm` over all axes but the last, without masks.

  In training, scale and bias are applied in float32.
  """

  scale: Any  # never None, unlike the base class's
  bias: Any

  def __call__(  # type: ignore[override]
    self, x: jax.Array, use_running_average: bool
  ) -> jax.Array:
    if use_running_average:
      return super().__call__(x, use_running_average)
    y, mean, var = normalize(x, self.scale[...], self.bias[...], self.epsilon, self.axis_name)
    for running, new in ((self.mean, mean), (self.var, var)):
      running[...] = self.momentum * running[...] + (1 - self.momentum) * new
    return y


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize(
  x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float, axis_name: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Normalizes activations [..., C] with the statistics of the batch.

  Args:
    x: activations; computations are in the dtype of `scale`.
    scale: [C] float32.
    bias: [C] float32.
    epsilon: added to the variance.
    axis_name: mesh axis over which statistics are averaged; None: per device.

  Returns:
    The result in the dtype of x; mean [C] and variance [C], which have no gradient.
  """
  return _forward(x, scale, bias, epsilon, axis_name)[0]


def _forward(x: Any, scale: Any, bias: Any, epsilon: float, axis_name: str | None) -> Any:
  wide = x.astype(scale.dtype)
  (total, squares), count = _over_devices(_sums(wide, wide * wide), x, axis_name)
  mean = total / count
  var = jnp.maximum(squares / count - mean * mean, 0.0)
  inverse = jax.lax.rsqrt(var + epsilon)
  y = (wide - mean) * (inverse * scale) + bias
  return (y.astype(x.dtype), mean, var), (x, scale, mean, inverse)


def _backward(epsilon: float, axis_name: str | None, saved: Any, cotangents: Any) -> Any:
  x, scale, mean, inverse = saved
  dy = cotangents[0].astype(scale.dtype)
  normal = (x.astype(scale.dtype) - mean) * inverse
  dbias, dscale = _sums(dy, dy * normal)
  (shift, slope), count = _over_devices((dbias, dscale), x, axis_name)
  dx = (dy - (shift + normal * slope) / count) * (inverse * scale)
  return dx.astype(x.dtype), dscale, dbias


normalize.defvjp(_forward, _backward)


def _sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Sums over all axes but the last: in one reduction, except on CPUs, where it is slow."""
  axes = tuple(range(x.ndim - 1))
  if platform() == "cpu":
    return jnp.sum(x, axes), jnp.sum(y, axes)
  zero = jnp.zeros((), x.dtype)
  return jax.lax.reduce((x, y), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), axes)


def _over_devices(
  sums: tuple[jax.Array, jax.Array], x: jax.Array, axis_name: str | None
) -> tuple[tuple[jax.Array, jax.Array], int]:
  """Sums over devices, in one message, and the number of summands of x [..., C] per channel."""
  count = x.size // x.shape[-1]
  if axis_name is None or jax.lax.axis_size(axis_name) == 1:
    return sums, count
  first, second = jax.lax.psum(jnp.stack(sums), axis_name)
  return (first, second), count * jax.lax.axis_size(axis_name)


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
  """ReLU whose gradient reads the result, which the next layer has saved, instead of `x`."""
  return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  y = relu(x)
  return y, y


def _relu_backward(y: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
  # Without the barrier XLA computes x again, since max(x, 0) > 0 is x > 0.
  return (jnp.where(jax.lax.optimization_barrier(y) > 0, dy, 0),)


relu.defvjp(_relu_forward, _relu_backward)
