"""Trains a study: launch/suite.py configs/studies/optimizers.yaml

  python launch/suite.py --config atari100k sweep gpu --games all --seeds 3
  sbatch --array=0-77 --gpus=1 --cpus-per-task=16 --mem=32G --requeue --wrap \\
    ".venv/bin/python launch/suite.py --config atari100k sweep gpu --games all --seeds 3 \\
    --part \\$SLURM_ARRAY_TASK_ID/78"

A study varies settings, games and seeds (speedyzero_jax/study/study.py). Its runs are folders in
DIR, with a log beside each. The same command resumes unfinished runs from their last checkpoints.
At the end, DIR/report.html compares the runs.

Exit codes: 0 done; 1 a run failed, or the comparison can't be written; 2 usage error; 129, 130 or
143 stopped by a closed terminal, Ctrl-C or SIGTERM, after saving.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from launch import multihost
from speedyzero_jax.cluster import devices
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.report import page, terminal
from speedyzero_jax.report.groups import to_json
from speedyzero_jax.report.runs import read_runs
from speedyzero_jax.run.processes import Interrupted, RunProcesses, log_of
from speedyzero_jax.run.signals import handling
from speedyzero_jax.study import study as studies
from speedyzero_jax.study import table
from speedyzero_jax.study.study import Study, StudyRun
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR

_SECONDS = 2.0  # between updates of the table


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  argv = sys.argv[1:] if argv is None else argv
  arguments = _parser().parse_intermixed_args(argv)
  try:
    processes = RunProcesses(devices.machine_shares(arguments.together))
    study = _study(arguments, argv)
    names = [Path(text).stem for text in arguments.study or arguments.config]
    folder = Path(os.path.expanduser(arguments.dir or Path("runs") / "+".join(names)))
    runs = studies.runs_of(study, folder)
    part, parts = _part(arguments.part)
    if parts > 1 and arguments.out:
      raise ConfigError("--out: a part of a study is not compared; omit --out or --part")
    for path in (folder, *([arguments.out.parent] if arguments.out else [])):
      path.mkdir(parents=True, exist_ok=True)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR
  except OSError as error:
    print(f"error: can't use {error.filename}: {error.strerror}", file=sys.stderr)
    return USAGE_ERROR
  with handling(processes.stop):
    failed = _train(runs, runs[part::parts], processes)
  if processes.received is not None:
    _say("stopped; repeat the command to continue")
    return 128 + processes.received
  reported = parts > 1 or _report(runs, folder, arguments.out)
  return 0 if reported and not failed else FAILED


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog="launch/suite.py", description="Trains the runs of a study and compares them."
  )
  add = parser.add_argument
  described = "YAML file (see configs/studies/), and settings of all runs"
  add("study", nargs="*", metavar="STUDY | key=value", help=described)
  presets, games = "replaces the study's presets", "games; all: the 26 games of Atari-100k"
  add("--config", nargs="+", action="extend", metavar="PRESET", default=[], help=presets)
  add("--games", nargs="+", action="extend", metavar="GAME", default=[], help=games)
  add("--seeds", type=int, metavar="N", help="run.seed=0 to N-1 (default: 3)")
  add("--out", type=Path, metavar="FILE", help="JSON file of the comparison")
  add("--dir", type=Path, help="folder of the runs (default: runs/, named after study or presets)")
  add("--together", type=int, metavar="N", help="runs trained at once (default: one per GPU, or 1)")
  add("--part", metavar="I/N", default="0/1", help="only runs I, I+N, I+2N, ..., for a job array")
  return parser


def _study(arguments: argparse.Namespace, argv: Sequence[str]) -> Study:
  """Returns the study of the arguments, and removes settings from their lists."""
  paths, config, games = arguments.study, arguments.config, arguments.games
  settings = multihost.separate_overrides(argv, paths, config, games)
  if len(paths) > 1:
    raise ConfigError(f"expected one study, got {', '.join(paths)}")
  study = studies.load(Path(paths[0])) if paths else Study()
  return dataclasses.replace(
    study,
    config=tuple(config) or study.config,
    settings=(*study.settings, *settings),
    games=tuple(games) or study.games,
    seeds=study.seeds if arguments.seeds is None else arguments.seeds,
  )


def _part(text: str) -> tuple[int, int]:
  numbers = re.fullmatch(r"(\d+)/(\d+)", text)
  if not numbers or int(numbers[1]) >= int(numbers[2]):
    raise ConfigError(f"--part: expected I/N with I below N, got {text}")
  return int(numbers[1]), int(numbers[2])


def _train(runs: list[StudyRun], part: list[StudyRun], processes: RunProcesses) -> set[Path]:
  """Trains unfinished runs; returns the folders of failed ones. Ends early after a signal."""
  failed: set[Path] = set()
  console = Console(markup=False, emoji=False)
  with (
    contextlib.suppress(OSError),  # drawing the table on a closed terminal
    concurrent.futures.ThreadPoolExecutor(processes.count) as pool,
    Live(console=console, auto_refresh=False, transient=True) as live,
  ):
    waiting = {
      pool.submit(processes.train, run.path, run.arguments, run.processes, run.finished): run
      for run in part
      if not run.finished()
    }
    while waiting:
      ended, _ = concurrent.futures.wait(waiting, _SECONDS, concurrent.futures.FIRST_COMPLETED)
      for future in ended:
        run = waiting.pop(future)
        if _failed(run, future):
          failed.add(run.path)
      if console.is_terminal:
        with contextlib.suppress(OSError):
          live.update(table.draw(runs, processes.running, failed), refresh=True)
  return failed


def _failed(run: StudyRun, future: concurrent.futures.Future[int]) -> bool:
  """Whether a run failed. Prints how it ended, unless a signal stopped it."""
  try:
    code = future.result()
    ended = f"failed with exit code {code}: see {log_of(run.path)}" if code else "finished"
  except Interrupted:
    return False
  except OSError as error:
    code, ended = FAILED, f"failed: {error}"
  _say(f"{time.strftime('%H:%M:%S')} {run.path.name} {ended}")
  return code != 0


def _report(runs: list[StudyRun], folder: Path, out: Path | None) -> bool:
  """Writes the comparison as HTML and JSON and prints it. Returns False if it can't be written."""
  results = read_runs(run.path for run in runs)
  try:
    (folder / "report.html").write_bytes(page.render(results))
    if out is not None:
      out.write_text(to_json(results, command=shlex.join(["python", *sys.argv])))
  except OSError as error:
    print(f"error: can't write the comparison: {error}", file=sys.stderr)
    return False
  with contextlib.suppress(OSError, UnicodeEncodeError):  # a closed output, or one without "±"
    terminal.show(results, Console())
  _say(f"{folder / 'report.html'} has curves, scores, ages and times")
  return True


def _say(line: str) -> None:
  with contextlib.suppress(OSError):  # a closed output
    print(line, flush=True)


if __name__ == "__main__":
  sys.exit(main())
