"""The numbers of several units as those of one run. Knows only what `names` says of them, not how they travel."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from speedyzero_jax.metrics import names

_COMBINE: Mapping[names.Across, Callable[[Sequence[float]], float]] = {
  "sum": sum,
  "mean": lambda values: float(np.mean(values)),
  "max": lambda values: float(np.max(values)),  # unlike max, it keeps a NaN
}


def to_tell(values: Mapping[str, Any]) -> dict[str, Any]:
  """Those of a unit's values that other units need, for `together`."""
  return {name: value for name, value in values.items() if names.across(name) != "own"}


def together(told: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """What units told, as one: of each metric the sum, mean or max over the units that have it."""
  gathered: dict[str, list[float]] = {}
  for values in told:
    for name, value in values.items():
      gathered.setdefault(name, []).append(value)
  return {name: _COMBINE[names.across(name)](values) for name, values in gathered.items()}
