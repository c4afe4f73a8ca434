"""Terminal table of a study: a row per variant and game, a cell per seed."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.study.study import StudyRun


def draw(runs: Sequence[StudyRun], running: Collection[Path], failed: Collection[Path]) -> Table:
  """Draws the state of every run: its score if finished, else its progress, or `failed`.

  Rows with running runs come first, as a terminal may be too small for the others.
  """
  seeds = sorted({run.seed for run in runs})
  table = Table("variant", "game", *map(str, seeds), box=box.SIMPLE_HEAD)
  first = sorted(runs, key=lambda run: run.path not in running)
  for variant, game in dict.fromkeys((run.variant, run.game) for run in first):
    row = {run.seed: run for run in runs if (run.variant, run.game) == (variant, game)}
    cells = [state(row[seed], running, failed) for seed in seeds]
    table.add_row(variant or "-", game, *cells)
  return table


def state(run: StudyRun, running: Collection[Path], failed: Collection[Path]) -> str:
  """Text of a run's cell; `|` after its progress means that it is not running."""
  if run.path in failed:
    return "failed"
  if run.path not in running and (score := run.score()) is not None:
    return format_number(score)
  share = f"{run.step() / run.config.learner.steps:.0%}"
  return share if run.path in running else f"{share} |" if run.path.exists() else "-"
