"""From the replay to the learner: draw, reanalyse, assemble, gather.

What travels is a `Batch` of indices and targets; frames are gathered at the very end, on the learner's devices if the
replay has them there.
"""

from typing import NamedTuple

import numpy as np

from speedyzero_jax.config import Config
from speedyzero_jax.reanalyser import Reanalyse
from speedyzero_jax.replay.buffer import Replay
from speedyzero_jax.replay.priorities import importance_weights
from speedyzero_jax.types import Batch, LearnerBatch


class Fed(NamedTuple):
  """A batch ready to be trained on, and what is to be told to the replay or logged about it."""

  batch: LearnerBatch
  lane: np.ndarray  # [B]
  time: np.ndarray  # [B]
  age: float  # mean age of its policy targets, learner steps
  age_max: float


def draw(config: Config, replay: Replay, reanalyse: Reanalyse | None, learner_step: int) -> Fed:
  """Draws the batch of learner step `learner_step` (from 0).

  Raises ValueError while nothing in the replay can be sampled.
  """
  lane, time, probability = replay.sample(config.learner.batch_size)
  if reanalyse is not None:
    reanalyse(replay, lane, time)
  batch = replay.make_batch(lane, time, probability, learner_step)
  share = min(learner_step / max(config.learner.steps, 1), 1.0)
  beta = config.replay.beta_start + share * (config.replay.beta_end - config.replay.beta_start)
  weight = importance_weights(probability, beta)
  known = batch.targets.policy_mask > 0
  ages = batch.age[known]
  return Fed(
    batch=gather(replay, batch, weight),
    lane=lane,
    time=time,
    age=float(ages.mean()) if ages.size else 0.0,
    age_max=float(ages.max(initial=0)),
  )


def gather(replay: Replay, batch: Batch, weight: np.ndarray) -> LearnerBatch:
  """Adds the frames of K+1 states and their stacks."""
  targets = batch.targets
  return LearnerBatch(
    frames=replay.windows(batch.lane, batch.time, after=batch.action.shape[1], spread=True),
    action=batch.action,
    weight=weight,
    value=targets.value,
    value_prefix=targets.value_prefix,
    policy=targets.policy,
    value_mask=targets.value_mask,
    prefix_mask=targets.prefix_mask,
    policy_mask=targets.policy_mask,
    consistency_mask=targets.consistency_mask,
  )
