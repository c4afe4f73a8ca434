"""Compares runs: one row for each run folder, one summary for each group of runs that differ only in their seed.

  python launch/report.py runs/*
  python launch/report.py runs/* --json report.json

Reads what runs leave behind (`config.yaml`, `metrics.jsonl`, `evaluation.json`), finished or not; a missing or damaged
file is said in its row. Needs neither jax nor the machine the runs were made on.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import pathlib
import signal
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.board import format_number

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 16
REPETITION_KEYS = (
  "seed",
  "dir",
  "compile_cache",
)  # of `run`: runs that differ in these only are repetitions


@dataclasses.dataclass(frozen=True)
class Run:
  """What one run folder says. None: not said."""

  path: str
  game: str | None = None
  seed: int | None = None
  steps: int | None = None  # learner steps
  env_steps: int | None = None  # agent steps
  wall_seconds: float | None = None
  training_return: float | None = None  # mean raw return of the last 100 training games
  curve: tuple[float, ...] = ()  # training_return, line by line
  evaluation_step: int | None = None
  evaluation_mean: float | None = None
  evaluation_std: float | None = None
  human_normalised: float | None = None
  problems: tuple[str, ...] = ()
  settings: str | None = None  # equal for runs that are repetitions of one another


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ only in their seed, summarised over their scores."""

  game: str | None
  seeds: tuple[int | None, ...]
  score: str  # what is summarised: evaluation_mean if every run has it, else training_return
  mean: float
  stderr: float
  iqm: float  # interquartile mean
  human_normalised: float | None  # mean over the runs, if every run has it


def read_run(path: pathlib.Path) -> Run | None:
  """Reads a run folder; None if there is nothing of a run in it."""
  if not any(
    (path / name).is_file() for name in ("config.yaml", "metrics.jsonl", "evaluation.json")
  ):
    return None
  values: dict[str, Any] = {}
  problems: list[str] = []
  for name, read in (
    ("config.yaml", _config),
    ("metrics.jsonl", _metrics),
    ("evaluation.json", _evaluation),
  ):
    try:
      read_values = read(path / name, problems)
      values |= {
        key: value for key, value in read_values.items() if value is not None and key not in values
      }
    except FileNotFoundError:
      problems.append(f"no {name}")
    except OSError as error:
      problems.append(f"{name}: {error.strerror}")
    except (ValueError, yaml.YAMLError):
      problems.append(f"{name} is damaged")
  return Run(path=str(path), problems=tuple(problems), **values)


def _config(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  config = yaml.safe_load(path.read_text())
  if not isinstance(config, dict):
    raise ValueError
  env, run = config.get("env"), config.get("run")
  if not isinstance(env, dict) or not isinstance(run, dict):
    raise ValueError
  settings = config | {
    "run": {key: value for key, value in run.items() if key not in REPETITION_KEYS}
  }
  return {
    "game": _text(env.get("game")),
    "seed": _integer(run.get("seed")),
    "settings": json.dumps(settings, sort_keys=True, default=str),
  }


def _metrics(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  rows, damaged = jsonl.read_rows(path)
  if damaged:
    problems.append(f"metrics.jsonl: {damaged} damaged line{'s' * (damaged > 1)} skipped")
  if not rows:
    problems.append("metrics.jsonl is empty")
    return {}
  last = {
    name: value for row in rows for name, value in row.items() if value is not None
  }  # of each metric
  curve = tuple(x for row in rows if (x := _number(row.get(names.EPISODE_RETURN))) is not None)
  return {
    "steps": max(row[names.STEP] for row in rows),
    "env_steps": _integer(last.get(names.ENV_STEPS)),
    "wall_seconds": _number(last.get(names.TIME)),
    "training_return": curve[-1] if curve else None,
    "curve": curve,
  }


def _evaluation(path: pathlib.Path, problems: list[str]) -> dict[str, Any]:
  evaluation = json.loads(path.read_text())
  if not isinstance(evaluation, dict):
    raise ValueError
  found = {
    "game": _text(evaluation.get("game")),
    "evaluation_step": _integer(evaluation.get("step")),
    "evaluation_mean": _number(evaluation.get("mean")),
    "evaluation_std": _number(evaluation.get("std")),
    "human_normalised": _number(evaluation.get("human_normalised")),
  }
  if found["evaluation_mean"] is None:
    raise ValueError
  return found


def _number(value: Any) -> float | None:
  return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _integer(value: Any) -> int | None:
  return value if type(value) is int else None


def _text(value: Any) -> str | None:
  return value if isinstance(value, str) else None


def group_runs(runs: Sequence[Run]) -> list[Group]:
  """Summaries of the groups of at least two runs that differ only in their seed and all have a score."""
  alike = collections.defaultdict(list)
  for run in runs:
    if run.settings is not None:
      alike[run.settings].append(run)
  groups = []
  for members in alike.values():
    for score in ("evaluation_mean", "training_return"):
      scores = [getattr(run, score) for run in members]
      if len(scores) > 1 and None not in scores:
        normalised = [run.human_normalised for run in members if run.human_normalised is not None]
        groups.append(
          Group(
            game=members[0].game,
            seeds=tuple(run.seed for run in members),
            score=score,
            mean=statistics.fmean(scores),
            stderr=statistics.stdev(scores) / math.sqrt(len(scores)),
            iqm=interquartile_mean(scores),
            human_normalised=statistics.fmean(normalised)
            if len(normalised) == len(scores)
            else None,
          )
        )
        break
  return groups


def interquartile_mean(scores: Sequence[float]) -> float:
  """Mean without the lowest and the highest quarter of the scores, each rounded down (Agarwal et al. 2021)."""
  cut = len(scores) // 4
  return statistics.fmean(sorted(scores)[cut : len(scores) - cut])


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
  """The values as at most `width` characters, each the mean of its share of them, scaled from lowest to highest."""
  if not values:
    return ""
  width = min(width, len(values))
  edges = [i * len(values) // width for i in range(width + 1)]
  means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
  low, high = min(means), max(means)
  scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
  return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def show(runs: Sequence[Run], groups: Sequence[Group], console: Console) -> None:
  """Prints the tables: drawn on a terminal, with problems below; tab-separated elsewhere, with a column of problems."""
  rows = [_cells(run) for run in runs]
  if console.is_terminal:
    left_out = {"notes"} if console.width >= 100 else {"notes", "curve"}
    _draw(
      "Runs",
      [{head: cell for head, cell in row.items() if head not in left_out} for row in rows],
      console,
    )
    for run in runs:
      if run.problems:
        print(f"{run.path}: {'; '.join(run.problems)}", file=console.file)
  else:
    _print_tabbed(rows, console)
  if groups:
    summaries = [_summary_cells(group) for group in groups]
    if console.is_terminal:
      _draw("Over seeds", summaries, console)
    else:
      print(file=console.file)
      _print_tabbed(summaries, console)


def _cells(run: Run) -> dict[str, str]:
  evaluation = format_number(run.evaluation_mean)
  if run.evaluation_std is not None:
    evaluation += f" ± {format_number(run.evaluation_std)}"
  return {
    "run": run.path,
    "game": run.game or "-",
    "seed": "-" if run.seed is None else str(run.seed),
    "steps": format_number(run.steps),
    "env steps": format_number(run.env_steps),
    "return": format_number(run.training_return),
    "curve": sparkline(run.curve) or "-",
    "evaluation": evaluation,
    "human": format_number(run.human_normalised),
    "min": "-" if run.wall_seconds is None else f"{run.wall_seconds / 60:.1f}",
    "notes": "; ".join(run.problems),
  }


def _summary_cells(group: Group) -> dict[str, str]:
  return {
    "game": group.game or "-",
    "seeds": ",".join("-" if seed is None else str(seed) for seed in group.seeds),
    "return of": "evaluation" if group.score == "evaluation_mean" else "training",
    "mean ± stderr": f"{format_number(group.mean)} ± {format_number(group.stderr)}",
    "IQM": format_number(group.iqm),
    "human": format_number(group.human_normalised),
  }


def _print_tabbed(rows: Sequence[dict[str, str]], console: Console) -> None:
  for cells in (list(rows[0]), *(list(row.values()) for row in rows)):
    print("\t".join(cells), file=console.file)


def _draw(title: str, rows: Sequence[dict[str, str]], console: Console) -> None:
  table = Table(
    title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True
  )
  for head in rows[0]:
    if head == "run":  # the only one that may take several lines
      table.add_column(head, overflow="fold")
    else:
      table.add_column(
        head, no_wrap=True, justify="left" if head in ("game", "seeds", "curve") else "right"
      )
  for row in rows:
    table.add_row(*map(Text, row.values()))
  console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0, or 2 if there is no run to report."""
  parser = argparse.ArgumentParser(prog="report.py", description=(__doc__ or "").split("\n\n")[0])
  parser.add_argument(
    "runs", nargs="*", type=pathlib.Path, metavar="RUN_DIR", help="folders of runs"
  )
  parser.add_argument(
    "--json", type=pathlib.Path, metavar="PATH", help="also write the report as JSON here"
  )
  options = parser.parse_args(arguments)
  found = [(path, read_run(path)) for path in options.runs]
  if not any(run for _, run in found):
    given = ", ".join(map(str, options.runs))
    print(
      f"report.py: no run in {given}" if given else "report.py: give at least one run folder",
      file=sys.stderr,
    )
    return 2
  runs = [run or Run(path=str(path), problems=("no run here",)) for path, run in found]
  groups = group_runs(runs)
  show(runs, groups, Console())
  if options.json:
    report = {
      "runs": [_plain(run) for run in runs],
      "groups": [dataclasses.asdict(group) for group in groups],
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n")
  return 0


def _plain(run: Run) -> dict[str, Any]:
  fields = dataclasses.asdict(run)
  del fields["settings"]
  return fields


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends as other programs do
  sys.exit(main())
