"""Population Based Training: launch/population.py configs/populations/cartpole.yaml --dir DIR

Members are run folders in DIR and train in rounds. After each round, the worst members copy the
best ones, including checkpoint and replay, and change their settings. DIR/events.jsonl records
every decision; DIR/population.json is written at the end. The same command continues an interrupted
population.

Exit codes: 0 done; 1 no member finished a round, or a file error; 2 usage error; 129, 130 or 143
stopped by a closed terminal, Ctrl-C or SIGTERM, after saving.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from speedyzero_jax.cluster import devices
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.population import config as populations
from speedyzero_jax.population import controller
from speedyzero_jax.population.trainer import RunTrainer
from speedyzero_jax.run import run_dir
from speedyzero_jax.run.processes import Interrupted, RunProcesses
from speedyzero_jax.run.signals import handling
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR
from speedyzero_jax.system.files import write_atomically


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/population.py", description="Trains a population of runs whose settings evolve."
  )
  parser.add_argument("population", type=Path, help="YAML file, see configs/populations/")
  parser.add_argument("--dir", required=True, help="folder of the population")
  parser.add_argument(
    "--together", type=int, metavar="N", help="members trained at once (default: one per GPU, or 1)"
  )
  arguments = parser.parse_args(argv)
  try:
    processes = RunProcesses(devices.machine_shares(arguments.together))
    population = populations.load(arguments.population)
    folder = Path(os.path.expanduser(arguments.dir))
    with _claimed(folder, arguments.population):
      return _run(population, folder, processes)
  except ConfigError as error:
    _say(f"error: {error}", sys.stderr)
    return USAGE_ERROR
  except (controller.NoMemberFinished, OSError) as error:
    _say(f"error: {error}; repeat the command to continue", sys.stderr)
    return FAILED


def _claimed(folder: Path, description: Path) -> IO:
  """Locks the folder and stores the population's description in it."""
  try:
    folder.mkdir(parents=True, exist_ok=True)
    entries = {entry.name for entry in folder.iterdir()}
  except OSError as error:
    raise ConfigError(f"can't use {folder}: {error.strerror}") from error
  kept = folder / "population.yaml"
  own = ("supervisor.lock", "population.yaml.")  # of a controller that was killed
  if kept.name not in entries and not all(name.startswith(own) for name in entries):
    raise ConfigError(f"{folder} is not empty and holds no population; choose another --dir")
  lock = run_dir.supervised(folder)
  if kept.exists() and populations.load(kept) != populations.load(description):
    lock.close()
    raise ConfigError(f"{folder} holds another population; choose another --dir")
  write_atomically(kept, description.read_text())
  return lock


def _run(population: populations.Population, folder: Path, processes: RunProcesses) -> int:
  trainer = RunTrainer(population, folder.resolve(), processes, _say)
  log = controller.EventLog(folder / "events.jsonl")
  try:
    with handling(processes.stop):
      result = controller.run(population, trainer, log, _say)
  except Interrupted as interruption:
    _say("stopped; repeat the command to continue")
    return 128 + int(interruption.args[0])
  (folder / "population.json").write_text(json.dumps(result, indent=1) + "\n")
  settings = ", ".join(f"{key}={value:.4g}" for key, value in result["settings"].items())
  _say(f"best: {trainer.path(result['best'])}, {result['scores'][-1][result['best']]}; {settings}")
  return 0


def _say(line: str, file: IO | None = None) -> None:
  with contextlib.suppress(OSError):  # a closed output
    print(line, file=file, flush=True)


if __name__ == "__main__":
  sys.exit(main())
