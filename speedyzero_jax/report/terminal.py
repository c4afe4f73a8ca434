"""The report in a terminal: a row per run, and one per method and game."""

import itertools
import math
import statistics
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.report import scores
from speedyzero_jax.report.groups import methods
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


def show(runs: Sequence[Run], console: Console) -> None:
  """Prints the tables: formatted on a terminal, otherwise tab-separated."""
  _show_table("Runs", [_run_cells(run) for run in runs], console)
  if console.is_terminal:  # notes are too wide for the table
    for run in runs:
      if run.problems:
        print(f"{run.path}: {'; '.join(run.problems)}", file=console.file)
  compared = methods(runs)
  heads, rows = scores.by_game(compared)
  if len(rows) < sum(len(method.runs) for method in compared):
    print(file=console.file)
    cells = [dict(zip(map(str, heads), map(str, row), strict=True)) for row in rows]
    _show_table("Over seeds", cells, console)


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


def _show_table(title: str, rows: Sequence[dict[str, str]], console: Console) -> None:
  if not console.is_terminal:
    for cells in (list(rows[0]), *(list(row.values()) for row in rows)):
      print("\t".join(cells), file=console.file)
    return
  hidden = {"notes", "device-minutes"}
  hidden |= set() if console.width >= 100 else {"curve", "lowest", "highest"}
  heads = [head for head in rows[0] if head not in hidden]
  table = Table(
    title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, collapse_padding=True
  )
  for head in heads:
    words = head in ("run", "game", "method")
    table.add_column(
      head,
      no_wrap=not words,
      overflow="fold",
      justify="left" if words or head == "curve" else "right",
    )
  for row in rows:
    table.add_row(*(Text(row[head]) for head in heads))
  console.print(table)
