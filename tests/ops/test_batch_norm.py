"""Tests of batch norm against the textbook formula and its automatic derivative, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.ops import batch_norm
from speedyzero_jax.system.platform import planned

EPSILON = 1e-5


def textbook(x, scale, bias):
  axes = tuple(range(x.ndim - 1))
  mean, var = jnp.mean(x, axes), jnp.var(x, axes)
  return (x - mean) / jnp.sqrt(var + EPSILON) * scale + bias, mean, var


@pytest.mark.parametrize(("platform", "shape"), [("cuda", (4, 3, 5, 2)), ("cpu", (7, 3))])
def test_value_and_gradient_are_those_of_the_formula(platform, shape):
  rng = np.random.default_rng(0)
  with jax.enable_x64(True), planned(platform):
    x, dy, join = (jnp.asarray(rng.normal(1, 2, shape)) for _ in range(3))
    scale, bias = (jnp.asarray(rng.normal(1, 0.5, shape[-1:])) for _ in range(2))

    def ours(x, join, scale, bias):
      y, *statistics = batch_norm.normalize(x, scale, bias, EPSILON, None)
      return batch_norm.relu(y + join), (y, *statistics)

    def expected(x, join, scale, bias):
      y, *statistics = textbook(x, scale, bias)
      return jnp.maximum(y + join, 0), (y, *statistics)

    for got, wanted in zip(
      *(jax.vjp(f, x, join, scale, bias, has_aux=True) for f in (ours, expected)), strict=True
    ):
      if callable(got):
        got, wanted = got(dy), wanted(dy)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), got, wanted)


def test_activations_of_few_bits_are_normalized_with_statistics_of_float32():
  """A large mean would cost bfloat16 sums all their digits; the gradient has the dtype of x."""
  x = (200 + jax.random.normal(jax.random.key(0), (512, 4))).astype(jnp.bfloat16)
  one, zero = jnp.ones(4), jnp.zeros(4)
  with jax.enable_x64(True):
    _, mean, var = textbook(jnp.asarray(x, jnp.float64), one, zero)
  (y, *statistics), pull = jax.vjp(lambda x: batch_norm.normalize(x, one, zero, EPSILON, None), x)
  np.testing.assert_allclose(statistics[0], mean, rtol=1e-6)
  np.testing.assert_allclose(statistics[1], var, rtol=0.02)
  assert y.dtype == pull((y, zero, zero))[0].dtype == jnp.bfloat16


def test_equal_activations_have_no_negative_variance():
  """For many large numbers, the mean square rounds to less than the squared mean."""
  x = jnp.broadcast_to(jnp.linspace(100, 1000, 64), (48, 64))
  y, _, var = batch_norm.normalize(x, jnp.ones(64), jnp.zeros(64), EPSILON, None)
  assert (var >= 0).all() and jnp.isfinite(y).all()
