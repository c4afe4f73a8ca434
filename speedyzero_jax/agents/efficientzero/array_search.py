"""Monte Carlo tree search in whole-array operations, without loops of unknown length.

`mctx.search` descends and backs up in loops as long as the deepest path of the batch. On a GPU the
host synchronizes after every iteration to evaluate the loop condition. Here every node selects an
action, paths are followed by pointer doubling, and all values on a path are backed up at once, so a
simulation is a fixed sequence of operations. The cost is quadratic in the number of nodes, which is
acceptable for tens of simulations.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import mctx
import numpy as np

from speedyzero_jax.types import Params


class _Nodes(NamedTuple):
  """The nodes of B trees, indexed by the simulation that added them; the root has index 0."""

  visits: chex.Array  # [B, N] int32
  value: chex.Array  # [B, N], mean of the returns through the node
  raw_value: chex.Array  # [B, N], value from the network
  prior_logits: chex.Array  # [B, N, A]
  children: chex.Array  # [B, N, A] int32, index of the child or mctx.Tree.UNVISITED
  ancestors: chex.Array  # [B, N, N] bool, [b, n, m]: m is an ancestor of n, or n itself
  embedding: Any  # pytree [B, N, ...]


def search(
  params: Params,
  key: chex.PRNGKey,
  *,
  root: mctx.RootFnOutput,
  recurrent_fn: mctx.RecurrentFn,
  root_action_selection_fn: mctx.RootActionSelectionFn,
  interior_action_selection_fn: mctx.InteriorActionSelectionFn,
  num_simulations: int,
  discount: float,
  invalid_actions: chex.Array | None = None,
  extra_data: Any = None,
) -> mctx.Tree:
  """Equivalent of `mctx.search` for a constant discount and deterministic selection.

  There is no depth limit. Embeddings must have the fields `reward` [B], of the edge into the node,
  and `depth` [B]. The `parents` of the tree are not set.
  """

  def select(tree: mctx.Tree) -> chex.Array:
    nodes = jnp.arange(num_simulations + 1)
    # Both at every node: what they have in common is computed once.
    at_root = jax.vmap(lambda node: root_action_selection_fn(key, tree, node))(nodes)
    interior = jax.vmap(lambda node: interior_action_selection_fn(key, tree, node, 1))(nodes)
    return jnp.where(nodes == 0, at_root, interior)

  def simulate(simulation: chex.Array, nodes: _Nodes) -> _Nodes:
    actions = jax.vmap(select)(_tree(nodes, discount, invalid_actions, extra_data))
    child = jnp.take_along_axis(nodes.children, actions[..., None], axis=2)[..., 0]
    parent = _follow(child, num_simulations - 1)
    action = _pick(actions, parent)
    embedding = jax.tree.map(lambda x: _pick(x, parent), nodes.embedding)
    step, embedding = recurrent_fn(params, key, action, embedding)
    return _expanded(nodes, simulation + 1, parent, action, step, embedding, discount)

  if invalid_actions is None:
    invalid_actions = jnp.zeros_like(root.prior_logits)
  nodes = _roots(root, num_simulations + 1)
  nodes = jax.lax.fori_loop(0, num_simulations, simulate, nodes)
  return _tree(nodes, discount, invalid_actions, extra_data)


def _roots(root: mctx.RootFnOutput, count: int) -> _Nodes:
  """Returns trees with room for `count` nodes, of which only the roots are in use."""

  def first(x: chex.Array) -> chex.Array:
    return jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype).at[:, 0].set(x)

  batch, actions = root.prior_logits.shape
  value = first(root.value)
  return _Nodes(
    visits=first(jnp.ones(batch, jnp.int32)),
    value=value,
    raw_value=value,
    prior_logits=first(root.prior_logits),
    children=jnp.full((batch, count, actions), mctx.Tree.UNVISITED, jnp.int32),
    ancestors=jnp.zeros((batch, count, count), bool).at[:, 0, 0].set(True),
    embedding=jax.tree.map(first, root.embedding),
  )


def _follow(child: chex.Array, steps: int) -> chex.Array:
  """Follows `child` [B, N] from the roots for `steps` steps, or to a leaf; returns nodes [B]."""
  jump = jnp.where(child == mctx.Tree.UNVISITED, jnp.arange(child.shape[1]), child)
  node = jnp.zeros(len(child), jnp.int32)
  while steps:
    if steps % 2:
      node = _pick(jump, node)
    jump = jnp.take_along_axis(jump, jump, axis=1)  # twice as far
    steps //= 2
  return node


def _expanded(
  nodes: _Nodes,
  new: chex.Array,
  parent: chex.Array,
  action: chex.Array,
  step: mctx.RecurrentFnOutput,
  embedding: Any,
  discount: float,
) -> _Nodes:
  """Adds node `new` for `action` in `parent`, and backs up its value."""

  count, num_actions = nodes.children.shape[1:]
  node = jnp.arange(count)
  is_new = node == new

  def put(x: chex.Array, y: chex.Array) -> chex.Array:
    if x.ndim == 2:  # small: XLA merges such selections into one kernel
      return jnp.where(is_new, y[:, None], x)
    return jax.lax.dynamic_update_index_in_dim(x, y, new, axis=1)

  path = _pick(nodes.ancestors, parent)  # [B, N]
  returns = _returns(nodes.embedding, path, parent, step, discount)
  backed_up = (nodes.value * nodes.visits + returns) / (nodes.visits + 1)
  edge = (node == parent[:, None])[..., None] & (jnp.arange(num_actions) == action[:, None, None])
  return _Nodes(
    visits=nodes.visits + (path | is_new),
    value=put(jnp.where(path, backed_up, nodes.value), step.value),
    raw_value=put(nodes.raw_value, step.value),
    prior_logits=put(nodes.prior_logits, step.prior_logits),
    children=jnp.where(edge, new, nodes.children),
    ancestors=put(nodes.ancestors, path | is_new),
    embedding=jax.tree.map(put, nodes.embedding, embedding),
  )


def _returns(
  embedding: Any,
  path: chex.Array,
  parent: chex.Array,
  step: mctx.RecurrentFnOutput,
  discount: float,
) -> chex.Array:
  """Discounted returns [B, N] from each node on the path to `parent`, ending with `step`."""
  depth, reward = embedding.depth, embedding.reward
  power = jnp.asarray(np.power(discount, np.arange(path.shape[1])), jnp.float32)
  last = _pick(depth, parent)[:, None] - depth  # number of edges before the step
  steps = depth[:, None, :] - depth[:, :, None] - 1  # [b, n, m]: edges from n to m's parent
  within = path[:, None, :] & (steps >= 0)
  rewards = jnp.where(within, power[jnp.maximum(steps, 0)] * reward[:, None, :], 0.0)
  tail = step.reward + discount * step.value
  return jnp.sum(rewards, axis=2) + power[jnp.maximum(last, 0)] * tail[:, None]


def _tree(
  nodes: _Nodes, discount: float, invalid_actions: chex.Array, extra_data: Any
) -> mctx.Tree:
  """Returns the nodes as a tree for mctx's functions."""
  shape = nodes.children.shape
  visited = nodes.children != mctx.Tree.UNVISITED
  index = jnp.maximum(nodes.children, 0).reshape(shape[0], -1)

  def of_children(x: chex.Array) -> chex.Array:
    return jnp.where(visited, jnp.take_along_axis(x, index, axis=1).reshape(shape), 0)

  return mctx.Tree(
    node_visits=nodes.visits,
    raw_values=nodes.raw_value,
    node_values=nodes.value,
    parents=None,
    action_from_parent=None,
    children_index=nodes.children,
    children_prior_logits=nodes.prior_logits,
    children_visits=of_children(nodes.visits),
    children_rewards=of_children(nodes.embedding.reward),
    children_discounts=jnp.full(shape, discount, jnp.float32),
    children_values=of_children(nodes.value),
    embeddings=nodes.embedding,
    root_invalid_actions=invalid_actions,
    extra_data=extra_data,
  )


def _pick(x: chex.Array, node: chex.Array) -> chex.Array:
  """Rows of x [B, N, ...] by node [B]."""
  return x[jnp.arange(len(x)), node]
