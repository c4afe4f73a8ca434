"""Components shared by actor-critics: supply of trajectories, and terms of the losses."""

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
  """Settings common to all losses on trajectories, and how these are queued and reused.

  The learner trains on one block at a time for `epochs` epochs. A block has `minibatches` times
  `learner.batch_size` new trajectories, plus replayed ones.
  """

  unroll_length: int = opt(
    20, "T, slots per trajectory (IMPALA: 20 on Atari, 100; A2C: 5)", "[1, 10000]"
  )
  synchronous: bool = opt(
    False, "alternate collection and learning (A2C, PPO); off: they overlap (IMPALA, APPO)"
  )
  value_coefficient: float = opt(
    0.5, "weight of half the squared error of the value (IMPALA: 0.5, PPO: 2)", "[0, 1e6]"
  )
  entropy_coefficient: float = opt(
    0.01, "weight of the policy's entropy (IMPALA on Atari, PPO: 0.01)", "[0, 1e6]"
  )
  reconstruction_coefficient: float = opt(
    0.0,
    "weight of the reconstruction loss, half the squared error of observations decoded from the "
    "torso's features, summed over pixels; 0: no decoder (Luo et al., RLDM 2019, use one)",
    "[0, 1e6]",
  )
  reward_scale: float = opt(
    1.0, "factor on rewards; the other coefficients suit returns of about 1", "(0, 1e6]"
  )
  # Settings of PPO only.
  minibatches, epochs, replay_proportion = 1, 1, 0.0

  def _block(self, config: Config) -> int:
    """New trajectories per block. If each is used only once, a block is a single trajectory."""
    once = self.minibatches == self.epochs == 1 and not self.replay_proportion
    return 1 if once else self.minibatches * config.learner.batch_size

  def _used(self, config: Config, blocks: int) -> int:
    """Samples that a number of blocks provides."""
    new = blocks * self._block(config)
    return self.epochs * (new + math.floor(new * self.replay_proportion))

  def queue(self, store: LaneStore, config: Config) -> TrajectoryQueue:
    """Makes the selector."""
    block, required = self._block(config), config.learner.steps * config.learner.batch_size
    blocks = math.floor(required / (self.epochs * block * (1 + self.replay_proportion)))
    while self._used(config, blocks) < required:
      blocks += 1
    return TrajectoryQueue(
      store,
      self.unroll_length,
      stack=config.env.frame_stack,
      pace=math.inf if self.synchronous else blocks * block / config.run.env_steps,
      block=block,
      epochs=self.epochs,
      replayed=self.replay_proportion,
    )

  def problems(self, config: Config) -> Iterable[str]:
    """Yields `key: problem` for settings that exhaust, evict or delay trajectories."""
    actor, learner, length = config.actor, config.learner, self.unroll_length
    delays = {"learner.tail_steps": learner.tail_steps, "actor.random_steps": actor.random_steps}
    for key, steps in delays.items():
      if steps:
        yield f"{key}: must be 0, as it delays training on trajectories, got {steps}"
    # In each lane up to T agent steps remain in an incomplete trajectory.
    trajectories = max(config.run.env_steps - actor.lanes * length, 0) // length
    most = self._used(config, trajectories // self._block(config)) // learner.batch_size
    if learner.steps > most:
      problem, got = f"learner.steps: must be at most {most}", learner.steps
      if not most:
        problem, got = "run.env_steps: must be higher", config.run.env_steps
      yield (
        f"{problem}, as run.env_steps ({config.run.env_steps}) in "
        f"{actor.lanes} lanes provide {trajectories} trajectories of loss.unroll_length ({length}) "
        f"and a learner step uses {learner.batch_size}"
        f"{', ' + self._reuse if self._block(config) > 1 else ''}; got {got}"
      )
    least = self.least_capacity(config)
    if 0 < config.replay.capacity < least:
      yield (
        f"replay.capacity: must be 0 or at least {least}, to hold the trajectories that the "
        f"learner has not finished with, got {config.replay.capacity}"
      )
    yield from self._synchronous_problems(config) if self.synchronous else ()

  @property
  def _reuse(self) -> str:
    share = self.replay_proportion
    replayed = f" and {share} replayed trajectories per new one" if share else ""
    return f"in blocks of {self.minibatches} minibatches with {self.epochs} epochs each{replayed}"

  def _synchronous_problems(self, config: Config) -> Iterable[str]:
    actor, batch, actors = config.actor, config.learner.batch_size, config.topology.actors
    apart = config.topology.gradients == "actors"  # each actor alternates for itself
    if apart and actors and (actor.lanes % actors or batch % (actor.lanes // actors)):
      yield (
        f"actor.lanes: must be topology.actors ({actors}) times a divisor of learner.batch_size "
        f"({batch}) with topology.gradients=actors, got {actor.lanes}"
      )
    if not apart and actors > max(config.topology.learners, 1):
      yield (
        "topology.actors: must be at most one per learner with loss.synchronous, as a fast actor "
        f"would run ahead of a slow one, got {actors}"
      )
    if not apart and self.minibatches * batch % actor.lanes:
      block = f"{self.minibatches} x {batch}" if self.minibatches > 1 else f"{batch}"
      yield (
        f"actor.lanes: must divide the number of trajectories collected at a time ({block}) with "
        f"loss.synchronous, got {actor.lanes}"
      )
    if self.minibatches * self.epochs % actor.weights_interval:
      yield (
        "actor.weights_interval: must divide the learner steps between collections "
        f"({self.minibatches * self.epochs}) with loss.synchronous, got {actor.weights_interval}"
      )
    if self.replay_proportion:
      yield (
        f"loss.replay_proportion: must be 0 with loss.synchronous, got {self.replay_proportion}"
      )

  def least_capacity(self, config: Config) -> int:
    """Minimum capacity with which no trajectory is evicted before the learner has used it.

    Collection runs ahead of the learner by at most the rate limiter's slack, or by the steps that
    fill the first trajectories of all lanes. Each lane needs room for three more trajectories: one
    by which it may be ahead of other lanes, an incomplete one, and one partly evicted. A block that
    is used several times stays stored meanwhile.
    """
    lanes, length, block = config.actor.lanes, self.unroll_length, self._block(config)
    slack = max(2 * lanes, 2 * -(-config.run.env_steps // config.learner.steps))
    ahead = max(slack, (lanes + max(block, config.learner.batch_size)) * length)
    in_use = block * length if block > 1 else 0
    return ahead + in_use + lanes * (3 * length + config.env.frame_stack)


class PolicyTerms(NamedTuple):
  """Terms of the current policy pi for actions taken by the behavior policy mu; [B, T] each."""

  log_chosen: jax.Array  # log pi(a|x)
  log_ratio: jax.Array  # log pi(a|x) - log mu(a|x)
  ratio: jax.Array  # its exponential; 0 where no action was taken
  entropy: jax.Array  # nats


def policy_terms(logits: jax.Array, batch: Arrays) -> PolicyTerms:
  """Computes the terms from pi's logits [B, T, A]; mu's logits and the actions are in `batch`."""
  log_policy = jax.nn.log_softmax(logits)
  log_chosen = chosen(log_policy, batch["action"])
  log_ratio = log_chosen - chosen(jax.nn.log_softmax(batch["logits"]), batch["action"])
  return PolicyTerms(
    log_chosen,
    log_ratio,
    jnp.where(batch["acted_mask"] > 0, jnp.exp(log_ratio), 0),
    -jnp.sum(jnp.exp(log_policy) * log_policy, axis=-1),
  )


def mean_count(mask: jax.Array) -> jax.Array:
  """Mean over devices of the sum of a 0/1 mask; not 0.

  Local sums divided by it have a mean over devices that is the mean over all entries with mask 1.
  """
  return jnp.maximum(jax.lax.psum(jnp.sum(mask), AXIS), 1) / jax.lax.axis_size(AXIS)
