"""Runs of a study: launch/suite.py configs/studies/optimizers.yaml --dir runs/optimizers

  python launch/suite.py --config atari100k --games all --seeds 3 --dir runs/atari100k
  sbatch --array=0-77 --gpus=1 --wrap "python launch/suite.py --config atari100k --games all \\
    --seeds 3 --dir runs/atari100k --part \\$SLURM_ARRAY_TASK_ID/78"

A study varies settings, games and seeds (speedyzero_jax/study/study.py). Its runs are folders in
DIR, with a log beside each. The same command trains what is not finished, from its last
checkpoint. At the end DIR/report.html compares the runs.

Exit codes: 0 done; 1 a run failed; 2 wrong use; 130 or 143 stopped by Ctrl-C or SIGTERM, after
saving.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a clone not installed

from speedyzero_jax.cluster import devices
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.report import page, terminal
from speedyzero_jax.report.groups import group_runs, summary
from speedyzero_jax.report.runs import read_runs
from speedyzero_jax.run.processes import Interrupted, RunProcesses, log_of
from speedyzero_jax.run.run_dir import RunFolderError
from speedyzero_jax.study import study as studies
from speedyzero_jax.study import table
from speedyzero_jax.study.study import Study, StudyRun

FAILED, WRONG_USE = 1, 2
_SECONDS = 2.0  # between drawings of the table


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  arguments = _parser().parse_intermixed_args(argv)
  try:
    processes = RunProcesses(devices.places(arguments.together))
    runs = studies.runs_of(_study(arguments), arguments.dir)
    part, parts = _part(arguments.part)
    arguments.dir.mkdir(parents=True, exist_ok=True)
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE
  except OSError as error:
    print(f"error: can't use {arguments.dir}: {error.strerror}", file=sys.stderr)
    return WRONG_USE
  received: list[int] = []

  def stop(number: int, _frame: object) -> None:
    received.append(number)
    processes.stop()

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
  failed = _train(runs, runs[part::parts], processes)
  if received:
    print("stopped; the same command continues")
    return 128 + received[0]
  if parts == 1:
    _report(runs, arguments.dir, arguments.out)
  return FAILED if failed else 0


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="launch/suite.py", description="Trains the runs of a study and compares them."
  )
  parser.add_argument("study", nargs="?", type=Path, help="YAML, see configs/studies/")
  parser.add_argument("settings", nargs="*", metavar="key=value", help="of all runs")
  parser.add_argument("--config", nargs="+", metavar="PRESET", help="instead of a study's presets")
  parser.add_argument("--games", nargs="+", metavar="GAME", help="all: the 26 games of Atari-100k")
  parser.add_argument("--seeds", type=int, metavar="N", help="run.seed=0 to N-1 (default: 3)")
  parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of the comparison")
  parser.add_argument("--dir", type=Path, required=True, help="folder of the runs")
  parser.add_argument(
    "--together", type=int, metavar="N", help="runs at once (default: one per GPU, or 1)"
  )
  parser.add_argument(
    "--part", metavar="I/N", default="0/1", help="only runs I, I+N, I+2N, ..., for a job array"
  )
  return parser


def _study(arguments: argparse.Namespace) -> Study:
  # key=value may follow --config and --games, or stand in the study's place.
  lists = [arguments.settings, arguments.config or [], arguments.games or []]
  path = arguments.study
  if path is not None and "=" in str(path):
    lists, path = [[str(path)], *lists], None
  settings = tuple(text for texts in lists for text in texts if "=" in text)
  config, games = (tuple(text for text in texts if "=" not in text) for texts in lists[-2:])
  if path is None and not config:
    raise ConfigError("a study or --config is needed")
  study = Study(config=()) if path is None else studies.load(path)
  return dataclasses.replace(
    study,
    config=config or study.config,
    settings=(*study.settings, *settings),
    games=games or study.games,
    seeds=study.seeds if arguments.seeds is None else arguments.seeds,
  )


def _part(text: str) -> tuple[int, int]:
  found = re.fullmatch(r"(\d+)/(\d+)", text)
  if not found or int(found[1]) >= int(found[2]):
    raise ConfigError(f"--part: expected I/N with I below N, got {text}")
  return int(found[1]), int(found[2])


def _train(runs: list[StudyRun], part: list[StudyRun], processes: RunProcesses) -> set[Path]:
  """Trains what is not finished; the folders of the runs that failed. Ends early after a signal."""
  failed: set[Path] = set()
  console = Console()

  def train(run: StudyRun) -> None:
    with contextlib.suppress(Interrupted):
      code = processes.train(run.path, run.arguments, run.processes)
      if code:
        failed.add(run.path)
      ended = f"failed with exit code {code}: see {log_of(run.path)}" if code else "finished"
      console.print(f"{time.strftime('%H:%M:%S')} {run.path.name} {ended}", highlight=False)

  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(processes.count))
    live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
    waiting = {pool.submit(train, run) for run in part if run.score() is None}
    while waiting:
      done, waiting = concurrent.futures.wait(waiting, _SECONDS)
      for future in done:
        future.result()
      if console.is_terminal:
        live.update(table.draw(runs, processes.running, failed), refresh=True)
  return failed


def _report(runs: list[StudyRun], folder: Path, out: Path | None) -> None:
  """Prints the comparison and writes it as a page, and as JSON."""
  found = read_runs(run.path for run in runs)
  groups = group_runs(found)
  terminal.show(found, groups, Console())
  try:
    (folder / "report.html").write_bytes(page.render(found))
    if out is not None:
      command = {"command": shlex.join(["python", *sys.argv])}
      out.write_text(json.dumps(command | summary(found, groups), indent=1) + "\n")
  except OSError as error:
    print(f"can't write {error.filename}: {error.strerror}", file=sys.stderr)
  else:
    print(f"{folder / 'report.html'} has curves, scores, ages and times")


if __name__ == "__main__":
  sys.exit(main())
