"""R2D2 (Kapturowski et al. 2019): recurrent Q-learning from prioritized sequences.

A sequence is `burn_in` slots that only warm the recurrent state up, from the one stored by the
actor, `sequence_length` slots that are trained on, and `td_steps` for the last returns. Sequences
begin at every `stride`-th slot of a lane and cross episodes: the state is reset where one starts,
so that nothing needs padding, and no return or state depends on another episode. (In the paper
they end with the episode, and the last returns are shorter.)
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
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
from speedyzero_jax.ops import recurrent, td
from speedyzero_jax.ops.torsos import (
  make_torso,
  observation_shape,
  observe,
  pure,
  stacked,
  torso_problems,
)
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import SequenceSampler, importance_weights
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params

# Means over the actions trained on, of rescaled values.
TD_ERROR = "losses/td_error"  # |target - Q(s, a)|
Q_VALUE = "losses/q_value"  # Q(s, a)


@dataclasses.dataclass(frozen=True)
class NetworkConfig(recurrent.CoreConfig, QHeadConfig):
  """The Q-network."""

  core: Literal["none", "lstm"] = opt(
    "lstm", "memory between torso and heads; lstm stores 8 * network.lstm_hidden bytes per step"
  )
  lstm_hidden: int = opt(512, "width of the LSTM (R2D2: 512)", "[1, 1e5]")


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Sequences, targets and priorities."""

  burn_in: int = opt(
    40, "slots before those trained on, for the recurrent state (R2D2: 40)", "[0, 1e4]"
  )
  sequence_length: int = opt(80, "slots of a sequence that are trained on (R2D2: 80)", "[1, 1e4]")
  stride: int = opt(40, "slots from one sequence's start to the next (R2D2: 40)", "[1, 1e4]")
  td_steps: int = opt(5, "n of the n-step return (R2D2: 5)", "[1, 1000]")
  target_interval: int = opt(
    2500, "learner steps between copies to the target network (R2D2: 2,500)", "[1, 1e9]"
  )
  priority_max: float = opt(
    0.9,
    "eta: priority = eta * largest error of a sequence + (1 - eta) * mean error (R2D2: 0.9)",
    "[0, 1]",
  )


@dataclasses.dataclass(frozen=True)
class R2d2Config(AgentConfig):
  """The sections and their constraints."""

  name: ClassVar[str] = "r2d2"
  network: NetworkConfig = NetworkConfig()
  priority: PriorityConfig = PriorityConfig()
  loss: LossConfig = LossConfig()
  explore: ExploreConfig = ExploreConfig()

  def problems(self, config: Config) -> Iterable[str]:
    yield from torso_problems(self.network, config.env)
    loss, lanes = self.loss, config.actor.lanes
    slots = loss.burn_in + loss.sequence_length + loss.td_steps
    if config.run.env_steps < lanes * slots:
      yield (
        f"loss.sequence_length: with loss.burn_in and loss.td_steps a sequence has {slots} slots; "
        f"run.env_steps ({config.run.env_steps}) are fewer in each of {lanes} lanes"
      )


AGENT_CONFIG = R2d2Config


class QNetwork(QHead):
  """Observations [B, T, H, W, C] -> Q [B, T, A], recurrent state (see `ops.recurrent.unroll`)."""

  def __init__(
    self, config: NetworkConfig, shape: tuple[int, int, int], actions: int, rngs: nnx.Rngs
  ):
    super().__init__(config, recurrent.features_size(config), config.hidden, actions, rngs)
    self.torso, self.core = make_torso(config, shape, rngs), recurrent.make_core(config, rngs)

  def __call__(self, x: jax.Array, first: Any, state: Any) -> tuple[jax.Array, Any]:
    features, state = recurrent.unroll(self.torso, self.core, x, first, state)
    return self.q(features), state


class R2D2(Agent):
  """See `agents.base.Agent`."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    own: R2d2Config = config.agent
    self._config, self._own, self._stack = config, own, config.env.frame_stack
    shape = observation_shape(frame_shape, self._stack)
    self._network = pure(lambda rngs: QNetwork(own.network, shape, actions, rngs))
    columns = recurrent.state_columns(own.network)
    self.schema = make_schema(frame_shape, frame_dtype, actions, columns)
    # The return of the last slot trained on ends td_steps later.
    after = own.loss.burn_in + own.loss.sequence_length - 1 + own.loss.td_steps
    self.window = Window(after=after, within_episode=False)
    self.lookahead = after + own.loss.stride - 1  # wherever a lane begins, it holds a sequence
    self.target_interval = own.loss.target_interval

  # --- device

  def init(self, key: jax.Array) -> Variables:
    return Variables(self._network.init(key), ())

  def initial_core(self, n: int) -> Any:
    return recurrent.initial_state(self._own.network, n)

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    slot = observe(inputs.frames)[:, None], inputs.first[:, None], inputs.core
    unrolled, core = self._network.apply(variables.params, *slot)
    q = unrolled[:, 0]
    if explore:
      epsilon = epsilons(self._own.explore, inputs.lane, self._config.actor.lanes, progress)
      action = epsilon_greedy(q, epsilon, key)
    else:
      action = jnp.argmax(q, axis=-1)
    shown = {} if explore else {"q": q}
    return ActOutput(action.astype(jnp.int32), recurrent.as_columns(inputs.core), core, shown)

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    acted = batch["loss_mask"]
    q, next_q = self._unrolled(params, batch), self._unrolled(target, batch)
    end = jnp.arange(acted.shape[1]) + batch["steps"]  # [B, T], slots that complete the returns
    selector, later = (jnp.take_along_axis(x, end[..., None], axis=1) for x in (q, next_q))
    q, action = q[:, : acted.shape[1]], batch["action"]
    error = acted * td.q_learning_error(
      q, action, batch["reward"], batch["discount"], later, selector, rescaled=True
    )
    loss = jnp.mean(batch["weight"] * jnp.sum(0.5 * error**2, axis=1))
    size, eta = jnp.abs(error), self._own.loss.priority_max
    count = jnp.maximum(jnp.sum(acted, axis=1), 1)
    mean = jnp.sum(size, axis=1) / count
    priority = eta * jnp.max(size, axis=1) + (1 - eta) * mean
    value = jnp.sum(acted * td.chosen(q, action), axis=1) / count
    return loss, LossOutput(
      batch_stats, {TD_ERROR: jnp.mean(mean), Q_VALUE: jnp.mean(value)}, priority
    )

  def _unrolled(self, params: Params, batch: Arrays) -> jax.Array:
    """Rescaled Q [B, T + n, A] of the slots after the burn-in, which has no gradient."""
    x = observe(stacked(batch["frames"], batch["stack"]))
    first, state, burn_in = batch.get("first"), batch.get("state", ()), self._own.loss.burn_in
    if first is not None and burn_in:
      frozen = jax.lax.stop_gradient(params)
      _, state = self._network.apply(frozen, x[:, :burn_in], first[:, :burn_in], state)
      first = first[:, burn_in:]
    q, _ = self._network.apply(params, x[:, burn_in:], first, state)
    return q

  # --- host

  def make_selector(self, store: LaneStore) -> SequenceSampler:
    return SequenceSampler(
      store,
      self._own.priority,
      stride=self._own.loss.stride,
      stack=self._stack,
      lookahead=self.window.after,
      first_step=lambda lane, time: take(store["step"], store.flat(lane, time)),
    )

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, loss = replay.store, self._own.loss
    present, time = replay.present(selection.lane, selection.time)
    # Where a sequence was evicted the lane's oldest slots, of which there are enough, stand in.
    lane, times = selection.lane[:, None], time[:, None] + np.arange(self.window.after + 1)
    trained = times[:, loss.burn_in : loss.burn_in + loss.sequence_length]
    shape = trained.shape
    returns = td.n_step(
      store, np.broadcast_to(lane, shape).ravel(), trained.ravel(), loss.td_steps,
      self._config.env.discount,
    )  # fmt: skip
    action = take(store.action, store.flat(lane, trained))
    progress = min(learner_step / self._config.learner.steps, 1.0)
    batch = {
      "action": np.maximum(action, 0),
      "weight": importance_weights(selection.probability, self._own.priority, progress),
      "loss_mask": ((action >= 0) & present[:, None]).astype(np.float32),
      **{name: x.reshape(shape) for name, x in returns._asdict().items()},
      **recurrent.of_windows(store, store.flat(lane, times)),
    }
    return batch, {}


make_agent = R2D2
