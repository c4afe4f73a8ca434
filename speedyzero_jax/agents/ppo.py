"""PPO (Schulman et al. 2017): a clipped policy gradient, in several epochs of minibatches.

Synchronous by default: a block of trajectories is collected with constant weights, then trained on
for several epochs while actors wait. The first action of each trajectory was chosen with the frame
that completed the previous one, by weights one block older. Importance ratios are always relative
to the policy that acted.

A minibatch consists of whole trajectories. Advantages are computed by `ops/vtrace.py`: GAE with the
values stored while acting, or V-trace with the current policy and values. The asynchronous variant
with V-trace is APPO (RLlib; probably as described by Luo et al., RLDM 2019). It weights each action
twice, by V-trace's clipped ratio and by PPO's.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.actor_critic import PolicyTerms, TrajectoryConfig
from speedyzero_jax.agents.base import AXIS, Arrays
from speedyzero_jax.agents.impala import Impala
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.ops.recurrent import CoreConfig
from speedyzero_jax.ops.torsos import torso_problems
from speedyzero_jax.ops.vtrace import vtrace
from speedyzero_jax.replay.schema import Column

# Means over the actions trained on.
CLIPPED = "losses/clipped_share"  # share of ratios outside 1 +- clip
DIVERGENCE = "losses/policy_divergence"  # ratio - 1 - log ratio, an estimate of KL(mu, pi)


@dataclasses.dataclass(frozen=True)
class LossConfig(TrajectoryConfig):
  """Trajectories and their reuse, advantages, and coefficients of the loss."""

  unroll_length: int = opt(128, "T, slots per trajectory (PPO: 128 on Atari)", "[1, 10000]")
  synchronous: bool = opt(True, "alternate collection and learning; off: they overlap (APPO)")
  minibatches: int = opt(
    4,
    "minibatches, each of learner.batch_size trajectories, and learner steps per epoch",
    "[1, 10000]",
  )
  epochs: int = opt(4, "number of times each trajectory is used (PPO: 3 on Atari)", "[1, 1000]")
  replay_proportion: float = opt(
    0.0, "asynchronous: replayed trajectories per new one (APPO: 0)", "[0, 100]"
  )
  advantages: Literal["gae", "vtrace"] = opt(
    "gae", "GAE with the values stored while acting (PPO), or V-trace with current values (APPO)"
  )
  gae_lambda: float = opt(0.95, "lambda of GAE and V-trace (PPO: 0.95, APPO: 1)", "[0, 1]")
  normalize_advantages: bool = opt(
    True, "normalize advantages to mean 0 and standard deviation 1 in each minibatch"
  )
  clip: float = opt(
    0.2, "maximum deviation of the ratio from 1 (PPO: 0.2, 0.1 on Atari; APPO: 0.4)", "(0, 1e9]"
  )
  clip_value: bool = opt(
    False, "also clip the change of the value since acting by loss.clip (PPO's code: yes)"
  )


@dataclasses.dataclass(frozen=True)
class PpoConfig(AgentConfig):
  """Configuration of PPO and APPO."""

  name: ClassVar[str] = "ppo"
  network: CoreConfig = CoreConfig()
  loss: LossConfig = LossConfig()

  def problems(self, config: Config) -> Iterable[str]:
    yield from torso_problems(self.network, config.env)
    yield from self.loss.problems(config)
    if self.loss.clip_value and self.loss.advantages == "vtrace":
      yield "loss.clip_value: must be off with loss.advantages=vtrace, which uses current values"


AGENT_CONFIG = PpoConfig


def clipped_gain(ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
  """Clipped surrogate objective of each action (Schulman et al. 2017, equation 7)."""
  return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


class PPO(Impala):
  """IMPALA with a clipped objective and reuse of trajectories."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions, Column("value", "float32"))
    self.value_scale = self._loss.reward_scale

  def _objective(
    self, batch: Arrays, values: jax.Array, terms: PolicyTerms, mean: Callable
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    config, acted, ratio, value = self._loss, batch["acted_mask"], terms.ratio, values[:, :-1]
    inputs = values, ratio
    if config.advantages == "gae":
      inputs = batch["value"], acted  # V-trace with ratios 1 is GAE
    estimate = jax.vmap(partial(vtrace, lambda_=config.gae_lambda))
    targets, advantage = estimate(batch["reward"], batch["discount"], *inputs)
    if config.normalize_advantages:
      advantage -= jax.lax.pmean(mean(advantage), AXIS)
      advantage /= jnp.sqrt(jax.lax.pmean(mean(advantage**2), AXIS)) + 1e-8
    error = (targets - value) ** 2
    if config.clip_value:
      old = batch["value"][:, :-1]
      clipped = old + jnp.clip(value - old, -config.clip, config.clip)
      error = jnp.maximum(error, (targets - clipped) ** 2)
    metrics = {
      CLIPPED: jnp.abs(ratio - 1) > config.clip,
      DIVERGENCE: ratio - 1 - terms.log_ratio,
    }
    return clipped_gain(ratio, advantage, config.clip), error, metrics


make_agent = PPO
