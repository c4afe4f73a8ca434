"""What XLA counts of programs, and what this machine does."""

import math

import jax
import jax.numpy as jnp
import pytest

from speedyzero_jax.system import costs
from speedyzero_jax.system.costs import Cost


def _lowered(function, *shapes):
  return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


def test_a_matrix_product_costs_what_it_costs():
  cost = costs.cost_of(_lowered(jnp.matmul, (64, 32), (32, 16)))
  assert cost.flops == pytest.approx(2 * 64 * 32 * 16, rel=0.01)
  assert cost.bytes == pytest.approx(4 * (64 * 32 + 32 * 16 + 64 * 16), rel=0.01)


def test_loops_count_once():
  """What the count of a search is built on."""

  def repeated(times):
    return lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ x, x)

  two, nine = (costs.cost_of(_lowered(repeated(times), (64, 64))).flops for times in (2, 9))
  assert two == pytest.approx(2 * 64**3, rel=0.01)
  assert nine == pytest.approx(two, rel=0.01)


class _Silent:
  """A program of a backend that does not count."""

  def __init__(self, answer):
    self._answer = answer

  def compile(self):
    return self

  def cost_analysis(self):
    if isinstance(self._answer, Exception):
      raise self._answer
    return self._answer

  memory_analysis = cost_analysis


@pytest.mark.parametrize("answer", [None, {}, [], NotImplementedError(), RuntimeError("no")])
def test_where_nothing_is_counted(answer):
  cost = costs.cost_of(_Silent(answer))
  assert math.isnan(cost.flops) and math.isnan(cost.bytes)
  if not isinstance(answer, dict | list):
    assert costs.memory_of(_Silent(answer)) is None


def test_the_count_that_sees_more_is_taken():
  """A GPU's libraries hide what they do from the count of a compiled program."""

  class Lowered(_Silent):
    def compile(self):
      return _Silent([{"flops": -1.0, "bytes accessed": 8.0}])

  assert costs.cost_of(Lowered({"flops": 100.0, "bytes accessed": 1000.0})) == Cost(100.0, 8.0)


def test_memory_beside_the_arguments():
  compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(1000)).compile()
  assert costs.memory_of(compiled) < 4000  # the result takes the argument's place
  assert costs.memory_of(jax.jit(lambda x: x + 1).lower(jnp.zeros(1000)).compile()) >= 4000


def test_median_seconds_runs_at_least_twice_and_no_longer_than_patience():
  calls = []
  assert costs.median_seconds(lambda: calls.append(1), repeat=7) >= 0
  assert len(calls) == 8
  calls.clear()
  costs.median_seconds(lambda: calls.append(1), repeat=7, patience=0.0)
  assert len(calls) == 2
