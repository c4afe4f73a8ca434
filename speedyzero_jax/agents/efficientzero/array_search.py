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

  visits: chex.Array  # [B, N] int32, 0 for nodes not yet added
  value: chex.Array  # [B, N], mean of the returns through the node
  raw_value: chex.Array  # [B, N], value from the network
  parent: chex.Array  # [B, N] int32
  action: chex.Array  # [B, N] int32, of the edge from the parent
  # [B, N, N] bool, [b, n, m]: the edge into node m is on the path from the root to node n.
  edges: chex.Array
  prior_logits: chex.Array  # [B, N, A]
  child_visits: chex.Array  # [B, N, A] int32
  qvalues: chex.Array  # [B, N, A], mean of the returns through the edge
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
    actions = jax.vmap(select)(_tree(nodes, invalid_actions, extra_data))
    # A node is reached if the selected actions lead along all edges to it. Indices increase along
    # a path.
    selected = _pick_each(actions, nodes.parent) == nodes.action
    path = (nodes.visits > 0) & jnp.all(selected[:, None] | ~nodes.edges, axis=2)
    parent = jnp.max(jnp.where(path, jnp.arange(num_simulations + 1), 0), axis=1)
    action = _pick(actions, parent)
    embedding = jax.tree.map(lambda x: _pick(x, parent), nodes.embedding)
    step, embedding = recurrent_fn(params, key, action, embedding)
    return _expanded(nodes, simulation + 1, path, actions, parent, step, embedding, discount)

  if invalid_actions is None:
    invalid_actions = jnp.zeros_like(root.prior_logits)
  nodes = _roots(root, num_simulations + 1)
  nodes = jax.lax.fori_loop(0, num_simulations, simulate, nodes)
  return _tree(nodes, invalid_actions, extra_data)


def _roots(root: mctx.RootFnOutput, count: int) -> _Nodes:
  """Returns trees with room for `count` nodes, of which only the roots are in use."""

  def first(x: chex.Array) -> chex.Array:
    return jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype).at[:, 0].set(x)

  value = first(root.value)
  prior_logits = first(root.prior_logits)
  batch = len(value)
  return _Nodes(
    visits=first(jnp.ones(batch, jnp.int32)),
    value=value,
    raw_value=value,
    parent=jnp.zeros((batch, count), jnp.int32),
    action=jnp.zeros((batch, count), jnp.int32),
    edges=jnp.zeros((batch, count, count), bool),
    prior_logits=prior_logits,
    child_visits=jnp.zeros(prior_logits.shape, jnp.int32),
    qvalues=jnp.zeros(prior_logits.shape, jnp.float32),
    embedding=jax.tree.map(first, root.embedding),
  )


def _expanded(
  nodes: _Nodes,
  new: chex.Array,
  path: chex.Array,
  actions: chex.Array,
  parent: chex.Array,
  step: mctx.RecurrentFnOutput,
  embedding: Any,
  discount: float,
) -> _Nodes:
  """Adds node `new` at the end of `path` [B, N], and backs up its value.

  The path follows `actions` [B, N] to the new node's `parent`.
  """
  node = jnp.arange(path.shape[1])
  is_new = node == new

  def put(x: chex.Array, y: chex.Array) -> chex.Array:
    y = jnp.expand_dims(y, 1)
    if x[0, 0].size <= 128:  # small: XLA merges such selections into one kernel
      return jnp.where(is_new.reshape(-1, *[1] * (x.ndim - 2)), y, x)
    return jax.lax.dynamic_update_slice_in_dim(x, y, new, 1, allow_negative_indices=False)

  def mean(x: chex.Array, visits: chex.Array, returns: chex.Array) -> chex.Array:
    return (x * visits + returns) / (visits + 1)

  returns = _returns(nodes.embedding, path, parent, step, discount)
  taken = path[..., None] & (actions[..., None] == jnp.arange(nodes.qvalues.shape[2]))
  value = jnp.where(path, mean(nodes.value, nodes.visits, returns), nodes.value)
  qvalues = mean(nodes.qvalues, nodes.child_visits, returns[..., None])
  return _Nodes(
    visits=nodes.visits + (path | is_new),
    value=put(value, step.value),
    raw_value=put(nodes.raw_value, step.value),
    parent=put(nodes.parent, parent),
    action=put(nodes.action, _pick(actions, parent)),
    edges=put(nodes.edges, path & (node > 0) | is_new),
    prior_logits=put(nodes.prior_logits, step.prior_logits),
    child_visits=nodes.child_visits + taken,
    qvalues=jnp.where(taken, qvalues, nodes.qvalues),
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


def _tree(nodes: _Nodes, invalid_actions: chex.Array, extra_data: Any) -> mctx.Tree:
  """Returns the nodes as a tree for mctx's functions."""
  return mctx.Tree(
    node_visits=nodes.visits,
    raw_values=nodes.raw_value,
    node_values=nodes.value,
    parents=nodes.parent,
    action_from_parent=nodes.action,
    children_index=jnp.full_like(nodes.child_visits, mctx.Tree.UNVISITED),
    children_prior_logits=nodes.prior_logits,
    children_visits=nodes.child_visits,
    children_rewards=jnp.zeros_like(nodes.qvalues),
    children_discounts=jnp.ones_like(nodes.qvalues),
    children_values=nodes.qvalues,
    embeddings=nodes.embedding,
    root_invalid_actions=invalid_actions,
    extra_data=extra_data,
  )


def _pick(x: chex.Array, node: chex.Array) -> chex.Array:
  """Rows of x [B, N, ...] by node [B]."""
  rows = jnp.arange(len(x)) * x.shape[1] + node
  return x.reshape(-1, *x.shape[2:]).at[rows].get(mode="promise_in_bounds")


def _pick_each(x: chex.Array, nodes: chex.Array) -> chex.Array:
  """Elements of x [B, N] by nodes [B, M]."""
  return jnp.take_along_axis(x, nodes, axis=1, mode="promise_in_bounds")
