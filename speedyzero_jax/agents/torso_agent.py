"""Base class of agents whose network is a torso, an optional recurrent core, and heads.

With a core, the recurrent state before each slot is stored in the column `core`, so that training
can start at any slot. It takes 8 * size bytes per slot, 4 kB for an LSTM of 512, and is zero in
slots played at random.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import ActInputs, Agent, Arrays, Variables
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops.recurrent import CoreNetwork
from speedyzero_jax.ops.torsos import functional, observe, stacked
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params


class TorsoAgent(Agent):
  """Network, recurrent state and schema shared by such agents.

  Args:
    config: its agent section has a subsection `network`, a `CoreConfig`.
    frame_shape: [H, W, C].
    frame_dtype: dtype of frames.
    actions: number of actions.
    network: (subsection `network`, observation shape, actions, rngs) -> a network that maps
      observations [B, T, H, W, C], `first` and the recurrent state (see `CoreNetwork.features`) to
      a pytree of outputs [B, T, ...] and the next recurrent state.
    columns: the agent's columns, without `core`.
    stamps: as in `Schema`.
  """

  def __init__(
    self,
    config: Config,
    frame_shape: tuple[int, ...],
    frame_dtype: Any,
    actions: int,
    network: Callable[..., CoreNetwork],
    columns: Iterable[Column] = (),
    stamps: tuple[str, ...] = (),
  ):
    agent_config = config.agent
    self._config, self._agent_config, self._stack = config, agent_config, config.env.frame_stack
    height, width, channels = frame_shape
    shape = height, width, channels * self._stack
    self._network = functional(lambda rngs: network(agent_config.network, shape, actions, rngs))
    self._state_size = (
      2 * agent_config.network.lstm_hidden if agent_config.network.core == "lstm" else 0
    )
    if self._state_size:
      columns = (*columns, Column("core", "float32", (self._state_size,)))
    self.schema = make_schema(frame_shape, frame_dtype, actions, tuple(columns), stamps=stamps)

  def init(self, key: jax.Array) -> Variables:
    return Variables(self._network.init(key), ())

  def initial_core(self, n: int) -> Any:
    return jnp.zeros((n, self._state_size)) if self._state_size else ()

  def _now(self, variables: Variables, inputs: ActInputs) -> tuple[Any, Arrays, Any]:
    """Device: outputs for acting [n, ...], the column `core` if any, and the next state."""
    slot = observe(inputs.frames)[:, None], inputs.first[:, None], inputs.core
    outputs, core = self._network.apply(variables.params, *slot)
    columns = {"core": inputs.core} if self._state_size else {}
    return jax.tree.map(lambda x: x[:, 0], outputs), columns, core

  def _unrolled(self, params: Params, batch: Arrays, burn_in: int = 0) -> Any:
    """Device: the network's outputs [B, T, ...] for a window's slots after the burn-in.

    The burn-in only updates the recurrent state; gradients do not pass through it.
    """
    x = observe(stacked(batch["frames"], batch["stack"]))
    first, state = batch.get("first"), batch.get("state", ())
    if first is not None and burn_in:
      frozen = jax.lax.stop_gradient(params)
      _, state = self._network.apply(frozen, x[:, :burn_in], first[:, :burn_in], state)
      first = first[:, burn_in:]
    return self._network.apply(params, x[:, burn_in:], first, state)[0]

  def _states(self, store: LaneStore, flat: np.ndarray) -> Arrays:
    """Host: the arrays besides frames that `_unrolled` needs, for flat cells [B, T]."""
    if not self._state_size:
      return {}
    return {"first": take(store["first"], flat), "state": take(store["core"], flat[:, 0])}
