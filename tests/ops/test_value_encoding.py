"""Tests of the encoding of values against its formula."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from speedyzero_jax.ops import value_encoding
from trained import h

_scalars = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)
_transform, _inverse = jax.jit(value_encoding.transform), jax.jit(value_encoding.inverse_transform)
_two_hot_of = jax.jit(value_encoding.two_hot, static_argnums=1)
_decode = jax.jit(value_encoding.decode)


@hypothesis.given(_scalars)
def test_transform_is_its_formula_and_inverse_transform_undoes_it(x):
  y = float(_transform(np.float32(x)))
  np.testing.assert_allclose(y, h(x), rtol=1e-5, atol=2e-7)
  np.testing.assert_allclose(_inverse(np.float32(h(x))), x, rtol=1e-5, atol=1e-37)
  np.testing.assert_allclose(_inverse(np.float32(y)), x, rtol=1e-5, atol=1e-6)


@hypothesis.given(_scalars, st.sampled_from([1, 300]))
@hypothesis.example(0.0, 300)
@hypothesis.example(1e6, 300)
@hypothesis.example(-1e6, 1)
def test_two_hot_is_two_neighbors_whose_mean_is_the_value(x, support):
  p = np.asarray(_two_hot_of(np.float32(x), support), np.float64)
  atoms = np.arange(-support, support + 1)
  mean = np.clip(h(x), -support, support)
  assert p.shape == (2 * support + 1,) and p.min() >= 0
  np.testing.assert_allclose(p.sum(), 1, rtol=1e-6)
  np.testing.assert_allclose(p @ atoms, mean, rtol=1e-5, atol=1e-5)
  assert np.all(np.abs(atoms[p > 0] - mean) < 1 + 1e-4)  # nothing further away than a neighbor
  if abs(h(x)) > support:
    assert p[0 if x < 0 else -1] == 1

  inside = math.copysign(min(abs(x), float(_inverse(np.float32(support)))), x)
  with np.errstate(divide="ignore"):
    decoded = _decode(np.float32(np.log(p)))
  np.testing.assert_allclose(decoded, inside, rtol=1e-3, atol=1e-4)
