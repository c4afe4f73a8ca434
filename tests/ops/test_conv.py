"""Tests of convolution against XLA's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.ops import conv
from speedyzero_jax.system.platform import planned

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


# Not drawn by hypothesis: XLA's compiler aborts for some shapes (of kernels with one row).
@pytest.mark.parametrize("min_weights", [0, 1000])
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
def test_outputs_and_gradients_of_large_batches(sides, kernel, strides, padding, min_weights):
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
    patch.setattr(conv, "_MIN_WEIGHTS", min_weights)
    found = run(conv.convolve)
  for a, b in zip(found, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_gradients_of_large_batches_are_computed_in_chunks_and_without_dilation():
  x, weights = jnp.zeros((2 * conv._CHUNK + 6, 24, 24, 2)), jnp.zeros((3, 3, 2, 3))

  def gradients(x, weights):
    y = conv.convolve(x, weights, (2, 2), "SAME", dimension_numbers=DIMENSIONS)
    return jnp.sum(y**2)

  def convolutions(*arguments):
    text = jax.jit(jax.grad(gradients, (0, 1))).trace(*arguments).lower().as_text()
    return [line for line in text.splitlines() if "stablehlo.convolution" in line]

  with planned("cpu"):
    large = convolutions(x, weights)
    small = convolutions(x[: conv._CHUNK], weights)
  assert len(large) == 1 + 1 + 3  # outputs, input gradient, kernel gradient of three chunks
  assert not any("lhs_dilate = [2, 2]" in line for line in large)
  assert len(small) == 3 and any("lhs_dilate = [2, 2]" in line for line in small)


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
