"""Compilation, before a run begins, of every program that it will call again and again.

Programs are compiled beside each other with placeholder arguments that have the shapes and placement
of real ones, and each is timed alone.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import ActInputs, Agent, Arrays, Work
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.builders import mean_stored, shortest_lane
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.system.compilation import Program
from speedyzero_jax.system.costs import median_seconds
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.weights import ACTOR

_LONG = 5.0  # seconds after which one measurement is enough


class _Call(NamedTuple):
  per_step: float  # calls per learner step, on average over the rest of the run
  prepare: Callable[[], None]
  run: Callable[[], Any]


def prepare(experiment: Experiment) -> float | None:
  """Compiles all programs of this process, unless the run is interrupted.

  Returns:
    Mean seconds of a learner step over the rest of the run if all work is done in sequence; None where
    it is not all done in this process, or not all was measured.
  """
  calls = list(_calls(experiment))
  with ThreadPoolExecutor() as pool:
    for future in [pool.submit(_unless_interrupted, experiment, call.prepare) for call in calls]:
      future.result()
  membership = experiment.membership
  if membership.units > 1 or not (membership.acts and membership.sweeps):
    return None
  seconds = 0.0
  for call in calls:
    if experiment.interrupted:
      return None
    seconds += call.per_step * _alone(call.run)
  return seconds


def _alone(run: Callable[[], Any]) -> float:
  """Seconds of a call; for a long one those of the first call, which is somewhat slower."""

  def waited() -> None:
    jax.block_until_ready(run())

  begin = time.perf_counter()
  waited()
  first = time.perf_counter() - begin
  return first if first > _LONG else median_seconds(waited, 1)


def _unless_interrupted(experiment: Experiment, call: Callable[[], None]) -> None:
  if not experiment.interrupted:
    call()


def _calls(experiment: Experiment) -> Iterator[_Call]:
  config, agent, key = experiment.own, experiment.agent, jax.random.key(0)
  limiter, inference = experiment.limiter, experiment.inference
  steps = max(config.learner.steps - limiter.learner_steps, 1)
  weights = {name: version.variables for name, version in experiment.weights.snapshot().items()}

  def call(per_step: float, program: Program, *args: Any, **kwargs: Any) -> _Call:
    return _Call(
      per_step, partial(program.prepare, *args, **kwargs), partial(program, *args, **kwargs)
    )

  def task(name: str, per_step: float, count: int, after: int) -> _Call:
    spread = count % inference.devices == 0
    frames = experiment.replay.blanks(count, after, spread=spread)
    variables = weights[agent.tasks[name].subscription]
    return call(per_step, inference.tasks[name], variables, frames, key)

  if experiment.membership.acts:
    left = config.run.env_steps - max(limiter.env_steps, config.actor.random_steps)
    per_step = max(left, 0) / config.actor.lanes / steps
    inputs = _act_inputs(experiment)
    yield call(per_step, inference.act, weights[ACTOR], inputs, key, np.float32(0), explore=True)
  batch, works = example_batch(experiment)
  if experiment.membership.sweeps:
    for sweeper in experiment.sweepers:
      stored = mean_stored(config, agent, limiter.env_steps)
      yield task(sweeper.name, sweeper.calls_per_step(stored), sweeper.block, 0)
    for work in works:
      yield task(work.task, 1, len(work.lane), work.real.shape[1] - 1)
  arrays = experiment.learner.put(batch)
  copy = jax.jit(partial(jax.tree.map, jnp.copy))  # a step donates its state
  yield _Call(
    1,
    partial(experiment.learner.prepare, experiment.state, arrays, key),
    lambda: experiment.learner.step(copy(experiment.state), arrays, key),
  )


def _act_inputs(experiment: Experiment) -> ActInputs:
  config, agent = experiment.own, experiment.agent
  lanes, frame = config.actor.lanes, agent.schema.frame
  return ActInputs(
    np.zeros((lanes, config.env.frame_stack, *frame.shape), frame.dtype),
    np.ones(lanes, bool),
    np.zeros(lanes, np.int32),
    jax.tree.map(np.asarray, agent.initial_core(lanes)),
  )


def example_batch(experiment: Experiment) -> tuple[Arrays, list[Work]]:
  """A batch with the shapes of real ones, and the work that precedes it, from a replay of zeros."""
  config, agent = experiment.own, experiment.agent
  size = config.learner.batch_size
  replay = _zeros(agent, config.env.frame_stack, shortest_lane(config, agent) + 1, size)
  with replay.lock:
    selection = replay.select(size)
    works = agent.batch_work(replay, selection)
    arrays, _ = agent.assemble(replay, selection, 0)
  window = agent.window
  if not window.within_episode:
    arrays |= {"stack": replay.trajectories(selection.lane, selection.time, window.after)[1]}
  frames = experiment.replay.blanks(size, window.after, spread=True)
  return {"frames": frames, **arrays}, works


def _zeros(agent: Agent, stack: int, slots: int, batch: int) -> Replay:
  """A replay of zeros from which a batch can be selected."""
  lanes = 1
  while True:
    replay = Replay(
      agent.schema,
      agent.make_selector,
      lanes=lanes,
      capacity=2 * slots,
      frame_stack=stack,
      rng_seed=0,
    )
    columns = {
      column.name: np.zeros((slots, *column.shape), column.dtype) for column in agent.schema.columns
    }
    columns["first"][0] = True
    replay.append_many([Segment.of(lane, 0, columns) for lane in range(lanes)])
    if replay.ready(batch):
      return replay
    lanes = batch
