"""Sum tree in numpy, for sampling in proportion to priorities."""

import numpy as np


class SumTree:
  """Non-negative priorities of n leaves, with their sum and maximum.

  Two binary trees in float64, in which nodes 2i and 2i+1 are the children of node i. Parents are
  always recomputed from their children, not incremented, so rounding errors do not accumulate.
  """

  def __init__(self, size: int):
    self._base = 1 << (size - 1).bit_length()  # index of the first leaf
    self._sum = np.zeros(2 * self._base)
    self._max = np.zeros(2 * self._base)

  @property
  def total(self) -> float:
    return float(self._sum[1])

  @property
  def max(self) -> float:
    return float(self._max[1])

  def get(self, leaf: np.ndarray) -> np.ndarray:
    """Returns priorities of leaves, float64."""
    return self._sum.take(leaf + self._base)

  def set(self, leaf: np.ndarray, priority: np.ndarray) -> None:
    """Sets priorities [m] of leaves [m] in O(m log n); for repeated leaves the last one is stored.

    Raises ValueError for a negative, infinite or NaN priority; nothing is changed.
    """
    if not (np.isfinite(priority) & (priority >= 0)).all():
      raise ValueError("priority must be finite and not negative")
    node = np.asarray(leaf, np.int64) + self._base
    self._sum[node] = self._max[node] = priority
    width = self._base  # number of nodes in the level of `node`
    while width > 1 and len(node):
      width //= 2
      # If `node` has repetitions, recomputing the whole level is cheaper.
      node = node // 2 if len(node) < width else np.arange(width, 2 * width)
      left, right = 2 * node, 2 * node + 1
      self._sum[node] = self._sum[left] + self._sum[right]
      self._max[node] = np.maximum(self._max[left], self._max[right])

  def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Samples n leaves with replacement: leaf [n] int64, probability [n] float64. O(n log size).

    Raises ValueError if all priorities are zero.
    """
    if not self.total > 0:
      raise ValueError("nothing to sample: no priority is greater than zero")
    rest = rng.random(n) * self.total
    node = np.ones(n, np.int64)
    for _ in range(self._base.bit_length() - 1):
      node *= 2
      left = self._sum[node]
      # Rounding may move `rest` past the last positive leaf, so never enter an all-zero subtree.
      right = (rest >= left) & (self._sum[node + 1] > 0)
      rest -= np.where(right, left, 0.0)
      node += right
    return node - self._base, self._sum[node] / self.total
