"""Batched tree search over a learned model that predicts value prefixes (EfficientZero), with mctx.

`SearchConfig` selects Gumbel search with sequential halving, or PUCT. Roots are searched
independently; only random numbers depend on the rest of the batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import mctx

from speedyzero_jax.agents.efficientzero import array_search, qtransforms
from speedyzero_jax.agents.efficientzero.config import SearchConfig
from speedyzero_jax.system.platform import platform
from speedyzero_jax.types import Params

# Scale of the random numbers added to PUCT scores; small enough to affect ties only.
_TIE_BREAK = 1e-6
# With more, the array search, whose work grows quadratically, is expected to be slower in spite of
# fewer launches.
_MOST_SIMULATIONS = 128


class SearchResult(NamedTuple):
  """Result of a search for a batch of roots."""

  action: chex.Array  # [B] int32, the action to play
  policy: chex.Array  # [B, A] float32, policy target: Gumbel's improved policy, or PUCT's visits
  search_value: chex.Array  # [B] float32, value of the root after the search
  value: chex.Array  # [B] float32, value of the root from the network
  visits: chex.Array  # [B, A] float32, share of the simulations by root action


class ModelStep(NamedTuple):
  """The model's prediction of a successor state. Scalars are decoded, in units of reward."""

  # [B] float32, undiscounted sum of rewards since the initial carry, including this step.
  value_prefix: chex.Array
  policy_logits: chex.Array  # [B, A] of the successor
  value: chex.Array  # [B] float32, of the successor
  state: Any  # pytree [B, ...], the successor
  carry: Any  # pytree [B, ...], recurrent state of the value prefix


class Root(NamedTuple):
  """States to search from, and the network's predictions for them."""

  policy_logits: chex.Array  # [B, A]
  value: chex.Array  # [B] float32
  state: Any  # pytree [B, ...]


class KnownEdge(NamedTuple):
  """An action at the root whose Q-value is known before the search (ReZero, Xuan et al. 2024)."""

  action: chex.Array  # [B] int32, -1: none
  qvalue: chex.Array  # [B] float32


class _Node(NamedTuple):
  """Embedding of a node in mctx's tree."""

  state: Any  # pytree [B, ...]
  carry: Any  # pytree [B, ...]
  prefix: chex.Array  # [B] float32, value prefix since the last reset at or above the parent
  reward: chex.Array  # [B] float32, of the edge from the parent
  depth: chex.Array  # [B] float32, edges from the root


def make_search(
  config: SearchConfig,
  *,
  discount: float,
  value_prefix_horizon: int,
  recurrent_fn: Callable[[Params, Any, Any, chex.Array], ModelStep],
  initial_carry: Callable[[int], Any],
  improved_values: bool = False,
) -> Callable[..., SearchResult]:
  """Makes the configured search.

  The value prefix is reset every `value_prefix_horizon` steps from the root: steps from a node
  whose depth is a multiple of the horizon start with the initial carry and a prefix of zero. The
  reward of an edge is the difference between the prefixes at its ends, or just after a reset the
  prefix itself (Ye et al. 2021, section 4.2).

  Args:
    config: algorithm and constants.
    value_prefix_horizon: steps between resets.
    recurrent_fn: the model's step, (params, state, carry, action [B] int32) -> ModelStep.
    initial_carry: maps a batch size to the carry after a reset.
    improved_values: for Gumbel, `search_value` is the value of the improved policy. The mean return
      of all simulations is lower, since most of them try other actions.

  Returns:
    A pure function (params, root, key, *, explore, stage=0, known=None) -> SearchResult. With
    `explore`, Gumbel or Dirichlet noise is added at the root, Gumbel search mixes the uniform
    policy into the prior, and PUCT samples the action in proportion to visits^(1 / temperature);
    `stage` is the index of the share of the uniform policy and of the temperature. Without
    `explore`, the result does not depend on the key, and the action is greedy: for Gumbel the
    highest score among the most visited actions, for PUCT the most visited action. A `known` edge
    is not simulated; this requires `improved_values`.
  """
  if config.algorithm == "gumbel":
    run = _gumbel_policy(config, discount, improved_values)
  else:
    run = _puct_policy(config, discount)

  def step(
    params: Params, key: chex.PRNGKey, action: chex.Array, node: _Node
  ) -> tuple[mctx.RecurrentFnOutput, _Node]:
    del key  # the model is deterministic
    starts = node.depth % value_prefix_horizon == 0
    where = functools.partial(jax.vmap(jnp.where), starts)
    carry = jax.tree.map(where, initial_carry(action.shape[0]), node.carry)
    out = recurrent_fn(params, node.state, carry, action)
    prefix = out.value_prefix.astype(jnp.float32)
    reward = prefix - jnp.where(starts, 0.0, node.prefix)
    output = mctx.RecurrentFnOutput(
      reward=reward,
      discount=jnp.full_like(reward, discount),
      prior_logits=out.policy_logits.astype(jnp.float32),
      value=out.value.astype(jnp.float32),
    )
    return output, _Node(out.state, out.carry, prefix, reward, node.depth + 1)

  def search(
    params: Params,
    root: Root,
    key: chex.PRNGKey,
    *,
    explore: bool,
    stage: chex.Numeric = 0,
    known: KnownEdge | None = None,
  ) -> SearchResult:
    value = root.value.astype(jnp.float32)
    zeros, carry = jnp.zeros_like(value), initial_carry(len(value))
    node = _Node(state=root.state, carry=carry, prefix=zeros, reward=zeros, depth=zeros)
    mctx_root = mctx.RootFnOutput(
      prior_logits=root.policy_logits.astype(jnp.float32), value=value, embedding=node
    )
    output = run(params, key, mctx_root, step, explore, stage, known)
    summary = output.search_tree.summary()
    return SearchResult(
      action=output.action.astype(jnp.int32),
      policy=output.action_weights,
      search_value=summary.value,
      value=value,
      visits=summary.visit_probs,
    )

  return search


def _grow(
  config, discount, params, key, root, step, select_at_root, select, extra_data, invalid=None
):
  """Searches with these rules of selection; returns the tree."""
  search = mctx.search
  if platform() != "cpu" and config.simulations <= _MOST_SIMULATIONS:
    search = functools.partial(array_search.search, discount=discount)
  return search(
    params,
    key,
    root=root,
    recurrent_fn=step,
    root_action_selection_fn=select_at_root,
    interior_action_selection_fn=select,
    num_simulations=config.simulations,
    invalid_actions=invalid,
    extra_data=extra_data,
  )


def _gumbel_policy(
  config: SearchConfig, discount: float, improved_values: bool
) -> Callable[..., mctx.PolicyOutput]:
  """Full Gumbel MuZero (Danihelka et al. 2022), like `mctx.gumbel_muzero_policy`."""
  qtransform = functools.partial(qtransforms.for_gumbel, config=config, discount=discount)
  select = functools.partial(mctx.gumbel_muzero_interior_action_selection, qtransform=qtransform)

  def run(params, key, root, step, explore, stage, known):
    key, gumbel_key = jax.random.split(key)
    shape = _, num_actions = root.prior_logits.shape
    select_at_root = functools.partial(
      mctx.gumbel_muzero_root_action_selection,
      num_simulations=config.simulations,
      max_num_considered_actions=min(config.max_considered, num_actions),
      qtransform=qtransform,
    )
    gumbel = jnp.zeros(shape)
    if explore:
      gumbel = jax.random.gumbel(gumbel_key, shape)
      if any(config.uniform_fraction):
        root = _with_prior(root, 1 / num_actions, _in_stage(config.uniform_fraction, stage))
    noise = mctx.GumbelMuZeroExtraData(root_gumbel=gumbel)
    invalid = None if known is None else jax.nn.one_hot(known.action, num_actions)
    tree = _grow(config, discount, params, key, root, step, select_at_root, select, noise, invalid)
    if known is not None:
      tree = _with_edge(tree, known)
    qvalues = jax.vmap(qtransform, in_axes=(0, None))(tree, tree.ROOT_INDEX)
    improved = root.prior_logits + qvalues
    visits = tree.children_visits[:, tree.ROOT_INDEX]
    most = visits == jnp.max(visits, axis=1, keepdims=True)
    action = jnp.argmax(jnp.where(most, gumbel + improved, -jnp.inf), axis=1)
    policy = jax.nn.softmax(improved)
    if improved_values:
      value = jax.vmap(qtransforms.improved_value, (0, None, 0))(tree, tree.ROOT_INDEX, policy)
      tree = tree.replace(node_values=tree.node_values.at[:, tree.ROOT_INDEX].set(value))
    return mctx.PolicyOutput(action=action, action_weights=policy, search_tree=tree)

  return run


def _puct_policy(config: SearchConfig, discount: float) -> Callable[..., mctx.PolicyOutput]:
  """MuZero's search (Schrittwieser et al. 2020, appendix B), like `mctx.muzero_policy`.

  It differs in how ties are broken. mctx draws random numbers at every node on the path, which is
  most of its cost on a CPU and makes a search without noise depend on the key. Here they are drawn
  once per search, and only with `explore`.
  """
  qtransform = functools.partial(qtransforms.for_puct, config=config, discount=discount)

  def select(key, tree, node_index, depth=0):
    del key, depth
    visits = tree.children_visits[node_index]
    node_visits = tree.node_visits[node_index]  # visits of all children, plus 1
    prior = jax.nn.softmax(tree.children_prior_logits[node_index])
    exploration = config.c1 + jnp.log((node_visits + config.c2 + 1) / config.c2)
    bonus = exploration * prior * jnp.sqrt(node_visits) / (1 + visits)
    score = qtransform(tree, node_index) + bonus
    if tree.extra_data is not None:
      score += tree.extra_data[node_index]
    return jnp.argmax(score).astype(jnp.int32)

  def run(params, key, root, step, explore, stage, known):
    assert known is None, "PUCT does not support known edges"
    noise_key, tie_key, action_key = jax.random.split(key, 3)
    batch, num_actions = root.prior_logits.shape
    tie_break = None
    if explore:
      alpha = jnp.full(num_actions, config.dirichlet_alpha)
      noise = jax.random.dirichlet(noise_key, alpha, (batch,))
      if config.dirichlet_fraction:
        root = _with_prior(root, noise, config.dirichlet_fraction)
      nodes = config.simulations + 1
      tie_break = _TIE_BREAK * jax.random.uniform(tie_key, (batch, nodes, num_actions))
    tree = _grow(config, discount, params, key, root, step, select, select, tie_break)
    visits = tree.summary().visit_probs
    if explore:
      logits = jnp.log(visits / jnp.max(visits, axis=-1, keepdims=True))
      logits /= _in_stage(config.temperatures, stage)
      action = jax.random.categorical(action_key, logits)
    else:
      action = jnp.argmax(visits, axis=-1)
    return mctx.PolicyOutput(action=action, action_weights=visits, search_tree=tree)

  return run


def _with_edge(tree: mctx.Tree, known: KnownEdge) -> mctx.Tree:
  """Adds known edges to the roots, with as many visits as the most visited action."""
  root, edge = tree.ROOT_INDEX, jax.nn.one_hot(known.action, tree.num_actions, dtype=bool)
  visits = jnp.max(tree.children_visits[:, root], axis=1, keepdims=True)

  def put(x: chex.Array, y: chex.Numeric) -> chex.Array:
    return x.at[:, root].set(jnp.where(edge, y, x[:, root]))

  return tree.replace(
    children_visits=put(tree.children_visits, visits),
    children_rewards=put(tree.children_rewards, known.qvalue[:, None]),
    children_values=put(tree.children_values, 0.0),
  )


def _in_stage(values: Sequence[float], stage: chex.Numeric) -> chex.Numeric:
  """Returns the value in a stage; a single value is that of all stages."""
  return values[0] if len(values) == 1 else jnp.array(values)[stage]


def _with_prior(
  root: mctx.RootFnOutput, other: chex.Numeric, share: chex.Numeric
) -> mctx.RootFnOutput:
  """Mixes a share of another distribution [B, A] into the root's prior."""
  prior = jax.nn.softmax(root.prior_logits)
  prior += share * (other - prior)
  return root.replace(prior_logits=jnp.log(jnp.maximum(prior, jnp.finfo(prior.dtype).tiny)))
