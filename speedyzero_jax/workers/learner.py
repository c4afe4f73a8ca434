"""The learner: a jitted, sharded training step over a mesh with one axis.

Parameters are replicated and the batch is sharded. The same global batch gives the same update on
any number of devices, unless `network.batch_norm=local`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import AXIS, Agent, Arrays, Variables, mean_over_devices
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names
from speedyzero_jax.ops import optimizers
from speedyzero_jax.system.compilation import Program, Report
from speedyzero_jax.system.dispatch_lock import dispatch_lock
from speedyzero_jax.types import Params


class LearnerState(NamedTuple):
  """State updated by a training step, replicated over the mesh."""

  variables: Variables
  target: Params  # parameters of the target network; () without one
  opt_state: optax.OptState
  step: jax.Array  # [] int32, number of learner steps taken


class Gradient(NamedTuple):
  """The gradient of a batch's loss and its auxiliary outputs, averaged over the devices."""

  params: Params  # derivatives with respect to the parameters
  batch_stats: Params  # new running statistics
  metrics: dict[str, jax.Array]  # scalars, by metric name
  priority: jax.Array  # [B], errors of the samples
  step: jax.Array  # [] int32, number of learner steps behind the weights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
  """Named scalars, stacked so that a single copy takes them to the host."""

  values: jax.Array  # [n] float32
  names: tuple[str, ...] = dataclasses.field(metadata={"static": True})


class DeviceResult(NamedTuple):
  """Results of a training step on the devices, on their way to the host."""

  scalars: Scalars  # metrics, and whether any process has requested a stop
  priority: jax.Array  # [B], errors of the samples


class StepResult(NamedTuple):
  """Results of a training step, on the host."""

  metrics: dict[str, float]
  priority: np.ndarray  # [B / processes], errors of this process's samples
  stopping: bool  # any process has requested a stop


_STOPPING = "stopping"


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """Returns the learner's mesh over devices of one or several processes."""
  return Mesh(np.asarray(devices), (AXIS,))


class Learner:
  """Compiles and runs the training step.

  Args:
    mesh: from `make_mesh`.
    report: receives a line for each compilation.

  Raises ValueError if the batch size is not a multiple of the number of devices.
  """

  def __init__(self, config: Config, agent: Agent, mesh: Mesh, *, report: Report = lambda _: None):
    if config.learner.batch_size % mesh.size:
      raise ValueError(
        f"learner.batch_size={config.learner.batch_size} must be a multiple of the {mesh.size} "
        "devices"
      )
    self.mesh, self._agent = mesh, agent
    self._optimizer = optimizers.make_optimizer(config.optim)
    self._schedule = optimizers.learning_rate_schedule(config.optim)
    replicated, sharded = PartitionSpec(), PartitionSpec(AXIS)
    self._replicated, self._sharded = (NamedSharding(mesh, x) for x in (replicated, sharded))
    step = jax.shard_map(
      self._local_step,
      mesh=mesh,
      in_specs=(replicated, sharded, replicated, sharded),
      out_specs=(replicated, DeviceResult._make((replicated, sharded))),
      check_vma=False,  # gradients of replicated parameters are averaged explicitly
    )
    self.update = Program(jax.jit(step, donate_argnums=0), "train step", report)
    gradient = jax.shard_map(
      self._local_gradient,
      mesh=mesh,
      in_specs=(replicated, sharded, replicated),
      out_specs=Gradient._make((replicated, replicated, replicated, sharded, replicated)),
      check_vma=False,
    )
    self._differentiate = Program(jax.jit(gradient), "gradient", report)
    self._apply = jax.jit(self._apply_gradient, donate_argnums=0, out_shardings=self._replicated)

  @functools.cached_property
  def _flags(self) -> dict[bool, jax.Array]:
    count = len(self.mesh.local_devices)
    return {
      value: jax.make_array_from_process_local_data(self._sharded, np.full(count, value))
      for value in (False, True)
    }

  def init(self, key: jax.Array) -> LearnerState:
    """Returns an initial state on the mesh."""
    return jax.jit(self._init_state, out_shardings=self._replicated)(key)

  def abstract(self) -> LearnerState:
    """Returns shapes and dtypes of the state."""
    return jax.eval_shape(self._init_state, jax.random.key(0))

  def restore(
    self, variables: Variables, target: Params, opt_state: optax.OptState, step: int
  ) -> LearnerState:
    """Returns a state on the mesh, from the parts in a checkpoint."""
    parts = LearnerState(variables, target, opt_state, jnp.asarray(step, jnp.int32))
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(self._replicated, x), jax.device_get(parts)
    )

  def put(self, batch: Arrays) -> Arrays:
    """Places this process's shard of a batch, [B / processes, ...], on its devices of the mesh.

    Arrays already sharded over those devices are not moved.
    """
    if self.mesh.size == len(self.mesh.local_devices):
      return jax.device_put(batch, self._sharded)  # one call for all arrays, which is faster
    return multihost_utils.host_local_array_to_global_array(batch, self.mesh, PartitionSpec(AXIS))

  def step(
    self, state: LearnerState, batch: Arrays, key: jax.Array, *, stop: bool = False
  ) -> tuple[LearnerState, DeviceResult]:
    """Takes one training step; does not wait for the devices.

    Args:
      state: donated.
      batch: from `put`.
      key: of the run; the step number is folded in.
      stop: request a stop of all processes, see `StepResult.stopping`.
    """
    with dispatch_lock(self.mesh):
      return _copying(self.update(state, batch, key, self._flags[stop]))

  def gradient(self, state: LearnerState, batch: Arrays, key: jax.Array) -> Gradient:
    """Returns the gradient that `step` would apply. The state's `opt_state` is not used."""
    with dispatch_lock(self.mesh):
      return self._differentiate(state, batch, key)

  def apply(self, state: LearnerState, gradient: Gradient) -> tuple[LearnerState, DeviceResult]:
    """Takes a training step with a gradient of these or of earlier weights; donates the state."""
    with dispatch_lock(self.mesh):
      return _copying(self._apply(state, gradient))

  def fetch(self, result: DeviceResult) -> StepResult:
    """Waits for a training step and returns its results."""
    values = np.asarray(result.scalars.values).tolist()
    metrics = dict(zip(result.scalars.names, values, strict=True))
    stopping = metrics.pop(_STOPPING) > 0
    priority = multihost_utils.global_array_to_host_local_array(
      result.priority, self.mesh, PartitionSpec(AXIS)
    )
    return StepResult(metrics, np.asarray(priority), stopping)

  def arguments(self, state: LearnerState, batch: Arrays, key: jax.Array) -> tuple:
    """Returns the arguments of `update`."""
    return state, batch, key, self._flags[False]

  def _init_state(self, key: jax.Array) -> LearnerState:
    variables = self._agent.init(key)
    target = variables.params if self._agent.target_interval else ()
    opt_state = self._optimizer.init(variables.params)
    return LearnerState(variables, target, opt_state, jnp.zeros((), jnp.int32))

  def _local_step(
    self, state: LearnerState, batch: Arrays, key: jax.Array, stop: jax.Array
  ) -> tuple[LearnerState, DeviceResult]:
    gradient = self._local_gradient(state, batch, key)
    new, metrics = self._update_state(state, gradient)
    metrics[_STOPPING] = jax.lax.pmax(jnp.any(stop).astype(jnp.float32), AXIS)
    return new, DeviceResult(_stack(metrics), gradient.priority)

  def _apply_gradient(
    self, state: LearnerState, gradient: Gradient
  ) -> tuple[LearnerState, DeviceResult]:
    new, metrics = self._update_state(state, gradient)
    staleness = state.step - gradient.step
    metrics |= {names.STALENESS: staleness, names.STALENESS_MAX: staleness}
    metrics[_STOPPING] = jnp.zeros(())
    return new, DeviceResult(_stack(metrics), gradient.priority)

  def _local_gradient(self, state: LearnerState, batch: Arrays, key: jax.Array) -> Gradient:
    local = batch["frames"].shape[0]
    # Keys depend on the index in the global batch, so they are the same on any number of devices.
    index = jax.lax.axis_index(AXIS) * local + jnp.arange(local)
    of_step = functools.partial(jax.random.fold_in, jax.random.fold_in(key, state.step))
    keys = jax.vmap(of_step)(index)
    (loss, out), grads = jax.value_and_grad(self._agent.loss, has_aux=True)(
      state.variables.params, state.variables.batch_stats, state.target, batch, keys
    )
    grads = mean_over_devices(grads)
    metrics = mean_over_devices({names.LOSS_TOTAL: loss, **out.metrics})
    return Gradient(grads, out.batch_stats, metrics, out.priority, state.step)

  def _update_state(
    self, state: LearnerState, gradient: Gradient
  ) -> tuple[LearnerState, dict[str, jax.Array]]:
    """Device: the state after the update, and metrics."""
    grads, params = gradient.params, state.variables.params
    updates, opt_state = self._optimizer.update(grads, state.opt_state, params)
    params = optimizers.apply_updates(params, updates)
    target = state.target
    if self._agent.target_interval:
      due = (state.step + 1) % self._agent.target_interval == 0
      target = jax.tree.map(lambda new, old: jnp.where(due, new, old), params, target)
    metrics = gradient.metrics | {
      names.LEARNING_RATE: jnp.asarray(self._schedule(state.step), jnp.float32),
      names.GRADIENT_NORM: optimizers.norm(grads),
      names.UPDATE_NORM: optimizers.norm(updates),
      names.PARAMETER_NORM: optimizers.norm(params),
    }
    variables = Variables(params, gradient.batch_stats)
    return LearnerState(variables, target, opt_state, state.step + 1), metrics


def _stack(scalars: dict[str, jax.Array]) -> Scalars:
  return Scalars(jnp.stack([x.astype(jnp.float32) for x in scalars.values()]), tuple(scalars))


def _copying(out: tuple[LearnerState, DeviceResult]) -> tuple[LearnerState, DeviceResult]:
  """Starts to copy a step's results to the host."""
  _, result = out
  result.scalars.values.copy_to_host_async()
  result.priority.copy_to_host_async()
  return out
