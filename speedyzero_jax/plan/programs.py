"""The programs of a run with abstract arguments, for devices that need not be there."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from speedyzero_jax.agents.base import AXIS, ActInputs, Agent, Variables
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.builders import mean_stored
from speedyzero_jax.run.warmup import example_batch
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner, LearnerState
from speedyzero_jax.workers.sweeper import make_sweepers

ROLES = frozenset({"actor", "refresher"})  # what a learner process does besides learning


class Planned(NamedTuple):
  """A program of a learner process."""

  name: str  # "train", "act", "evaluate", "publish", or that of a task
  batch: int  # samples or states of a call, on all devices that share it
  calls: float  # in the whole run
  lowered: jax.stages.Lowered


def abstract_state(learner: Learner) -> LearnerState:
  """The learner's state, replicated over its mesh."""
  state: LearnerState = _on(NamedSharding(learner.mesh, PartitionSpec()), learner.abstract())
  return state


def programs(
  config: Config, own: Config, agent: Agent, learner: Learner, local: Mesh, roles: frozenset[str]
) -> Iterator[Planned]:
  """What a learner process compiles.

  Args:
    config: of the run.
    own: this process' share of it.
    agent: of the run.
    learner: on the mesh of all learner processes.
    local: this process' devices.
    roles: what the process does besides learning, from `ROLES`.
  """
  state, arrays, works = abstract_state(learner), *example_batch(own, agent)
  frames = functools.partial(_frames, own, agent, local)
  inference = Inference(agent, local)
  variables = _on(NamedSharding(local, PartitionSpec()), state.variables)
  key = _key(local)
  steps = config.learner.steps
  yield Planned(
    "train", config.learner.batch_size, steps, _train(config, own, agent, learner, state, arrays)
  )
  yield Planned("publish", 1, _publications(config, agent), _copy.lower(variables))
  act = functools.partial(_act, own, agent, inference, variables, key)
  yield Planned("evaluate", config.evaluation.episodes, 0, act(own.evaluation.episodes, False))
  if "actor" in roles:
    calls = max(own.run.env_steps - own.actor.random_steps, 0) / own.actor.lanes
    yield Planned("act", own.actor.lanes, calls, act(own.actor.lanes, True))
  if "refresher" in roles:
    stored = mean_stored(own, agent, own.actor.random_steps)
    for sweeper in make_sweepers(agent, own.actor.weights_interval):
      lowered = inference.tasks[sweeper.name].function.lower(
        variables, frames(sweeper.block, 0), key
      )
      calls = steps * sweeper.calls_per_step(stored)
      yield Planned(sweeper.name, sweeper.block, calls, lowered)
    for work in works:
      count, states = work.real.shape
      lowered = inference.tasks[work.task].function.lower(
        variables, frames(count, states - 1), key
      )
      yield Planned(work.task, work.real.size, steps, lowered)


_copy = jax.jit(functools.partial(jax.tree.map, jnp.copy))


def _publications(config: Config, agent: Agent) -> float:
  intervals = [config.actor.weights_interval, *agent.subscriptions.values()]
  return sum(config.learner.steps / interval for interval in intervals)


def _train(
  config: Config,
  own: Config,
  agent: Agent,
  learner: Learner,
  state: LearnerState,
  arrays: dict[str, np.ndarray],
) -> jax.stages.Lowered:
  size = config.learner.batch_size
  divided = NamedSharding(learner.mesh, PartitionSpec(AXIS))
  batch = {
    name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=divided)
    for name, x in arrays.items()
  }
  batch["frames"] = jax.ShapeDtypeStruct(
    (size, own.env.frame_stack + agent.window.after, *agent.schema.frame.shape),
    agent.schema.frame.dtype,
    sharding=divided,
  )
  flags = jax.ShapeDtypeStruct((learner.mesh.size,), bool, sharding=divided)
  lowered: jax.stages.Lowered = learner.update.function.lower(
    state, batch, _key(learner.mesh), flags
  )
  return lowered


def _act(
  own: Config,
  agent: Agent,
  inference: Inference,
  variables: Variables,
  key: Any,
  count: int,
  explore: bool,
) -> jax.stages.Lowered:
  core = jax.eval_shape(lambda: agent.initial_core(count))
  shape = (count, own.env.frame_stack, *agent.schema.frame.shape)
  inputs = ActInputs(
    jax.ShapeDtypeStruct(shape, agent.schema.frame.dtype),
    jax.ShapeDtypeStruct((count,), bool),
    jax.ShapeDtypeStruct((count,), np.int32),
    core,
  )
  mesh = variables_mesh(variables)
  inputs = _on(NamedSharding(mesh, _divided(mesh, count)), inputs)
  progress = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  lowered: jax.stages.Lowered = inference.act.function.lower(
    variables, inputs, key, progress, explore=explore
  )
  return lowered


def variables_mesh(variables: Variables) -> Mesh:
  """The mesh over which abstract variables are replicated."""
  mesh: Mesh = jax.tree.leaves(variables)[0].sharding.mesh
  return mesh


def _frames(own: Config, agent: Agent, mesh: Mesh, count: int, after: int) -> jax.ShapeDtypeStruct:
  column = agent.schema.frame
  return jax.ShapeDtypeStruct(
    (count, own.env.frame_stack + after, *column.shape),
    column.dtype,
    sharding=NamedSharding(mesh, _divided(mesh, count)),
  )


def _divided(mesh: Mesh, count: int) -> PartitionSpec:
  return PartitionSpec(AXIS) if count % mesh.size == 0 else PartitionSpec()


def _key(mesh: Mesh) -> Any:
  return _on(
    NamedSharding(mesh, PartitionSpec()), jax.eval_shape(functools.partial(jax.random.key, 0))
  )


def _on(sharding: Sharding, tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
