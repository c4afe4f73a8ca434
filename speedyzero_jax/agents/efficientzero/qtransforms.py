"""Q transforms for mctx that normalize by the range of Q in the whole tree, as EfficientZero does.

A qtransform maps an unbatched tree and a node to one number per action. mctx normalizes over the
node's children; these transforms normalize over all edges of the tree, so that children of nearly
equal value stay close.

`tree.embeddings.reward` [N] must hold the reward of the edge into each node. The range is then
taken over N numbers rather than N x A, and XLA hoists it out of the descent: it is computed once
per simulation.
"""

import chex
import jax.numpy as jnp
import mctx

from speedyzero_jax.agents.efficientzero.config import SearchConfig


def tree_range(tree: mctx.Tree, discount: float) -> tuple[chex.Array, chex.Array]:
  """Returns minimum and maximum of Q = reward + discount * value over the tree's visited edges.

  Returns (inf, -inf) while no node below the root is visited.
  """
  # Every node except the root is the end of exactly one edge.
  is_edge = (tree.node_visits > 0) & (jnp.arange(tree.node_visits.shape[0]) != tree.ROOT_INDEX)
  qvalues = tree.embeddings.reward + discount * tree.node_values
  low = jnp.min(jnp.where(is_edge, qvalues, jnp.inf))
  return low, jnp.max(jnp.where(is_edge, qvalues, -jnp.inf))


def mean_value(tree: mctx.Tree, node_index: chex.Numeric) -> chex.Array:
  """Returns the mean of a node's network value and the Q of its visited actions, a scalar.

  It is (V(s) + sum of Q(s, a) over visited a) / (1 + number of visited a). In place of V(s),
  EfficientZero uses the mean value of the parent node, and no term at the root; V(s) estimates the
  same quantity directly.
  """
  visited = tree.children_visits[node_index] > 0
  total = jnp.sum(jnp.where(visited, tree.qvalues(node_index), 0.0))
  return (tree.raw_values[node_index] + total) / (1 + jnp.sum(visited))


def mixed_value(tree: mctx.Tree, node_index: chex.Numeric) -> chex.Array:
  """Returns v_mix, which interpolates a node's network value and its prior-weighted Q; a scalar.

  It is (V(s) + n * sum of pi(a) Q(s, a) / sum of pi(a)) / (1 + n), with sums over visited actions
  and n the total visit count: equation 33 of Danihelka et al. (2022), "Policy improvement by
  planning with Gumbel".
  """
  visits = tree.children_visits[node_index]
  visited, total_visits = visits > 0, jnp.sum(visits)
  # Proportional to the prior, at most 1. Even visited actions may all have a prior of zero.
  lowest = jnp.finfo(jnp.float32).min
  logits = jnp.maximum(tree.children_prior_logits[node_index], lowest)
  weight = jnp.exp(logits - jnp.max(logits, initial=lowest, where=visited))
  weight = jnp.where(visited, weight, 0.0)
  weighted = jnp.sum(weight * tree.qvalues(node_index)) / jnp.maximum(jnp.sum(weight), 1.0)
  return (tree.raw_values[node_index] + total_visits * weighted) / (1 + total_visits)


def improved_value(tree: mctx.Tree, node_index: chex.Numeric, policy: chex.Array) -> chex.Array:
  """Returns the mean under `policy` [A] of the node's Q, completed by `mixed_value`; a scalar."""
  return policy @ _completed(tree, node_index, mixed_value(tree, node_index))


def _completed(tree: mctx.Tree, node_index: chex.Numeric, missing: chex.Array) -> chex.Array:
  return jnp.where(tree.children_visits[node_index] > 0, tree.qvalues(node_index), missing)


def _scaled(
  tree: mctx.Tree,
  node_index: chex.Numeric,
  missing: chex.Array,
  config: SearchConfig,
  discount: float,
) -> chex.Array:
  qvalues = _completed(tree, node_index, missing)
  low, high = tree_range(tree, discount)
  # `missing` may lie outside the range of the edges. Widening the range, rather than clipping the
  # value, keeps the transform strictly increasing, as policy improvement requires.
  low, high = jnp.minimum(low, jnp.min(qvalues)), jnp.maximum(high, jnp.max(qvalues))
  return (qvalues - low) / jnp.maximum(high - low, config.min_value_range)


def for_puct(
  tree: mctx.Tree, node_index: chex.Numeric, *, config: SearchConfig, discount: float
) -> chex.Array:
  """Returns Q [A] completed by `mean_value` and scaled to [0, 1] (EfficientZero, sec. 3).

  It is (Q - min) / max(max - min, min_value_range). The range covers the visited edges of the tree
  and, if any action of the node is unvisited, its `mean_value`. `min_value_range` prevents noise
  from being amplified when all Q are nearly equal.
  """
  return _scaled(tree, node_index, mean_value(tree, node_index), config, discount)


def for_gumbel(
  tree: mctx.Tree, node_index: chex.Numeric, *, config: SearchConfig, discount: float
) -> chex.Array:
  """Returns sigma(Q) [A], with Q completed by `mixed_value` and scaled to [0, 1].

  It is (c_visit + max visits) * c_scale * Q, to be added to the prior logits: equation 8 of
  Danihelka et al. (2022), as in EfficientZero V2.
  """
  scaled = _scaled(tree, node_index, mixed_value(tree, node_index), config, discount)
  return (config.c_visit + jnp.max(tree.children_visits[node_index])) * config.c_scale * scaled
