"""Q transforms for mctx that scale by the range of the whole tree, as EfficientZero does.

A qtransform maps an unbatched tree and a node to one number per action. mctx scales by the node's
siblings; these scale by every edge of the tree, so that siblings of nearly equal value stay close.

Both need `tree.embeddings.reward` [N], the reward of the edge into each node: the range is then
taken over N numbers rather than N x A, and XLA hoists it out of the descent, to once per
simulation.
"""

import chex
import jax
import jax.numpy as jnp
import mctx


def tree_range(tree: mctx.Tree, discount: float) -> tuple[chex.Array, chex.Array]:
  """The minimum and maximum Q = reward + discount * value over the tree's visited edges.

  (inf, -inf) while nothing below the root is visited.
  """
  # Every node but the root is the far end of exactly one edge.
  is_edge = (tree.node_visits > 0) & (jnp.arange(tree.node_visits.shape[0]) != tree.ROOT_INDEX)
  qvalues = tree.embeddings.reward + discount * tree.node_values
  low = jnp.min(jnp.where(is_edge, qvalues, jnp.inf))
  return low, jnp.max(jnp.where(is_edge, qvalues, -jnp.inf))


def mean_value(tree: mctx.Tree, node_index: chex.Numeric) -> chex.Array:
  """The mean of a node's network value and the Q of its visited actions. Scalar.

  (V(s) + sum of Q(s, a) over visited a) / (1 + number of visited a). EfficientZero uses the mean of
  the parent node in place of V(s), and nothing at the root; the node's own value estimates the same
  quantity directly.
  """
  visited = tree.children_visits[node_index] > 0
  total = jnp.sum(jnp.where(visited, tree.qvalues(node_index), 0.0))
  return (tree.raw_values[node_index] + total) / (1 + jnp.sum(visited))


def mixed_value(tree: mctx.Tree, node_index: chex.Numeric) -> chex.Array:
  """v_mix, the interpolation of a node's network value and its prior-weighted Q. Scalar.

  (V(s) + n * sum of pi(a) Q(s, a) / sum of pi(a)) / (1 + n), sums over visited a, n visits of all
  actions: Danihelka et al. (2022), "Policy improvement by planning with Gumbel", equation 33.
  """
  visits = tree.children_visits[node_index]
  prior = jax.nn.softmax(tree.children_prior_logits[node_index])
  # A visited action may have a prior of zero; the sum of weights must stay positive.
  weight = jnp.where(visits > 0, jnp.maximum(prior, jnp.finfo(prior.dtype).tiny), 0.0)
  total_visits = jnp.sum(visits)
  total_weight = jnp.where(total_visits > 0, jnp.sum(weight), 1.0)
  weighted = jnp.sum(weight * tree.qvalues(node_index)) / total_weight
  return (tree.raw_values[node_index] + total_visits * weighted) / (1 + total_visits)


def _scaled(
  tree: mctx.Tree, node_index: chex.Numeric, missing: chex.Array, discount: float, min_range: float
) -> chex.Array:
  qvalues = jnp.where(tree.children_visits[node_index] > 0, tree.qvalues(node_index), missing)
  low, high = tree_range(tree, discount)
  # The completing value may lie outside the range of the edges. Widening the range, rather than
  # clipping the value, keeps the transform strictly increasing, as policy improvement requires.
  low, high = jnp.minimum(low, jnp.min(qvalues)), jnp.maximum(high, jnp.max(qvalues))
  return (qvalues - low) / jnp.maximum(high - low, min_range)


def qtransform_tree_by_mean_value(
  tree: mctx.Tree, node_index: chex.Numeric, *, discount: float, min_range: float = 0.01
) -> chex.Array:
  """Q completed by `mean_value`, scaled to [0, 1], for PUCT (EfficientZero, section 3).

  [A], (Q - min) / max(max - min, min_range). The range covers the visited edges of the tree and, if
  some action of the node is unvisited, the value that completes it. `min_range` keeps noise among
  equals from being amplified.
  """
  return _scaled(tree, node_index, mean_value(tree, node_index), discount, min_range)


def qtransform_tree_by_mixed_value(
  tree: mctx.Tree,
  node_index: chex.Numeric,
  *,
  discount: float,
  min_range: float = 0.01,
  value_scale: float = 0.1,
  maxvisit_init: float = 50.0,
) -> chex.Array:
  """sigma(Q) for Gumbel search: Q completed by `mixed_value` and scaled over the tree.

  Equation 8 of Danihelka et al. (2022), (maxvisit_init + max visits) * value_scale * Q, as in
  EfficientZero V2; arguments as in `mctx.qtransform_completed_by_mix_value`. [A], to be added to
  the prior logits.
  """
  scaled = _scaled(tree, node_index, mixed_value(tree, node_index), discount, min_range)
  return (maxvisit_init + jnp.max(tree.children_visits[node_index])) * value_scale * scaled
