"""Tests of convolution against XLA's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.ops import conv
from speedyzero_jax.system.platform import planned


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
