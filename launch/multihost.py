"""Trains SpeedyZero: python launch/multihost.py --config PRESET [PRESET ...] [key=value ...]

Exit codes: 0 finished, 1 the run failed, 2 wrong use (an unknown key, a folder that can't be used),
130 or 143 stopped by Ctrl-C or SIGTERM, after saving what there was; go on with --resume RUN_DIR.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from speedyzero_jax import config_io, runfolder
from speedyzero_jax.config import Config
from speedyzero_jax.config_io import ConfigError
from speedyzero_jax.runfolder import RunFolder, RunFolderError

if TYPE_CHECKING:
  from speedyzero_jax.reporting import Reporter

FAILED, WRONG_USE = 1, 2


class Signals:
  """Inside this context Ctrl-C and SIGTERM are remembered and told to `on_stop`; a second one ends the process."""

  def __init__(self) -> None:
    self.received: int | None = None
    self.on_stop: Callable[[], None] = lambda: None

  def __enter__(self) -> "Signals":
    self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
    return self

  def __exit__(self, *_: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _stop(self, number: int, _frame: object) -> None:
    self.received = number
    for caught in self._before:
      signal.signal(caught, signal.SIG_DFL)
    self.on_stop()

  @property
  def exit_code(self) -> int:
    """What shells make of the signal received."""
    assert self.received is not None
    return 128 + self.received


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line. Overrides may stand anywhere, also right after the presets."""
  parser = argparse.ArgumentParser(
    prog="launch/multihost.py",
    description="Trains SpeedyZero on one machine: collects, reanalyses, refreshes priorities, learns, evaluates.",
    epilog=config_io.help_text(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--config", nargs="+", metavar="PRESET", default=[], help="presets from configs/, the later ones win"
  )
  parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with the run in this folder")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, listed below")
  arguments = parser.parse_args(argv)
  arguments.overrides += [text for text in arguments.config if "=" in text]
  arguments.config = [text for text in arguments.config if "=" not in text]
  if arguments.resume is None and not arguments.config:
    parser.error("say what to train with --config PRESET, or what to go on with by --resume RUN_DIR")
  if arguments.resume is not None and arguments.config:
    parser.error("--resume takes its configuration from the run folder; leave --config out")
  return arguments


def open_folder(arguments: argparse.Namespace) -> RunFolder:
  """The run folder to work in. Raises ConfigError or RunFolderError."""
  if arguments.resume is not None:
    if any(text.partition("=")[0].strip() == "run.dir" for text in arguments.overrides):
      raise ConfigError(f"run.dir: --resume says already that the folder is {arguments.resume}; leave run.dir out")
    folder = runfolder.open_existing(arguments.resume, arguments.overrides)
    try:
      check_possible(folder.config)
    except ConfigError:
      folder.close()
      raise
    return folder
  config = config_io.load(arguments.config, arguments.overrides)
  check_possible(config)
  preset = "+".join(Path(name).stem for name in arguments.config)
  return runfolder.create(config, f"{preset}-{config.env.game}-s{config.run.seed}")


def check_possible(config: Config) -> None:
  """Raises ConfigError for what only this machine can tell, so that it is known before anything is touched."""
  import jax

  from speedyzero_jax.envs import make_env

  here = len(jax.local_devices())
  if config.learner.devices > here:
    raise ConfigError(f"learner.devices: there are {here} here, got {config.learner.devices}")
  devices = config.learner.devices or here
  if config.learner.batch_size % devices:
    raise ConfigError(
      f"learner.batch_size: must be a multiple of the {devices} devices used, got {config.learner.batch_size}"
    )
  try:
    make_env(config.env, 1, config.run.seed, training=True).close()
  except ValueError as error:
    raise ConfigError(f"env: {error}") from error


def train(folder: RunFolder, resume: bool, signals: Signals) -> int:
  """Runs to the end, or until a signal. Returns the exit code."""
  import jax

  from speedyzero_jax import memory, modes
  from speedyzero_jax.checkpoint import CheckpointError, Checkpoints
  from speedyzero_jax.reporting import Reporter
  from speedyzero_jax.training import Training, TrainingError, enable_compilation_cache, replay_bytes

  config = folder.config
  enable_compilation_cache(config)
  resume_step = None
  if resume:
    steps = Checkpoints(folder.path).steps()
    resume, resume_step = bool(steps), max(steps, default=0)  # it may have ended before its first checkpoint
  try:
    opened = Reporter(config, folder.path, folder.path.name, resume_step)
  except OSError as error:
    print(f"error: can't write into {folder.path}: {error.strerror or error}", file=sys.stderr)
    return FAILED
  with opened as reporter:
    devices = jax.local_devices()
    reporter.message(f"run folder {folder.path}; {len(devices)} x {devices[0].device_kind}; mode {config.run.mode}")
    full, room = replay_bytes(config), memory.available()
    if room is not None and full > room:
      reporter.message(
        f"warning: the replay will take {_size(full)}, but {_size(room)} of memory are there; "
        "replay.capacity bounds it, env.frame_size and env.grayscale make frames smaller"
      )
    training = None
    try:
      if not signals.received:
        training = Training(config, folder.path, reporter, resume=resume)
        signals.on_stop = training.interrupt
        if signals.received:  # while it was built
          training.interrupt()
        finished = modes.run(training)
      if training is None or (signals.received and not training.pacer.env_steps):
        reporter.message(f"stopped before there was anything to save; begin again: --resume {folder.path}")
        return signals.exit_code
      training.save(required=True)
      if not finished:
        reporter.message(
          f"stopped and saved at learner step {training.pacer.learner_steps}; go on: --resume {folder.path}"
        )
        return signals.exit_code
      reporter.message(
        f"trained: {training.pacer.env_steps} agent steps, {training.pacer.learner_steps} learner steps; "
        f"parameters {training.parameters_hash()[:16]}"
      )
      if config.evaluation.at_end:
        evaluation = training.evaluate()
        if evaluation is None:
          reporter.message(f"evaluation stopped; do it with launch/evaluate.py {folder.path}")
          return signals.exit_code
        evaluation.write(folder.evaluation)
        training.log()
      return 0
    except (TrainingError, CheckpointError, OSError) as error:
      return _fail(reporter, str(error))
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
      where = memory.ran_out(error)
      if where is None:
        raise
      held = training.replay.stats(0)["bytes"] if training else 0
      return _fail(reporter, _out_of_memory(where, error, held, full))
    finally:
      if training is not None:
        training.close()


def _fail(reporter: "Reporter", reason: str) -> int:
  reporter.message(f"error: {reason}")
  print(f"error: {reason}", file=sys.stderr)
  return FAILED


def _out_of_memory(where: str, error: BaseException, held: float, full: float) -> str:
  """What to say: `held` and `full` are the replay's bytes now and at the run's end."""
  smaller = "learner.batch_size, reanalyse.block, refresh.block, env.frame_size"
  smaller += ", replay.capacity" if where == "host" else " or replay.frames=host"
  said = str(error).strip().splitlines() or [type(error).__name__]
  return (
    f"out of {where} memory: {said[0][:200]}. The replay holds {_size(held)} of the {_size(full)} that it will take. "
    f"Start a run with less of {smaller}, or resume this one where there is more memory; checkpoints are intact"
  )


def _size(size: float) -> str:
  return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes about its cache
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  try:
    with Signals() as signals, open_folder(arguments) as folder:
      return train(folder, arguments.resume is not None, signals)
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE


if __name__ == "__main__":
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # all is saved and closed; a library's thread must not keep a finished run from ending
