"""Counters, running means and episode statistics, and their combination over learners.

Any thread may add values.
"""

import collections
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from speedyzero_jax.metrics import names


class Counters:
  """Named counters: per second if the name ends in `_per_second`, else per learner step.

  Thread-safe. The attribute `step` is the learner step at which the current interval began.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock, self._lock = clock, threading.RLock()
    self._totals: dict[str, float] = {}
    self.restart(0)

  def restart(self, step: int) -> None:
    """Starts a new interval at this learner step."""
    with self._lock:
      self._before, self._begin, self.step = self.totals(), self._clock(), step

  def add(self, name: str, amount: float) -> None:
    with self._lock:
      self._totals[name] = self._totals.get(name, 0.0) + amount

  def totals(self) -> dict[str, float]:
    """Totals over all intervals, by name."""
    with self._lock:
      return dict(self._totals)

  def rates(self, min_seconds: float) -> dict[str, float]:
    """Rates per second in this interval; empty if it is shorter than `min_seconds`."""
    with self._lock:
      seconds = self._clock() - self._begin
      return self._per(seconds, names.RATE_SUFFIX) if seconds >= min_seconds else {}

  def take(self, step: int) -> dict[str, float]:
    """Returns all values of this interval and starts a new one; empty without a learner step."""
    with self._lock:
      if step <= self.step:
        return {}
      seconds = (self._clock() - self._begin) or math.inf
      values = self._per(step - self.step) | self._per(seconds, names.RATE_SUFFIX)
      self.restart(step)
    return values

  def _per(self, divisor: float, suffix: str = "") -> dict[str, float]:
    return {
      name: (total - self._before.get(name, 0.0)) / divisor
      for name, total in self._totals.items()
      if name.endswith(suffix)
    }


class RunningMeans:
  """The mean of each metric's values, or `names.over_time`'s statistic. Thread-safe."""

  def __init__(self) -> None:
    self._values: dict[str, list[float]] = collections.defaultdict(list)
    self._lock = threading.Lock()

  def add(self, values: Mapping[str, float]) -> None:
    """Adds one value to each of the given metrics."""
    with self._lock:
      for name, value in values.items():
        self._values[name].append(float(value))

  def take(self) -> dict[str, float]:
    """Returns one value per metric, from the values added since the last call.

    Means, minima and maxima with a NaN value are NaN.
    """
    with self._lock:
      taken, self._values = self._values, collections.defaultdict(list)
    return {name: _combine(names.over_time(name), values) for name, values in taken.items()}


class Episode(NamedTuple):
  """A finished game, from its reset to its end or cap, over all lives."""

  score: float  # sum of raw rewards
  length: int  # agent steps


class EpisodeStats:
  """Returns and lengths of the last `window` finished games. Thread-safe."""

  def __init__(self, window: int = 100):
    self._lock = threading.Lock()
    self._recent: collections.deque[Episode] = collections.deque(maxlen=window)
    self._best, self._count = -math.inf, 0

  def record(self, episode: Episode) -> None:
    """Adds a finished game."""
    with self._lock:
      self._recent.append(episode)
      self._best = max(self._best, episode.score)
      self._count += 1

  def state_dict(self) -> dict[str, Any]:
    """Finished games, for JSON."""
    with self._lock:
      return {"recent": list(self._recent), "best": self._best, "count": self._count}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Replaces the finished games."""
    with self._lock:
      self._recent.clear()
      self._recent.extend(Episode(*episode) for episode in state["recent"])
      self._best, self._count = state["best"], state["count"]

  def summary(self) -> dict[str, float]:
    """The `charts/episode*` metrics; before the first finished game only their number, 0."""
    with self._lock:
      recent, count, best = list(self._recent), self._count, float(self._best)
    if not recent:
      return {names.EPISODES: count}
    return {
      names.EPISODES: count,
      names.EPISODE_RETURN: float(np.mean([episode.score for episode in recent])),
      names.EPISODE_RETURN_LAST: recent[-1].score,
      names.EPISODE_RETURN_BEST: best,
      names.EPISODE_LENGTH: float(np.mean([episode.length for episode in recent])),
    }


def shared_values(values: Mapping[str, Any]) -> dict[str, Any]:
  """Selects the values that are combined over learners, rather than local."""
  return {name: x for name, x in values.items() if names.across_learners(name) != "local"}


def combine_learners(learners: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Combines the learners' values into the run's, per metric over the learners that have it."""
  gathered = collections.defaultdict(list)
  for values in learners:
    for name, value in values.items():
      gathered[name].append(value)
  return {name: _combine(names.across_learners(name), xs) for name, xs in gathered.items()}


def _combine(how: str, values: Sequence[float]) -> float:
  if how == "sum":
    return sum(values)  # integers stay integers
  if how == "last":
    return values[-1]
  return float(getattr(np, how)(values))  # mean, min or max
