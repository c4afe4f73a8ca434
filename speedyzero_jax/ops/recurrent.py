"""A recurrent core between torso and heads: an LSTM that is reset where an episode starts.

Its state is one array [B, 2 * size]: output and cell (Hochreiter & Schmidhuber 1997; with forget
gates, Gers et al. 2000). The state before each slot is stored as a column of the schema, so that
training can begin anywhere: 8 * size bytes per slot, 4 kB for an LSTM of 512. Unrolling resets the
state at the first slots of episodes, which makes windows across them exact.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.config.fields import opt
from speedyzero_jax.ops.torsos import TorsoConfig
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.storage import LaneStore, take

_CORE = "core"  # column of the state before a slot


@dataclasses.dataclass(frozen=True)
class CoreConfig(TorsoConfig):
  """A torso, and a core or none."""

  core: Literal["none", "lstm"] = opt(
    "none", "memory between torso and heads; lstm stores 8 * network.lstm_hidden bytes per step"
  )
  lstm_hidden: int = opt(256, "width of the LSTM (IMPALA: 256, R2D2: 512)", "[1, 1e5]")


class Lstm(nnx.Module):
  """Inputs [B, T, D], first [B, T] bool, state [B, 2 * size] -> outputs [B, T, size], state after.

  `first` marks slots before which the state is zeroed. A step of acting is T = 1.
  """

  def __init__(self, inputs: int, size: int, rngs: nnx.Rngs):
    self.inputs = nnx.Linear(inputs, 4 * size, rngs=rngs)
    self.recurrent = nnx.Linear(size, 4 * size, use_bias=False, rngs=rngs)

  def __call__(
    self, x: jax.Array, first: jax.Array, state: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    def step(state: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      from_input, reset = slot
      output, cell = jnp.split(jnp.where(reset[:, None], 0, state), 2, axis=-1)
      gates = jnp.split(from_input + self.recurrent(output), 4, axis=-1)
      enter, forget, leave = (jax.nn.sigmoid(gate) for gate in gates[:3])
      cell = forget * cell + enter * jnp.tanh(gates[3])
      output = leave * jnp.tanh(cell)
      return jnp.concatenate([output, cell], axis=-1), output

    gates = self.inputs(x)  # of all slots in one product
    gates += jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), state.shape[-1] // 2)  # remember at first
    state, outputs = jax.lax.scan(step, state, (gates.swapaxes(0, 1), first.swapaxes(0, 1)))
    return outputs.swapaxes(0, 1), state


def make_core(config: CoreConfig, rngs: nnx.Rngs) -> Lstm | None:
  """The configured core of a torso's features."""
  if config.core == "none":
    return None
  return Lstm(config.hidden, config.lstm_hidden, rngs)


def features_size(config: CoreConfig) -> int:
  """Width of the features that the heads get."""
  return config.hidden if config.core == "none" else config.lstm_hidden


def unroll(
  torso: nnx.Module, core: Lstm | None, x: jax.Array, first: Any, state: Any
) -> tuple[jax.Array, Any]:
  """Features [B, T, D] of consecutive slots, and the state after them.

  Args:
    torso: of `make_torso`.
    core: of `make_core`; without one `first` and `state` are not used.
    x: [B, T, H, W, C] observations.
    first: [B, T] bool, an episode starts in the slot.
    state: before the first slot.
  """
  size, slots = x.shape[:2]
  features = torso(x.reshape(size * slots, *x.shape[2:])).reshape(size, slots, -1)
  return (features, state) if core is None else core(features, first, state)


def initial_state(config: CoreConfig, n: int) -> Any:
  """The state at an episode's start, [n, ...]; () without a core."""
  return () if config.core == "none" else jnp.zeros((n, 2 * config.lstm_hidden))


def state_columns(config: CoreConfig) -> tuple[Column, ...]:
  """The columns of the schema that hold the state. It is zero in slots played at random."""
  return () if config.core == "none" else (Column(_CORE, "float32", (2 * config.lstm_hidden,)),)


def as_columns(state: Any) -> dict[str, Any]:
  """A state as values of `state_columns`."""
  return {} if isinstance(state, tuple) else {_CORE: state}


def of_windows(store: LaneStore, flat: np.ndarray) -> dict[str, np.ndarray]:
  """What `unroll` needs of stored slots, cells [B, T] (see `LaneStore.flat`): `first` and `state`.

  Empty without a core.
  """
  if _CORE not in store.fields:
    return {}
  return {"first": take(store["first"], flat), "state": take(store[_CORE], flat[:, 0])}
