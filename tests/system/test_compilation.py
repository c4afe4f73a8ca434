"""What compiles is heard by name; and a run compiles nothing more once it is warm."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from speedyzero_jax.run import loops
from speedyzero_jax.system.compilation import Compilations, Program, WarmUp


def test_a_function_is_heard_once_for_each_shape():
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
    assert compilations.names == ["cube"] and compilations.seconds("cube") > 0
    jax.jit(lambda x: x - 1).lower(x[0]).compile()
    assert compilations.names == ["cube", "<lambda>"]
  cube(jnp.ones(5))
  assert "cube" not in compilations.names[1:] and compilations.seconds("never") == 0


def test_a_program_tells_what_compiles_before_and_after_once_for_each_label():
  said: list[str] = []

  def power(scale, x, *, cubed):
    return scale * (x @ x @ x if cubed else x @ x)

  program = Program(
    jax.jit(power, static_argnames="cubed"),
    lambda _, x, *, cubed: f"{len(x)}, {cubed}",
    said.append,
  )
  with Compilations() as compilations:
    assert program.bytes == 0
    program.prepare(1.0, np.eye(3), cubed=True)
    assert [line.split(", True")[0] for line in said] == ["compiling 3", "compiled 3"]
    small = program.bytes
    assert small >= 3 * 3 * 4  # the result at least
    for _ in range(2):
      np.testing.assert_array_equal(program(1.0, 2 * np.eye(3), cubed=True), 8 * np.eye(3))
    assert len(said) == 2
    np.testing.assert_array_equal(program(1.0, 2 * np.eye(50), cubed=False), 4 * np.eye(50))
    assert (
      len(said) == 4
      and said[2].startswith("compiling 50, False")
      and program.bytes >= small + 50 * 50 * 4
    )
    assert compilations.names == ["power", "power"]  # what was prepared is what is called
  assert program.seconds("3, True") > 0 == program.seconds("4, True")
  program(1.0, jnp.eye(3), cubed=True)  # what lies on a device may compile apart, and is told so
  assert said[4].startswith("compiling 3, True") and program.bytes >= 2 * small + 50 * 50 * 4
  for _ in range(2):  # what does not compile is no reason to believe that it has
    with pytest.raises(TypeError):
      program(1.0, np.ones((4, 2)), cubed=True)


def test_warm_is_who_has_worked_and_compiled_nothing_for_a_while():
  heard, worked = Compilations(), False
  warm_up = WarmUp(heard, lambda: worked)

  def steps(n):
    for _ in range(n):
      warm_up.step()
    return warm_up.over

  assert not steps(20)  # not everything has worked yet
  worked = True
  assert not steps(4)
  heard.names.append("late")
  assert not steps(5)
  assert steps(1)
  heard.names.append("later still")
  assert steps(1)  # it stays over


# With checkpoints, lines of metrics, weights handed on, temperatures that change and, at the end, lanes that close.
@pytest.mark.parametrize(
  "overrides", [("replay.frames=device",), ("reanalyse.schedule=batch", "replay.frames=host")]
)
def test_nothing_compiles_after_the_warm_up(tmp_path, monkeypatch, overrides):
  tiny.share_compiled(monkeypatch)
  config = tiny.config(*overrides, "learner.steps=25", "run.env_steps=250")
  with Compilations() as compilations, tiny.training(config, tmp_path) as training:
    warm_up = WarmUp(compilations, lambda: training.in_full_work)
    warm: list[int] = []  # programs compiled until each warm step

    def look():
      warm_up.step()
      if warm_up.over:
        warm.append(len(compilations.names))

    training.after_step.append(look)
    assert loops.run(training)
    assert len(warm) >= 12
    assert compilations.names[warm[0] :] == []
    # It would have been heard.
    training.inference.value(
      training.state.variables, np.zeros((4 + len(overrides), 2, 1, 1, 50), np.float32)
    )
    assert "_value_windows" in compilations.names[warm[0] :]
