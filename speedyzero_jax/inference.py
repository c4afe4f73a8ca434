"""The network and the search, compiled for the roles that only look: actor, reanalyser, refresher, evaluator.

Everything takes frames as stored (unstacked, uint8) in windows of S-1+n frames and returns what is known of the n
states in them. Knows nothing of replay, environments or processes.
"""

from collections.abc import Callable
from functools import partial

import jax

from speedyzero_jax import losses
from speedyzero_jax.config import Config
from speedyzero_jax.networks import Blueprint, Variables, initial_carry
from speedyzero_jax.search import ModelStep, Root, SearchFn, make_search
from speedyzero_jax.types import Params, SearchResult


def make_recurrent_fn(blueprint: Blueprint) -> Callable[..., ModelStep]:
  """g and f as the search wants them: `(variables, state, carry, action) -> ModelStep`, scalars decoded."""

  def recurrent(variables: Params, state: jax.Array, carry: Params, action: jax.Array) -> ModelStep:
    network = blueprint.bind(variables)
    state, carry, prefix_logits = network.step(state, carry, action)
    value_logits, policy_logits = network.predict(state, False)
    return ModelStep(
      value_prefix=losses.decode(prefix_logits),
      policy_logits=policy_logits,
      value=losses.decode(value_logits),
      state=state,
      carry=carry,
    )

  return recurrent


class Inference:
  """Compiled functions over one network; each compiles once per batch size.

  Args:
    config: of the run.
    blueprint: of the network.
  """

  def __init__(self, config: Config, blueprint: Blueprint):
    self._blueprint = blueprint
    self._stack = config.env.frame_stack
    self._search: SearchFn = make_search(
      config.search,
      num_actions=blueprint.num_actions,
      discount=config.env.discount,
      value_prefix_horizon=config.network.value_prefix_horizon,
      recurrent_fn=make_recurrent_fn(blueprint),
      initial_carry=partial(initial_carry, config.network),
    )
    self.search = jax.jit(self._search_windows, static_argnames="explore")
    self.value = jax.jit(self._value_windows)

  def _roots(self, variables: Variables, frames: jax.Array) -> Root:
    network = self._blueprint.bind(variables)
    observations = losses.stack_frames(frames, self._stack)
    observations = losses.normalise(observations.reshape(-1, *observations.shape[2:]))
    state = network.represent(observations, False)
    value_logits, policy_logits = network.predict(state, False)
    return Root(policy_logits=policy_logits, value=losses.decode(value_logits), state=state)

  def _search_windows(
    self, variables: Variables, frames: jax.Array, key: jax.Array, temperature: jax.Array | float, *, explore: bool
  ) -> SearchResult:
    """frames [B, S-1+n, H, W, C] -> SearchResult with leaves [B, n, ...]. Compiled as `search`."""
    batch, length = frames.shape[:2]
    root = self._roots(variables, frames)
    result = self._search(variables, root, key, explore=explore, temperature=temperature)
    states = length - self._stack + 1
    return jax.tree.map(lambda x: x.reshape(batch, states, *x.shape[1:]), result)

  def _value_windows(self, variables: Variables, frames: jax.Array) -> jax.Array:
    """frames [B, S-1+n, H, W, C] -> the network's values [B, n]. Compiled as `value`."""
    return self._roots(variables, frames).value.reshape(frames.shape[0], -1)
