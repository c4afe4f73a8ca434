"""Recurrent core between torso and heads: an LSTM that is reset where an episode starts.

The LSTM (Hochreiter & Schmidhuber 1997) has forget gates (Gers et al. 2000). Its state is one array
[B, 2 * size], output and cell. Unrolling resets the state at the first slot of each episode, so
windows that span several episodes are exact.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.config.fields import opt
from speedyzero_jax.ops.torsos import TorsoConfig, make_torso


@dataclasses.dataclass(frozen=True)
class CoreConfig(TorsoConfig):
  """A torso and an optional recurrent core."""

  core: Literal["none", "lstm"] = opt(
    "none", "memory between torso and heads; lstm stores 8 * network.lstm_hidden bytes per step"
  )
  lstm_hidden: int = opt(256, "width of the LSTM (IMPALA: 256, R2D2: 512)", "[1, 1e5]")


class Lstm(nnx.Module):
  """Inputs [B, T, D], first [B, T] bool, state [B, 2 * size] -> outputs [B, T, size], next state.

  The state is set to zero before slots marked by `first`. Acting uses T = 1.
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
      input_gate, forget_gate, output_gate = (jax.nn.sigmoid(gate) for gate in gates[:3])
      cell = forget_gate * cell + input_gate * jnp.tanh(gates[3])
      output = output_gate * jnp.tanh(cell)
      return jnp.concatenate([output, cell], axis=-1), output

    gates = self.inputs(x)  # one product for all slots
    # A constant bias of 1 on the forget gate.
    gates += jnp.repeat(jnp.array([0.0, 1.0, 0.0, 0.0]), state.shape[-1] // 2)
    state, outputs = jax.lax.scan(step, state, (gates.swapaxes(0, 1), first.swapaxes(0, 1)))
    return outputs.swapaxes(0, 1), state


class CoreNetwork(nnx.Module):
  """A torso and an optional core; subclasses add heads.

  Attributes:
    width: number of features passed to the heads.
  """

  def __init__(self, config: CoreConfig, shape: tuple[int, int, int], rngs: nnx.Rngs):
    self.torso = make_torso(config, shape, rngs)
    recurrent = config.core == "lstm"
    self.core = Lstm(config.hidden, config.lstm_hidden, rngs) if recurrent else None
    self.width = config.lstm_hidden if recurrent else config.hidden

  def features(self, x: jax.Array, first: Any, state: Any) -> tuple[jax.Array, Any]:
    """Returns features [B, T, width] of consecutive slots, and the next recurrent state.

    Args:
      x: [B, T, H, W, C] observations.
      first: [B, T] bool, an episode starts in the slot; unused without a core.
      state: recurrent state before the first slot; unused without a core.
    """
    return self.apply_core(self.encode(x), first, state)

  def encode(self, x: jax.Array) -> jax.Array:
    """Applies the torso: observations [B, T, H, W, C] -> features [B, T, D]."""
    return self.torso(x.reshape(-1, *x.shape[2:])).reshape(*x.shape[:2], -1)

  def apply_core(self, encoded: jax.Array, first: Any, state: Any) -> tuple[jax.Array, Any]:
    """Applies the core, if any, to the torso's features; returns as `features`."""
    return (encoded, state) if self.core is None else self.core(encoded, first, state)
