"""Compilations by name, programs with their costs and calls, and the end of a warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.system.compilation import Compilations, Program, WarmUp, memory_of


def test_a_function_counts_once_for_each_shape():
  @jax.jit
  def cube(x):
    return x * x * x

  x = [jnp.ones(n) for n in (3, 4)]
  cube(x[0])
  with Compilations() as compilations:
    cube(x[0])
    assert compilations.names == []
    cube(x[1])
    cube(x[1])
    assert compilations.names == ["cube"]
    jax.jit(lambda x: x - 1).lower(x[0]).compile()
    assert compilations.names == ["cube", "<lambda>"]
  cube(jnp.ones(5))
  assert "cube" not in compilations.names[1:]


def power(scale, x, *, cubed):
  return scale * (x @ x @ x if cubed else x @ x)


def test_a_program_compiles_once_for_each_label_and_counts_calls():
  lines: list[str] = []
  function = jax.jit(power, static_argnames="cubed")
  program = Program(function, lambda _, x, *, cubed: f"{len(x)}, {cubed}", lines.append)
  with Compilations() as compilations:
    small = program.prepare(1.0, np.eye(3), cubed=True)
    assert len(lines) == 2 and all("3, True" in line for line in lines)
    assert not program.calls
    for _ in range(2):
      np.testing.assert_array_equal(program(1.0, 2 * np.eye(3), cubed=True), 8 * np.eye(3))
    np.testing.assert_array_equal(program(1.0, 2 * np.eye(50), cubed=False), 4 * np.eye(50))
    assert compilations.names == ["power", "power"]  # what was prepared is what is called
  large = program.prepare(1.0, np.eye(50), cubed=False)
  assert len(lines) == 4 and program.calls == {"3, True": 2, "50, False": 1}
  assert (small.flops.total(), large.flops.total()) == (2 * 2 * 3**3, 2 * 50**3)
  assert small.memory >= 3 * 3 * 4 and program.bytes == small.memory + large.memory
  assert large.traffic is not None and large.traffic >= 2 * 50 * 50 * 4
  program(1.0, jnp.eye(3), cubed=True)  # arrays on a device compile apart
  assert len(lines) == 6
  for _ in range(2):  # a failed compilation is not remembered as done
    with pytest.raises(TypeError):
      program(1.0, np.ones((4, 2)), cubed=True)


def test_memory_excludes_arguments_and_what_takes_their_place():
  x = jnp.zeros(1000)
  assert memory_of(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()) < 4000
  assert memory_of(jax.jit(lambda x: x + 1).lower(x).compile()) >= 4000


def test_a_warm_up_ends_when_all_has_worked_and_nothing_compiles():
  compilations, worked = Compilations(), False
  warm_up = WarmUp(compilations, lambda: worked)

  def steps(n):
    for _ in range(n):
      warm_up.step()
    return warm_up.over

  assert not steps(20)
  worked = True
  assert not steps(4)
  compilations.names.append("late")
  assert not steps(5)
  assert steps(1)
  compilations.names.append("later still")
  assert steps(1)  # it stays over
