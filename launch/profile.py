"""Profile of a few learner steps: launch/profile.py --config PRESET [PRESET ...] [key=value ...]

A run as configured, in one process, with a replay that random play has filled. Once nothing
compiles any more, profile.steps learner steps are timed and as many more traced; then it ends. The
new folder (--out, or one under runs/) has profile.json and the trace (plugins/profile/, for xprof
or ui.perfetto.dev); the tables are printed too.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
"""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works uninstalled

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.run.run_dir import RunFolderError
from speedyzero_jax.system import memory

FAILED, WRONG_USE = 1, 2
STEPS = 5  # learner steps profiled, unless profile.steps is set


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line. Overrides may stand anywhere, also right after the presets."""
  parser = argparse.ArgumentParser(
    prog="launch/profile.py", description="Profiles a few learner steps of a new run."
  )
  parser.add_argument(
    "--config",
    nargs="+",
    action="extend",
    required=True,
    metavar="PRESET",
    help="presets from configs/",
  )
  parser.add_argument(
    "--out", type=Path, metavar="DIR", help="new folder for the results (default: under runs/)"
  )
  parser.add_argument(
    "--fill",
    type=int,
    metavar="N",
    help="agent steps of random play before (default: half of the run's; sweeps cost more the "
    "fuller the replay is)",
  )
  parser.add_argument(
    "overrides", nargs="*", metavar="key=value", help="settings (see launch/multihost.py --help)"
  )
  arguments = parser.parse_args(argv)
  multihost.separate_overrides(arguments, argv)
  return arguments


def filled(config: Config, random_steps: int, max_age: int) -> Config:
  """The configuration with so many random agent steps, then learner steps at the same pace.

  There are enough learner steps for sweeps of at most `max_age` to come round, and for the profile.

  Raises ConfigError if `random_steps` is not from actor.random_steps to below all agent steps.
  """
  total, begin, learner = config.run.env_steps, config.actor.random_steps, config.learner
  if not begin <= random_steps < total:
    raise ConfigError(f"--fill: must be from actor.random_steps ({begin}) to below {total}")
  pace = (total - begin) / max(learner.steps - learner.tail_steps, 1)  # agent per learner steps
  # The first block of a sweep is computed within half of its age.
  steps = max(round((total - random_steps) / pace), 2 * config.profile.steps + 2 * max_age + 10)
  changes = [
    f"actor.random_steps={random_steps}",
    f"run.env_steps={max(total, random_steps + round(steps * pace))}",
    f"learner.steps={steps}",
    "learner.tail_steps=0",
  ]
  return loader.override(config, changes)


def configured(arguments: argparse.Namespace) -> Config:
  """The configuration of the run to profile. Raises ConfigError."""
  from speedyzero_jax.run.builders import make_agent

  config = loader.load(arguments.config, arguments.overrides)
  changes = [f"run.dir={arguments.out}"] if arguments.out else []
  changes += [] if config.profile.steps else [f"profile.steps={STEPS}"]
  config = loader.override(config, changes)
  if topology.resolve(config).num_processes > 1:
    raise ConfigError("topology: asks for several processes; only one can be profiled")
  multihost.check_possible(config)
  fill = arguments.fill
  if fill is None:
    fill = max(config.run.env_steps // 2, config.actor.random_steps)
  ages = [task.max_age for task in make_agent(config).tasks.values()]
  return filled(config, fill, max(ages, default=0))


def profile(config: Config, folder: Path) -> bool:
  """Starts a run in this folder and ends it after the profile. Returns whether it was completed."""
  from speedyzero_jax.metrics.logger import MetricsLogger
  from speedyzero_jax.run import loops, warmup
  from speedyzero_jax.run.build import build
  from speedyzero_jax.run.builders import enable_compilation_cache
  from speedyzero_jax.run.profiler import Profiler
  from speedyzero_jax.system.compilation import Compilations, WarmUp

  enable_compilation_cache(config)
  with (
    Compilations() as compilations,
    MetricsLogger(config, folder, None) as logger,
    contextlib.closing(build(config, folder, logger, resume=False)) as experiment,
  ):
    warm_up = WarmUp(compilations, lambda: experiment.in_full_work)
    experiment.after_step.append(warm_up.step)
    timings = warmup.prepare(experiment)
    with Profiler(
      experiment, folder, timings, compilations, warm_up, then=experiment.interrupt
    ) as profiler:
      loops.run(experiment)
    return profiler.done


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  memory.keep_freed()
  try:
    config = configured(arguments)
    presets = "-".join(Path(preset).stem for preset in arguments.config)
    folder = run_dir.create(config, f"profile-{presets}-{config.env.game}")
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE

  import jax

  from speedyzero_jax.run.experiment import TrainingError
  from speedyzero_jax.workers.weights import DivergedError

  try:
    with folder:
      return 0 if profile(config, folder.path) else FAILED
  except (TrainingError, DivergedError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return FAILED
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    where = memory.ran_out(error)
    if where is None:
      raise
    print(f"error: {memory.out_of(where, error)}", file=sys.stderr)
    return FAILED
  except KeyboardInterrupt:
    return 128 + signal.SIGINT


if __name__ == "__main__":
  sys.exit(main())
