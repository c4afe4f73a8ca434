"""Profiles a few learner steps: launch/profile_run.py --config PRESET [PRESET ...] [key=value ...]

Starts a run in one process, with a replay filled by random play if the agent begins with it. After
a few learner steps, profile.steps of them are timed and as many more are traced. The new folder
(--out, or one under runs/) has profile.json and the trace (plugins/profile/, for xprof or
ui.perfetto.dev); the tables are also printed.

Exit codes are those of launch/multihost.py.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.system import memory
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR

STEPS = 5  # learner steps profiled, unless profile.steps is set


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    prog="launch/profile_run.py", description="Profiles a few learner steps of a new run."
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
    help="agent steps of random play before the profile (default: half of the run's, or none for "
    "agents that begin without); sweeps take longer in a fuller replay",
  )
  return multihost.parse_with_overrides(parser, argv)


def shortened(config: Config, fill: int | None) -> Config:
  """Returns the configuration of a run that pauses after the profile, at the same replay ratio.

  Args:
    config: configuration of the whole run.
    fill: agent steps of random play before the first learner step; None for half of the run, or
      for none if the run begins without random play.

  Raises:
    ConfigError: `fill` is below actor.random_steps or not below run.env_steps, or the agent does
      not begin with random play.
  """
  from speedyzero_jax.run.factories import make_agent
  from speedyzero_jax.workers.sweeper import make_sweepers

  total, begin, learner = config.run.env_steps, config.actor.random_steps, config.learner
  if fill is None:
    fill = max(total // 2, begin) if begin else 0
  if not begin <= fill < total:
    raise ConfigError(
      f"--fill: must be at least actor.random_steps ({begin}) and below run.env_steps ({total}), "
      f"got {fill}"
    )
  pace = (total - begin) / max(learner.steps - learner.tail_steps, 1)  # agent per learner steps
  profiled = config.profile.steps or STEPS
  sweepers = make_sweepers(make_agent(config), config.actor.weights_interval)
  stored = min(fill, config.replay.capacity or fill)
  first = max((1 / sweeper.calls_per_step(stored) for sweeper in sweepers), default=0)
  steps = 10 + math.ceil(first) + 2 * profiled  # `first`: until all sweeps have begun
  total = max(total, fill + math.ceil(steps * pace))
  changes = [
    f"actor.random_steps={fill}",
    f"run.env_steps={total}",
    f"run.pause_at={steps}",
    f"run.checkpoint_interval={steps}",
    f"learner.steps={round((total - fill) / pace)}",
    "learner.tail_steps=0",
    "evaluation.interval=0",
    "evaluation.at_end=false",
    f"profile.steps={profiled}",
  ]
  return loader.override(config, changes)


def configured(arguments: argparse.Namespace) -> Config:
  """Returns the configuration of the run to profile. Raises ConfigError."""
  out = [f"run.dir={arguments.out}"] if arguments.out else []
  config = loader.load(arguments.config, [*arguments.overrides, *out])
  if topology.resolve(config).num_processes > 1:
    raise ConfigError("topology: several processes are configured; only one can be profiled")
  multihost.check_possible(config)
  return shortened(config, arguments.fill)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  memory.retain_freed()
  try:
    config = configured(arguments)
    presets = "-".join(Path(preset).stem for preset in arguments.config)
    folder = run_dir.create(config, f"profile-{presets}-{config.env.game}")
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR

  from speedyzero_jax.run.signals import Signals
  from speedyzero_jax.run.train import train

  with Signals() as signals, folder:
    code = train(config, folder.path, resume=False, signals=signals)
  if code == 0 and not (folder.path / "profile.json").exists():
    print("error: no profile, as the run ended before all sweeps had begun", file=sys.stderr)
    return FAILED
  return code


if __name__ == "__main__":
  sys.exit(main())
