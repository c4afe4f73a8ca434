"""Aggregates of human-normalized scores over games and seeds, with bootstrap intervals.

Definitions: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", and their library rliable.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES, CONFIDENCE = 2000, 0.95

# Scores of each game, [..., seeds]. A statistic reduces over seeds and games.
Scores = Sequence[np.ndarray]
Statistic = Callable[[Scores], np.ndarray]


class Estimate(NamedTuple):
  """A statistic and its stratified bootstrap interval; None if any game has only one seed."""

  value: float
  interval: tuple[float, float] | None


def mean(scores: Scores) -> np.ndarray:
  """Mean over games of the mean over seeds."""
  return _of_games(scores).mean(-1)


def median(scores: Scores) -> np.ndarray:
  """Median over games of the mean over seeds."""
  return np.median(_of_games(scores), -1)


def iqm(scores: Scores) -> np.ndarray:
  """Interquartile mean over all runs: drops the lowest and highest quarter, rounded down.

  If games have different numbers of seeds, runs are repeated such that every game counts equally.
  """
  common = math.lcm(*(game.shape[-1] for game in scores))
  weights = np.concatenate([np.full(game.shape[-1], common // game.shape[-1]) for game in scores])
  runs = np.concatenate(scores, -1)
  order = np.argsort(runs, -1)
  last = np.cumsum(weights[order], -1)  # end of each run's repetitions in ascending order
  cut, total = len(scores) * common // 4, len(scores) * common
  kept = np.clip(last, cut, total - cut) - np.clip(last - weights[order], cut, total - cut)
  return (np.take_along_axis(runs, order, -1) * kept).sum(-1) / (total - 2 * cut)


def optimality_gap(scores: Scores) -> np.ndarray:
  """Mean over games and seeds of how far a run's score falls short of 1."""
  return 1 - mean([np.minimum(game, 1) for game in scores])


STATISTICS: dict[str, Statistic] = {
  "mean": mean, "median": median, "IQM": iqm, "optimality gap": optimality_gap
}  # fmt: skip


def _of_games(scores: Scores) -> np.ndarray:
  return np.stack([game.mean(-1) for game in scores], -1)


def estimate(statistic: Statistic, scores: Sequence[ArrayLike]) -> Estimate:
  """Estimates a statistic from each game's scores [seeds]; numbers of seeds may differ.

  The interval is a percentile bootstrap that resamples seeds within each game. Every call uses the
  same resamples, so the points of a curve share them.
  """
  games = [np.asarray(game, np.float64) for game in scores]
  value = float(statistic(games))
  if any(len(game) < 2 for game in games):
    return Estimate(value, None)
  rng = np.random.default_rng(0)
  drawn = [game[rng.integers(len(game), size=(RESAMPLES, len(game)))] for game in games]
  tail = (1 - CONFIDENCE) / 2
  low, high = np.quantile(statistic(drawn), [tail, 1 - tail])
  return Estimate(value, (float(low), float(high)))


def performance_profile(scores: Sequence[ArrayLike], thresholds: Sequence[float]) -> list[Estimate]:
  """Fraction of runs whose score exceeds each threshold, with games weighted equally."""
  return [estimate(mean, [np.asarray(game) > tau for game in scores]) for tau in thresholds]
