"""Parts of actor-critics on trajectories: the supply of trajectories, and terms of their losses."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.base import AXIS, Arrays
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops.td import chosen
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.replay.trajectory_queue import TrajectoryQueue

# Means over the actions trained on.
LOSS_POLICY = "losses/policy"
LOSS_VALUE = "losses/value"  # half the squared error
ENTROPY = "losses/policy_entropy"  # nats
RECONSTRUCTION = "losses/reconstruction"  # half the squared error, summed over pixels


@dataclasses.dataclass(frozen=True)
class TrajectoryConfig:
  """Settings of all losses on trajectories."""

  unroll_length: int = opt(
    20, "T, slots per trajectory (IMPALA: 20 on Atari, 100; A2C: 5)", "[1, 10000]"
  )
  synchronous: bool = opt(
    False, "collection and learning take turns (A2C, PPO); off: they overlap (IMPALA, APPO)"
  )
  value_coefficient: float = opt(
    0.5, "weight of half the squared error of the value (IMPALA: 0.5, PPO: 1)", "[0, 1e6]"
  )
  entropy_coefficient: float = opt(
    0.01, "weight of the policy's entropy (IMPALA on Atari, PPO: 0.01)", "[0, 1e6]"
  )
  reconstruction_coefficient: float = opt(
    0.0,
    "weight of half the squared error of observations decoded from the torso's features, summed "
    "over pixels; 0: no decoder (Luo et al., RLDM 2019, use one)",
    "[0, 1e6]",
  )
  reward_scale: float = opt(
    1.0, "multiplies rewards; returns near 1 suit the other coefficients", "(0, 1e6]"
  )

  @property
  def supply(self) -> "Supply":
    return Supply(self.unroll_length, synchronous=self.synchronous)


class Supply(NamedTuple):
  """How trajectories are queued and used.

  A block is what the learner goes through before it takes new trajectories: `minibatches` times
  `learner.batch_size` of them, and those replayed.
  """

  length: int  # T, slots per trajectory
  minibatches: int = 1
  epochs: int = 1
  replayed: float = 0.0  # old trajectories per new one
  synchronous: bool = False  # see `Agent.synchronous`

  def _block(self, config: Config) -> int:
    """New trajectories per block; 1 if each is used once, so that they need not be together."""
    once = self.minibatches == self.epochs == 1 and not self.replayed
    return 1 if once else self.minibatches * config.learner.batch_size

  def _used(self, config: Config, blocks: int) -> int:
    """Samples that so many blocks provide."""
    new = blocks * self._block(config)
    return self.epochs * (new + math.floor(new * self.replayed))

  def queue(self, store: LaneStore, config: Config) -> TrajectoryQueue:
    """The selector."""
    block, wanted = self._block(config), config.learner.steps * config.learner.batch_size
    blocks = math.floor(wanted / (self.epochs * block * (1 + self.replayed)))
    while self._used(config, blocks) < wanted:
      blocks += 1
    return TrajectoryQueue(
      store,
      self.length,
      stack=config.env.frame_stack,
      pace=math.inf if self.synchronous else blocks * block / config.run.env_steps,
      block=block,
      epochs=self.epochs,
      replayed=self.replayed,
    )

  def problems(self, config: Config) -> Iterable[str]:
    """Yields `key: problem` for settings with which trajectories run out or are used late."""
    actor, learner, length = config.actor, config.learner, self.length
    late = {"learner.tail_steps": learner.tail_steps, "actor.random_steps": actor.random_steps}
    for key, steps in late.items():
      if steps:
        yield f"{key}: must be 0, or trajectories would be trained on late, got {steps}"
    # Up to T agent steps of each lane do not fill a trajectory.
    trajectories = max(config.run.env_steps - actor.lanes * length, 0) // length
    most = self._used(config, trajectories // self._block(config)) // learner.batch_size
    if learner.steps > most:
      yield (
        f"learner.steps: must be at most {most}, as run.env_steps "
        f"({config.run.env_steps}) give {trajectories} trajectories of loss.unroll_length "
        f"({length}) in {actor.lanes} lanes, {learner.batch_size} a learner step"
        f"{', ' + self._reuse if self._block(config) > 1 else ''}; got {learner.steps}"
      )
    least = self.least_capacity(config)
    if 0 < config.replay.capacity < least:
      yield (
        f"replay.capacity: must be 0 or at least {least}, for trajectories that wait while actors "
        f"are ahead of the learner, got {config.replay.capacity}"
      )
    yield from self._synchronous_problems(config) if self.synchronous else ()

  @property
  def _reuse(self) -> str:
    replayed = f" and {self.replayed} old ones per new one" if self.replayed else ""
    return f"in blocks of {self.minibatches} of these, {self.epochs} epochs each{replayed}"

  def _synchronous_problems(self, config: Config) -> Iterable[str]:
    actor, batch = config.actor, config.learner.batch_size
    if config.topology.actors > max(config.topology.learners, 1):
      yield (
        "topology.actors: must be at most one per learner with loss.synchronous, or lanes of a "
        f"fast actor would run ahead of a slow one's, got {config.topology.actors}"
      )
    if self.minibatches * batch % actor.lanes:
      block = f"{self.minibatches} x {batch}" if self.minibatches > 1 else f"{batch}"
      yield (
        f"actor.lanes: must divide the trajectories collected at a time ({block}) with "
        f"loss.synchronous, or some would wait for a turn, got {actor.lanes}"
      )
    if self.minibatches * self.epochs % actor.weights_interval:
      yield (
        "actor.weights_interval: must divide the learner steps between collections "
        f"({self.minibatches * self.epochs}) with loss.synchronous, got {actor.weights_interval}"
      )
    if self.replayed:
      yield (f"loss.replay_proportion: must be 0 with loss.synchronous, got {self.replayed}")

  def least_capacity(self, config: Config) -> int:
    """Slots with which no lane evicts a trajectory that the run will need.

    Collection is ahead of the learner by the rate limiter's slack, or by what all lanes need to
    fill their first trajectories. Lanes take turns, so one may have a trajectory more than another;
    one may be incomplete, and one have lost its start. A block that is used several times stays.
    """
    lanes, length, block = config.actor.lanes, self.length, self._block(config)
    slack = max(2 * lanes, 2 * -(-config.run.env_steps // config.learner.steps))
    ahead = max(slack, (lanes + max(block, config.learner.batch_size)) * length)
    in_use = block * length if block > 1 else 0
    return ahead + in_use + lanes * (3 * length + config.env.frame_stack)


class PolicyTerms(NamedTuple):
  """What a policy makes of actions that another, the behavior policy, has taken; [B, T] each."""

  log_chosen: jax.Array  # log pi(a|x)
  ratio: jax.Array  # pi(a|x) / mu(a|x); 0 where no action was taken
  entropy: jax.Array  # nats


def policy_terms(logits: jax.Array, batch: Arrays) -> PolicyTerms:
  """Terms from the policy's logits [B, T, A] and a batch's `action`, `acted_mask` and `logits`."""
  log_policy = jax.nn.log_softmax(logits)
  log_chosen = chosen(log_policy, batch["action"])
  log_behavior = chosen(jax.nn.log_softmax(batch["logits"]), batch["action"])
  return PolicyTerms(
    log_chosen,
    jnp.where(batch["acted_mask"] > 0, jnp.exp(log_chosen - log_behavior), 0),
    -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1),
  )


def mean_count(mask: jax.Array) -> jax.Array:
  """Number of nonzero entries on each device, on average; at least 1. With it local sums become
  shares of the mean over all devices."""
  return jnp.maximum(jax.lax.pmean(jnp.sum(mask), AXIS), 1)
