"""Monte Carlo tree search in whole-array operations, without loops of unknown length.

`mctx.search` descends and backs up in loops as long as the deepest path of the batch. On a GPU the
host synchronizes after every iteration to evaluate the loop condition. Here every node selects an
action, a node is on the path if at each of its ancestors the selected action leads to it, and all
values on the path are backed up at once, so a simulation is a fixed sequence of operations. The
cost is quadratic in the number of nodes, which is acceptable for tens of simulations.

A simulation's many small operations take the time of their launches, so the trees are kept in few
arrays, which XLA updates by few kernels.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import mctx

from speedyzero_jax.types import Params


class _Node(NamedTuple):
  """Network outputs and embedding of a new node."""

  value: chex.Array  # [B] float32, from the network
  prior_logits: chex.Array  # [B, A] float32
  embedding: Any  # pytree [B, ...]


class _Trees(NamedTuple):
  """B trees of N nodes, indexed by the simulation that added them; the root has index 0."""

  visits: chex.Array  # [B, N] int32, 0 for nodes not yet added
  route: chex.Array  # [B, N, N] int16, [b, n, m]: action at m towards n, -1 if m isn't above n
  child_visits: chex.Array  # [B, N, A] int32
  qvalues: chex.Array  # [B, N, A], means of the returns through the edges
  rows: list[chex.Array]  # [B, N, ...], the nodes joined by `_join`


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
  and `depth` [B], both float32. In the tree, `children_values` are Q-values, with rewards of 0 and
  discounts of 1; the indices of parents and children are not set.
  """
  node_index = jnp.arange(num_simulations + 1)
  like = _Node(root.value, root.prior_logits, root.embedding)
  if invalid_actions is None:
    invalid_actions = jnp.zeros_like(root.prior_logits)

  def select(tree: mctx.Tree) -> chex.Array:
    # Both at every node: what they have in common is computed once.
    at_root = jax.vmap(lambda node: root_action_selection_fn(key, tree, node))(node_index)
    interior = jax.vmap(lambda node: interior_action_selection_fn(key, tree, node, 1))(node_index)
    return jnp.where(node_index == 0, at_root, interior)

  def simulate(simulation: chex.Array, trees: _Trees) -> _Trees:
    nodes = _split(trees.rows, like)
    actions = jax.vmap(select)(_tree(trees, nodes, invalid_actions, extra_data))
    agree = (trees.route < 0) | (trees.route == actions[:, None])
    path = (trees.visits > 0) & jnp.all(agree, axis=2)
    last = jnp.max(jnp.where(path, node_index, 0), axis=1)  # indices increase along a path
    parent = _split([_pick(x, last) for x in trees.rows], like).embedding
    step, embedding = recurrent_fn(params, key, _pick(actions, last), parent)
    node = _Node(step.value, step.prior_logits, embedding)
    returns = _returns(nodes.embedding, path, parent.depth, step, discount)
    return _expanded(trees, simulation + 1, path, actions, node, returns)

  trees = _roots(like, num_simulations + 1)
  trees = jax.lax.fori_loop(0, num_simulations, simulate, trees)
  return _tree(trees, _split(trees.rows, like), invalid_actions, extra_data)


def _roots(root: _Node, count: int) -> _Trees:
  """Returns trees with room for `count` nodes, of which only the roots are in use."""

  def first(x: chex.Array) -> chex.Array:
    return jnp.zeros((x.shape[0], count, *x.shape[1:]), x.dtype).at[:, 0].set(x)

  batch, actions = root.prior_logits.shape
  assert actions <= jnp.iinfo(jnp.int16).max, "actions on routes are int16"
  return _Trees(
    visits=first(jnp.ones(batch, jnp.int32)),
    route=jnp.full((batch, count, count), -1, jnp.int16),
    child_visits=jnp.zeros((batch, count, actions), jnp.int32),
    qvalues=jnp.zeros((batch, count, actions), jnp.float32),
    rows=[first(x) for x in _join(root)],
  )


def _expanded(
  trees: _Trees,
  new: chex.Array,
  path: chex.Array,
  actions: chex.Array,
  node: _Node,
  returns: chex.Array,
) -> _Trees:
  """Adds `node` with index `new` to the end of `path` [B, N], and backs up `returns` [B, N].

  The path follows `actions` [B, N].
  """
  is_new = jnp.arange(path.shape[1]) == new
  route = jnp.where(path, actions, -1).astype(trees.route.dtype)[:, None]
  taken = path[..., None] & (actions[..., None] == jnp.arange(trees.qvalues.shape[2]))
  total = trees.qvalues * trees.child_visits + returns[..., None]
  return _Trees(
    visits=trees.visits + (path | is_new),
    route=jnp.where(is_new[:, None], route, trees.route),
    child_visits=trees.child_visits + taken,
    qvalues=jnp.where(taken, total / (trees.child_visits + 1), trees.qvalues),
    rows=[
      jax.lax.dynamic_update_index_in_dim(x, row, new, axis=1, allow_negative_indices=False)
      for x, row in zip(trees.rows, _join(node), strict=True)
    ],
  )


def _returns(
  nodes: Any, path: chex.Array, end: chex.Array, step: mctx.RecurrentFnOutput, discount: float
) -> chex.Array:
  """Discounted returns [B, N] from nodes on the path to depth `end` [B], and on with `step`."""
  depth = nodes.depth
  edges = depth[:, None, :] - depth[:, :, None] - 1  # [b, n, m]: edges from n to m's parent
  weights = jnp.where(path[:, None] & (edges >= 0), discount ** jnp.maximum(edges, 0), 0.0)
  rewards = jnp.sum(weights * nodes.reward[:, None], axis=2)
  tail = step.reward + discount * step.value
  return rewards + discount ** jnp.maximum(end[:, None] - depth, 0) * tail[:, None]


def _tree(trees: _Trees, nodes: _Node, invalid_actions: chex.Array, extra_data: Any) -> mctx.Tree:
  """Returns the trees for mctx's functions."""
  total = nodes.value + jnp.sum(trees.child_visits * trees.qvalues, axis=2)
  return mctx.Tree(
    node_visits=trees.visits,
    raw_values=nodes.value,
    node_values=total / jnp.maximum(trees.visits, 1),
    parents=None,
    action_from_parent=None,
    children_index=jnp.full_like(trees.child_visits, mctx.Tree.UNVISITED),
    children_prior_logits=nodes.prior_logits,
    children_visits=trees.child_visits,
    children_rewards=jnp.zeros_like(trees.qvalues),
    children_discounts=jnp.ones_like(trees.qvalues),
    children_values=trees.qvalues,
    embeddings=nodes.embedding,
    root_invalid_actions=invalid_actions,
    extra_data=extra_data,
  )


def _join(tree: Any) -> list[chex.Array]:
  """Joins leaves [B, ...] of the same dtype into an array [B, K], for every dtype."""
  groups: dict[Any, list[chex.Array]] = {}
  for x in jax.tree.leaves(tree):
    groups.setdefault(x.dtype, []).append(x.reshape(len(x), -1))
  return [jnp.concatenate(group, axis=1) for group in groups.values()]


def _split(rows: list[chex.Array], like: Any) -> Any:
  """Inverse of `_join` for arrays [..., K]; `like` has the structure and shapes [B, ...]."""
  leaves, structure = jax.tree.flatten(like)
  arrays = dict(zip(dict.fromkeys(x.dtype for x in leaves), rows, strict=True))
  parts = []
  for x in leaves:
    part, arrays[x.dtype] = jnp.split(arrays[x.dtype], [x[0].size], axis=-1)
    parts.append(part.reshape(*part.shape[:-1], *x.shape[1:]))
  return jax.tree.unflatten(structure, parts)


def _pick(x: chex.Array, node: chex.Array) -> chex.Array:
  """Rows of x [B, N, ...] by node [B]."""
  rows = jnp.arange(len(x)) * x.shape[1] + node
  return x.reshape(-1, *x.shape[2:]).at[rows].get(mode="promise_in_bounds")
