"""Convolution with faster gradients on CPUs, and aligned channels on accelerators."""

from typing import Any

import jax
import jax.numpy as jnp

from speedyzero_jax.system.platform import platform

_ALIGNMENT = 8  # input channels at 16 bits; cuDNN pads others in a slow pass of its own
_MIN_PIXELS = 32 * 24 * 24  # fewer input pixels in a batch: convolved and differentiated by XLA
_MIN_WEIGHTS = 8 * 8 * 4 * 32  # smaller kernels: outputs of the whole batch at once
_CHUNK = 32  # images per chunk of a batch, or more
_MAX_CHUNKS = 32  # of a batch; each is compiled


def convolve(
  x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: Any, **options: Any
) -> jax.Array:
  """Like `jax.lax.conv_general_dilated` for channels last, one group and no dilation, but faster.

  On CPUs, large batches are divided into chunks of 32 images, which makes kernel gradients two to
  five times as fast, and the outputs of large kernels twice as fast. For the input gradient of a
  convolution with strides, XLA inserts zeros between output pixels; without them it is three to six
  times as fast. (Layers of `nature` and `small` in `torsos.py`, 672 images, two cores.)

  On accelerators, zeros pad the channels of 16-bit inputs to a multiple of 8: XLA fuses this with
  the computation of the input.
  """

  def whole(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, strides, padding, **options)

  half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 2
  if platform() != "cpu" and half and (missing := -x.shape[-1] % _ALIGNMENT):
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    kernel = jnp.pad(kernel, [(0, 0)] * (kernel.ndim - 2) + [(0, missing), (0, 0)])
  if platform() != "cpu" or len(x) <= _CHUNK or x.size // x.shape[-1] < _MIN_PIXELS:
    return whole(x, kernel)

  def unstrided(x: jax.Array, kernel: jax.Array) -> jax.Array:
    x, kernel = _without_strides(x, kernel, strides, padding)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", **options)

  def chunks(x: jax.Array) -> list[jax.Array]:
    size = max(_CHUNK, -(-len(x) // _MAX_CHUNKS))
    return [x[i : i + size] for i in range(0, len(x), size)]

  @jax.custom_vjp
  def chunked(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if kernel.size < _MIN_WEIGHTS:
      return whole(x, kernel)
    return jnp.concatenate([whole(chunk, kernel) for chunk in chunks(x)])

  def backward(saved: tuple[jax.Array, jax.Array], y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    forward = unstrided if max(strides) > 1 else whole
    (dx,) = jax.linear_transpose(lambda x: forward(x, kernel), x)(y)
    return dx, sum(
      jax.linear_transpose(lambda kernel, x=x: whole(x, kernel), kernel)(y)[0]
      for x, y in zip(chunks(x), chunks(y), strict=True)
    )

  chunked.defvjp(lambda x, kernel: (chunked(x, kernel), (x, kernel)), backward)
  return chunked(x, kernel)


def _without_strides(
  x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: Any
) -> tuple[jax.Array, jax.Array]:
  """Returns input and kernel of an equivalent convolution with strides 1 and no padding.

  For strides (a, b), blocks of a x b pixels become the channels of one pixel (space to depth).
  """
  (_, *sides, channels), sizes = x.shape, kernel.shape[:2]
  if isinstance(padding, str):
    padding = jax.lax.padtype_to_pads(sides, sizes, strides, padding)
  pads, ends = [(0, 0, 0)], []
  for side, size, stride, (before, after) in zip(sides, sizes, strides, padding, strict=True):
    end = -size % stride  # the kernel is padded to whole blocks
    used = (side + before + after - size) // stride * stride + size + end
    pads.append((before, used - side - before, 0))
    ends.append((0, end))
  x = jax.lax.pad(x, jnp.zeros((), x.dtype), [*pads, (0, 0, 0)])
  kernel = jnp.pad(kernel, [*ends, (0, 0), (0, 0)])
  (n, height, width, _), (a, b) = x.shape, strides
  x = x.reshape(n, height // a, a, width // b, b, channels).swapaxes(2, 3)
  rows, columns, _, outputs = kernel.shape
  kernel = kernel.reshape(rows // a, a, columns // b, b, channels, outputs).swapaxes(1, 2)
  channels *= a * b
  return (
    x.reshape(n, height // a, width // b, channels),
    kernel.reshape(rows // a, columns // b, channels, outputs),
  )
