"""Random keys of initial parameters against flax's."""

import jax
import numpy as np
from flax import nnx

from speedyzero_jax.ops.param_rngs import param_rngs


def test_keys_are_those_of_flax():
  key = jax.random.key(3)
  expected, rngs = nnx.Rngs(key), param_rngs(key)
  for _ in range(3):
    np.testing.assert_array_equal(
      jax.random.key_data(rngs.params()), jax.random.key_data(expected.params())
    )
