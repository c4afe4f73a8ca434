"""Curves of metrics over agent steps or time: of single runs, or the mean and range of several."""

from collections.abc import Sequence

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.report import aggregates
from speedyzero_jax.report.charts import Line
from speedyzero_jax.report.runs import Run

AXES = ("agent steps", "minutes", "device-minutes")
POINTS = 120  # maximum points of a line

Curve = tuple[np.ndarray, np.ndarray]


def curve(run: Run, name: str, axis: str) -> Curve | None:
  """Returns a run's metric over an axis, averaged to at most `POINTS`; None if it has none.

  Evaluation metrics repeat in every row until the next evaluation: the last value of a learner step
  counts. It is drawn at that step's row, if there is one, or else at the first with the value.
  """
  if axis == "device-minutes" and not run.starts:
    return None
  if axis == "agent steps":
    across = [row.get(names.ENV_STEPS) for row in run.rows]
  elif axis == "minutes":
    across = [row[names.TIME] / 60 if names.TIME in row else None for row in run.rows]
  else:
    across = [seconds / 60 for seconds in run.device_seconds_by_row]
  points: dict[float, tuple[float, float]] = {}
  located = [(row[names.STEP], x) for row, x in zip(run.rows, across, strict=True) if x is not None]
  by_step = dict(reversed(located))  # the first of a repeated step
  for i, (row, x) in enumerate(zip(run.rows, across, strict=True)):
    if name not in row or x is None or x < 0:
      continue
    key: float = i
    if name.startswith(names.EVALUATION_PREFIX):
      key = row.get(names.EVALUATION_STEP, -1)
      x = points[key][0] if key in points else by_step.get(key, x)
    points[key] = x, row[name]
  if not points:
    return None
  ordered = np.array(sorted(points.values(), key=lambda point: point[0]), np.float64)
  edges = np.linspace(0, len(points), min(POINTS, len(points)) + 1).astype(int)
  x, y = (np.add.reduceat(ordered, edges[:-1]) / np.diff(edges)[:, None]).T
  return x, y


def common_grid(curves: Sequence[Curve], points: int = POINTS) -> np.ndarray | None:
  """Grid over the range common to all curves, or None if they have none in common.

  Curves with equal points keep these.
  """
  first = curves[0][0]
  if all(np.array_equal(x, first) for x, _ in curves):
    return first
  low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
  return np.linspace(low, high, points) if low < high else None


def lines(
  runs: Sequence[Run], name: str, axis: str, color: int, label: str, single: bool
) -> list[Line]:
  """Lines of a metric: the mean over runs with a band from lowest to highest.

  They cover the range that all runs have reached, without those of a single point if there are
  others. If `single`, each run is a thin line, too.
  """
  each = [(run, c) for run in runs if (c := curve(run, name, axis))]
  long = [(run, c) for run, c in each if len(c[0]) > 1] or each
  if len(long) == 1:
    ((run, (x, y)),) = long
    return [Line(color, f"{label}: {run.path}", x, y)]
  drawn = [Line(color, f"{label}: {run.path}", *c, thin=True) for run, c in each if single]
  grid = common_grid([c for _, c in long]) if long else None
  if grid is not None:
    ys = np.array([np.interp(grid, x, y) for _, (x, y) in long])
    text = f"{label}: mean of {len(long)} runs"
    drawn.append(Line(color, text, grid, ys.mean(0), ys.min(0), ys.max(0)))
  return drawn


def aggregate_line(
  games: dict[str, list[Curve]], color: int, label: str, points: int = 20
) -> Line | None:
  """IQM over games and seeds of curves of human-normalized scores, with its interval."""
  long = [[c for c in curves if len(c[0]) > 1] for curves in games.values()]
  grid = common_grid([c for curves in long for c in curves], points) if all(long) else None
  if grid is None:
    return None
  scores = [np.array([np.interp(grid, x, y) for x, y in curves]) for curves in long]
  estimates = [
    aggregates.estimate(aggregates.iqm, [game[:, i] for game in scores]) for i in range(len(grid))
  ]
  value = np.array([estimate.value for estimate in estimates])
  edges = [estimate.interval for estimate in estimates if estimate.interval]
  low, high = np.array(edges).T if edges else (None, None)
  return Line(color, label, grid, value, low, high)
