"""Convolution with a faster weight gradient on CPUs, and aligned channels on accelerators."""

from typing import Any

import jax
import jax.numpy as jnp

from speedyzero_jax.system.platform import platform

_ALIGNMENT = 8  # input channels at 16 bits; cuDNN pads others in a slow pass of its own
_CHUNK = 32  # images per chunk of a weight gradient on a CPU


def convolve(
  x: jax.Array, kernel: jax.Array, strides: tuple[int, ...], padding: Any, **options: Any
) -> jax.Array:
  """Like `jax.lax.conv_general_dilated` for channels last and one group, but faster.

  XLA's CPU backend contracts the weight gradient over the whole batch. Summing it over chunks of 32
  images is twice as fast for 256 images of at least 24x24.

  On accelerators, zeros pad the channels of 16-bit inputs to a multiple of 8: XLA fuses this with
  the computation of the input.
  """

  def whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)

  half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
  if platform() != "cpu" and half and (missing := -x.shape[-1] % _ALIGNMENT):
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    kernel = jnp.pad(kernel, [(0, 0)] * (kernel.ndim - 2) + [(0, missing), (0, 0)])
  if platform() != "cpu" or len(x) <= _CHUNK or x.shape[1] * x.shape[2] < 24 * 24:
    return whole(x, kernel)

  @jax.custom_vjp
  def chunked(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return whole(x, kernel)

  def backward(saved: tuple[jax.Array, jax.Array], y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    (dx,) = jax.linear_transpose(lambda x: whole(x, kernel), x)(y)
    chunks = [slice(i, i + _CHUNK) for i in range(0, len(x), _CHUNK)]
    return dx, sum(
      jax.linear_transpose(lambda k, at=at: whole(x[at], k), kernel)(y[at])[0] for at in chunks
    )

  chunked.defvjp(lambda x, kernel: (whole(x, kernel), (x, kernel)), backward)
  return chunked(x, kernel)
