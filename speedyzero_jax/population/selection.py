"""Exploit and explore of Population Based Training (Jaderberg et al. 2017), as pure functions."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Copy(NamedTuple):
  """A member to be replaced by a copy of another."""

  member: int
  source: int


class Knob(NamedTuple):
  """A setting that evolves, and its range."""

  key: str  # dotted
  low: float
  high: float
  log: bool  # drawn log-uniformly instead of uniformly

  def draw(self, rng: np.random.Generator) -> float:
    """A value from the whole range."""
    if not self.log:
      return float(rng.uniform(self.low, self.high))
    return self._fit(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

  def perturb(self, value: float, factors: Sequence[float], rng: np.random.Generator) -> float:
    """The value times one of the factors, within the range."""
    return self._fit(value * factors[int(rng.integers(len(factors)))])

  def _fit(self, value: float) -> float:
    return min(max(value, self.low), self.high)


def truncation(scores: Sequence[float], share: float, rng: np.random.Generator) -> list[Copy]:
  """Members among the worst `share` copy a random one of the best `share`.

  Scores of members without one are -inf; those are not copied. No member is both copied and
  replaced.
  """
  count = min(max(round(share * len(scores)), 1), len(scores) // 2)
  order = np.argsort(scores, kind="stable")
  best = order[len(order) - count :]
  drawn = [Copy(int(member), int(rng.choice(best))) for member in order[:count]]
  return [copy for copy in drawn if scores[copy.source] > -math.inf]


def t_test(
  returns: Sequence[Sequence[float]], level: float, rng: np.random.Generator
) -> list[Copy]:
  """Each member copies a random other one whose returns are higher by Welch's one-sided t-test.

  Members without returns copy any that has some. Copies come in an order in which every source is
  still itself when it is copied: from the lowest mean up.
  """
  means = [float(np.mean(each)) if len(each) else -math.inf for each in returns]
  found = []
  for member in np.argsort(means, kind="stable").tolist():
    others = [i for i in range(len(returns)) if i != member]
    source = others[rng.integers(len(others))]
    if means[member] < means[source] and _lower(returns[member], returns[source], level):
      found.append(Copy(member, source))
  return found


def _lower(a: Sequence[float], b: Sequence[float], level: float) -> bool:
  """Whether the mean of `a` is lower than that of `b`, which it is in this sample."""
  if not len(a):
    return True
  if np.ptp(a) == np.ptp(b) == 0:  # constants that differ
    return True
  if min(len(a), len(b)) < 2:
    return False
  found = stats.ttest_ind(a, b, equal_var=False, alternative="less")
  return bool(found.pvalue < level)
