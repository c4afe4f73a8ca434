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
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.actor_critic import PolicyTerms, Supply, TrajectoryConfig
from speedyzero_jax.agents.base import AXIS, Arrays
from speedyzero_jax.agents.impala import Impala
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.ops.recurrent import CoreConfig
from speedyzero_jax.ops.torsos import torso_problems
from speedyzero_jax.ops.vtrace import vtrace
from speedyzero_jax.replay.schema import Column

# Over the actions trained on.
CLIPPED = "losses/clipped_share"  # ratios outside 1 +- clip
DIVERGENCE = "losses/policy_divergence"  # mean of ratio - 1 - log ratio, estimates KL(mu, pi)


@dataclasses.dataclass(frozen=True)
class LossConfig(TrajectoryConfig):
  """Trajectories, their use, advantages and the terms of the loss."""

  unroll_length: int = opt(128, "T, slots per trajectory (PPO: 128 on Atari)", "[1, 10000]")
  synchronous: bool = opt(True, "collection and learning take turns; off: they overlap (APPO)")
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
  normalize_advantages: bool = opt(True, "to mean 0 and deviation 1 in each minibatch")
  clip: float = opt(0.2, "of the ratio, around 1 (PPO: 0.2, 0.1 on Atari; APPO: 0.4)", "(0, 1e9]")
  clip_value: bool = opt(
    False, "clip the value's change since acting, too, by loss.clip (PPO's code: yes)"
  )
  reduction: ClassVar[str] = "mean"

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


def clipped_gain(ratio: jax.Array, advantage: jax.Array, clip: float) -> jax.Array:
  """Clipped surrogate objective of each action (Schulman et al. 2017, equation 7)."""
  return jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)


class PPO(Impala):
  """IMPALA with another objective and use of trajectories."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions, Column("value", "float32"))

  def _objective(
    self, batch: Arrays, values: jax.Array, terms: PolicyTerms, mean: Callable
  ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    config, acted, ratio, value = self._loss, batch["acted_mask"], terms.ratio, values[:, :-1]
    of = values, ratio
    if config.advantages == "gae":
      of = batch["value"], acted  # V-trace with ratios 1 is GAE
    estimate = jax.vmap(partial(vtrace, lambda_=config.gae_lambda))
    targets, advantage = estimate(batch["reward"], batch["discount"], *of)
    if config.normalize_advantages:
      advantage -= jax.lax.pmean(mean(advantage), AXIS)
      advantage /= jnp.sqrt(jax.lax.pmean(mean(advantage**2), AXIS)) + 1e-8
    error = (targets - value) ** 2
    if config.clip_value:
      old = batch["value"][:, :-1]
      near = old + jnp.clip(value - old, -config.clip, config.clip)
      error = jnp.maximum(error, (targets - near) ** 2)
    measured = {
      CLIPPED: jnp.abs(ratio - 1) > config.clip,
      DIVERGENCE: ratio - 1 - jnp.log(jnp.where(acted > 0, ratio, 1)),
    }
    return clipped_gain(ratio, advantage, config.clip), error, measured


make_agent = PPO
