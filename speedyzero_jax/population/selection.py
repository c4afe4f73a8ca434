"""Exploit and explore steps of Population Based Training (Jaderberg et al. 2017)."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


class Copy(NamedTuple):
  """Replacement of a member by a copy of another."""

  member: int
  source: int


class Knob(NamedTuple):
  """A setting that is explored, with its range."""

  key: str  # dotted
  low: float
  high: float
  log: bool  # whether to sample log-uniformly instead of uniformly

  def draw(self, rng: np.random.Generator) -> float:
    """Samples a value from the whole range."""
    if not self.log:
      return float(rng.uniform(self.low, self.high))
    return self._fit(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))

  def perturb(self, value: float, factors: Sequence[float], rng: np.random.Generator) -> float:
    """Multiplies the value by a random factor and clips it to the range."""
    return self._fit(value * factors[int(rng.integers(len(factors)))])

  def _fit(self, value: float) -> float:
    return min(max(value, self.low), self.high)


def truncation(scores: Sequence[float], share: float, rng: np.random.Generator) -> list[Copy]:
  """Truncation selection: each of the worst `share` of members copies a random one of the best.

  Members without a score have -inf and are never copied. No member is both copied and replaced.
  """
  count = min(max(round(share * len(scores)), 1), len(scores) // 2)
  order = np.argsort(scores, kind="stable")
  best = [int(i) for i in order[len(order) - count :] if scores[i] > -math.inf]
  return [Copy(int(member), int(rng.choice(best))) for member in order[:count]] if best else []


def t_test(
  returns: Sequence[Sequence[float]], level: float, rng: np.random.Generator
) -> list[Copy]:
  """Compares each member with a random other one, and copies that if its returns are higher.

  The test is Welch's one-sided t-test at significance `level`. Members without returns copy the
  other member if it has some. Copies are ordered by the replaced member's mean, ascending, so that
  no member is replaced before it is copied.
  """
  means = [float(np.mean(each)) if len(each) else -math.inf for each in returns]
  copies = []
  for member in np.argsort(means, kind="stable").tolist():
    others = [i for i in range(len(returns)) if i != member]
    source = others[rng.integers(len(others))]
    if means[member] < means[source] and _lower(returns[member], returns[source], level):
      copies.append(Copy(member, source))
  return copies


def _lower(a: Sequence[float], b: Sequence[float], level: float) -> bool:
  """Whether `a` is significantly lower than `b`, given that its sample mean is lower."""
  if not len(a):
    return True
  if min(len(a), len(b)) < 2:
    return False
  if np.ptp(a) == np.ptp(b) == 0:  # different constants
    return True
  test = stats.ttest_ind(a, b, equal_var=False, alternative="less")
  return bool(test.pvalue < level)
