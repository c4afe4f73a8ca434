"""Tests of compiled programs: when they compile, and the memory that they need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from speedyzero_jax.system.compilation import Program, memory_of


def power(scale, x, *, cubed):
  return scale * (x @ x @ x if cubed else x @ x)


def test_a_program_compiles_once_for_each_form():
  lines: list[str] = []
  program = Program(jax.jit(power, static_argnames="cubed"), "powers", lines.append)
  program.prepare(1.0, np.eye(3), cubed=True)
  assert len(lines) == 2 and all("powers, batch 3" in line for line in lines)
  small = program.bytes
  assert small >= 3 * 3 * 4
  for _ in range(2):
    np.testing.assert_array_equal(program(1.0, 2 * np.eye(3), cubed=True), 8 * np.eye(3))
  assert len(lines) == 2 and program.function._cache_size() == 1  # what was prepared is called
  np.testing.assert_array_equal(program(1.0, 2 * np.eye(50), cubed=False), 4 * np.eye(50))
  assert len(lines) == 4 and program.bytes >= small + 50 * 50 * 4
  program(1.0, np.eye(3), cubed=False)
  program(1.0, jnp.eye(3), cubed=True)  # arrays on a device compile apart
  assert len(lines) == 8
  for _ in range(2):  # a failed compilation is not remembered as done
    with pytest.raises(TypeError):
      program(1.0, np.ones((4, 2)), cubed=True)


def test_memory_excludes_arguments_and_what_takes_their_place():
  x = jnp.zeros(1000)
  assert memory_of(jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()) < 4000
  assert memory_of(jax.jit(lambda x: x + 1).lower(x).compile()) >= 4000
