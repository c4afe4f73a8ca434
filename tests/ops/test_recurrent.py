"""Tests of the LSTM core in float64: unrolling, resets, stored states and gradients."""

import functools
import itertools

import jax
import numpy as np
import pytest

import trained
from speedyzero_jax.ops import recurrent
from speedyzero_jax.ops.torsos import functional

_B, _T, _D, _H = 3, 6, 4, 5
_NETWORK = functional(lambda rngs: recurrent.Lstm(_D, _H, rngs))


@functools.cache
def _params():
  rng, shapes = np.random.default_rng(3), jax.eval_shape(_NETWORK.init, trained.KEY)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


_apply = jax.jit(_NETWORK.apply)


def _inputs(first):
  rng = np.random.default_rng(5)
  x = rng.normal(size=(_B, _T, _D)).astype(np.float32)
  return x, first, rng.normal(size=(_B, 2 * _H)).astype(np.float32)


def _resets():
  """Cases: no reset, one at each position, all positions, and random ones in each sample."""
  rows = np.zeros(_T, bool), *np.eye(_T, dtype=bool), np.ones(_T, bool)
  random = np.random.default_rng(0).random((_B, _T)) < 0.3
  return [*(np.broadcast_to(row, (_B, _T)) for row in rows), random]


@pytest.mark.parametrize("first", _resets())
def test_outputs_and_state(first):
  x, first, state = _inputs(first)
  outputs, after = _apply(_params(), x, first, state)
  for b in range(_B):
    expected, states = trained.lstm(_params(), x[b], first[b], state[b])
    np.testing.assert_allclose(outputs[b], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[b], states[-1], rtol=1e-5, atol=1e-6)


def test_single_steps_and_parts_do_as_one_unroll():
  x, first, state = _inputs(np.broadcast_to(np.arange(_T) == 3, (_B, _T)))
  whole, after = _apply(_params(), x, first, state)
  for cuts in (range(_T + 1), (0, 2, _T)):
    now, parts = state, []
    for begin, end in itertools.pairwise(cuts):
      part, now = _apply(_params(), x[:, begin:end], first[:, begin:end], now)
      parts.append(part)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(now, after, rtol=1e-5, atol=1e-6)


def test_no_gradient_passes_a_reset():
  x, first, state = _inputs(np.broadcast_to(np.arange(_T) == 3, (_B, _T)))

  def later(x, state):
    return _apply(_params(), x, first, state)[0][:, 3:].sum()

  for_x, for_state = jax.grad(later, argnums=(0, 1))(x, state)
  assert not for_state.any() and not for_x[:, :3].any() and for_x[:, 3:].all()
