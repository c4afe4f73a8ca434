"""A sum tree in numpy, for sampling in proportion to priorities."""

import numpy as np


class SumTree:
  """Non-negative priorities of n leaves, with their exact total and maximum.

  Two binary heaps in float64, with node i over nodes 2i and 2i+1. Parents are always recomputed
  from their children, never adjusted by a difference, so rounding errors do not accumulate.
  """

  def __init__(self, size: int):
    """Raises ValueError for a size below 1."""
    if size < 1:
      raise ValueError(f"size must be at least 1, got {size}")
    self.size = size
    self._base = 1 << (size - 1).bit_length()  # index of the first leaf
    self._sum = np.zeros(2 * self._base)
    self._max = np.zeros(2 * self._base)

  @property
  def total(self) -> float:
    return float(self._sum[1])

  @property
  def max(self) -> float:
    return float(self._max[1])

  @property
  def leaves(self) -> np.ndarray:
    """Priorities of all leaves, float64 [size]; a view."""
    return self._sum[self._base : self._base + self.size]

  def get(self, leaf: np.ndarray) -> np.ndarray:
    """Priorities of leaves, float64."""
    return self.leaves.take(leaf)

  def set(self, leaf: np.ndarray, priority: np.ndarray) -> None:
    """Sets priorities [m] of leaves [m], the last one for repeated leaves. O(m log n).

    Raises:
      ValueError: a negative, infinite or NaN priority, or a leaf out of range; nothing has changed.
    """
    leaf, priority = np.asarray(leaf, np.int64), np.asarray(priority, np.float64)
    if leaf.shape != priority.shape or leaf.ndim != 1:
      raise ValueError(f"leaf and priority must be [m] each, got {leaf.shape} and {priority.shape}")
    if not len(leaf):
      return
    if leaf.min() < 0 or leaf.max() >= self.size:
      raise ValueError(f"leaf must be in 0..{self.size - 1}, got {leaf.min()}..{leaf.max()}")
    if not (np.isfinite(priority).all() and priority.min() >= 0):
      raise ValueError("priority must be finite and not negative")
    node = leaf + self._base
    self._sum[node] = priority
    self._max[node] = priority
    width = self._base  # number of nodes in the level of `node`
    while width > 1:
      width //= 2
      if width <= len(node):  # cheaper to recompute the whole level
        self._recompute_level(width)
        continue
      node = node >> 1
      left, right = 2 * node, 2 * node + 1
      self._sum[node] = self._sum[left] + self._sum[right]
      self._max[node] = np.maximum(self._max[left], self._max[right])

  def _recompute_level(self, width: int) -> None:
    level = slice(width, 2 * width)
    left, right = slice(2 * width, 4 * width, 2), slice(2 * width + 1, 4 * width, 2)
    np.add(self._sum[left], self._sum[right], out=self._sum[level])
    np.maximum(self._max[left], self._max[right], out=self._max[level])

  def sample(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draws n leaves with replacement: leaf [n] int64, probability [n] float64. O(n log size).

    Raises:
      ValueError: all priorities are zero.
    """
    if not self.total > 0:
      raise ValueError("nothing to sample: all priorities are zero")
    rest = rng.random(n) * self.total
    node = np.ones(n, np.int64)
    for _ in range(self._base.bit_length() - 1):
      node *= 2
      left = self._sum[node]
      # Rounding may push `rest` past the last positive leaf: never enter an all-zero subtree.
      right = (rest >= left) & (self._sum[node + 1] > 0)
      rest -= np.where(right, left, 0.0)
      node += right
    return node - self._base, self._sum[node] / self.total
