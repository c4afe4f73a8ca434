"""Entry point of a run in one learner process: from a configuration to an exit code."""

import contextlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run import forecast, loops, profiler, run_dir, snapshot, steps, topology, warmup
from speedyzero_jax.run.build import build
from speedyzero_jax.run.checkpoint import CheckpointError
from speedyzero_jax.run.experiment import ALONE, Experiment, Membership, TrainingError
from speedyzero_jax.run.factories import enable_compilation_cache
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.system import memory
from speedyzero_jax.system.exit_codes import FAILED
from speedyzero_jax.workers.weights import DivergedError


def train(
  config: Config,
  folder: Path,
  *,
  resume: bool,
  signals: Signals,
  membership: Membership = ALONE,
  serving: Callable[[Experiment], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> int:
  """Trains to the end of the run, or until a signal. Returns the exit code.

  `folder` is that of the run, whose lock this process must hold, or that of a further learner.
  `signals` is entered. The first learner process evaluates, and reports for all. The context
  manager `serving` serves actors and refreshers while the run trains.
  """
  enable_compilation_cache(config)
  unit, units = membership.unit, membership.units
  reported = loader.divide(config, unit, units) if unit else config
  with MetricsLogger(reported, folder, membership.exchange_metrics) as logger:
    try:
      if signals.received and units == 1:  # several learner processes stop together
        return _nothing_saved(logger, _resuming(config, folder), signals)
      devices = jax.local_devices()
      logger.message(
        f"run folder {folder}; {len(devices)} x {devices[0].device_kind}; mode {config.run.mode}"
      )
      experiment = build(config, folder, logger, resume=resume, membership=membership)
      with contextlib.closing(experiment):
        return _run(experiment, folder, signals, serving)
    except (TrainingError, DivergedError, CheckpointError, JournalError, OSError) as error:
      return _fail(str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
      several = units > 1 or topology.resolve(config).num_processes > 1
      return _device_or_memory_error(error, logger, several)


def _run(
  experiment: Experiment,
  folder: Path,
  signals: Signals,
  serving: Callable[[Experiment], contextlib.AbstractContextManager],
) -> int:
  logger, limiter = experiment.logger, experiment.limiter
  signals.on_stop = experiment.interrupt
  if signals.received:  # while the experiment was built
    experiment.interrupt()
  experiment.after_step.append(lambda: experiment.pause() if _paused(experiment) else None)
  with serving(experiment):
    if not limiter.finished and not _paused(experiment):
      if not experiment.membership.unit:
        mesh = experiment.learner.mesh
        kind = mesh.devices.flat[0].device_kind
        run_dir.record_start(folder, limiter.learner_steps, mesh.size, kind)
      timings = warmup.prepare(experiment)
      forecast.report(experiment, timings)
      if experiment.config.profile.steps:
        phases = profiler.profile(experiment, folder, timings)
        experiment.after_step.append(lambda: next(phases, None))
      # An evaluation that a stop prevented is made up for.
      if steps.due(experiment).evaluating and steps.evaluate_once(experiment):
        steps.log(experiment)
      loops.run(experiment)
  empty = signals.received and not limiter.env_steps
  if not empty:
    snapshot.save(experiment, required=True)
  logger.update_display()  # with the final values, which the line of the evaluation combines
  # Also a barrier: a learner that ends would abort others that are saving.
  env_steps = sum(experiment.membership.all_gather(limiter.env_steps))
  snapshot.check_same_network(experiment, limiter.learner_steps, experiment.state.variables)
  if empty:
    how = "" if experiment.membership.unit else _resuming(experiment.config, folder)
    return _nothing_saved(logger, how, signals)
  if not limiter.finished:
    paused = _paused(experiment) and not signals.received
    how = f"; continue with {_resuming(experiment.config, folder, 0 if paused else None)}"
    logger.message(
      f"stopped and saved at learner step {limiter.learner_steps}"
      f"{'' if experiment.membership.unit else how}"
    )
    if paused:
      return _final_evaluation(experiment, folder, signals)
    # Without a signal here, another learner process received one.
    return signals.exit_code if signals.received else 128 + signal.SIGTERM
  logger.message(
    f"trained: {env_steps} agent steps, {limiter.learner_steps} learner steps; "
    f"parameters {snapshot.hash_of(experiment.state.variables)[:16]}"
  )
  return _final_evaluation(experiment, folder, signals)


def _paused(experiment: Experiment) -> bool:
  """Whether the run has reached `run.pause_at`."""
  return 0 < experiment.config.run.pause_at <= experiment.limiter.learner_steps


def _resuming(config: Config, folder: Path, pause_at: int | None = None) -> str:
  """Options that resume the run, with another `run.pause_at` if that is not None."""
  shape = config.topology
  several = shape.learners + shape.actors + shape.refreshers > 1
  change = "" if pause_at is None else f" run.pause_at={pause_at}"
  processes = " and the same processes" if several else ""
  return f"--resume {shlex.quote(str(folder))}{change}{processes}"


def _final_evaluation(experiment: Experiment, folder: Path, signals: Signals) -> int:
  if not experiment.config.evaluation.at_end or experiment.membership.unit:
    return 0
  evaluation = steps.evaluate_now(experiment)
  if evaluation is None:
    pause_at = None if experiment.limiter.finished else experiment.config.run.pause_at
    how = _resuming(experiment.config, folder, pause_at)
    experiment.logger.message(f"evaluation stopped; repeat it with {how}")
    return signals.exit_code
  evaluation.write(folder / "evaluation.json")
  steps.log(experiment)
  # As typed: a `python` on the path may lack the packages.
  interpreter, programs = sys.orig_argv[0], Path(sys.argv[0]).parent
  words = interpreter, programs / "report.py", programs / "evaluate.py", folder
  python, report, evaluate, run = (shlex.quote(str(word)) for word in words)
  experiment.logger.message(
    f"to compare runs: {python} {report} {run} --out report.html; "
    f"to watch: {python} {evaluate} {run} --video episode.gif"
  )
  return 0


def _nothing_saved(logger: MetricsLogger, how: str, signals: Signals) -> int:
  logger.message(f"stopped before anything could be saved{how and f'; start again with {how}'}")
  return signals.exit_code


def _device_or_memory_error(error: BaseException, logger: MetricsLogger, several: bool) -> int:
  where = memory.exhausted(error)
  if where is not None:
    return _fail(
      f"{memory.exhausted_message(where, error)}. Reduce learner.batch_size, env.frame_size, "
      "replay.capacity or the block sizes of the agent's tasks"
      f"{'' if where == 'host' else ', or set replay.frames=host'}, or resume on a machine with "
      "more memory; checkpoints are intact",
    )
  if not several:
    raise error
  traceback.print_exception(error)
  logger.message("error of a device, or of a collective operation as another learner is lost")
  os.abort()  # as jax does in surviving processes; the supervisor restarts all processes


def _fail(reason: str) -> int:
  print(f"error: {reason}", file=sys.stderr)
  return FAILED
