"""Takes a `Training` from its beginning to an exit code: signals, errors, the last checkpoint, the final evaluation."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run import loops, warmup
from speedyzero_jax.run.builders import enable_compilation_cache, replay_bytes
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.experiment import WHOLE, Part, Training, TrainingError
from speedyzero_jax.run.forecast import Forecast
from speedyzero_jax.run.profiler import Profiler
from speedyzero_jax.run.topology import unit_config
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import Compilations, WarmUp
from speedyzero_jax.workers.weights import DivergedError

FAILED, WRONG_USE = 1, 2  # exit codes
_ECHO = (
  1.0  # seconds in which a repeated signal is the same one, sent to the process and to its group
)


class Signals:
  """Inside this context Ctrl-C, SIGTERM and SIGHUP are remembered and told to `on_stop`; a second one ends the process.

  SIGHUP is what a terminal that is closed sends; where it is ignored (nohup) it stays so.
  """

  def __init__(self) -> None:
    self.received: int | None = None
    self.on_stop: Callable[[], None] = lambda: None
    self._when = 0.0

  def __enter__(self) -> "Signals":
    self._before = {number: signal.signal(number, self._stop) for number in _stops()}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _stop(self, number: int, _frame: object) -> None:
    if self.received is None:
      self.received, self._when = number, time.monotonic()
      self.on_stop()
    elif time.monotonic() - self._when > _ECHO:
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)

  @staticmethod
  @contextlib.contextmanager
  def at_once() -> Iterator[None]:
    """Inside this context, where there is nothing to save, they end the process whatever it waits for."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _stops()}
    try:
      yield
    finally:
      for number, handler in before.items():
        signal.signal(number, handler)

  def came(self) -> bool:
    """Whether there was one."""
    return self.received is not None

  @property
  def exit_code(self) -> int:
    """What shells make of the signal received."""
    assert self.received is not None
    return 128 + self.received


def _stops() -> set[signal.Signals]:
  ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
  return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} - ignored


def train(
  config: Config,
  folder: Path,
  *,
  resume: bool,
  signals: Signals,
  part: Part = WHOLE,
  around: Callable[[Training], contextlib.AbstractContextManager] = contextlib.nullcontext,
  saved: Callable[[], None] = lambda: None,
) -> int:
  """Runs to the end, or until a signal. Returns the exit code.

  Args:
    config: of the run.
    folder: of the run, or of the unit, held by this process.
    resume: go on from what is there.
    signals: entered.
    part: what of the run this process has; the first unit evaluates, and reports on all.
    around: what is to be open while the roles work.
    saved: called when all that there is is saved.
  """
  enable_compilation_cache(config)
  steps = Checkpoints(folder).steps()
  reported = unit_config(config, part.unit, part.units) if part.unit else config
  try:
    opened = Reporter(
      reported, folder, folder.name, max(steps, default=0) if resume else None, part.share
    )
  except OSError as error:
    print(f"error: can't write into {folder}: {error.strerror or error}", file=sys.stderr)
    return FAILED
  with opened as reporter, Compilations() as compilations, contextlib.ExitStack() as onlookers:
    devices = jax.local_devices()
    reporter.message(
      f"run folder {folder}; {len(devices)} x {devices[0].device_kind}; mode {config.run.mode}"
    )
    full, room = replay_bytes(config) // part.units, memory.available()
    if room is not None and full > room:
      reporter.message(
        f"warning: the replay will take {memory.size(full)}, but {memory.size(room)} of memory are there; "
        "replay.capacity bounds it, env.frame_size and env.grayscale make frames smaller"
      )
    forecast = Forecast(unit_config(config, part.unit, part.units), reporter.message)
    training = None
    try:
      if not signals.came():
        training = Training(config, folder, reporter, resume=resume, part=part)
        signals.on_stop = training.interrupt
        warm_up = WarmUp(compilations, lambda: training.in_full_work)
        training.after_step.append(warm_up.step)
        forecast.watch(training, warm_up)
        if config.profile.steps:
          profiler = Profiler(folder, config.profile.steps, compilations, reporter.message)
          onlookers.enter_context(profiler).watch(training, warm_up)
        if signals.came():  # while it was built
          training.interrupt()
        finished = False
        with around(training):
          if not training.pacer.finished:
            forecast.prepared(training, warmup.prepare(training))
          finished = loops.run(training)
      if training is None or (signals.came() and not training.pacer.env_steps):
        reporter.message(
          f"stopped before there was anything to save; begin again: --resume {folder}"
        )
        return signals.exit_code
      training.save(required=True)
      saved()
      if not finished:
        reporter.message(
          f"stopped and saved at learner step {training.pacer.learner_steps}; go on: --resume {folder}"
        )
        return (
          signals.exit_code if signals.came() else 128 + signal.SIGTERM
        )  # or another unit was stopped
      reporter.message(
        f"trained: {training.pacer.env_steps} agent steps, {training.pacer.learner_steps} learner steps; "
        f"parameters {training.parameters_hash()[:16]}"
      )
      forecast.ended()
      if config.evaluation.at_end and part.unit == 0:
        evaluation = training.evaluate()
        if evaluation is None:
          reporter.message(f"evaluation stopped; do it with launch/evaluate.py {folder}")
          return signals.exit_code
        evaluation.write(folder / "evaluation.json")
        training.log()
      return 0
    except (TrainingError, DivergedError, CheckpointError, JournalError, OSError) as error:
      return _fail(reporter, str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
      where = memory.ran_out(error)
      if where is not None:
        held = training.replay.stats(0)["bytes"] if training else 0
        return _fail(reporter, _out_of_memory(where, error, held, full))
      if part.units == 1:
        raise
      reporter.message(f"a learner is lost: {str(error).strip().splitlines()[0][:200]}")
      os.abort()  # as jax itself does to survivors; whoever started us starts all again
    finally:
      if training is not None:
        training.close()


def _fail(reporter: Reporter, reason: str) -> int:
  reporter.message(f"error: {reason}")
  print(f"error: {reason}", file=sys.stderr)
  return FAILED


def _out_of_memory(where: str, error: BaseException, held: float, full: float) -> str:
  """What to say: `held` and `full` are the replay's bytes now and at the run's end."""
  smaller = "learner.batch_size, reanalyse.block, refresh.block, env.frame_size"
  smaller += ", replay.capacity" if where == "host" else " or replay.frames=host"
  return (
    f"{memory.out_of(where, error)}. The replay holds {memory.size(held)} of the {memory.size(full)} that it "
    "will take. "
    f"Start a run with less of {smaller}, or resume this one where there is more memory; checkpoints are intact"
  )
