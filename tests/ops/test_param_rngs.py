"""Tests of random keys of initial parameters against flax's."""

import jax
import numpy as np
import pytest
from flax import nnx

from speedyzero_jax.ops.param_rngs import param_rngs
from speedyzero_jax.ops.torsos import functional


class _Mixed(nnx.Module):
  """A module that uses keys in each way that a network may."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(2, 3, rngs=rngs)
    self.scale = nnx.Param(rngs.params.uniform((3,)))
    self.shift = nnx.Param(jax.random.normal(rngs(), (3,)))
    stacked = nnx.vmap(lambda r: nnx.Linear(2, 2, rngs=r), in_axes=0, out_axes=0)
    self.stack = stacked(rngs.fork(split=4))


def _params(module):
  return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@pytest.mark.filterwarnings("ignore:The 'split' argument:DeprecationWarning")
def test_keys_are_those_of_flax():
  key = jax.random.key(3)
  expected = jax.jit(lambda key: _params(_Mixed(nnx.Rngs(key))))(key)
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.jit(lambda key: _params(_Mixed(param_rngs(key))))(key),
    expected,
  )
  jax.tree.map(np.testing.assert_array_equal, functional(_Mixed).init(key), expected)
