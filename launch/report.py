"""Comparison of runs: a row per run folder, and a summary per group that differs in its seed.

  python launch/report.py runs/*
  python launch/report.py runs/* --json report.json

Reads `config.yaml`, `metrics.jsonl` and `evaluation.json` of finished and unfinished runs; a row
says which of them is missing or damaged. Needs neither jax nor the machine of the runs.
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

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.progress import format_number

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 16
REPETITION_KEYS = ("seed", "dir", "compile_cache")  # of `run`, in which repetitions may differ
SCORES = ("evaluation_mean", "training_return")  # the first one that all runs of a group have


@dataclasses.dataclass
class Run:
  """The contents of one run folder; None or empty where its files do not say."""

  path: str
  game: str | None = None
  seed: int | None = None
  steps: int | None = None  # learner steps
  env_steps: int | None = None  # agent steps
  wall_seconds: float | None = None
  training_return: float | None = None  # mean raw return of the last 100 training games
  curve: list[float] = dataclasses.field(default_factory=list)  # training_return, line by line
  evaluation_step: int | None = None
  evaluation_mean: float | None = None
  evaluation_std: float | None = None
  human_normalised: float | None = None
  problems: list[str] = dataclasses.field(default_factory=list)
  settings: str | None = None  # equal for repetitions of one another


@dataclasses.dataclass(frozen=True)
class Group:
  """Runs that differ only in their seed, summarised over their scores."""

  game: str | None
  seeds: list[int | None]
  score: str  # one of SCORES
  mean: float
  stderr: float
  iqm: float  # interquartile mean
  human_normalised: float | None  # mean over the runs, if every run has it


def read_run(path: pathlib.Path) -> Run:
  """Reads a run folder, in whatever state it is."""
  run = Run(str(path))
  readers = {
    "config.yaml": _read_config, "metrics.jsonl": _read_metrics, "evaluation.json": _read_evaluation
  }  # fmt: skip
  if not any((path / name).exists() for name in readers):
    run.problems.append("no run here")
    return run
  for name, read in readers.items():
    try:
      read(run, path / name)
    except FileNotFoundError:
      run.problems.append(f"no {name}")
    except OSError as error:
      run.problems.append(f"{name}: {error.strerror}")
    except (ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
      run.problems.append(f"{name} is damaged")
  return run


def _read_config(run: Run, path: pathlib.Path) -> None:
  config = yaml.safe_load(path.read_text())
  kept = {key: value for key, value in config["run"].items() if key not in REPETITION_KEYS}
  run.game, run.seed = str(config["env"]["game"]), int(config["run"]["seed"])
  run.settings = json.dumps(config | {"run": kept}, sort_keys=True, default=str)


def _read_metrics(run: Run, path: pathlib.Path) -> None:
  rows, damaged = jsonl.read_rows(path)
  if damaged:
    run.problems.append(f"metrics.jsonl: {damaged} damaged line{'s' * (damaged > 1)} skipped")
  if not rows:
    run.problems.append("metrics.jsonl is empty")
    return
  run.steps = max(row[names.STEP] for row in rows)
  run.env_steps, run.wall_seconds = rows[-1].get(names.ENV_STEPS), rows[-1].get(names.TIME)
  run.curve = [float(x) for row in rows if (x := row.get(names.EPISODE_RETURN)) is not None]
  run.training_return = run.curve[-1] if run.curve else None


def _read_evaluation(run: Run, path: pathlib.Path) -> None:
  evaluation = json.loads(path.read_text())
  run.game = run.game or evaluation.get("game")
  run.evaluation_std, run.human_normalised = evaluation["std"], evaluation["human_normalised"]
  run.evaluation_mean, run.evaluation_step = float(evaluation["mean"]), evaluation["step"]


def group_runs(runs: Sequence[Run]) -> list[Group]:
  """Groups of at least two runs that differ only in their seed and all have a score."""
  alike = collections.defaultdict(list)
  for run in runs:
    if run.settings is not None:
      alike[run.settings].append(run)
  groups = []
  for members in alike.values():
    for score in SCORES:
      scores = [x for run in members if (x := getattr(run, score)) is not None]
      if 1 < len(scores) == len(members):
        groups.append(_group(members, score, scores))
        break
  return groups


def _group(members: Sequence[Run], score: str, scores: Sequence[float]) -> Group:
  human = [x for run in members if (x := run.human_normalised) is not None]
  return Group(
    game=members[0].game,
    seeds=[run.seed for run in members],
    score=score,
    mean=statistics.fmean(scores),
    stderr=statistics.stdev(scores) / math.sqrt(len(scores)),
    iqm=interquartile_mean(scores),
    human_normalised=statistics.fmean(human) if len(human) == len(scores) else None,
  )


def interquartile_mean(scores: Sequence[float]) -> float:
  """Mean without the lowest and the highest quarter, each rounded down (Agarwal et al. 2021)."""
  cut = len(scores) // 4
  return statistics.fmean(sorted(scores)[cut : len(scores) - cut])


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
  """At most `width` characters, each the mean of its share, scaled from lowest to highest."""
  if not values:
    return ""
  width = min(width, len(values))
  edges = [i * len(values) // width for i in range(width + 1)]
  means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
  low, span = min(means), (max(means) - min(means)) or math.inf
  return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] for mean in means)


def show(runs: Sequence[Run], groups: Sequence[Group], console: Console) -> None:
  """Prints the tables: drawn on a terminal, tab-separated elsewhere."""
  _show_table("Runs", [_run_cells(run) for run in runs], console)
  if console.is_terminal:  # where notes would take too much of the width
    for run in runs:
      if run.problems:
        print(f"{run.path}: {'; '.join(run.problems)}", file=console.file)
  if groups:
    print(file=console.file)
    _show_table("Over seeds", [_group_cells(group) for group in groups], console)


def _run_cells(run: Run) -> dict[str, str]:
  deviation = "" if run.evaluation_std is None else f" ± {format_number(run.evaluation_std)}"
  return {
    "run": run.path,
    "game": run.game or "-",
    "seed": "-" if run.seed is None else str(run.seed),
    "steps": format_number(run.steps),
    "env steps": format_number(run.env_steps),
    "return": format_number(run.training_return),
    "curve": sparkline(run.curve) or "-",
    "evaluation": format_number(run.evaluation_mean) + deviation,
    "human": format_number(run.human_normalised),
    "min": "-" if run.wall_seconds is None else f"{run.wall_seconds / 60:.1f}",
    "notes": "; ".join(run.problems),
  }


def _group_cells(group: Group) -> dict[str, str]:
  return {
    "game": group.game or "-",
    "seeds": ",".join(str(seed) for seed in group.seeds),
    "return of": "evaluation" if group.score == "evaluation_mean" else "training",
    "mean ± stderr": f"{format_number(group.mean)} ± {format_number(group.stderr)}",
    "IQM": format_number(group.iqm),
    "human": format_number(group.human_normalised),
  }


def _show_table(title: str, rows: Sequence[dict[str, str]], console: Console) -> None:
  if not console.is_terminal:
    for cells in (rows[0].keys(), *(row.values() for row in rows)):
      print("\t".join(cells), file=console.file)
    return
  hidden = {"notes"} if console.width >= 100 else {"notes", "curve"}
  heads = [head for head in rows[0] if head not in hidden]
  table = Table(
    title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True
  )
  for head in heads:
    justify = "left" if head in ("run", "game", "seeds", "curve") else "right"
    table.add_column(head, no_wrap=head != "run", overflow="fold", justify=justify)
  for row in rows:
    table.add_row(*(Text(row[head]) for head in heads))
  console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0, or 2 if there is no run to report."""
  parser = argparse.ArgumentParser(prog="report.py", description=(__doc__ or "").split("\n\n")[0])
  parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN_DIR", help="run folders")
  parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="also write JSON here")
  options = parser.parse_args(arguments)
  runs = [read_run(path) for path in options.runs]
  if all(run.problems == ["no run here"] for run in runs):
    print(f"report.py: no run in {', '.join(map(str, options.runs))}", file=sys.stderr)
    return 2
  groups = group_runs(runs)
  show(runs, groups, Console())
  if options.json:
    described = [{k: v for k, v in vars(run).items() if k != "settings"} for run in runs]
    report = {"runs": described, "groups": [vars(group) for group in groups]}
    options.json.write_text(json.dumps(report, indent=2) + "\n")
  return 0


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `report.py ... | head` ends as other programs do
  sys.exit(main())
