"""Scores of methods: per game, aggregated over games, and compared with published ones."""

import math
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import numpy as np

from speedyzero_jax.envs.scores import human_normalized, table
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.report import aggregates, curves
from speedyzero_jax.report.charts import Line, line_chart
from speedyzero_jax.report.elements import Child, element
from speedyzero_jax.report.groups import Method
from speedyzero_jax.report.runs import Run

Table = tuple[list[Child], list[list[Child]]]  # heads, rows


def by_game(methods: Sequence[Method]) -> Table:
  """Table of every method's evaluations on every game, Atari or not."""
  heads: list[Child] = ["game", "method", "evaluated", "episodes", "mean ± stderr", "lowest",
                        "highest", "training return", "minutes", "device-minutes"]  # fmt: skip
  rows: list[list[Child]] = []
  pairs = [(*item, method.name) for method in methods for item in method.games().items()]
  for game, runs, name in sorted(pairs, key=lambda pair: (pair[0], pair[2])):
    means = _means(runs)
    kinds = {run.episodes for run in runs if run.evaluation_mean is not None}
    episodes = "; ".join(sorted(kinds))
    numbers = [
      *((min(means), max(means)) if means else (None, None)),
      _mean([run.training_return for run in runs]),
      _mean([run.wall_seconds and run.wall_seconds / 60 for run in runs]),
      _mean([run.device_seconds and run.device_seconds / 60 for run in runs]),
    ]
    share = f"{len(means)} of {len(runs)}"
    rows.append([game, name, share, episodes, _estimate(means), *map(format_number, numbers)])
  return heads, rows


def _means(runs: Sequence[Run]) -> list[float]:
  return [run.evaluation_mean for run in runs if run.evaluation_mean is not None]


def _estimate(values: Sequence[float]) -> str:
  """Mean and, of two or more values, standard error."""
  if len(values) < 2:
    return format_number(_mean(values))
  error = statistics.stdev(values) / math.sqrt(len(values))
  return f"{format_number(_mean(values))} ± {format_number(error)}"


def _mean(values: Sequence[float | None]) -> float | None:
  known = [value for value in values if value is not None]
  return statistics.fmean(known) if known else None


def common_games(methods: Sequence[Method]) -> list[str]:
  """Games evaluated by every method that has human-normalized scores."""
  each = [method.scores().keys() for method in methods if method.scores()]
  return sorted(set.intersection(*map(set, each))) if each else []


def published(games: Sequence[str]) -> dict[str, list[list[float]]]:
  """Human-normalized scores of the published systems, [1] per game."""
  return {
    name: [[human_normalized(game, scores[game]) or 0.0] for game in games]
    for name, scores in table().items()
    if name not in ("random", "human")
  }


def aggregate_table(methods: Sequence[Method], games: Sequence[str]) -> Table:
  """Table of aggregate scores of the methods and of published systems over these games."""
  rows: list[list[Child]] = []
  for method in methods:
    if not (game_scores := method.scores()):
      continue
    scores = [game_scores[game] for game in games]
    estimates = [aggregates.estimate(f, scores) for f in aggregates.STATISTICS.values()]
    rows.append([method.name, str(sum(map(len, scores))), *map(_estimate_text, estimates)])
  for name, scores in published(games).items():
    numbers = [
      f"{aggregates.estimate(f, scores).value:.3f}" for f in (aggregates.mean, aggregates.median)
    ]
    rows.append([name, "published", *numbers, "-", "-"])
  return ["method", "runs", *aggregates.STATISTICS], rows


def _estimate_text(estimate: aggregates.Estimate) -> str:
  bounds = estimate.interval
  return f"{estimate.value:.3f}" + (f" [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else "")


def published_table(methods: Sequence[Method]) -> Table:
  """Table of raw scores of the methods, random play, humans and published systems."""
  scored = [method for method in methods if method.scores()]
  random, human, *systems = table()
  heads: list[Child] = ["game", random, human, *(method.name for method in scored), *systems]
  rows: list[list[Child]] = []
  for game in sorted({game for method in scored for game in method.scores()}):
    references = [format_number(table()[key][game]) for key in (random, human)]
    ours = [element("b", _estimate(_means(method.games().get(game, [])))) for method in scored]
    theirs = [format_number(table()[name][game]) for name in systems]
    rows.append([game, *references, *ours, *theirs])
  return heads, rows


def training_metric(methods: Sequence[Method], games: Sequence[str]) -> str:
  """Metric for learning curves: evaluations, if every run has at least three; else training games.

  Runs without any training games are ignored.
  """
  runs = [run for method in methods for run in method.runs if run.curve and run.game in games]
  evaluations = [curves.curve(run, names.EVALUATION_MEAN, "agent steps") for run in runs]
  evaluated = all(c and len(c[0]) >= 3 for c in evaluations)
  return names.EVALUATION_MEAN if evaluated else names.EPISODE_RETURN


def training_lines(
  methods: Sequence[Method], games: Sequence[str], metric: str, axis: str
) -> list[Line]:
  """Each method's IQM of human-normalized scores over games and seeds during training."""
  drawn = []
  for i, method in enumerate(methods):
    game_curves = {
      game: [
        (c[0], np.array([human_normalized(game, y) for y in c[1]]))
        for run in method.games().get(game, [])
        if (c := curves.curve(run, metric, axis))
      ]
      for game in games
    }
    if all(game_curves.values()) and (line := curves.aggregate_line(game_curves, i, method.name)):
      drawn.append(line)
  return drawn


def profile_chart(methods: Sequence[Method], games: Sequence[str]) -> ET.Element:
  """Chart of performance profiles: fraction of runs above each human-normalized score."""
  scored = [(i, method.scores()) for i, method in enumerate(methods) if method.scores()]
  highest = max(max(game_scores[game]) for _, game_scores in scored for game in games)
  thresholds = np.linspace(0, min(max(highest, 1.0), 8.0), 81)
  drawn = []
  for i, game_scores in scored:
    profile = aggregates.performance_profile(
      [game_scores[game] for game in games], thresholds.tolist()
    )
    edges = [estimate.interval for estimate in profile if estimate.interval]
    low, high = np.array(edges).T if edges else (None, None)
    share = np.array([estimate.value for estimate in profile])
    drawn.append(Line(i, methods[i].name, thresholds, share, low, high))
  chart = line_chart(drawn, "human-normalized score", from_zero=True)
  caption = element("figcaption", "Performance profile: fraction of runs above a score")
  return element("figure", caption, element("div", chart))
