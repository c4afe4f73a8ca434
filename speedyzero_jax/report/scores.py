"""Scores of methods: per game, aggregated over games, and beside published ones."""

import statistics
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np

from speedyzero_jax.envs.scores import human_normalised, table
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.report import aggregates, curves
from speedyzero_jax.report.charts import Line, line_chart
from speedyzero_jax.report.elements import Child, element
from speedyzero_jax.report.groups import Method
from speedyzero_jax.report.runs import Run

Table = tuple[list[Child], list[list[Child]]]  # heads, rows


def by_game(methods: Sequence[Method]) -> Table:
  """Evaluations of every method on every game, Atari or not."""
  heads: list[Child] = ["game", "method", "evaluated", "mean", "lowest", "highest",
                        "training return", "minutes", "device-minutes"]  # fmt: skip
  rows: list[list[Child]] = []
  for game in sorted({game for method in methods for game in method.games()}):
    for method in methods:
      runs = method.games().get(game, [])
      if not runs:
        continue
      found = [run.evaluation_mean for run in runs if run.evaluation_mean is not None]
      numbers = [
        *([statistics.fmean(found), min(found), max(found)] if found else [None] * 3),
        _mean([run.training_return for run in runs]),
        _mean([run.wall_seconds and run.wall_seconds / 60 for run in runs]),
        _mean([run.device_seconds and run.device_seconds / 60 for run in runs]),
      ]
      evaluated = f"{len(found)} of {len(runs)}"
      rows.append([game, method.name, evaluated, *map(format_number, numbers)])
  return heads, rows


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else None


def common_games(methods: Sequence[Method]) -> list[str]:
  """Games with human-normalised scores that every method with such scores has evaluated."""
  each = [method.scores().keys() for method in methods if method.scores()]
  return sorted(set.intersection(*map(set, each))) if each else []


def published(games: Sequence[str]) -> dict[str, list[list[float]]]:
  """Human-normalised scores of the published systems, [1] for each game."""
  return {
    name: [[human_normalised(game, system["scores"][game]) or 0.0] for game in games]
    for name, system in table()["systems"].items()
  }


def aggregate_table(methods: Sequence[Method], games: Sequence[str]) -> Table:
  """Aggregates of the methods and of published systems over the same games."""
  rows: list[list[Child]] = []
  for method in methods:
    if not (found := method.scores()) or not games:
      continue
    scores = [found[game] for game in games]
    estimates = [aggregates.estimate(f, scores) for f in aggregates.STATISTICS.values()]
    rows.append([method.name, str(sum(map(len, scores))), *map(_estimate_text, estimates)])
  for name, scores in published(games).items() if games else ():
    numbers = [
      f"{aggregates.estimate(f, scores).value:.3f}" for f in (aggregates.mean, aggregates.median)
    ]
    rows.append([name, "published", *numbers, "-", "-"])
  return ["method", "runs", *aggregates.STATISTICS], rows


def _estimate_text(estimate: aggregates.Estimate) -> str:
  bounds = estimate.interval
  return f"{estimate.value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def published_table(methods: Sequence[Method]) -> Table:
  """Raw scores of the methods beside random play, humans and published systems."""
  scored = [method for method in methods if method.scores()]
  systems = table()["systems"]
  heads: list[Child] = ["game", "random", "human", *(method.name for method in scored), *systems]
  rows: list[list[Child]] = []
  for game in sorted({game for method in scored for game in method.scores()}):
    references = [format_number(table()[key][game]) for key in ("random", "human")]
    ours = [element("b", _raw_score(method.games().get(game, []))) for method in scored]
    theirs = [format_number(system["scores"][game]) for system in systems.values()]
    rows.append([game, *references, *ours, *theirs])
  return heads, rows


def _raw_score(runs: Sequence[Run]) -> str:
  found = [run.evaluation_mean for run in runs if run.evaluation_mean is not None]
  if not found:
    return "-"
  spread = f" ± {format_number(statistics.stdev(found))}" if len(found) > 1 else ""
  return format_number(statistics.fmean(found)) + spread


def training_lines(methods: Sequence[Method], games: Sequence[str], axis: str) -> list[Line]:
  """IQM over games and seeds of each method along its training.

  Scores are those of evaluations where every run has at least three, else of training games.
  """
  drawn = []
  for i, method in enumerate(methods):
    runs = {game: method.games().get(game, []) for game in games}
    every = [run for members in runs.values() for run in members]
    for name, what in ((names.EVALUATION_MEAN, "evaluations"), (names.EPISODE_RETURN, "training")):
      found = {game: [curves.curve(run, name, axis) for run in runs[game]] for game in games}
      known = [c for members in found.values() for c in members if c and len(c[0]) >= 3]
      if every and len(known) == len(every):
        normalised = {
          game: [
            (x, np.array([human_normalised(game, y) for y in ys]))
            for x, ys in filter(None, members)
          ]
          for game, members in found.items()
        }
        line = curves.aggregate_line(normalised, i, f"{method.name}, {what}")
        drawn += [line] if line else []
        break
  return drawn


def profile_chart(methods: Sequence[Method], games: Sequence[str]) -> ET.Element | None:
  """Performance profiles: the share of runs above each human-normalised score."""
  scored = [(i, method.scores()) for i, method in enumerate(methods) if method.scores()]
  if not games:
    return None
  highest = max(max(found[game]) for _, found in scored for game in games)
  thresholds = np.linspace(0, min(max(highest, 1.0), 8.0), 81)
  drawn = []
  for i, found in scored:
    profile = aggregates.performance_profile([found[game] for game in games], thresholds.tolist())
    edges = [estimate.interval for estimate in profile if estimate.interval]
    low, high = np.array(edges).T if edges else (None, None)
    share = np.array([estimate.value for estimate in profile])
    drawn.append(Line(i, methods[i].name, thresholds, share, low, high))
  chart = line_chart(drawn, "human-normalised score", from_zero=True)
  caption = element("figcaption", "Performance profile: share of runs above a score")
  return element("figure", caption, element("div", chart))
