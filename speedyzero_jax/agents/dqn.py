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
from flax import nnx

from speedyzero_jax.agents.base import (
  ActInputs,
  ActOutput,
  Agent,
  Arrays,
  LossOutput,
  Variables,
  Window,
)
from speedyzero_jax.agents.q_network import (
  ExploreConfig,
  QHead,
  QHeadConfig,
  epsilon_greedy,
  epsilons,
)
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config, PriorityConfig
from speedyzero_jax.ops import td
from speedyzero_jax.ops.torsos import (
  TorsoConfig,
  make_torso,
  observation_shape,
  observe,
  pure,
  torso_problems,
)
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler, importance_weights
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params

TD_ERROR = "losses/td_error"  # mean |target - Q(s, a)| of the sampled transitions
Q_VALUE = "losses/q_value"  # mean Q(s, a) of the same


@dataclasses.dataclass(frozen=True)
class NetworkConfig(TorsoConfig, QHeadConfig):
  """The Q-network."""


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


class QNetwork(QHead):
  """Observations [B, H, W, C] -> Q [B, A]."""

  def __init__(
    self, config: NetworkConfig, shape: tuple[int, int, int], actions: int, rngs: nnx.Rngs
  ):
    self.torso = make_torso(config, shape, rngs)
    super().__init__(config, config.hidden, config.hidden, actions, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.q(self.torso(x))


class DQN(Agent):
  """See `agents.base.Agent`."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    own: DqnConfig = config.agent
    self._config, self._own, self._stack = config, own, config.env.frame_stack
    shape = observation_shape(frame_shape, self._stack)
    self._network = pure(lambda rngs: QNetwork(own.network, shape, actions, rngs))
    self.schema = make_schema(frame_shape, frame_dtype, actions)
    self.window = Window(after=own.loss.td_steps, within_episode=True)
    self.lookahead = own.loss.td_steps
    self.target_interval = own.loss.target_interval

  # --- device

  def init(self, key: jax.Array) -> Variables:
    return Variables(self._network.init(key), ())

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    q = self._network.apply(variables.params, observe(inputs.frames))
    if explore:
      epsilon = epsilons(self._own.explore, inputs.lane, self._config.actor.lanes, progress)
      action = epsilon_greedy(q, epsilon, key)
    else:
      action = jnp.argmax(q, axis=-1)
    return ActOutput(action.astype(jnp.int32), {}, (), {} if explore else {"q": q})

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    config, network, frames = self._own.loss, self._network, batch["frames"]

    def later(frames: jax.Array, steps: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(frames, steps, self._stack)

    now = observe(frames[:, : self._stack])
    end = observe(jax.vmap(later)(frames, batch["steps"]))
    q = network.apply(params, now)
    next_q = network.apply(target, end)
    selector = network.apply(params, end) if config.double else next_q
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
      store,
      self._own.priority,
      stack=self._stack,
      lookahead=self.lookahead,
      first_step=lambda lane, time: take(store["step"], store.flat(lane, time)),
    )

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, lane, priority = replay.store, selection.lane, self._own.priority
    present, time = replay.present(lane, selection.time)
    returns = td.n_step(store, lane, time, self._own.loss.td_steps, self._config.env.discount)
    # An evicted transition's place may be taken by a slot without an action.
    action = np.maximum(take(store.action, store.flat(lane, time)), 0)
    progress = min(learner_step / self._config.learner.steps, 1.0)
    batch = {
      "action": action,
      "weight": importance_weights(selection.probability, priority, progress),
      "loss_mask": present[:, None].astype(np.float32),
      **returns._asdict(),
    }
    return batch, {}


make_agent = DQN
