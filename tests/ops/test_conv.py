"""Tests of convolution against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.ops import conv
from speedyzero_jax.system.platform import planned

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


# Not drawn by hypothesis: XLA's compiler aborts for the input gradient of some, for example 10x5
# pixels, a kernel of 2x4, strides of 2 and padding ((1, 1), (0, 2)).
@pytest.mark.parametrize(
  "sides, kernel, strides, padding",
  [
    ((10, 9), (4, 4), (2, 2), "SAME"),
    ((8, 9), (3, 3), (2, 2), ((1, 1), (1, 1))),
    ((21, 22), (8, 8), (4, 4), "VALID"),
    ((7, 9), (3, 2), (2, 1), ((0, 2), (1, 0))),
    ((11, 8), (5, 3), (3, 2), "SAME"),
    ((6, 6), (3, 3), (1, 1), "SAME"),
    ((7, 8), (1, 1), (2, 2), "VALID"),
  ],
)
def test_outputs_and_gradients_of_large_batches(sides, kernel, strides, padding):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(7, *sides, 2)).astype(np.float32)
  weights = rng.normal(size=(*kernel, 2, 3)).astype(np.float32)

  def run(convolve):
    y, pullback = jax.vjp(
      lambda x, weights: convolve(x, weights, strides, padding, dimension_numbers=DIMENSIONS),
      x, weights,
    )  # fmt: skip
    return y, *pullback(jnp.cos(jnp.arange(y.size)).reshape(y.shape))

  expected = run(jax.lax.conv_general_dilated)
  with planned("cpu"), pytest.MonkeyPatch.context() as patch:
    patch.setattr(conv, "_CHUNK", 2)
    patch.setattr(conv, "_MAX_CHUNKS", 3)  # of 3, 3 and 1 images
    patch.setattr(conv, "_MIN_PIXELS", 0)
    patch.setattr(conv, "_MIN_WEIGHTS", 0)
    found = run(conv.convolve)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "images, outputs, convolutions",
  [
    (conv._CHUNK, 3, 1 + 1 + 1),  # of outputs, input gradient and kernel gradient
    (2 * conv._CHUNK + 6, 3, 1 + 1 + 3),
    (2 * conv._CHUNK + 6, conv._MIN_WEIGHTS, 3 + 1 + 3),
    (9999, 3, 1 + 1 + conv._MAX_CHUNKS),
  ],
)
def test_large_batches_are_convolved_in_chunks_and_without_dilation(images, outputs, convolutions):
  x = jax.ShapeDtypeStruct((images, 24, 24, 2), jnp.float32)
  weights = jax.ShapeDtypeStruct((3, 3, 2, outputs), jnp.float32)

  def gradients(x, weights):
    y = conv.convolve(x, weights, (2, 2), "SAME", dimension_numbers=DIMENSIONS)
    return jnp.sum(y**2)

  with planned("cpu"):
    text = jax.jit(jax.grad(gradients, (0, 1))).trace(x, weights).lower().as_text()
  assert text.count("stablehlo.convolution") == convolutions
  assert ("lhs_dilate = [2, 2]" in text) == (images <= conv._CHUNK)


def test_channels_of_16_bit_inputs_are_aligned_on_gpus():
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(2, 6, 6, 12)), jnp.bfloat16)
  kernel = jnp.asarray(rng.normal(size=(3, 3, 12, 5)), jnp.bfloat16)

  def run(x, kernel):
    return conv.convolve(
      x, kernel, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )

  def pullback(x, kernel):
    return jax.vjp(run, x, kernel)[1](jnp.ones((2, 3, 3, 5), jnp.bfloat16))

  def channels(x, kernel):
    eqns = jax.make_jaxpr(lambda *args: run(*args))(x, kernel).eqns
    return [e.invars[0].aval.shape[-1] for e in eqns if e.primitive.name == "conv_general_dilated"]

  expected = run(x, kernel), *pullback(x, kernel)
  with planned("cuda"):
    found = run(x, kernel), *pullback(x, kernel)
    assert channels(x, kernel) == [16]
    assert channels(x.astype(jnp.float32), kernel.astype(jnp.float32)) == [12]
  for a, b in zip(expected, found, strict=True):
    np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02)
