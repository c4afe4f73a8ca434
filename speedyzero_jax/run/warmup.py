"""Compiles what a run will call again and again before it begins, and finds out what each of it takes alone.

With arguments that show nothing, but have the shapes of the real ones and lie where those will.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.replay.experience import Array
from speedyzero_jax.run.builders import game_of, mean_stored
from speedyzero_jax.run.experiment import Training
from speedyzero_jax.system.compilation import Program
from speedyzero_jax.system.costs import median_seconds
from speedyzero_jax.types import LearnerBatch
from speedyzero_jax.workers.weights import ACTOR, REANALYSER, REFRESHER

_LONG = 5.0  # seconds


class _Call(NamedTuple):
  """Something that a run does."""

  per_step: float  # how often, for each learner step, on average from now to its end
  prepare: Callable[[], None]
  run: Callable[[], Any]


def prepare(training: Training) -> float | None:
  """Compiles all that this process calls until the final evaluation, as far as the run is not interrupted.

  Returns:
    Seconds that a learner step will take on average from now on, if what belongs to it is done one after another; None
    where it is not all done here, or not all was tried.
  """
  calls = list(_calls(training))
  with ThreadPoolExecutor() as pool:
    for prepared in [pool.submit(_unless_interrupted, training, call.prepare) for call in calls]:
      prepared.result()
  part = training.part
  if part.units > 1 or not (part.acts and part.reanalyses):
    return None
  seconds = 0.0
  for call in calls:
    if training.interrupted:
      return None
    seconds += call.per_step * _alone(call.run)
  return seconds


def _alone(run: Callable[[], Any]) -> float:
  """Seconds that it takes; the first time, which is somewhat slow, is good enough of what takes long."""

  def waited() -> None:
    jax.block_until_ready(run())

  begin = time.perf_counter()
  waited()
  first = time.perf_counter() - begin
  return first if first > _LONG else median_seconds(waited, 1)


def _unless_interrupted(training: Training, call: Callable[[], None]) -> None:
  if not training.interrupted:
    call()


def _calls(training: Training) -> Iterator[_Call]:
  config, part, key = training.own, training.part, jax.random.key(0)
  learner, reanalyse, unroll = (
    config.learner,
    config.agent.reanalyse,
    config.agent.loss.unroll_steps,
  )
  steps = max(learner.steps - training.pacer.learner_steps, 1)
  weights = {name: version.variables for name, version in training.weights.snapshot().items()}
  search, value = training.inference.search, training.inference.value

  def call(per_step: float, program: Program, *args: Any, **kwargs: Any) -> _Call:
    return _Call(
      per_step, partial(program.prepare, *args, **kwargs), partial(program, *args, **kwargs)
    )

  def windows(count: int, after: int) -> Array:
    return training.replay.blanks(count, after, spread=count % training.inference.devices == 0)

  if part.acts:
    game = game_of(config)
    shown = np.zeros(
      (config.actor.lanes, config.env.frame_stack, *game.frame_shape), game.frame_dtype
    )
    searched = config.run.env_steps - max(training.pacer.env_steps, config.actor.random_steps)
    yield call(
      max(searched, 0) / config.actor.lanes / steps,
      search,
      weights[ACTOR],
      shown,
      key,
      1.0,
      explore=True,
    )
  for sweeper in training.sweepers if part.reanalyses else ():
    frames = windows(sweeper.block, 0)
    per_step = sweeper.calls_per_step(mean_stored(config, training.pacer.env_steps))
    if sweeper.kind == "refresh":
      yield call(per_step, value, weights[REFRESHER], frames)
    else:
      yield call(per_step, search, weights[REANALYSER], frames, key, 1.0, explore=reanalyse.explore)
  if training.reanalyse is training.batch_reanalyser:
    sampled = round(reanalyse.ratio * learner.batch_size)
    if sampled:
      yield call(
        1,
        search,
        weights[REANALYSER],
        windows(sampled, unroll),
        key,
        1.0,
        explore=reanalyse.explore,
      )
    yield call(1, value, weights[REANALYSER], windows(learner.batch_size, unroll))
  batch = training.learner.put(_batch(training))
  copy = jax.jit(partial(jax.tree.map, jnp.copy))  # a step donates its state
  yield _Call(
    1,
    partial(training.learner.prepare, training.state, batch, key),
    lambda: training.learner.step(copy(training.state), batch, key),
  )


def _batch(training: Training) -> LearnerBatch:
  """A batch of nothing."""
  config, actions = training.own, training.learner.blueprint.num_actions
  samples, steps = config.learner.batch_size, config.agent.loss.unroll_steps
  of_states, of_steps = (
    np.zeros((samples, steps + 1), np.float32),
    np.zeros((samples, steps), np.float32),
  )
  return LearnerBatch(
    frames=training.replay.blanks(samples, steps, spread=True),
    action=np.zeros((samples, steps), np.int32),
    weight=np.ones(samples, np.float32),
    value=of_states,
    value_prefix=of_steps,
    policy=np.full((samples, steps + 1, actions), 1 / actions, np.float32),
    value_mask=of_states,
    prefix_mask=of_steps,
    policy_mask=of_states,
    consistency_mask=of_steps,
  )
