"""IMPALA (Espeholt et al. 2018): an actor-critic on trajectories in the order they are collected.

With `loss.synchronous` it is A2C (Mnih et al. 2016): the policy that acts is the one that learns,
and all ratios are 1 but those of each trajectory's first action, which was chosen with the frame
that completed the trajectory before, one learner step earlier.

V-trace corrects for the policy lag, which is bounded. With R agent steps per learner step, in one
process, a slot is trained on at most

    actor.weights_interval + (slack + replay.capacity + actor.lanes + 1) / R

learner steps after those of the weights that acted in it: the rate limiter lets collection be
`slack` agent steps ahead, and the ring evicts what waits for longer than its capacity.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.agents.actor_critic import (
  ENTROPY,
  LOSS_POLICY,
  LOSS_VALUE,
  Supply,
  mean_count,
  policy_terms,
)
from speedyzero_jax.agents.base import (
  AXIS,
  ActInputs,
  ActOutput,
  Agent,
  Arrays,
  LossOutput,
  Variables,
  Window,
)
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.ops import recurrent
from speedyzero_jax.ops.torsos import (
  make_torso,
  observation_shape,
  observe,
  pure,
  stacked,
  torso_problems,
)
from speedyzero_jax.ops.vtrace import vtrace
from speedyzero_jax.replay.replay import Replay, Selection
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.replay.trajectory_queue import TrajectoryQueue
from speedyzero_jax.types import Params

# Means over the actions trained on.
RATIO = "losses/importance_ratio"  # min(rho_bar, pi / mu)
TRAINED_LAG_MEAN = "stats/trained_lag_mean"  # learner steps since the weights that chose them
TRAINED_LAG_MAX = "stats/trained_lag_max"


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Trajectories, V-trace and the terms of the loss."""

  unroll_length: int = opt(
    20, "T, slots per trajectory (IMPALA: 20 on Atari, 100; A2C: 5)", "[1, 10000]"
  )
  synchronous: bool = opt(
    False, "collection and learning take turns (A2C); off: they overlap (IMPALA)"
  )
  vtrace_lambda: float = opt(1.0, "mixes multi-step with one-step returns (IMPALA: 1)", "[0, 1]")
  rho_bar: float = opt(
    1.0, "largest importance ratio of a temporal difference (IMPALA: 1)", "(0, 1e9]"
  )
  c_bar: float = opt(1.0, "largest importance ratio of a trace (IMPALA: 1)", "(0, 1e9]")
  rho_bar_pg: float = opt(
    1.0, "largest importance ratio in the policy gradient (IMPALA: 1)", "(0, 1e9]"
  )
  value_coefficient: float = opt(
    0.5, "weight of half the squared error of the value (IMPALA: 0.5)", "[0, 1e6]"
  )
  reward_scale: float = opt(
    1.0, "multiplies rewards; returns near 1 suit the other coefficients", "(0, 1e6]"
  )
  entropy_coefficient: float = opt(
    0.01, "weight of the policy's entropy (IMPALA: 0.01 on Atari)", "[0, 1e6]"
  )
  reduction: Literal["mean", "sum"] = opt(
    "mean",
    "over the actions of a batch: mean (as SEED RL and acme do) or sum (IMPALA's code, cleanba)",
  )

  @property
  def supply(self) -> Supply:
    return Supply(self.unroll_length, synchronous=self.synchronous)


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(AgentConfig):
  """The sections and their constraints."""

  name: ClassVar[str] = "impala"
  network: recurrent.CoreConfig = recurrent.CoreConfig()
  loss: LossConfig = LossConfig()

  def problems(self, config: Config) -> Iterable[str]:
    yield from torso_problems(self.network, config.env)
    yield from self.loss.supply.problems(config)


AGENT_CONFIG = ImpalaConfig


class ActorCritic(nnx.Module):
  """Observations [B, T, H, W, C] -> logits [B, T, A], values [B, T], recurrent state.

  `first` and `state` are those of `ops.recurrent.unroll`.
  """

  def __init__(
    self,
    config: recurrent.CoreConfig,
    shape: tuple[int, int, int],
    actions: int,
    rngs: nnx.Rngs,
  ):
    self.torso, self.core = make_torso(config, shape, rngs), recurrent.make_core(config, rngs)
    features, zeros = recurrent.features_size(config), nnx.initializers.zeros
    # All actions are alike at first.
    self.policy = nnx.Linear(features, actions, kernel_init=zeros, rngs=rngs)
    self.value = nnx.Linear(features, 1, rngs=rngs)

  def __call__(
    self, x: jax.Array, first: Any = None, state: Any = ()
  ) -> tuple[jax.Array, jax.Array, Any]:
    features, state = recurrent.unroll(self.torso, self.core, x, first, state)
    return self.policy(features), self.value(features)[..., 0], state


class Impala(Agent):
  """See `agents.base.Agent`."""

  on_policy = True

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    own: ImpalaConfig = config.agent
    self._config, self._loss, self._stack = config, own.loss, config.env.frame_stack
    self._discount = config.env.discount
    shape = observation_shape(frame_shape, self._stack)
    self._core = own.network
    self._network = pure(lambda rngs: ActorCritic(own.network, shape, actions, rngs))
    # In slots played at random the logits are 0: a uniform policy.
    logits = Column("logits", "float32", (actions,))
    extra = (logits, *recurrent.state_columns(own.network))
    self.schema = make_schema(frame_shape, frame_dtype, actions, extra)
    self.window = Window(after=own.loss.unroll_length, within_episode=False)
    self.lookahead = 2 * own.loss.unroll_length  # the least that a queue works with
    self.synchronous = own.loss.synchronous

  # --- device

  def init(self, key: jax.Array) -> Variables:
    return Variables(self._network.init(key), ())

  def initial_core(self, n: int) -> Any:
    return recurrent.initial_state(self._core, n)

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    slot = observe(inputs.frames)[:, None], inputs.first[:, None], inputs.core
    logits, value, core = self._network.apply(variables.params, *slot)
    logits = logits[:, 0]
    action = jax.random.categorical(key, logits) if explore else jnp.argmax(logits, axis=-1)
    known = {"logits": logits, "value": value[:, 0], **recurrent.as_columns(inputs.core)}
    columns = {column.name: known[column.name] for column in self.schema.extra}
    return ActOutput(action.astype(jnp.int32), columns, core)

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    config, acted = self._loss, batch["acted_mask"]
    logits, value = self._unrolled(params, batch)
    terms = policy_terms(logits[:, :-1], batch)
    returns = jax.vmap(
      partial(
        vtrace,
        lambda_=config.vtrace_lambda,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        rho_bar_pg=config.rho_bar_pg,
      )
    )(batch["reward"], batch["discount"], value, terms.ratio)
    count = mean_count(acted)

    def mean(x: jax.Array) -> jax.Array:
      return jnp.sum(x * acted) / count

    policy = mean(-terms.log_chosen * returns.advantages)
    error = mean(0.5 * (returns.targets - value[:, :-1]) ** 2)
    entropy = mean(terms.entropy)
    loss = policy + config.value_coefficient * error - config.entropy_coefficient * entropy
    if config.reduction == "sum":
      loss *= count * jax.lax.axis_size(AXIS)
    clipped = mean(jnp.minimum(terms.ratio, config.rho_bar))
    metrics = {LOSS_POLICY: policy, LOSS_VALUE: error, ENTROPY: entropy, RATIO: clipped}
    return loss, LossOutput(batch_stats, metrics, jnp.zeros(len(acted)))

  def _unrolled(self, params: Params, batch: Arrays) -> tuple[jax.Array, jax.Array]:
    """Logits [B, T+1, A] and values [B, T+1]."""
    x = observe(stacked(batch["frames"], batch["stack"]))
    unrolled = batch.get("first"), batch.get("state", ())
    logits, value, _ = self._network.apply(params, x, *unrolled)
    return logits, value

  # --- host

  def make_selector(self, store: LaneStore) -> TrajectoryQueue:
    return self._config.agent.loss.supply.queue(store, self._config)

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store = replay.store
    present, time = replay.present(selection.lane, selection.time)
    times = time[:, None] + np.arange(self._loss.unroll_length + 1)
    flat = store.flat(selection.lane[:, None], times)
    now, following = flat[:, :-1], flat[:, 1:]
    action = take(store.action, now)
    acted = (action >= 0) & present[:, None]
    lag = (learner_step - take(store["step"], now))[acted]
    batch = {
      "action": np.maximum(action, 0),
      "reward": take(store.reward, now) * np.float32(self._loss.reward_scale),
      "discount": np.where(take(store.terminated, following), 0, self._discount).astype(np.float32),
      "logits": take(store["logits"], now),
      "acted_mask": acted.astype(np.float32),
      **recurrent.of_windows(store, flat),
    }
    if not lag.size:  # resets, or evicted
      return batch, {}
    return batch, {TRAINED_LAG_MEAN: float(lag.mean()), TRAINED_LAG_MAX: float(lag.max())}


make_agent = Impala
