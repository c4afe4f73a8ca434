"""Random keys for the initial parameters of a module."""

from typing import Any

import jax
from flax import nnx


class _Stream(nnx.RngStream):
  """A stream that counts its keys in Python, which is faster to trace.

  Under `jax.jit`, flax 0.12 takes milliseconds for each update of a count that is a jax array, and
  a second in all for a network of 80 layers.
  """

  def __init__(self, key: jax.Array, *, tag: str):
    super().__init__(key, tag=tag)
    self.used = 0

  def __call__(self) -> jax.Array:
    self.used += 1
    return jax.random.fold_in(self.key[...], self.used - 1)


def param_rngs(key: jax.Array) -> nnx.Rngs:
  """Returns `nnx.Rngs(key)`, with the same keys, that is faster to trace."""
  rngs: Any = nnx.Rngs(key)
  rngs.default = _Stream(key, tag="default")
  return rngs
