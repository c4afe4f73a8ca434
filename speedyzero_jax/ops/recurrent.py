"""A recurrent core between torso and heads: an LSTM that is reset where an episode starts.

Its state is one array [B, 2 * size]: output and cell (Hochreiter & Schmidhuber 1997; with forget
gates, Gers et al. 2000). Unrolling resets the state at the first slots of episodes, which makes
windows across them exact.
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


class CoreNetwork(nnx.Module):
  """A torso and the core, if there is one; networks derive from it and add their heads.

  Attributes:
    width: of the features that the heads get.
  """

  def __init__(self, config: CoreConfig, shape: tuple[int, int, int], rngs: nnx.Rngs):
    self.torso = make_torso(config, shape, rngs)
    recurrent = config.core == "lstm"
    self.core = Lstm(config.hidden, config.lstm_hidden, rngs) if recurrent else None
    self.width = config.lstm_hidden if recurrent else config.hidden

  def features(self, x: jax.Array, first: Any, state: Any) -> tuple[jax.Array, Any]:
    """Features [B, T, width] of consecutive slots, and the state after them.

    Args:
      x: [B, T, H, W, C] observations.
      first: [B, T] bool, an episode starts in the slot; not used without a core.
      state: before the first slot; not used without a core.
    """
    return self.remember(self.seen(x), first, state)

  def seen(self, x: jax.Array) -> jax.Array:
    """The torso's features [B, T, D] of observations."""
    return self.torso(x.reshape(-1, *x.shape[2:])).reshape(*x.shape[:2], -1)

  def remember(self, seen: jax.Array, first: Any, state: Any) -> tuple[jax.Array, Any]:
    """`features`, from the torso's."""
    return (seen, state) if self.core is None else self.core(seen, first, state)
