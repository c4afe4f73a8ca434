"""DQN (Mnih et al. 2015) with double Q-learning, n-step returns, prioritized replay, dueling heads.

Lanes may explore with different epsilons, as the actors of Ape-X (Horgan et al. 2018) do.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speedyzero_jax.agents.base import Arrays, LossOutput, Window
from speedyzero_jax.agents.q_agent import ExploreConfig, QAgent, QHeadConfig
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config, PriorityConfig
from speedyzero_jax.ops import td
from speedyzero_jax.ops.torsos import TorsoConfig, observe, torso_problems
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params

TD_ERROR = "losses/td_error"  # mean |target - Q(s, a)| of the sampled transitions
Q_VALUE = "losses/q_value"  # mean Q(s, a) of the same


@dataclasses.dataclass(frozen=True)
class NetworkConfig(TorsoConfig, QHeadConfig):
  """The Q-network."""

  core: ClassVar[str] = "none"


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The target and the loss."""

  td_steps: int = opt(3, "n of the n-step return (DQN: 1, Ape-X: 3)", "[1, 1000]")
  double: bool = opt(
    True, "the online network chooses the target's action (van Hasselt et al. 2016)"
  )
  target_interval: int = opt(
    2500,
    "learner steps between copies to the target network (DQN: 10,000, Ape-X: 2,500)",
    "[1, 1e9]",
  )
  huber_delta: float = opt(1.0, "error from which the loss is linear (DQN: 1)", "(0, 1e9]")


@dataclasses.dataclass(frozen=True)
class DqnConfig(AgentConfig):
  """The sections and their constraints."""

  name: ClassVar[str] = "dqn"
  network: NetworkConfig = NetworkConfig()
  priority: PriorityConfig = PriorityConfig()
  loss: LossConfig = LossConfig()
  explore: ExploreConfig = ExploreConfig()

  def problems(self, config: Config) -> Iterable[str]:
    return torso_problems(self.network, config.env)


AGENT_CONFIG = DqnConfig


class DQN(QAgent):
  """See `agents.base.Agent`."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions)
    self.window = Window(after=self._own.loss.td_steps, within_episode=True)
    self.lookahead = self._own.loss.td_steps

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    config = self._own.loss

    def q_of(params: Params, slot: jax.Array) -> jax.Array:
      def shown(frames: jax.Array, slot: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(frames, slot, self._stack)

      observation = observe(jax.vmap(shown)(batch["frames"], slot))
      return self._network.apply(params, observation[:, None])[0][:, 0]

    end = batch["steps"]
    q, next_q = q_of(params, jnp.zeros_like(end)), q_of(target, end)
    selector = q_of(params, end) if config.double else next_q
    error = td.q_learning_error(
      q, batch["action"], batch["reward"], batch["discount"], next_q, selector
    )
    error = error * batch["loss_mask"][:, 0]
    loss = jnp.mean(batch["weight"] * optax.losses.huber_loss(error, delta=config.huber_delta))
    metrics = {
      TD_ERROR: jnp.mean(jnp.abs(error)),
      Q_VALUE: jnp.mean(td.chosen(q, batch["action"])),
    }
    return loss, LossOutput(batch_stats, metrics, jnp.abs(error))

  # --- host

  def make_selector(self, store: LaneStore) -> PrioritizedSampler:
    return PrioritizedSampler(
      store, self._own.priority, stack=self._stack, lookahead=self.lookahead
    )

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, lane = replay.store, selection.lane
    present, time = replay.present(lane, selection.time)
    returns = td.n_step(store, lane, time, self._own.loss.td_steps, self._config.env.discount)
    batch = {
      # An evicted transition's place may be taken by a slot without an action.
      "action": np.maximum(take(store.action, store.flat(lane, time)), 0),
      "weight": self._weights(selection, learner_step),
      "loss_mask": present[:, None].astype(np.float32),
      **returns._asdict(),
    }
    return batch, {}


make_agent = DQN
