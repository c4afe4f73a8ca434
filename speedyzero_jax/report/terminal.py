"""The report in a terminal: a row per run, and a summary over seeds."""

import itertools
import math
import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.report.groups import Group
from speedyzero_jax.report.runs import Run

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 16


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
  """Draws at most `width` characters, each the mean of an equal share of the values."""
  if not values:
    return ""
  width = min(width, len(values))
  edges = [i * len(values) // width for i in range(width + 1)]
  means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
  low, span = min(means), (max(means) - min(means)) or math.inf
  return "".join(SPARKS[round((mean - low) / span * (len(SPARKS) - 1))] for mean in means)


def show(runs: Sequence[Run], groups: Sequence[Group], console: Console) -> None:
  """Prints the tables: formatted on a terminal, otherwise tab-separated."""
  _show_table("Runs", [_run_cells(run) for run in runs], console)
  if console.is_terminal:  # notes are too wide for the table
    for run in runs:
      if run.problems:
        print(f"{run.path}: {'; '.join(run.problems)}", file=console.file)
  if groups:
    print(file=console.file)
    _show_table("Over seeds", [_group_cells(group) for group in groups], console)


def _run_cells(run: Run) -> dict[str, str]:
  deviation = "" if run.evaluation_std is None else f" ± {format_number(run.evaluation_std)}"
  explored = " explored" if run.evaluation_explore and run.evaluation_episodes else ""
  return {
    "run": run.path,
    "game": run.game or "-",
    "seed": "-" if run.seed is None else str(run.seed),
    "steps": format_number(run.steps),
    "env steps": format_number(run.env_steps),
    "return": format_number(run.training_return),
    "curve": sparkline(run.curve) or "-",
    "evaluation": format_number(run.evaluation_mean) + deviation + explored,
    "human": format_number(run.human_normalized),
    "min": "-" if run.wall_seconds is None else f"{run.wall_seconds / 60:.1f}",
    "notes": "; ".join(run.problems),
  }


def _shared_start(texts: Sequence[str]) -> str:
  columns = itertools.takewhile(lambda column: len({*column}) == 1, zip(*texts, strict=False))
  return "".join(column[0] for column in columns)


def _group_cells(group: Group) -> dict[str, str]:
  return {
    "runs": _shared_start(group.runs) + "*",
    "game": group.game or "-",
    "seeds": ",".join(str(seed) for seed in group.seeds),
    "return of": "evaluation" if group.score == "evaluation_mean" else "training",
    "mean ± stderr": f"{format_number(group.mean)} ± {format_number(group.stderr)}",
    "IQM": format_number(group.iqm),
    "human": format_number(group.human_normalized),
  }


def _show_table(title: str, rows: Sequence[dict[str, str]], console: Console) -> None:
  if not console.is_terminal:
    for cells in (list(rows[0]), *(list(row.values()) for row in rows)):
      print("\t".join(cells), file=console.file)
    return
  hidden = {"notes"} if console.width >= 100 else {"notes", "curve"}
  heads = [head for head in rows[0] if head not in hidden]
  table = Table(
    title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True
  )
  for head in heads:
    paths = head in ("run", "runs")
    words = paths or head in ("game", "seeds", "curve")
    table.add_column(
      head,
      no_wrap=not paths,
      overflow="fold",
      justify="left" if words else "right",
    )
  for row in rows:
    table.add_row(*(Text(row[head]) for head in heads))
  console.print(table)
