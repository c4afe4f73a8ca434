"""Training loops of an experiment: roles take turns (lockstep) or overlap in threads (async)."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from speedyzero_jax.metrics import names
from speedyzero_jax.run import steps
from speedyzero_jax.run.batch_pipeline import PreparedBatch
from speedyzero_jax.run.experiment import Experiment, TrainingError
from speedyzero_jax.run.rate_limiter import Stopped
from speedyzero_jax.workers.learner import DeviceResult
from speedyzero_jax.workers.sweeper import Sweeper


def run(experiment: Experiment) -> bool:
  """Runs the experiment in the configured mode.

  Returns True at the end of the run, False if it was stopped earlier. Raises a role's error.
  """
  if experiment.config.run.mode == "lockstep":
    _lockstep(experiment)
  else:
    _AsyncLoops(experiment).run()
  return experiment.limiter.finished


def _lockstep(experiment: Experiment) -> None:
  """Runs all roles in a fixed order in one thread: equal seeds give bit-identical runs."""
  limiter = experiment.limiter
  while not limiter.finished and not limiter.stopping:
    if not (limiter.may_learn() and experiment.can_draw()):
      _check_supply(experiment, limiter.learner_steps)
      experiment.collector.collect()
      continue
    for sweeper in experiment.sweepers:
      while sweeper.due(experiment.replay, limiter.learner_steps):
        steps.sweep(experiment, sweeper)
    step = limiter.learner_steps
    prepared = steps.draw(experiment, step)
    steps.finish_step(experiment, prepared, steps.learn(experiment, prepared), step)
    steps.bookkeeping(experiment)


def _check_supply(experiment: Experiment, step: int) -> None:
  """Raises TrainingError if there will never be a batch for learner step `step` (from 0)."""
  if experiment.limiter.collected and not experiment.can_draw():
    config, count = experiment.local_config, experiment.replay.selector.count
    raise TrainingError(
      f"collection is complete ({config.run.env_steps} agent steps), but learner step {step + 1} "
      f"of {config.learner.steps} needs {config.learner.batch_size} samples and only {count} are "
      "available; increase run.env_steps or reduce learner.steps"
    )


class _AsyncLoops:
  """Runs each role in a thread of its own; all threads wait on the rate limiter's condition."""

  def __init__(self, experiment: Experiment):
    self._experiment, self._limiter = experiment, experiment.limiter
    self._batches = experiment.batches
    self._next = experiment.limiter.learner_steps  # learner step of the next batch to draw
    # On-policy, several learners: the last batch, reused before a joint stop if no other is
    # complete.
    self._spare: PreparedBatch | None = None
    # The previous step. Results are read back one step late, so the host does not block on it.
    self._pending: tuple[PreparedBatch, DeviceResult, int] | None = None

  def run(self) -> None:
    """Starts the other roles, runs the learner in this thread, and joins the others."""
    membership = self._experiment.membership
    received = self._experiment.config.topology.gradients == "actors"
    roles: list[Callable[[], None]] = [] if received else [self._draw]
    if membership.runs_actor:
      roles.append(self._collect)
    if membership.runs_sweeps:
      sweepers = self._experiment.sweepers
      roles += [functools.partial(self._sweep, sweeper) for sweeper in sweepers]
    threads = [threading.Thread(target=self._guard, args=(role,), daemon=True) for role in roles]
    for thread in threads:
      thread.start()
    try:
      with contextlib.suppress(Stopped):
        self._learn()
    finally:
      self._limiter.stop()
      for thread in threads:
        thread.join()
    self._finish_step()  # first: it detects divergence, of which a role's error may be a result
    if self._limiter.failure is not None:
      raise self._limiter.failure

  def _guard(self, role: Callable[[], None]) -> None:
    try:
      role()
    except Stopped:
      pass
    except BaseException as error:  # re-raised in the learner's thread
      self._limiter.stop(error)

  def _wait(self, kind: str, predicate: Callable[[], bool]) -> None:
    begin = time.monotonic()
    self._limiter.wait_until(predicate)
    self._experiment.logger.log_mean({names.wait(kind): time.monotonic() - begin})

  def _collect(self) -> None:
    def may_collect() -> bool:  # also while the learner lacks data for a batch
      return self._limiter.may_collect() or self._experiment.needs_data()

    while not self._limiter.collected:
      self._wait("actor", may_collect)
      self._experiment.collector.collect()

  def _sweep(self, sweeper: Sweeper) -> None:
    experiment, limiter = self._experiment, self._limiter

    def due() -> bool:
      return experiment.sweeping() and sweeper.due(experiment.replay, limiter.learner_steps)

    while True:
      self._wait("refresher", due)
      steps.sweep(experiment, sweeper)
      limiter.notify()

  def _draw(self) -> None:
    experiment, limiter = self._experiment, self._limiter

    def may_draw() -> bool:
      if len(self._batches) >= experiment.config.learner.prefetch:
        return False
      due = limiter.may_draw(self._next)
      return due and (limiter.collected or experiment.can_draw() or self._may_repeat())

    keep = experiment.agent.on_policy and experiment.membership.units > 1
    while self._next < experiment.config.learner.steps:
      limiter.wait_until(may_draw)
      if experiment.can_draw() or not self._may_repeat():
        _check_supply(experiment, self._next)
        prepared = steps.draw(experiment, self._next)
        self._spare = prepared if keep else None
      self._batches.append(prepared)
      self._next += 1
      limiter.notify()

  def _may_repeat(self) -> bool:
    """Whether the latest batch may be used again, for the last learner steps before a stop."""
    return self._limiter.unpaced and self._spare is not None

  def _may_learn(self) -> bool:
    experiment, limiter = self._experiment, self._limiter
    if not self._batches or experiment.interrupted:
      return bool(self._batches)
    if limiter.lag_exceeded:
      return False
    bounded = experiment.membership.runs_sweeps or experiment.config.topology.bound_age
    now = experiment.replay, limiter.learner_steps
    return not bounded or not any(s.overdue(*now) or s.behind(*now) for s in experiment.sweepers)

  def _may_go_on(self) -> bool:
    return self._may_learn() or self._limiter.finished

  def _learn(self) -> None:
    experiment, limiter = self._experiment, self._limiter
    total = experiment.config.learner.steps
    if limiter.learner_steps < total:
      limiter.wait_for(self._may_go_on)
      failed = limiter.stopping and not experiment.interrupted
      if failed or not steps.begin_learning(experiment):
        return
    while limiter.learner_steps < total:
      with experiment.logger.part("wait"):
        self._wait("learner", self._may_go_on)
      if not self._batches:  # all agent steps are used up, and the actors computed the gradients
        self._finish_step()
        steps.log(experiment)
        return
      step, prepared = limiter.learner_steps, self._batches.popleft()
      result = steps.learn(experiment, prepared)
      self._finish_step()
      self._pending = prepared, result, step
      if any(steps.due(experiment)):
        self._finish_step()
      steps.bookkeeping(experiment)
      if experiment.stop_agreed:
        return
    if not experiment.interrupted:
      limiter.wait_until(lambda: limiter.finished)

  def _finish_step(self) -> None:
    pending, self._pending = self._pending, None
    if pending is not None:
      steps.finish_step(self._experiment, *pending)
