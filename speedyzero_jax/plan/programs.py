"""A run's programs with abstract arguments, for devices that need not be present."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from speedyzero_jax.agents.base import AXIS, ActInputs, Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.factories import mean_stored
from speedyzero_jax.run.warmup import example_batch
from speedyzero_jax.system.memory import bytes_of
from speedyzero_jax.workers.evaluator import MAX_LANES
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner, LearnerState
from speedyzero_jax.workers.sweeper import make_sweepers
from speedyzero_jax.workers.weights import copy_tree

ROLES = frozenset({"actor", "refresher"})  # possible roles of a learner process besides learning
EPISODE = 2000  # assumed agent steps of an evaluation episode


class Planned(NamedTuple):
  """A program of a learner process."""

  name: str  # "train", "act", "evaluate", "publish", or a task's name
  batch: int  # samples or states per call, over all devices that share it
  calls: float  # in the whole run
  state_bytes: int  # bytes of the first argument if it should be updated in place, else 0
  function: Any  # jitted function, or an object with its `lower` method
  args: tuple  # abstract arguments; the first is the learner's state or its variables
  options: dict[str, Any]  # static arguments

  def compile(self) -> jax.stages.Compiled:
    """Compiles the program."""
    compiled: jax.stages.Compiled = self.function.lower(*self.args, **self.options).compile()
    return compiled


def abstract_state(learner: Learner) -> LearnerState:
  """The learner's abstract state, replicated over its mesh."""
  state: LearnerState = _on(NamedSharding(learner.mesh, PartitionSpec()), learner.abstract())
  return state


def programs(
  config: Config,
  local_config: Config,
  agent: Agent,
  learner: Learner,
  local: Mesh,
  roles: frozenset[str],
) -> Iterator[Planned]:
  """Yields the programs of a learner process with these `roles` besides learning.

  `local_config` is its share of the configuration and `local` the mesh of its devices; the
  learner's mesh spans all learner processes.
  """
  state, (arrays, works) = abstract_state(learner), example_batch(local_config, agent)
  inference, steps = Inference(agent, local), config.learner.steps
  variables = _on(NamedSharding(local, PartitionSpec()), state.variables)

  def task(name: str, count: int, states: int, calls: float) -> Planned:
    sharding = NamedSharding(local, _divided(local, count))
    inputs = {
      x.name: jax.ShapeDtypeStruct((count, states, *x.shape), x.dtype, sharding=sharding)
      for x in agent.tasks[name].reads
    }
    inputs |= {"frames": _frames(local_config, agent, local, count, states - 1)}
    args = variables, inputs, _key(local)
    return Planned(name, count * states, calls, 0, inference.tasks[name].function, args, {})

  def act(name: str, count: int, calls: float, explore: bool) -> Planned:
    args = variables, _inputs(local_config, agent, local, count), _key(local), _progress(local)
    return Planned(name, count, calls, 0, inference.act.function, args, {"explore": explore})

  args = state, _batch(config, agent, learner, arrays), _key(learner.mesh), _flags(learner)
  update, size = learner.update.function, config.learner.batch_size
  yield Planned("train", size, steps, bytes_of(state), update, args, {})
  intervals = {config.actor.weights_interval, *agent.subscriptions.values()}
  copies = sum(any(step % n == 0 for n in intervals) for step in range(1, steps + 1))
  yield Planned("publish", 1, copies, 0, copy_tree, (variables,), {})
  together = min(config.evaluation.episodes, MAX_LANES)
  yield act("evaluate", together, evaluation_steps(config), config.evaluation.explore)
  if "actor" in roles:
    lanes = local_config.actor.lanes
    calls = max(local_config.run.env_steps - local_config.actor.random_steps, 0) / lanes
    yield act("act", lanes, calls, True)
  if "refresher" in roles:
    stored = mean_stored(local_config, agent, local_config.actor.random_steps)
    for sweeper in make_sweepers(agent, local_config.actor.weights_interval):
      calls = steps * sweeper.calls_per_step(stored)
      yield task(sweeper.name, sweeper.block, 1, calls)
    for work in works:
      count, states = work.real.shape
      yield task(work.task, count, states, steps)


def evaluation_steps(config: Config) -> float:
  """Vectorized steps of all evaluations of a run, with up to `MAX_LANES` parallel episodes."""
  interval = config.evaluation.interval
  times = int(config.evaluation.at_end) + (config.learner.steps // interval if interval else 0)
  return times * EPISODE * -(-config.evaluation.episodes // MAX_LANES)


def _batch(
  config: Config, agent: Agent, learner: Learner, arrays: dict[str, np.ndarray]
) -> dict[str, jax.ShapeDtypeStruct]:
  size, divided = config.learner.batch_size, NamedSharding(learner.mesh, PartitionSpec(AXIS))
  frame = agent.schema.frame
  shape = (size, config.env.frame_stack + agent.window.after, *frame.shape)
  return {
    "frames": jax.ShapeDtypeStruct(shape, frame.dtype, sharding=divided),
    **{
      name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype, sharding=divided)
      for name, x in arrays.items()
    },
  }


def _flags(learner: Learner) -> jax.ShapeDtypeStruct:
  divided = NamedSharding(learner.mesh, PartitionSpec(AXIS))
  return jax.ShapeDtypeStruct((learner.mesh.size,), bool, sharding=divided)


def _inputs(local_config: Config, agent: Agent, mesh: Mesh, count: int) -> ActInputs:
  inputs = ActInputs(
    _frames(local_config, agent, mesh, count, 0),
    jax.ShapeDtypeStruct((count,), bool),
    jax.ShapeDtypeStruct((count,), np.int32),
    jax.eval_shape(lambda: agent.initial_core(count)),
  )
  placed: ActInputs = _on(NamedSharding(mesh, _divided(mesh, count)), inputs)
  return placed


def _frames(
  local_config: Config, agent: Agent, mesh: Mesh, count: int, after: int
) -> jax.ShapeDtypeStruct:
  frame = agent.schema.frame
  shape = (count, local_config.env.frame_stack + after, *frame.shape)
  sharding = NamedSharding(mesh, _divided(mesh, count))
  return jax.ShapeDtypeStruct(shape, frame.dtype, sharding=sharding)


def _progress(mesh: Mesh) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))


def _divided(mesh: Mesh, count: int) -> PartitionSpec:
  return PartitionSpec(AXIS) if count % mesh.size == 0 else PartitionSpec()


def _key(mesh: Mesh) -> Any:
  return _on(
    NamedSharding(mesh, PartitionSpec()), jax.eval_shape(functools.partial(jax.random.key, 0))
  )


def _on(sharding: Sharding, tree: Any) -> Any:
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
