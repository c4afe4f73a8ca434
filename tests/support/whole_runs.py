"""Helpers to run, interrupt and compare whole runs within this process."""

import threading

import jax
import pytest

import tiny
from same import assert_same, frames_of
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.run import loops, snapshot


def quick(folder, *overrides, **options):
  """A tiny experiment with the agent that compiles quickly; see `tiny.experiment`."""
  return tiny.experiment(folder, "agent=quick_agent", *overrides, **options)


def everything(experiment):
  """A run's complete state as arrays: runs with equal states continue identically."""
  limiter = experiment.limiter
  return {
    "learner": jax.tree.leaves(jax.device_get(experiment.state)),
    "weights": [
      (name, version.step, jax.tree.leaves(jax.device_get(version.variables)))
      for name, version in sorted(experiment.weights.snapshot().items())
    ],
    "replay": experiment.replay.state_dict(),
    "frames": frames_of(experiment.replay),
    # Not restored once all agent steps are collected.
    "actor": None if limiter.collected else experiment.collector.local.state_dict(),
    "sweepers": {sweeper.name: sweeper.state_dict() for sweeper in experiment.sweepers},
    "counters": [limiter.env_steps, limiter.learner_steps],
    "episodes": experiment.collector.episodes.summary(),
  }


def rows_of(folder):
  """The rows of a run's metrics; asserts that the file is undamaged."""
  rows, damaged = jsonl.read_rows(folder / "metrics.jsonl")
  assert not damaged
  return rows


def finish(experiment, seconds=240):
  """Returns the result of `loops.run`, or the error it raises; fails the test on timeout."""
  done = []

  def body():
    try:
      done.append(loops.run(experiment))
    except BaseException as error:
      done.append(error)

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  thread.join(seconds)
  if thread.is_alive():
    experiment.interrupt()
    thread.join(30)
    pytest.fail("timeout: the roles are in a deadlock")
  return done[0]


def run(folder, *overrides, resume_step=None):
  """Runs to the end and saves; returns the complete state and the hash of the parameters."""
  with quick(folder, *overrides, resume_step=resume_step) as experiment:
    assert finish(experiment) is True
    snapshot.save(experiment, required=True)
    return everything(experiment), snapshot.hash_of(experiment.state.variables)


def interrupt_at(experiment, *, learner_step=None, collects=None):
  """Interrupts after a learner step's bookkeeping, or after `collects` calls of `collect`."""
  collect, collector = experiment.collector.collect, experiment.collector

  def after_step():
    if experiment.limiter.learner_steps == learner_step:
      experiment.interrupt()

  def counted():
    nonlocal collects
    collect()
    if collects is not None:
      collects -= 1
      if not collects:
        experiment.interrupt()

  experiment.after_step.append(after_step)
  collector.collect = counted


def stopped(folder, *overrides, resume_step=None, before=None, **stop):
  """Runs until `interrupt_at` stops it, and saves; returns the learner step and complete state.

  If `before` is given, asserts that it is the run's initial state.
  """
  with quick(folder, *overrides, resume_step=resume_step) as experiment:
    if before is not None:
      assert_same(before, everything(experiment))
    interrupt_at(experiment, **stop)
    assert finish(experiment) is False
    snapshot.save(experiment, required=True)
    return experiment.limiter.learner_steps, everything(experiment)
