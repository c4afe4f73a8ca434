"""Profiles a few steps of a run: python launch/profile.py --config PRESET [PRESET ...] [key=value ...]

Real environments, replay, search and learner, as configured, with a replay that random play has filled. When nothing
compiles any more, some learner steps are timed, and as many more are traced; then it ends. The new folder (--out, or
one under runs/) has the trace (plugins/profile/, for xprof or ui.perfetto.dev) and profile.json; the tables are printed
too.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
  0, str(Path(__file__).resolve().parent.parent)
)  # a clone works without being installed

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.run.run_dir import RunFolderError
from speedyzero_jax.system import memory

FAILED, WRONG_USE = 1, 2
STEPS = 5  # learner steps profiled, unless profile.steps says otherwise


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line. Overrides may stand anywhere, also right after the presets."""
  parser = argparse.ArgumentParser(
    prog="launch/profile.py",
    description="Profiles a few steps of a run: a trace, and where the time goes.",
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
    "--out", type=Path, metavar="DIR", help="new folder for what is found (default: under runs/)"
  )
  parser.add_argument(
    "--fill",
    type=int,
    metavar="N",
    help="agent steps of random play before (default: half of the run's, since sweeps cost more the more there is)",
  )
  parser.add_argument(
    "overrides", nargs="*", metavar="key=value", help="settings (see launch/multihost.py --help)"
  )
  arguments = parser.parse_args(argv)
  multihost.separate_overrides(arguments, argv)
  return arguments


def filled(config: Config, random_steps: int) -> Config:
  """A run that is never played to its end: so many random agent steps, then learner steps at the pace of `config`.

  Raises ConfigError if they are not fewer than all.
  """
  run, begin, learner = config.run.env_steps, config.actor.random_steps, config.learner
  if not begin <= random_steps < run:
    raise ConfigError(f"--fill: must be from actor.random_steps ({begin}) to below {run}")
  pace = (run - begin) / max(
    learner.steps - learner.tail_steps, 1
  )  # agent steps for each learner step
  # Long enough for sweeps to come round: each computes its first block within half of its age.
  enough = 2 * config.profile.steps + 2 * max(
    config.agent.reanalyse.max_age, config.agent.refresh.max_age
  )
  steps = max(round((run - random_steps) / pace), enough)
  changes = [
    f"actor.random_steps={random_steps}",
    f"run.env_steps={max(run, random_steps + round(steps * pace))}",
    f"learner.steps={steps}",
    "learner.tail_steps=0",
  ]
  return loader.override(config, changes)


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  memory.keep_freed()
  try:
    config = loader.load(arguments.config, arguments.overrides)
    changes = [f"run.dir={arguments.out}"] if arguments.out else []
    changes += [] if config.profile.steps else [f"profile.steps={STEPS}"]
    half = max(config.run.env_steps // 2, config.actor.random_steps)
    config = filled(
      loader.override(config, changes), half if arguments.fill is None else arguments.fill
    )
    if topology.resolve(config).num_processes > 1:
      raise ConfigError(
        "topology: asks for several processes; a profile is of one that does it all"
      )
    multihost.check_possible(config)
    name = "-".join(
      ["profile", *(Path(preset).stem for preset in arguments.config), config.env.game]
    )
    folder = run_dir.create(config, name)
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE

  import jax

  from speedyzero_jax.run.builders import enable_compilation_cache
  from speedyzero_jax.run.experiment import TrainingError
  from speedyzero_jax.run.profiler import profile
  from speedyzero_jax.workers.weights import DivergedError

  enable_compilation_cache(config)
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
