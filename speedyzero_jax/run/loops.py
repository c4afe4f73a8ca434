"""The two ways to run the roles of a `Training` in one process: taking turns, or overlapping in threads."""

import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Callable

from speedyzero_jax.agents.efficientzero.reanalyse import Sweeper
from speedyzero_jax.metrics import names
from speedyzero_jax.run.batch_pipeline import Fed
from speedyzero_jax.run.experiment import Training
from speedyzero_jax.run.rate_limiter import Stopped
from speedyzero_jax.workers.learner import StepResult


def run(training: Training) -> bool:
  """Runs to the end in the configured mode. Returns False if stopped before it; raises what a role raised."""
  if training.config.run.mode == "lockstep":
    _lockstep(training)
  else:
    _Overlapped(training).run()
  return training.pacer.finished


def _lockstep(training: Training) -> None:
  """A fixed order in one thread: the same seed gives the same run, bit for bit."""
  pacer = training.pacer
  while not pacer.finished and not pacer.stopping:
    if not (pacer.may_learn() and training.replay.num_eligible):
      training.collect()
      continue
    for sweeper in training.sweepers:
      while sweeper.due(training.replay, pacer.learner_steps):
        training.sweep(sweeper)
    step = pacer.learner_steps
    fed = training.draw(step)
    training.learned(fed, training.learn(fed), step)
    training.bookkeeping()


class _Overlapped:
  """One thread per role beside the learner's; the pacer's condition is what they all wait on."""

  def __init__(self, training: Training):
    self._training, self._pacer = training, training.pacer
    self._ready: deque[Fed] = deque()
    self._drawn = training.pacer.learner_steps  # batches drawn so far, by learner step
    self._pending: tuple[Fed, StepResult, int] | None = (
      None  # told to the replay a step late, not to wait for it
    )
    self._errors: list[BaseException] = []

  def run(self) -> None:
    """Starts the roles, learns in this thread, and ends them however it ends."""
    roles: list[Callable[[], None]] = [self._draw]
    if self._training.part.acts:
      roles.append(self._collect)
    if self._training.part.reanalyses:
      roles += [functools.partial(self._sweep, sweeper) for sweeper in self._training.sweepers]
    threads = [threading.Thread(target=self._guard, args=(role,), daemon=True) for role in roles]
    for thread in threads:
      thread.start()
    try:
      self._learn()
    except Stopped:
      pass
    finally:
      self._pacer.stop()
      for thread in threads:
        thread.join()
    self._settle()  # a role may have failed for what shows here as divergence
    if self._errors or self._training.failure:
      raise self._errors[0] if self._errors else self._training.failure or AssertionError

  def _guard(self, role: Callable[[], None]) -> None:
    try:
      role()
    except Stopped:
      pass
    except BaseException as error:  # raised again in the learner's thread
      self._errors.append(error)
      self._pacer.stop()

  def _collect(self) -> None:
    def may_collect() -> bool:  # the learner may be due, but have nothing to draw from yet
      return self._pacer.may_collect() or not self._training.replay.num_eligible

    while not self._pacer.collected:
      begin = time.monotonic()
      self._pacer.wait_until(may_collect)
      self._training.reporter.mean({names.ACTOR_WAIT: time.monotonic() - begin})
      self._training.collect()

  def _sweep(self, sweeper: Sweeper) -> None:
    training, pacer = self._training, self._pacer
    while True:
      begin = time.monotonic()
      pacer.wait_until(
        lambda: training.replay.num_eligible and sweeper.due(training.replay, pacer.learner_steps)
      )
      training.reporter.mean({names.REANALYSER_WAIT: time.monotonic() - begin})
      training.sweep(sweeper)
      pacer.notify()

  def _draw(self) -> None:
    training, pacer = self._training, self._pacer

    def may_draw() -> bool:
      enough = pacer.may_draw(self._drawn) and training.replay.num_eligible > 0
      return enough and len(self._ready) < training.config.learner.prefetch

    while self._drawn < training.config.learner.steps:
      pacer.wait_until(may_draw)
      fed = training.draw(self._drawn)
      self._ready.append(fed)
      self._drawn += 1
      pacer.notify()

  def _learn(self) -> None:
    training, pacer = self._training, self._pacer

    bounded = (
      training.sweepers if training.part.reanalyses or training.config.topology.bound_age else []
    )

    def may_learn() -> bool:
      if not self._ready or training.interrupted:
        return bool(self._ready)
      now = training.replay, pacer.learner_steps
      return not pacer.lagging and not any(
        sweeper.overdue(*now) or sweeper.behind(*now) for sweeper in bounded
      )

    if pacer.learner_steps < training.config.learner.steps:
      with contextlib.suppress(Stopped):
        pacer.wait_until(may_learn)
      failed = pacer.stopping and not training.interrupted
      if failed or not training.begin_learning():
        return
    while pacer.learner_steps < training.config.learner.steps:
      begin = time.monotonic()
      with training.times.part("wait"):
        pacer.wait_until(may_learn)
      training.reporter.mean({names.LEARNER_WAIT: time.monotonic() - begin})
      step, fed = pacer.learner_steps, self._ready.popleft()
      result = training.learn(fed)
      self._settle()
      self._pending = fed, result, step
      if training.saving_due:
        self._settle()
      training.bookkeeping()
      if training.leaving:
        return
    if not training.interrupted:
      pacer.wait_until(lambda: pacer.collected)

  def _settle(self) -> None:
    pending, self._pending = self._pending, None
    if pending is not None:
      self._training.learned(*pending)
