"""Tests of convolution against XLA's own."""

import functools

import jax
import numpy as np
import pytest

from speedyzero_jax.ops import conv


@pytest.mark.parametrize("stride", [1, 2])
def test_kernel_gradient_in_pieces(stride):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(2 * conv._CHUNK + 6, 24, 24, 2)).astype(
    np.float32
  )  # two whole pieces and a rest
  kernel = rng.normal(size=(3, 3, 2, 3)).astype(np.float32)
  cotangent = rng.normal(size=(len(x), 24 // stride, 24 // stride, 3)).astype(np.float32)

  def pullback(convolve, x, kernel):
    def run(x, kernel):
      return convolve(
        x, kernel, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
      )

    return jax.vjp(run, x, kernel)[1](cotangent)

  ours = functools.partial(pullback, conv.convolve)
  theirs = functools.partial(pullback, jax.lax.conv_general_dilated)
  for a, b in zip(ours(x, kernel), theirs(x, kernel), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)

  def convolutions(of):
    return str(jax.make_jaxpr(of)(x, kernel)).count("= conv_general_dilated[")

  assert convolutions(ours) == convolutions(theirs) + (2 if jax.default_backend() == "cpu" else 0)
