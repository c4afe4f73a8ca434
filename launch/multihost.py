"""Trains SpeedyZero: python launch/multihost.py --config PRESET [PRESET ...] [key=value ...]

Exit codes: 0 finished, 1 the run failed, 2 wrong use (an unknown key, a folder that can't be used),
130 or 143 stopped by Ctrl-C or SIGTERM after saving a checkpoint; go on with --resume RUN_DIR.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from speedyzero_jax import config_io, runfolder
from speedyzero_jax.config import Config
from speedyzero_jax.config_io import ConfigError
from speedyzero_jax.runfolder import RunFolder, RunFolderError

FAILED, WRONG_USE = 1, 2


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
    return runfolder.open_existing(arguments.resume, arguments.overrides)
  config = config_io.load(arguments.config, arguments.overrides)
  check_possible(config)
  preset = "+".join(Path(name).stem for name in arguments.config)
  return runfolder.create(config, f"{preset}-{config.env.game}-s{config.run.seed}")


def check_possible(config: Config) -> None:
  """Raises ConfigError for what only this machine can tell, so that it is known before anything is written."""
  import jax

  from speedyzero_jax.envs import make_env

  devices = len(jax.local_devices())
  if config.learner.devices > devices:
    raise ConfigError(f"learner.devices: there are {devices} here, got {config.learner.devices}")
  if config.learner.batch_size % (config.learner.devices or devices):
    raise ConfigError(
      f"learner.batch_size: must be a multiple of the {devices} devices here, got {config.learner.batch_size}"
    )
  try:
    make_env(config.env, 1, config.run.seed, training=True).close()
  except ValueError as error:
    raise ConfigError(f"env: {error}") from error


def train(folder: RunFolder, resume: bool) -> int:
  """Runs to the end, or until a signal. Returns the exit code."""
  import jax

  from speedyzero_jax import modes
  from speedyzero_jax.checkpoint import CheckpointError, Checkpoints
  from speedyzero_jax.reporting import Reporter
  from speedyzero_jax.training import Training, TrainingError, enable_compilation_cache

  config = folder.config
  enable_compilation_cache(config)
  resume_step = None
  if resume:
    steps = Checkpoints(folder.path).steps()
    resume, resume_step = bool(steps), max(steps, default=0)  # it may have ended before its first checkpoint
  received: list[int] = []
  try:
    opened = Reporter(config, folder.path, folder.path.name, resume_step)
  except OSError as error:
    print(f"error: can't write into {folder.path}: {error.strerror or error}", file=sys.stderr)
    return FAILED
  with opened as reporter:
    devices = jax.local_devices()
    reporter.message(f"run folder {folder.path}; {len(devices)} x {devices[0].device_kind}; mode {config.run.mode}")
    training = None
    try:
      training = Training(config, folder.path, reporter, resume=resume)

      def stop(number: int, _frame: object) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        training.interrupt()

      signal.signal(signal.SIGINT, stop)
      signal.signal(signal.SIGTERM, stop)
      finished = modes.run(training)
      training.save(required=True)
      if not finished:
        reporter.message(
          f"stopped and saved at learner step {training.pacer.learner_steps}; go on: --resume {folder.path}"
        )
        return 128 + received[0]
      reporter.message(
        f"trained: {training.pacer.env_steps} agent steps, {training.pacer.learner_steps} learner steps; "
        f"parameters {training.parameters_hash()[:16]}"
      )
      if config.evaluation.at_end:
        evaluation = training.evaluate()
        if evaluation is None:
          reporter.message(f"evaluation stopped; do it with launch/evaluate.py {folder.path}")
          return 128 + received[0]
        evaluation.write(folder.evaluation)
        training.log()
      return 0
    except (TrainingError, CheckpointError, OSError) as error:
      reporter.message(f"error: {error}")
      print(f"error: {error}", file=sys.stderr)
      return FAILED
    finally:
      if training is not None:
        training.close()


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes about its cache
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  try:
    with open_folder(arguments) as folder:
      return train(folder, resume=arguments.resume is not None)
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE


if __name__ == "__main__":
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # all is saved and closed; a library's thread must not keep a finished run from ending
