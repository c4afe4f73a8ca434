"""The training step: one jitted shard_map over a mesh with one axis, `data`.

Parameters are replicated, the batch is sharded; gradients, batch statistics (if synchronised) and the largest
importance weight are the only collectives. The same global batch gives the same update on any number of devices.
Knows nothing of replay, threads or files.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.networks import (
  Blueprint,
  Variables,
  make_blueprint,
  variables_of,
)
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names
from speedyzero_jax.ops import optimizers
from speedyzero_jax.system.compilation import Program
from speedyzero_jax.system.dispatch_lock import in_order
from speedyzero_jax.types import LearnerBatch, Params

AXIS = "data"
_TRUST_RATIOS = {
  "min": names.TRUST_RATIO_MIN,
  "mean": names.TRUST_RATIO_MEAN,
  "max": names.TRUST_RATIO_MAX,
  "fraction_clipped": names.TRUST_RATIO_CLIPPED,
}


class LearnerState(NamedTuple):
  """All that a training step changes; replicated over the mesh."""

  variables: Variables
  opt_state: optax.OptState
  step: jax.Array  # [] int32, steps taken


class StepResult(NamedTuple):
  """What a step reports; stays on the device until somebody asks."""

  metrics: dict[str, chex.Array]  # scalars, by metric name
  td_error: chex.Array  # [B] |v - z| of the sampled states
  stopping: chex.Array  # [] bool, some process wants to leave


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """The learner's mesh over these devices, of one process or of several."""
  return Mesh(np.asarray(devices), (AXIS,))


class Learner:
  """Compiles and runs the training step; `update` is the jitted function itself.

  Args:
    config: of the run.
    observation_shape: [H, W, S*C].
    num_actions: |A|.
    mesh: from `make_mesh`.
    report: takes a line when something compiles.

  Raises:
    ValueError: the batch can't be shared equally among the devices.
  """

  def __init__(
    self,
    config: Config,
    observation_shape: tuple[int, int, int],
    num_actions: int,
    mesh: Mesh,
    *,
    report: Callable[[str], None] = lambda _: None,
  ):
    if config.learner.batch_size % mesh.size:
      raise ValueError(
        f"learner.batch_size={config.learner.batch_size} is not a multiple of {mesh.size} devices"
      )
    self.mesh = mesh
    self._config = config
    self._sync = config.agent.network.batch_norm == "sync"
    self._blueprint = make_blueprint(
      config.agent.network, observation_shape, num_actions, axis_name=AXIS if self._sync else None
    )
    self._optimizer = optimizers.make_optimizer(config.optim)
    self._schedule = optimizers.learning_rate_schedule(config.optim)
    self._replicated = NamedSharding(mesh, PartitionSpec())
    self._sharded = NamedSharding(mesh, PartitionSpec(AXIS))
    self.update = Program(jax.jit(self._make_step(), donate_argnums=0), self._label, report)
    here = len(mesh.local_devices)
    self._flags = {
      value: jax.make_array_from_process_local_data(self._sharded, np.full(here, value))
      for value in (False, True)
    }

  @property
  def blueprint(self) -> Blueprint:
    """The network's, for inference elsewhere."""
    return self._blueprint

  def init(self, key: jax.Array) -> LearnerState:
    """A fresh state on the mesh."""
    return jax.jit(self._fresh, out_shardings=self._replicated)(key)

  def abstract(self) -> LearnerState:
    """Shapes of the state, for restoring a checkpoint onto one device of this process."""
    here = jax.sharding.SingleDeviceSharding(self.mesh.local_devices[0])
    shapes = jax.eval_shape(self._fresh, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)

  def restore(self, variables: Variables, opt_state: optax.OptState, step: int) -> LearnerState:
    """A state from its parts, for a checkpoint that was read."""
    state = jax.device_get(LearnerState(variables, opt_state, jnp.asarray(step, jnp.int32)))
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(self._replicated, x), state
    )

  def put(self, batch: LearnerBatch) -> LearnerBatch:
    """Puts this process' share of a batch, [B / processes, ...], onto its devices of the mesh, each its own part.

    What lies on them already, so spread, stays where it is.
    """

    def place(x: chex.Array) -> jax.Array:
      if not isinstance(x, jax.Array):
        return jax.make_array_from_process_local_data(self._sharded, x)
      shape = (x.shape[0] * self.mesh.size // len(self.mesh.local_devices), *x.shape[1:])
      return jax.make_array_from_single_device_arrays(
        shape, self._sharded, [s.data for s in x.addressable_shards]
      )

    return jax.tree.map(place, batch)

  @staticmethod
  def local(x: jax.Array) -> np.ndarray:
    """This process' part of something sharded over the mesh, [B / processes, ...]; waits for it."""
    if x.is_fully_addressable:
      return np.asarray(x)
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])

  def step(
    self, state: LearnerState, batch: LearnerBatch, key: jax.Array, *, stop: bool = False
  ) -> tuple[LearnerState, StepResult]:
    """One update. `state` is donated: don't use it again. `key` is the run's; the step number is folded in.

    `stop` says that this process wants to leave; all learn of it from the same step's result.
    """
    with in_order(self.mesh):
      state, result = self.update(state, batch, key, self._flags[stop])
    return state, StepResult(*result)

  def prepare(self, state: LearnerState, batch: LearnerBatch, key: jax.Array) -> None:
    """Compiles the step, unless it is."""
    self.update.prepare(state, batch, key, self._flags[False])

  def lower(self, state: LearnerState, batch: LearnerBatch, key: jax.Array) -> jax.stages.Lowered:
    """The step before compilation, to look at its cost."""
    return self.update.lower(state, batch, key, self._flags[False])

  @staticmethod
  def _label(state: LearnerState, batch: LearnerBatch, *_: Any) -> str:
    return f"train step, batch {len(batch.action)}"

  def _fresh(self, key: jax.Array) -> LearnerState:
    variables = self._blueprint.init(key)
    return LearnerState(variables, self._optimizer.init(variables.params), jnp.zeros((), jnp.int32))

  def _make_step(self):
    replicated, sharded = PartitionSpec(), PartitionSpec(AXIS)
    return jax.shard_map(
      self._local_step,
      mesh=self.mesh,
      in_specs=(replicated, sharded, replicated, sharded),
      out_specs=(replicated, (replicated, sharded, replicated)),
      check_vma=False,  # gradients of replicated parameters are averaged by hand below
    )

  def _mean(self, tree: Any) -> Any:
    """The mean over devices, in one message: between CPU processes each array would be sent by itself."""
    if self.mesh.size == 1:
      return tree
    flat, unravel = jax.flatten_util.ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, AXIS))

  def _local_step(
    self, state: LearnerState, batch: LearnerBatch, key: jax.Array, stop: jax.Array
  ) -> tuple[LearnerState, tuple[dict[str, jax.Array], jax.Array, jax.Array]]:
    local = batch.action.shape[0]
    # One key per sample by its place in the global batch, so that sharding changes no augmentation.
    index = jax.lax.axis_index(AXIS) * local + jnp.arange(local)
    keys = jax.vmap(partial(jax.random.fold_in, jax.random.fold_in(key, state.step)))(index)
    weight = batch.weight / jax.lax.pmax(jnp.max(batch.weight), AXIS)
    batch = batch._replace(weight=jnp.maximum(weight, self._config.agent.priority.min_weight))

    def loss_fn(params: Params):
      network = self._blueprint.bind(Variables(params, state.variables.batch_stats))
      loss, terms = losses.unrolled_loss(
        network,
        batch,
        keys,
        self._config.agent.loss,
        frame_stack=self._config.env.frame_stack,
        horizon=self._config.agent.network.value_prefix_horizon,
      )
      return loss, (terms, variables_of(network).batch_stats)

    (loss, (terms, stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      state.variables.params
    )
    grads = self._mean(grads)
    if not self._sync:
      stats = self._mean(stats)
    params = state.variables.params
    updates, opt_state = self._optimizer.update(grads, state.opt_state, params)
    params = optax.apply_updates(params, updates)
    means = self._mean(
      {
        names.LOSS_TOTAL: loss,
        names.LOSS_VALUE: terms.value,
        names.LOSS_VALUE_PREFIX: terms.value_prefix,
        names.LOSS_POLICY: terms.policy,
        names.LOSS_CONSISTENCY: terms.consistency,
        names.POLICY_ENTROPY: terms.policy_entropy,
        names.TD_ERROR: jnp.mean(terms.td_error),
      }
    )
    metrics = means | {
      names.LEARNING_RATE: jnp.asarray(self._schedule(state.step), jnp.float32),
      names.GRADIENT_NORM: optax.tree.norm(grads),
      names.UPDATE_NORM: optax.tree.norm(updates),
      names.PARAMETER_NORM: optax.tree.norm(params),
    }
    metrics |= {
      _TRUST_RATIOS[name]: value
      for name, value in optimizers.trust_ratio_summary(opt_state).items()
    }
    new = LearnerState(Variables(params, stats), opt_state, state.step + 1)
    stopping = jax.lax.pmax(jnp.any(stop).astype(jnp.int32), AXIS) > 0
    return new, (metrics, terms.td_error, stopping)
