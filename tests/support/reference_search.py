"""Reference of Gumbel and PUCT tree search with value prefixes, for test_search.py.

Written from the papers in plain Python with NumPy float64, without mctx, jax or this package. It
searches one root at a time with nodes as objects: slow but simple.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import softmax

# (state, carry, action) -> (value prefix, policy logits [A], value, next state, next carry)
Step = Callable[[Any, Any, int], tuple[float, np.ndarray, float, Any, Any]]


@dataclasses.dataclass
class Node:
  """A state reached by the search."""

  state: Any
  carry: Any
  prefix: float
  logits: np.ndarray
  value: float  # predicted by the network
  depth: int
  returns: list[float]  # all values backed up into this node; the first is its own
  children: dict[int, "Node"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Settings:
  """Settings of a search; names as in SearchConfig."""

  algorithm: str
  simulations: int
  discount: float
  horizon: int
  min_range: float
  max_considered: int
  c_visit: float
  c_scale: float
  c1: float
  c2: float


@dataclasses.dataclass
class Result:
  """Result of a search of one root."""

  action: int
  policy: np.ndarray
  search_value: float
  visits: np.ndarray
  depth: int  # depth of the deepest node
  margin: float  # smallest lead of a best score over the second best, over all decisions


class Search:
  """One search of one root."""

  def __init__(self, step: Step, settings: Settings, initial_carry: Any):
    self.step, self.s, self.initial_carry = step, settings, initial_carry
    self.margin = math.inf
    self.root: Node | None = None
    self.known: tuple[int, float] | None = None  # an action of the root, and its Q
    self.simulating = True  # the known action has neither visits nor Q until the end

  # Values.

  def reward(self, parent: Node, child: Node) -> float:
    if parent.depth % self.s.horizon == 0:
      return child.prefix
    return child.prefix - parent.prefix

  def q(self, parent: Node, action: int) -> float:
    child = parent.children[action]
    return self.reward(parent, child) + self.s.discount * float(np.mean(child.returns))

  def visits(self, node: Node) -> np.ndarray:
    """Visit counts of all actions, equal to the number of returns backed up into each child."""
    counts = np.array(
      [len(node.children[a].returns) if a in node.children else 0 for a in range(len(node.logits))]
    )
    if self.known and node is self.root and not self.simulating:
      counts[self.known[0]] = counts.max()
    return counts

  def all_q(self, node: Node) -> list[float]:
    result = []
    for action, child in node.children.items():
      result += [self.q(node, action)] + self.all_q(child)
    return result

  def raw_q(self, node: Node) -> np.ndarray:
    """Q of every action of `node`, including unvisited ones."""
    visited = {a: self.q(node, a) for a in node.children}
    if self.known and node is self.root and not self.simulating:
      visited[self.known[0]] = self.known[1]
    if self.s.algorithm == "gumbel":
      prior, n = softmax(node.logits), self.visits(node).sum()
      missing = node.value
      if visited:
        mean = sum(prior[a] * v for a, v in visited.items()) / sum(prior[a] for a in visited)
        missing = (node.value + n * mean) / (1 + n)
    else:
      missing = (node.value + sum(visited.values())) / (1 + len(visited))
    return np.array([visited.get(a, missing) for a in range(len(node.logits))])

  def completed_q(self, root: Node, node: Node) -> np.ndarray:
    """`raw_q`, scaled by the range over the tree."""
    q = self.raw_q(node)
    pool = [*q, *self.all_q(root)]
    return (q - min(pool)) / max(max(pool) - min(pool), self.s.min_range)

  def sigma(self, root: Node, node: Node) -> np.ndarray:
    return (
      (self.s.c_visit + self.visits(node).max()) * self.s.c_scale * self.completed_q(root, node)
    )

  # Decisions.

  def best(self, score: np.ndarray, allowed: np.ndarray) -> int:
    order = sorted((a for a in range(len(score)) if allowed[a]), key=lambda a: -score[a])
    if len(order) > 1:
      self.margin = min(self.margin, score[order[0]] - score[order[1]])
    return order[0]

  def puct(self, root: Node, node: Node) -> int:
    visits = self.visits(node)
    total = visits.sum() + 1
    c = self.s.c1 + math.log((total + self.s.c2 + 1) / self.s.c2)
    bonus = c * softmax(node.logits) * math.sqrt(total) / (1 + visits)
    return self.best(self.completed_q(root, node) + bonus, np.ones(len(visits), bool))

  def gumbel_interior(self, root: Node, node: Node) -> int:
    visits = self.visits(node)
    improved = softmax(node.logits + self.sigma(root, node))
    return self.best(improved - visits / (1 + visits.sum()), np.ones(len(visits), bool))

  def gumbel_root(self, root: Node, gumbel: np.ndarray, due: int) -> int:
    allowed = self.visits(root) == due
    if self.known and self.simulating:
      allowed[self.known[0]] = False
    return self.best(gumbel + root.logits + self.sigma(root, root), allowed)

  def schedule(self, num_actions: int) -> list[int]:
    """Sequential halving: for each simulation, the visit count of the root actions considered."""
    survivors = min(self.s.max_considered, num_actions)
    phases = math.ceil(math.log2(survivors)) if survivors > 1 else 1
    due: list[int] = []
    rounds_done = 0
    while len(due) < self.s.simulations:
      for _ in range(max(1, self.s.simulations // (phases * survivors))):
        due += [rounds_done] * survivors
        rounds_done += 1
      survivors = max(2, survivors // 2) if survivors > 1 else 1
    return due[: self.s.simulations]

  # The search.

  def simulate(self, root: Node, first_action: int | None) -> None:
    path, node = [root], root
    while True:
      if node is root and first_action is not None:
        action = first_action
      else:
        action = (self.gumbel_interior if self.s.algorithm == "gumbel" else self.puct)(root, node)
      is_new = action not in node.children
      if is_new:
        carry = self.initial_carry if node.depth % self.s.horizon == 0 else node.carry
        prefix, logits, value, state, carry = self.step(node.state, carry, action)
        node.children[action] = Node(state, carry, prefix, logits, value, node.depth + 1, [])
      node_above, node = node, node.children[action]
      assert node.depth == node_above.depth + 1
      path.append(node)
      if is_new:
        break
    g = path[-1].value
    path[-1].returns.append(g)
    for parent, child in zip(path[-2::-1], path[:0:-1], strict=True):
      g = self.reward(parent, child) + self.s.discount * g
      parent.returns.append(g)

  def run(
    self,
    state: Any,
    logits: np.ndarray,
    value: float,
    gumbel: np.ndarray,
    known: tuple[int, float] | None = None,
    improved_values: bool = False,
  ) -> Result:
    root = Node(state, self.initial_carry, 0.0, logits, value, 0, [value])
    self.root, self.known, num_actions = root, known, len(logits)
    if self.s.algorithm == "gumbel":
      for due in self.schedule(num_actions - bool(known)):
        self.simulate(root, self.gumbel_root(root, gumbel, due))
      assert not known or known[0] not in root.children
      self.simulating = False
      visits = self.visits(root)
      action = self.gumbel_root(root, gumbel, visits.max())
      policy = softmax(logits + self.sigma(root, root))
    else:
      for _ in range(self.s.simulations):
        self.simulate(root, None)
      visits = self.visits(root)
      action = int(np.argmax(visits))
      policy = visits / visits.sum()
    found = policy @ self.raw_q(root) if improved_values else np.mean(root.returns)
    return Result(action, policy, float(found), visits, deepest(root), self.margin)


def deepest(node: Node) -> int:
  return max([node.depth, *(deepest(child) for child in node.children.values())])
