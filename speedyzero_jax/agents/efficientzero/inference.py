"""The network and the search, compiled for the roles that only look: actor, reanalyser, refresher, evaluator.

Everything takes frames as stored (unstacked, uint8) in windows of S-1+n frames and returns what is known of the n
states in them. Knows nothing of replay, environments or processes.
"""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero import losses
from speedyzero_jax.agents.efficientzero.networks import Blueprint, Variables, initial_carry
from speedyzero_jax.agents.efficientzero.search import ModelStep, Root, SearchFn, make_search
from speedyzero_jax.config.schema import Config
from speedyzero_jax.system.compilation import Program
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
    mesh: devices of this process, of one axis, that share the windows among them; weights lie on all. None for one.
    report: takes a line when something compiles.
  """

  def __init__(
    self,
    config: Config,
    blueprint: Blueprint,
    mesh: Mesh | None = None,
    *,
    report: Callable[[str], None] = lambda _: None,
  ):
    self._blueprint = blueprint
    self._stack = config.env.frame_stack
    self.devices = 1 if mesh is None else mesh.size
    self._axis = None if mesh is None else mesh.axis_names[0]
    self._search: SearchFn = make_search(
      config.agent.search,
      num_actions=blueprint.num_actions,
      discount=config.env.discount,
      value_prefix_horizon=config.agent.network.value_prefix_horizon,
      recurrent_fn=make_recurrent_fn(blueprint),
      initial_carry=partial(initial_carry, config.agent.network),
    )
    search: Any
    value: Any
    if mesh is None or mesh.size == 1:
      search, value = (
        jax.jit(self._search_windows, static_argnames="explore"),
        jax.jit(self._value_windows),
      )
    else:
      search, value = _Shared(self._search_part, mesh, 2), _Shared(self._value_windows, mesh, 0)
    self.search = Program(search, self._search_label, report)
    self.value = Program(value, self._value_label, report)

  def states(self, frames: jax.Array) -> int:
    """How many there are in frames [B, S-1+n, ...]: B * n."""
    return frames.shape[0] * (frames.shape[1] - self._stack + 1)

  def _search_label(self, variables: Variables, frames: jax.Array, *_: Any, explore: bool) -> str:
    return f"search{'' if explore else ' greedily'}, {self.states(frames)} roots"

  def _value_label(self, variables: Variables, frames: jax.Array) -> str:
    return f"values, {self.states(frames)} states"

  def _roots(self, variables: Variables, frames: jax.Array) -> Root:
    network = self._blueprint.bind(variables)
    observations = losses.stack_frames(frames, self._stack)
    observations = losses.normalise(observations.reshape(-1, *observations.shape[2:]))
    state = network.represent(observations, False)
    value_logits, policy_logits = network.predict(state, False)
    return Root(policy_logits=policy_logits, value=losses.decode(value_logits), state=state)

  def _search_windows(
    self,
    variables: Variables,
    frames: jax.Array,
    key: jax.Array,
    temperature: jax.Array | float,
    *,
    explore: bool,
  ) -> SearchResult:
    """frames [B, S-1+n, H, W, C] -> SearchResult with leaves [B, n, ...]. Compiled as `search`."""
    batch, length = frames.shape[:2]
    root = self._roots(variables, frames)
    result = self._search(variables, root, key, explore=explore, temperature=temperature)
    states = length - self._stack + 1
    return jax.tree.map(lambda x: x.reshape(batch, states, *x.shape[1:]), result)

  def _search_part(self, variables, frames, key, temperature, *, explore: bool) -> SearchResult:
    """A device's part of `search`, with randomness of its own."""
    key = jax.random.fold_in(key, jax.lax.axis_index(self._axis))
    return self._search_windows(variables, frames, key, temperature, explore=explore)

  def _value_windows(self, variables: Variables, frames: jax.Array) -> jax.Array:
    """frames [B, S-1+n, H, W, C] -> the network's values [B, n]. Compiled as `value`."""
    return self._roots(variables, frames).value.reshape(frames.shape[0], -1)


class _Shared:
  """`function(variables, frames, *rest)` of frames [B, ...], computed by each device of a mesh for its part of B."""

  def __init__(self, function: Callable, mesh: Mesh, rest: int):
    self.__name__, self._devices = function.__name__, mesh.size
    parts, whole = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
    self._specs, self._sharding = (whole, parts, *[whole] * rest), NamedSharding(mesh, parts)

    @lru_cache
    def compiled(**static: Any) -> Any:
      of_parts = wraps(function)(
        partial(function, **static)
      )  # with its name, by which compilations are known
      return jax.jit(
        jax.shard_map(of_parts, mesh=mesh, in_specs=self._specs, out_specs=parts, check_vma=False)
      )

    self._compiled = compiled

  def __call__(self, variables: Variables, frames: jax.Array, *rest: Any, **static: Any) -> Any:
    batch = len(frames)
    found = self._compiled(**static)(variables, self._dealt(frames), *rest)
    return found if batch % self._devices == 0 else jax.tree.map(lambda x: x[:batch], found)

  def lower(
    self, variables: Variables, frames: jax.Array, *rest: Any, **static: Any
  ) -> jax.stages.Lowered:
    """As of a jitted function."""
    return self._compiled(**static).lower(variables, self._dealt(frames), *rest)

  def _dealt(self, frames: jax.Array) -> jax.Array:
    missing = -len(frames) % self._devices
    if missing:  # any windows will do
      frames = jnp.concatenate([frames, jnp.repeat(frames[-1:], missing, axis=0)])
    return jax.device_put(frames, self._sharding)
