"""A run's programs with abstract arguments, for devices that need not be present."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import AXIS, ActInputs, Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import episode_cap
from speedyzero_jax.run import topology
from speedyzero_jax.run.factories import mean_stored
from speedyzero_jax.run.warmup import example_batch, placeholders
from speedyzero_jax.system.memory import bytes_of
from speedyzero_jax.workers.evaluator import MAX_LANES
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner
from speedyzero_jax.workers.sweeper import make_sweepers
from speedyzero_jax.workers.weights import publication

# Possible roles of a learner process besides learning.
ROLES: frozenset[topology.Kind] = frozenset({"actor", "refresher"})
EPISODE = 2000  # assumed agent steps of an evaluation episode, if the game may last so long
_WHOLE = PartitionSpec()


class Planned(NamedTuple):
  """A program of a learner process."""

  name: str  # "train", "act", "evaluate", "publish", or a task's name
  batch: int  # samples or states per call, over all devices that share it
  calls: float  # in the whole run
  state_bytes: int  # bytes of the first argument if it should be updated in place, else 0
  function: Any  # jitted function, or an object with its `lower` method
  args: tuple  # abstract; the first is the learner's state, its variables or published ones
  options: dict[str, Any]  # static arguments

  def compile(self) -> jax.stages.Compiled:
    """Compiles the program."""
    compiled: jax.stages.Compiled = self.function.lower(*self.args, **self.options).compile()
    return compiled


def learner_roles(config: Config) -> frozenset[str]:
  """Roles, besides learning, of the learner process that has the most of them."""
  shape = topology.resolve(config)
  last = shape.learners - 1  # with the fewest actors and refreshers
  roles = {kind for kind in ROLES if not shape.serving(kind, last)}
  central = config.topology.inference == "central"  # the learner's devices act
  return frozenset(roles | {"actor"} if central else roles)


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
  arrays, works = example_batch(local_config, agent)
  inference, steps = Inference(agent, local), config.learner.steps
  abstract, key = learner.abstract(), jax.eval_shape(functools.partial(jax.random.key, 0))
  state, variables = _on(learner.mesh, _WHOLE, abstract), _on(local, _WHOLE, abstract.variables)
  published = _on(local, _WHOLE, jax.eval_shape(agent.published, abstract.variables))

  def task(name: str, count: int, states: int, calls: float) -> Planned:
    inputs = jax.eval_shape(lambda: placeholders(agent.tasks[name], count, states - 1))
    inputs |= {"frames": _frames(local_config, agent, count, states - 1)}
    args = published, _on(local, _batch_spec(local, count), inputs), _on(local, _WHOLE, key)
    return Planned(name, count * states, calls, 0, inference.tasks[name].function, args, {})

  def act(name: str, count: int, calls: float, explore: bool) -> Planned:
    inputs, progress = _inputs(local_config, agent, count), jax.ShapeDtypeStruct((), np.float32)
    inputs = _on(local, _batch_spec(local, count), inputs)
    args = published, inputs, *_on(local, _WHOLE, (key, progress))
    return Planned(name, count, calls, 0, inference.act.function, args, {"explore": explore})

  update, size = learner.update.function, config.learner.batch_size
  batch = {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in arrays.items()}
  batch |= {"frames": _frames(config, agent, size, agent.window.after)}
  flags = jax.ShapeDtypeStruct((learner.mesh.size,), bool)
  batch, flags = _on(learner.mesh, PartitionSpec(AXIS), (batch, flags))
  args = state, batch, _on(learner.mesh, _WHOLE, key), flags
  yield Planned("train", size, steps, bytes_of(state), update, args, {})
  intervals = {config.actor.weights_interval, *agent.subscriptions.values()}
  copies = sum(any(step % n == 0 for n in intervals) for step in range(1, steps + 1))
  yield Planned("publish", 1, copies, 0, publication(agent), (variables,), {})
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
  interval, before_last = config.evaluation.interval, config.learner.steps - 1
  times = int(config.evaluation.at_end) + (before_last // interval if interval else 0)
  length = min(EPISODE, episode_cap(config.env.game, config.evaluation.max_episode_steps))
  return times * length * -(-config.evaluation.episodes // MAX_LANES)


def _inputs(local_config: Config, agent: Agent, count: int) -> ActInputs:
  return ActInputs(
    _frames(local_config, agent, count, 0),
    jax.ShapeDtypeStruct((count,), bool),
    jax.ShapeDtypeStruct((count,), np.int32),
    jax.eval_shape(lambda: agent.initial_core(count)),
  )


def _frames(config: Config, agent: Agent, count: int, after: int) -> jax.ShapeDtypeStruct:
  frame = agent.schema.frame
  return jax.ShapeDtypeStruct((count, config.env.frame_stack + after, *frame.shape), frame.dtype)


def _batch_spec(mesh: Mesh, count: int) -> PartitionSpec:
  return PartitionSpec(AXIS) if count % mesh.size == 0 else PartitionSpec()


def _on(mesh: Mesh, spec: PartitionSpec, tree: Any) -> Any:
  sharding = NamedSharding(mesh, spec)
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)
