"""PPO (Schulman et al. 2017): a clipped policy gradient, in several epochs of minibatches.

Synchronous by default: a block of trajectories is collected with the same weights and gone through
in epochs while actors wait. Of each trajectory the first action was chosen with the frame that
completed the one before, with weights a block older; ratios are to the policy that acted.

Minibatches are of whole trajectories, so that advantages are those of `ops/vtrace.py`: of GAE with
the values stored while acting, or of V-trace with the current policy and values. Asynchronous with
V-trace it is APPO (RLlib's; Luo et al., RLDM 2019, is its likely description), which weighs actions
twice, by V-trace's clipped ratio and by PPO's.
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.actor_critic import (
  ENTROPY,
  LOSS_POLICY,
  LOSS_VALUE,
  Supply,
  mean_count,
  policy_terms,
)
from speedyzero_jax.agents.base import AXIS, Arrays, LossOutput
from speedyzero_jax.agents.impala import Impala
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.ops.recurrent import CoreConfig
from speedyzero_jax.ops.torsos import torso_problems
from speedyzero_jax.ops.vtrace import VTrace, vtrace
from speedyzero_jax.replay.replay import Replay, Selection
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.replay.storage import take
from speedyzero_jax.types import Params

# Over the actions trained on.
CLIPPED = "losses/clipped_share"  # ratios outside 1 +- clip
DIVERGENCE = "losses/policy_divergence"  # mean of ratio - 1 - log ratio, estimates KL(mu, pi)


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Trajectories, their use, advantages and the terms of the loss."""

  unroll_length: int = opt(128, "T, slots per trajectory (PPO: 128 on Atari)", "[1, 10000]")
  synchronous: bool = opt(
    True, "collection and learning take turns (PPO); off: they overlap (APPO)"
  )
  minibatches: int = opt(
    4, "learner steps per epoch; learner.batch_size is of one, in trajectories", "[1, 10000]"
  )
  epochs: int = opt(4, "times that each trajectory is used (PPO: 3 on Atari)", "[1, 1000]")
  replay_proportion: float = opt(
    0.0, "asynchronous: old trajectories in the replay used per new one (APPO: 0)", "[0, 100]"
  )
  advantages: Literal["gae", "vtrace"] = opt(
    "gae", "from the values stored while acting (PPO), or from the current ones by V-trace (APPO)"
  )
  gae_lambda: float = opt(0.95, "of GAE and V-trace (PPO: 0.95, APPO: 1)", "[0, 1]")
  normalise_advantages: bool = opt(True, "to mean 0 and deviation 1 in each minibatch")
  clip: float = opt(0.2, "of the ratio, around 1 (PPO: 0.2, 0.1 on Atari; APPO: 0.4)", "(0, 1e9]")
  clip_value: bool = opt(
    False, "clip the value's change since acting, too, by loss.clip (PPO's code: yes)"
  )
  value_coefficient: float = opt(
    0.5, "weight of half the squared error of the value (PPO: 1, CleanRL: 0.5)", "[0, 1e6]"
  )
  entropy_coefficient: float = opt(0.01, "weight of the policy's entropy (PPO: 0.01)", "[0, 1e6]")
  reward_scale: float = opt(
    1.0, "multiplies rewards; returns near 1 suit the other coefficients", "(0, 1e6]"
  )

  @property
  def supply(self) -> Supply:
    return Supply(
      self.unroll_length, self.minibatches, self.epochs, self.replay_proportion, self.synchronous
    )


@dataclasses.dataclass(frozen=True)
class PpoConfig(AgentConfig):
  """The sections and their constraints."""

  name: ClassVar[str] = "ppo"
  network: CoreConfig = CoreConfig()
  loss: LossConfig = LossConfig()

  def problems(self, config: Config) -> Iterable[str]:
    yield from torso_problems(self.network, config.env)
    yield from self.loss.supply.problems(config)
    if self.loss.clip_value and self.loss.advantages == "vtrace":
      yield "loss.clip_value: must be off with loss.advantages=vtrace, whose values are the current"


AGENT_CONFIG = PpoConfig


def clipped_loss(ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
  """Negative clipped surrogate objective of each action (Schulman et al. 2017, equation 7)."""
  return -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


class PPO(Impala):
  """See `agents.base.Agent`. Differs from IMPALA in its loss and in the use of trajectories."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions)
    self._ppo: LossConfig = config.agent.loss
    columns = (*self.schema.extra, Column("value", "float32"))
    self.schema = make_schema(frame_shape, frame_dtype, actions, columns)

  # --- device

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    config, acted = self._ppo, batch["acted_mask"]
    logits, values = self._unrolled(params, batch)
    terms, value = policy_terms(logits[:, :-1], batch), values[:, :-1]
    returns = self._returns(batch, values, terms.ratio)
    count = mean_count(acted)

    def mean(x: jax.Array) -> jax.Array:
      return jnp.sum(x * acted) / count

    advantage = returns.advantages
    if config.normalise_advantages:
      advantage -= jax.lax.pmean(mean(advantage), AXIS)
      advantage /= jnp.sqrt(jax.lax.pmean(mean(advantage**2), AXIS)) + 1e-8
    policy = mean(clipped_loss(terms.ratio, advantage, config.clip))
    error = (returns.targets - value) ** 2
    if config.clip_value:
      old = batch["value"][:, :-1]
      near = old + jnp.clip(value - old, -config.clip, config.clip)
      error = jnp.maximum(error, (returns.targets - near) ** 2)
    half, entropy = mean(0.5 * error), mean(terms.entropy)
    loss = policy + config.value_coefficient * half - config.entropy_coefficient * entropy
    metrics = {
      LOSS_POLICY: policy,
      LOSS_VALUE: half,
      ENTROPY: entropy,
      CLIPPED: mean(jnp.abs(terms.ratio - 1) > config.clip),
      DIVERGENCE: mean(terms.ratio - 1 - jnp.log(jnp.where(acted > 0, terms.ratio, 1))),
    }
    return loss, LossOutput(batch_stats, metrics, jnp.zeros(len(acted)))

  def _returns(self, batch: Arrays, values: jax.Array, ratio: jax.Array) -> VTrace:
    """Targets and advantages [B, T]."""
    if self._ppo.advantages == "gae":
      values, ratio = batch["value"], batch["acted_mask"]  # V-trace with ratios 1 is GAE
    estimate = partial(vtrace, lambda_=self._ppo.gae_lambda)
    return jax.vmap(estimate)(batch["reward"], batch["discount"], values, ratio)

  # --- host

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    batch, info = super().assemble(replay, selection, learner_step)
    _, time = replay.present(selection.lane, selection.time)
    times = time[:, None] + np.arange(self._ppo.unroll_length + 1)
    flat = replay.store.flat(selection.lane[:, None], times)
    return batch | {"value": take(replay.store["value"], flat)}, info


make_agent = PPO
