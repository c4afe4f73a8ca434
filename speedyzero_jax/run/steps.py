"""The steps of a run: drawing a batch, learning, sweeping and bookkeeping.

`loops.py` determines their order and threads.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.ops import optimizers
from speedyzero_jax.run import batch_pipeline, factories, snapshot
from speedyzero_jax.run.batch_pipeline import PreparedBatch
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.workers.evaluator import Evaluation, evaluate
from speedyzero_jax.workers.learner import DeviceResult
from speedyzero_jax.workers.sweeper import Sweeper
from speedyzero_jax.workers.weights import ACTOR, DivergedError, Version


def sweep(experiment: Experiment, sweeper: Sweeper) -> None:
  """Computes one block of a sweep. Call it only if `sweeper.due`."""
  with experiment.logger.part(sweeper.task.part):
    states = experiment.run_task(sweeper.next(experiment.replay), experiment.sweep_key(sweeper))
  sweeper.calls += 1
  sweeper.states += states


def draw(experiment: Experiment, learner_step: int) -> PreparedBatch:
  """Draws the batch of a learner step and puts it on the learner's devices."""
  experiment.drawn += 1
  prepared = batch_pipeline.draw(
    experiment.agent,
    experiment.replay,
    experiment.local_config.learner.batch_size,
    learner_step,
    experiment.execute,
    experiment.logger.part,
  )
  with experiment.logger.part("gather"):
    return prepared._replace(arrays=experiment.learner.put(prepared.arrays))


def learn(experiment: Experiment, prepared: PreparedBatch) -> DeviceResult:
  """Starts one learner step; `finish_step` waits for it."""
  learner, state, gradient = experiment.learner, experiment.state, prepared.gradient
  with experiment.logger.part("train"):
    if gradient is not None:
      experiment.state, result = learner.apply(state, gradient)
    else:
      experiment.state, result = learner.step(
        state, prepared.arrays, experiment.learn_key, stop=experiment.interrupted
      )
  experiment.limiter.add_learner_step()
  with experiment.logger.part("publish"):
    step, variables = experiment.limiter.learner_steps, experiment.state.variables
    # With several learners the last steps before a stop may repeat a batch, which moves the
    # collections of synchronous agents away from multiples of `actor.weights_interval`.
    collecting = experiment.agent.synchronous and not experiment.can_draw()
    experiment.weights.publish(step, variables, [ACTOR] if collecting else [])
  experiment.learned += 1
  experiment.limiter.notify()
  experiment.logger.log_mean(prepared.info)
  experiment.logger.count(names.LEARNER_STEPS_PER_SECOND, 1)
  experiment.logger.count(names.SAMPLES_PER_SECOND, experiment.local_config.learner.batch_size)
  return result


def finish_step(
  experiment: Experiment, prepared: PreparedBatch, result: DeviceResult, step: int
) -> None:
  """Waits for learner step `step` (from 0), logs its metrics and updates priorities in the replay.

  Raises DivergedError if the priorities, or the parameters after the step, are not finite.
  """
  with experiment.logger.part("train"):
    metrics, priority, stopping = experiment.learner.fetch(result)
  if not (np.isfinite(priority).all() and np.isfinite(metrics[names.PARAMETER_NORM])):
    raise DivergedError(step + 1)
  experiment.logger.log_mean(metrics)
  experiment.replay.update(prepared.selection, priority, step)
  experiment.stop_agreed = experiment.stop_agreed or stopping


def begin_learning(experiment: Experiment) -> bool:
  """Prepares for the first learner step; waits for all learner processes.

  Returns False if any of them is interrupted.
  """
  experiment.learning = True
  # Discards times and counts from before the first learner step.
  experiment.logger.restart_counts(experiment.limiter.learner_steps)
  experiment.logger.update_display()  # so that the first line includes all processes
  return not any(experiment.membership.all_gather(int(experiment.interrupted)))


class Due(NamedTuple):
  """The parts of `bookkeeping` that are due after a learner step."""

  evaluating: bool
  logging: bool
  saving: bool


def due(experiment: Experiment) -> Due:
  step, config = experiment.limiter.learner_steps, experiment.config
  last = step >= config.learner.steps
  interval = config.evaluation.interval
  evaluating = bool(interval) and step % interval == 0 and not last
  return Due(
    evaluating,
    logging=evaluating or step % config.run.log_interval == 0 or last,
    saving=step % config.run.checkpoint_interval == 0 and not last,
  )


def bookkeeping(experiment: Experiment) -> None:
  """Evaluates and writes the metrics and checkpoint due after a learner step; calls hooks.

  If any is due, the step must be finished.
  """
  evaluating, logging, saving = due(experiment)
  if evaluating:
    evaluate_once(experiment)
  if logging:
    log(experiment)
  if saving:  # last, so that a run that resumes here has what was logged
    with experiment.logger.part("save"):
      snapshot.save(experiment)
  for call in experiment.after_step:
    call()


def log(experiment: Experiment) -> None:
  step = experiment.limiter.learner_steps
  state = experiment.state
  ratios = optimizers.trust_ratios(state.opt_state, state.variables.params)
  experiment.logger.log_latest(
    {names.TRUST_RATIO_PREFIX + layer: ratio for layer, ratio in ratios.items()}
  )
  experiment.logger.write_line(step, experiment.replay.stats(step), experiment.collector.episodes)


def evaluate_once(experiment: Experiment) -> bool:
  """Evaluates during training, in the first learner process; the others wait.

  Returns False if these weights have been evaluated already, or if the run is stopping or has
  failed: then all processes stop at this step, and a resumed run evaluates them.
  """
  step = experiment.limiter.learner_steps
  if experiment.evaluated == step or experiment.stop_agreed:
    return False
  with experiment.logger.part("evaluate"):
    result = None
    if experiment.membership.unit == 0:
      result = evaluate_now(experiment, lambda: experiment.limiter.stopping)
    done, *_ = experiment.membership.all_gather(int(result is not None))  # also a barrier
  if done:
    experiment.evaluated = step
  else:
    experiment.stop_agreed = True
  return bool(done)


def evaluate_now(
  experiment: Experiment, should_stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
  """Evaluates the current weights over full episodes; returns None if the run is stopping."""
  config = experiment.local_config  # the agent's
  variables = experiment.weights.derive(experiment.state.variables)
  result = evaluate(
    config,
    experiment.agent,
    experiment.inference,
    Version(experiment.limiter.learner_steps, variables),
    episodes=config.evaluation.episodes,
    seed=factories.evaluation_seed(config),
    should_stop=lambda: experiment.interrupted or should_stop(),
    report=experiment.logger.message,
  )
  if result is not None:
    experiment.logger.message(str(result))
    experiment.logger.log_latest(result.metrics())
  return result
