"""IMPALA (Espeholt et al. 2018): an actor-critic trained on trajectories in order of collection.

With `loss.synchronous` it is A2C (Mnih et al. 2016): the behavior policy is the current one, and
all importance ratios are 1, except for each trajectory's first action. That action was chosen with
the frame that completed the previous trajectory, one learner step earlier.

V-trace corrects for the policy lag, which is bounded. With N lanes, batches of B trajectories and R
agent steps per learner step in one process, the weights that acted in a slot are at most

    actor.weights_interval + 1 + max((slack + N) / R + (2 N + 1) / B, learner.prefetch + 2 + N / B)

learner steps old when the slot is trained on. The first term is for a learner that waits for agent
steps, of which the rate limiter grants `slack` in advance; the second for one that waits for
trajectories.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.agents.actor_critic import (
  ENTROPY,
  LOSS_POLICY,
  LOSS_VALUE,
  RECONSTRUCTION,
  PolicyTerms,
  TrajectoryConfig,
  mean_count,
  policy_terms,
)
from speedyzero_jax.agents.base import (
  ActInputs,
  ActOutput,
  Arrays,
  LossOutput,
  Variables,
  Window,
)
from speedyzero_jax.agents.torso_agent import TorsoAgent
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.ops.recurrent import CoreConfig, CoreNetwork
from speedyzero_jax.ops.torsos import Decoder, observe, stacked, torso_problems
from speedyzero_jax.ops.vtrace import vtrace
from speedyzero_jax.replay.replay import Replay, Selection
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.replay.trajectory_queue import TrajectoryQueue
from speedyzero_jax.types import Params

# Means over the actions trained on.
RATIO = "losses/importance_ratio"  # min(rho_bar, pi / mu)
TRAINED_LAG_MEAN = "stats/trained_lag_mean"  # policy lag in learner steps
TRAINED_LAG_MAX = "stats/trained_lag_max"


@dataclasses.dataclass(frozen=True)
class LossConfig(TrajectoryConfig):
  """V-trace, and coefficients of the loss."""

  vtrace_lambda: float = opt(1.0, "lambda of V-trace, 0: one-step returns (IMPALA: 1)", "[0, 1]")
  rho_bar: float = opt(
    1.0, "clips the importance ratios of temporal differences (IMPALA: 1)", "(0, 1e9]"
  )
  c_bar: float = opt(1.0, "clips the importance ratios of traces (IMPALA: 1)", "(0, 1e9]")
  rho_bar_pg: float = opt(
    1.0, "clips the importance ratios of the policy gradient (IMPALA: 1)", "(0, 1e9]"
  )


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(AgentConfig):
  """Configuration of IMPALA and A2C."""

  name: ClassVar[str] = "impala"
  network: CoreConfig = CoreConfig()
  loss: LossConfig = LossConfig()

  @property
  def trains_once(self) -> bool:
    return self.loss.synchronous

  def problems(self, config: Config) -> Iterable[str]:
    yield from torso_problems(self.network, config.env)
    yield from self.loss.problems(config)


AGENT_CONFIG = ImpalaConfig


class ActorCritic(CoreNetwork):
  """Observations [B, T, H, W, C] -> (logits [B, T, A], values [B, T], decoded), recurrent state.

  See `CoreNetwork.features` for `first` and `state`. `decoded` are observations reconstructed from
  the torso's features, or () without a decoder.
  """

  def __init__(
    self,
    config: CoreConfig,
    shape: tuple[int, int, int],
    actions: int,
    rngs: nnx.Rngs,
    *,
    decodes: bool = False,
  ):
    super().__init__(config, shape, rngs)
    self.decoder = Decoder(config, shape, rngs) if decodes else None
    zeros = nnx.initializers.zeros  # the initial policy is uniform
    self.policy = nnx.Linear(self.width, actions, kernel_init=zeros, rngs=rngs)
    self.value = nnx.Linear(self.width, 1, rngs=rngs)

  def __call__(
    self, x: jax.Array, first: Any = None, state: Any = ()
  ) -> tuple[tuple[jax.Array, jax.Array, Any], Any]:
    encoded = self.encode(x)
    features, state = self.apply_core(encoded, first, state)
    decoded = () if self.decoder is None else self.decoder(encoded).reshape(x.shape)
    return (self.policy(features), self.value(features)[..., 0], decoded), state


class Impala(TorsoAgent):
  """See `agents.base.Agent`. Subclasses may replace `network`."""

  on_policy = True
  network = ActorCritic

  def __init__(
    self,
    config: Config,
    frame_shape: tuple[int, ...],
    frame_dtype: Any,
    actions: int,
    *columns: Column,
  ):
    columns = (Column("logits", "float32", (actions,)), *columns)
    network = partial(self.network, decodes=config.agent.loss.reconstruction_coefficient > 0)
    super().__init__(config, frame_shape, frame_dtype, actions, network, columns)
    self._loss, length = config.agent.loss, config.agent.loss.unroll_length
    self.window = Window(after=length, within_episode=False)
    self.lookahead = 2 * length  # minimum for a `TrajectoryQueue`
    self.synchronous = config.agent.loss.synchronous

  # --- device

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    (logits, value, _), columns, core = self._now(variables, inputs)
    action = jax.random.categorical(key, logits) if explore else jnp.argmax(logits, axis=-1)
    known = {"logits": logits, "value": value, **columns}
    stored = {column.name for column in self.schema.extra}  # a subclass may add columns
    columns = {name: x for name, x in known.items() if name in stored}
    return ActOutput(action.astype(jnp.int32), columns, core, {})

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    config, acted = self._loss, batch["acted_mask"]
    logits, values, decoded = self._unrolled(params, batch)
    terms = policy_terms(logits[:, :-1], batch)
    count = mean_count(acted)

    def mean(x: jax.Array) -> jax.Array:
      return jnp.sum(x * acted) / count

    gain, error, measured = self._objective(batch, values, terms, mean)
    policy, error, entropy = mean(-gain), mean(0.5 * error), mean(terms.entropy)
    loss = policy + config.value_coefficient * error - config.entropy_coefficient * entropy
    metrics = {LOSS_POLICY: policy, LOSS_VALUE: error, ENTROPY: entropy}
    metrics |= {name: mean(x) for name, x in measured.items()}
    if config.reconstruction_coefficient:
      seen = observe(stacked(batch["frames"], batch["stack"]))
      reconstruction = mean(0.5 * jnp.sum((decoded - seen)[:, :-1] ** 2, axis=(-3, -2, -1)))
      loss += config.reconstruction_coefficient * reconstruction
      metrics[RECONSTRUCTION] = reconstruction
    return loss, LossOutput(batch_stats, metrics, jnp.zeros(len(acted)))

  def _objective(
    self, batch: Arrays, values: jax.Array, terms: PolicyTerms, mean: Callable
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Policy objective [B, T], squared value errors [B, T], and metrics [B, T] by name.

    Args:
      batch: as in `loss`.
      values: [B, T+1], from the network.
      terms: of the policy.
      mean: averages [B, T] over the device's actions, see `mean_count`.
    """
    config = self._loss
    correct = partial(
      vtrace,
      lambda_=config.vtrace_lambda,
      rho_bar=config.rho_bar,
      c_bar=config.c_bar,
      rho_bar_pg=config.rho_bar_pg,
    )
    returns = jax.vmap(correct)(batch["reward"], batch["discount"], values, terms.ratio)
    clipped = jnp.minimum(terms.ratio, config.rho_bar)
    error = (returns.targets - values[:, :-1]) ** 2
    return terms.log_chosen * returns.advantages, error, {RATIO: clipped}

  # --- host

  def make_selector(self, store: LaneStore) -> TrajectoryQueue:
    return self._loss.queue(store, self._config)

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, discount = replay.store, self._config.env.discount
    present, time = replay.clamp(selection.lane, selection.time)
    times = time[:, None] + np.arange(self._loss.unroll_length + 1)
    flat = store.flat(selection.lane[:, None], times)
    now, next_slot = flat[:, :-1], flat[:, 1:]
    action = take(store.action, now)
    acted = (action >= 0) & present[:, None]
    lag = (learner_step - take(store["step"], now))[acted]
    batch = {
      "action": np.maximum(action, 0),
      "reward": take(store.reward, now) * np.float32(self._loss.reward_scale),
      "discount": np.where(take(store.terminated, next_slot), 0, discount).astype(np.float32),
      "logits": take(store["logits"], now),
      "acted_mask": acted.astype(np.float32),
      **self._states(store, flat),
    }
    if "value" in store.fields:
      batch["value"] = take(store["value"], flat)
    if not lag.size:  # all slots are resets or evicted
      return batch, {}
    return batch, {TRAINED_LAG_MEAN: float(lag.mean()), TRAINED_LAG_MAX: float(lag.max())}


make_agent = Impala
