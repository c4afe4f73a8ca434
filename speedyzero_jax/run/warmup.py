"""Compilation and timing, before a run begins, of every program that it will call repeatedly.

Programs are compiled with placeholder arguments that have the shapes and placement of real ones:
for CPUs in parallel, for accelerators one after another, as the compiler chooses kernels by their
time on the device. Then each is timed in isolation.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs, Agent, Arrays, Task, Work
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.factories import mean_stored, shortest_lane
from speedyzero_jax.system.compilation import Program
from speedyzero_jax.system.platform import platform
from speedyzero_jax.types import Slots
from speedyzero_jax.workers.batched_inference import padded_batch_size
from speedyzero_jax.workers.inference import steps_of
from speedyzero_jax.workers.sweeper import make_sweepers, split
from speedyzero_jax.workers.weights import ACTOR, copy_tree

_MAX_TIMING = 5.0  # seconds of calls after which a program is not called again


class Timing(NamedTuple):
  """A program that a run calls repeatedly."""

  program: str  # "train", "act", or the name of a task
  calls: float  # per learner step, on average over the rest of the run
  seconds: float  # of one call in isolation


class _Call(NamedTuple):
  """A program with placeholder arguments: `compile` only compiles it, `run` calls it."""

  name: str
  per_step: float
  compile: Callable[[], None]
  run: Callable[[], Any]


def prepare(experiment: Experiment) -> list[Timing]:
  """Compiles all programs of this process, and times them if it is the only learner process.

  Returns an empty list if the run is interrupted.
  """

  def compile_now(call: _Call) -> None:
    interrupted = experiment.interrupted
    if call.name == "train":  # the learner processes compile it together
      interrupted = any(experiment.membership.all_gather(int(interrupted)))
    if not interrupted:
      call.compile()

  calls = list(_calls(experiment))
  with ThreadPoolExecutor(None if platform() == "cpu" else 1) as pool:
    list(pool.map(compile_now, calls))
  timings = []
  for call in calls if experiment.membership.units == 1 else ():
    if experiment.interrupted:
      return []
    timings.append(Timing(call.name, call.per_step, _seconds(call.run)))
  return timings


def _seconds(run: Callable[[], Any]) -> float:
  """Seconds of the fastest of up to three calls."""
  times: list[float] = []
  while len(times) < 3 and sum(times) < _MAX_TIMING:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - begin)
  return min(times)


def _calls(experiment: Experiment) -> Iterator[_Call]:
  config, agent, key = experiment.local_config, experiment.agent, jax.random.key(0)
  limiter, inference = experiment.limiter, experiment.inference
  begin = max(limiter.env_steps, config.actor.random_steps)  # when learning begins or resumes
  steps = max(config.learner.steps - limiter.learner_steps, 1)
  weights = {name: version.variables for name, version in experiment.weights.snapshot().items()}

  def call(name: str, program: Program, per_step: float, *args: Any, **keywords: Any) -> _Call:
    run, compiles = partial(program, *args, **keywords), partial(program.prepare, *args, **keywords)
    return _Call(name, per_step, compiles, run)

  def task(name: str, per_step: float, count: int, after: int) -> _Call:
    variables = weights[agent.tasks[name].subscription]
    inputs = placeholders(agent.tasks[name], count, after)
    inputs |= {"frames": experiment.replay.blanks(count, after)}
    return call(name, inference.tasks[name], per_step, variables, inputs, key)

  per_step = max(config.run.env_steps - begin, 0) / config.actor.lanes / steps
  for lanes in _acting_lanes(config, experiment.membership.runs_actor):
    frame, core = agent.schema.frame, jax.tree.map(np.asarray, agent.initial_core(lanes))
    frames = np.zeros((lanes, config.env.frame_stack, *frame.shape), frame.dtype)
    inputs = ActInputs(frames, np.ones(lanes, bool), np.zeros(lanes, np.int32), core)
    args = weights[ACTOR], inputs, key, np.float32(0)
    yield call("act", inference.act, per_step, *args, explore=True)
    per_step = 0.0  # forecast as if all batches had the largest size
  if config.topology.gradients == "actors":  # which then train
    return
  batch, works = example_batch(config, agent)
  batch |= {"frames": experiment.replay.blanks(config.learner.batch_size, agent.window.after)}
  if experiment.membership.runs_sweeps:
    stored = mean_stored(config, agent, begin)
    for sweeper in experiment.sweepers:
      yield task(sweeper.name, sweeper.calls_per_step(stored), sweeper.block, 0)
  if limiter.learner_steps == config.learner.steps:  # only experience is still to be collected
    return
  if experiment.membership.runs_sweeps:
    for work in works:
      yield task(work.task, 1, len(work.lane), work.real.shape[1] - 1)
  learner, arrays = experiment.learner, experiment.learner.put(batch)
  train = call("train", learner.update, 1, *learner.arguments(experiment.state, arrays, key))
  # A step donates its state.
  yield train._replace(run=lambda: learner.step(copy_tree(experiment.state), arrays, key))


def _acting_lanes(config: Config, runs_actor: bool) -> list[int]:
  """Returns the numbers of lanes for which a learner process computes actions, largest first."""
  lanes, topology = config.actor.lanes, config.topology
  if topology.inference != "central":
    return [lanes] if runs_actor else []
  actors = -(-topology.actors // max(topology.learners, 1))
  largest, smallest = padded_batch_size(lanes), padded_batch_size(lanes // actors)
  return [largest >> i for i in range((largest // smallest).bit_length())]


def placeholders(task: Task, count: int, after: int) -> Arrays:
  """Returns inputs, without frames, of `count` states and the `after` slots that follow each."""
  inputs = {x.name: np.zeros((count, after + 1, *x.shape), x.dtype) for x in task.reads}
  return inputs | steps_of(0, count)


def task_shapes(config: Config, agent: Agent, refreshers: int) -> set[tuple[str, int, int]]:
  """Returns the name, states and slots after them of each call that a refresher will get.

  `refreshers` share the work of each batch.
  """
  sweepers = make_sweepers(agent, config.actor.weights_interval)
  parts = [part for work in example_batch(config, agent)[1] for part in split(work, refreshers)]
  shapes = {(part.task, len(part.lane), part.real.shape[1] - 1) for part in parts}
  return shapes | {(sweeper.name, sweeper.block, 0) for sweeper in sweepers}


def example_batch(config: Config, agent: Agent) -> tuple[Arrays, list[Work]]:
  """Returns a batch of one process, without frames, and the work requested for it.

  All samples are the first slot of a replay of zeros, and have the shapes of real ones.
  """
  size, window = config.learner.batch_size, agent.window
  replay = _zeros(agent, config.env.frame_stack, shortest_lane(config, agent) + 1)
  selection = Selection(np.zeros(size, np.int32), np.zeros(size, np.int64), np.ones(size))
  with replay.lock:
    works = agent.batch_work(replay, selection)
    arrays, _ = agent.assemble(replay, selection, 0)
  if not window.within_episode:
    arrays |= {"stack": replay.trajectories(selection.lane, selection.time, window.after)[1]}
  return arrays, works


def _zeros(agent: Agent, stack: int, slots: int) -> Replay:
  """Returns a replay whose only lane holds an open episode of zeros."""
  columns = {x.name: np.zeros((slots, *x.shape), x.dtype) for x in agent.schema.columns}
  columns["first"][0] = True
  replay = Replay(
    agent.schema,
    agent.make_selector,
    lanes=1,
    capacity=slots,
    frame_stack=stack,
    rng_seed=0,
  )
  replay.append(Slots.of_lane(0, 0, columns))
  return replay
