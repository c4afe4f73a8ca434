"""Compiled inference for acting and for background tasks, on the devices of one process."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import ActInputs, ActOutput, Agent, Arrays
from speedyzero_jax.system.compilation import Program, Report
from speedyzero_jax.system.dispatch_lock import dispatch_lock
from speedyzero_jax.workers.weights import Version, device_get_finite


class Inference:
  """An agent's programs for acting and for tasks, each compiled once per batch size.

  Args:
    agent: defines the programs.
    mesh: devices of this process. Inputs are sharded over it and weights replicated. None: the
      default device.
    report: receives a line for each compilation.
  """

  def __init__(self, agent: Agent, mesh: Mesh | None = None, *, report: Report = lambda _: None):
    self._mesh = mesh
    self.act = Program(self._compiled(agent.act, "explore"), "act", report)
    self.tasks = {
      name: Program(self._compiled(task.program), name, report)
      for name, task in agent.tasks.items()
    }

  def _compiled(self, function: Callable, *static: str) -> Any:
    if self._mesh is None or self._mesh.size == 1:
      return jax.jit(function, static_argnames=static)
    return _Sharded(function, self._mesh, static)

  @property
  def program_bytes(self) -> int:
    """Bytes on each device that the compiled programs need in addition to their arguments."""
    return self.act.bytes + sum(program.bytes for program in self.tasks.values())

  def decide(
    self, version: Version, inputs: ActInputs, key: jax.Array, progress: float, *, explore: bool
  ) -> ActOutput:
    """Returns the output of `Agent.act` on the host.

    Raises DivergedError if any value is not finite.
    """
    out = self.act(version.variables, inputs, key, np.float32(progress), explore=explore)
    return device_get_finite(version, out)

  def compute(self, version: Version, task: str, inputs: Arrays, key: jax.Array) -> Arrays:
    """Returns the results of a task's program, [B, n, ...] each, on the host.

    Raises DivergedError if any value is not finite.
    """
    inputs = inputs | steps_of(version.step, len(inputs["frames"]))
    return device_get_finite(version, self.tasks[task](version.variables, inputs, key))


def steps_of(step: int, batch: int) -> Arrays:
  """Returns the input `step` of a task's program."""
  return {"step": np.full(batch, step, np.int32)}


class _Sharded:
  """Jitted `function(variables, inputs, key, *rest)` with inputs sharded over a mesh."""

  def __init__(self, function: Callable, mesh: Mesh, static: Sequence[str]):
    self._mesh, (axis,) = mesh, mesh.axis_names
    parts, whole = PartitionSpec(axis), PartitionSpec()
    self._parts, self._whole = NamedSharding(mesh, parts), NamedSharding(mesh, whole)

    @partial(jax.jit, static_argnames=static)
    @wraps(function)  # compilations are reported by function name
    def program(variables: Any, inputs: Any, key: jax.Array, *rest: Any, **static: Any) -> Any:
      def of_part(variables: Any, inputs: Any, key: jax.Array, *rest: Any) -> Any:
        key = jax.random.fold_in(key, jax.lax.axis_index(axis))
        return function(variables, inputs, key, *rest, **static)

      batch = len(jax.tree.leaves(inputs)[0])
      # Pad to a multiple of the devices by repeating the last input.
      padded = np.minimum(np.arange(batch + -batch % mesh.size), batch - 1)
      inputs = jax.tree.map(lambda x: x[padded], inputs) if len(padded) > batch else inputs
      specs = (whole, parts, whole, *[whole] * len(rest))
      sharded = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=parts, check_vma=False)
      return jax.tree.map(lambda x: x[:batch], sharded(variables, inputs, key, *rest))

    self._program, self.__name__ = program, function.__name__

  def __call__(self, variables: Any, inputs: Any, *rest: Any, **static: Any) -> Any:
    where = self._where(inputs)
    inputs = jax.device_put(inputs, where)
    # Only results of padded batches are gathered by collectives.
    with contextlib.nullcontext() if where is self._parts else dispatch_lock(self._mesh):
      return self._program(variables, inputs, *rest, **static)

  def lower(self, variables: Any, inputs: Any, *rest: Any, **static: Any) -> jax.stages.Lowered:
    """Like the method `lower` of a jitted function."""
    where = self._where(inputs)
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), inputs)
    return self._program.lower(variables, inputs, *rest, **static)

  def _where(self, inputs: Any) -> NamedSharding:
    divisible = len(jax.tree.leaves(inputs)[0]) % self._mesh.size == 0
    return self._parts if divisible else self._whole
