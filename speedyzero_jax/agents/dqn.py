"""DQN (Mnih et al. 2015) with double Q-learning, n-step returns, prioritized replay, dueling heads.

Lanes may explore with different epsilons, like the actors of Ape-X (Horgan et al. 2018). With
`network.atoms` it learns distributions of returns, as C51 (Bellemare et al. 2017).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from speedyzero_jax.agents.base import Arrays, LossOutput, Window
from speedyzero_jax.agents.q_agent import QAgent, QAgentConfig, QHeadConfig
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops import td
from speedyzero_jax.ops.torsos import TorsoConfig, observe, stacked, torso_problems
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.types import Params

TD_ERROR = "losses/td_error"  # mean |target - Q(s, a)| of the sampled transitions
Q_VALUE = "losses/q_value"  # mean Q(s, a) of the same
DIVERGENCE = "losses/divergence"  # C51: mean KL divergence from the target to Z(s, a), nats


@dataclasses.dataclass(frozen=True)
class NetworkConfig(TorsoConfig, QHeadConfig):
  """The Q-network."""

  core: ClassVar[str] = "none"
  atoms: int = opt(
    0, "atoms of the return distribution (C51: 51); 0: learn expected values", "[0, 1e4]"
  )
  value_min: float = opt(-10.0, "atoms: smallest return (C51: -10)", "[-1e6, 1e6]")
  value_max: float = opt(10.0, "atoms: largest return (C51: 10)", "[-1e6, 1e6]")


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Targets and loss."""

  td_steps: int = opt(3, "n of the n-step return (DQN: 1, Ape-X: 3)", "[1, 1000]")
  double: bool = opt(
    True, "the online network chooses the target's action (van Hasselt et al. 2016)"
  )
  target_interval: int = opt(
    2500,
    "learner steps between copies to the target network (DQN: 10,000, Ape-X: 2,500)",
    "[1, 1e9]",
  )
  huber_delta: float = opt(
    1.0, "without atoms: error above which the loss is linear (DQN: 1)", "(0, 1e9]"
  )


@dataclasses.dataclass(frozen=True)
class DqnConfig(QAgentConfig):
  """Configuration of DQN."""

  name: ClassVar[str] = "dqn"
  network: NetworkConfig = NetworkConfig()
  loss: LossConfig = LossConfig()

  def problems(self, config: Config) -> Iterable[str]:
    yield from super().problems(config)
    yield from torso_problems(self.network, config.env)
    network = self.network
    if network.atoms and (self.priority.initial != "max" or self.refresh.enabled):
      yield (
        "network.atoms: must be 0 with priority.initial=actor or refresh.enabled, which compute "
        f"priorities from expected values, got {network.atoms}"
      )
    if network.atoms == 1:
      yield "network.atoms: must be 0 or at least 2, got 1"
    if network.value_max <= network.value_min:
      yield (
        f"network.value_max: must be greater than network.value_min ({network.value_min}), "
        f"got {network.value_max}"
      )


AGENT_CONFIG = DqnConfig


class DQN(QAgent):
  """See `agents.base.Agent`."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions, trained=np.zeros(1, int))
    self.window = Window(after=self._agent_config.loss.td_steps, within_episode=True)
    self.lookahead = self._agent_config.loss.td_steps
    network = self._agent_config.network
    self._atoms = np.linspace(network.value_min, network.value_max, network.atoms, dtype=np.float32)

  def _expected(self, outputs: jax.Array) -> jax.Array:
    return jax.nn.softmax(outputs) @ self._atoms if len(self._atoms) else outputs

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    mask, action = batch["loss_mask"], batch["action"]

    def outputs_of(params: Params, slot: jax.Array) -> jax.Array:
      index = slot[:, None, None] + jnp.arange(self._stack)  # [B, 1, S]
      return self._network.apply(params, observe(stacked(batch["frames"], index)))[0][:, 0]

    end = batch["steps"]
    now, later = outputs_of(params, jnp.zeros_like(end)), outputs_of(target, end)
    q, next_q = self._expected(now), self._expected(later)
    selector = self._expected(outputs_of(params, end)) if self._agent_config.loss.double else next_q
    returns = batch["reward"], batch["discount"]
    error = mask * td.q_learning_error(q, action, *returns, next_q, selector)
    metrics = {TD_ERROR: jnp.mean(jnp.abs(error)), Q_VALUE: jnp.mean(td.chosen(q, action))}
    if len(self._atoms):
      sample, best = jnp.arange(len(action)), jnp.argmax(selector, axis=-1)
      target_probs = td.project(later[sample, best], *returns, self._atoms)
      target_probs, logits = jax.lax.stop_gradient(target_probs), now[sample, action]
      loss = mask * optax.losses.softmax_cross_entropy(logits, target_probs)
      # The cross-entropy minus the entropy of the target, which training cannot reduce.
      priority = mask * optax.losses.kl_divergence(jax.nn.log_softmax(logits), target_probs)
      metrics[DIVERGENCE] = jnp.mean(priority)
    else:
      loss = optax.losses.huber_loss(error, delta=self._agent_config.loss.huber_delta)
      priority = jnp.abs(error)
    loss = jnp.mean(batch["weight"] * loss)
    return loss, LossOutput(batch_stats, metrics, priority)

  # --- host

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    _, time = replay.clamp(selection.lane, selection.time)
    return self._batch(replay.store, selection, selection.lane, time, learner_step), {}


make_agent = DQN
