"""From the replay to the learner: draw, reanalyse, assemble, gather.

What travels is a `Batch` of indices and targets; frames are gathered at the very end, on the learner's devices if the
replay has them there.
"""

from typing import NamedTuple

import numpy as np

from speedyzero_jax.agents.efficientzero.reanalyse import Reanalyse
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.aggregation import PartTimes
from speedyzero_jax.replay.device_frames import host_bytes
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sum_tree import importance_weights
from speedyzero_jax.types import Batch, LearnerBatch


class Fed(NamedTuple):
  """A batch ready to be trained on, and what is to be told to the replay or logged about it."""

  batch: LearnerBatch
  lane: np.ndarray  # [B]
  time: np.ndarray  # [B]
  age: float  # mean age of its policy targets, learner steps
  age_max: float
  host_bytes: int  # that the host hands to devices for it


def draw(
  config: Config,
  replay: Replay,
  reanalyse: Reanalyse | None,
  learner_step: int,
  times: PartTimes | None = None,
) -> Fed:
  """Draws the batch of learner step `learner_step` (from 0). `times` is told of the parts sample, search and gather.

  Raises ValueError while nothing in the replay can be sampled.
  """
  part = (times or PartTimes()).part
  with part("sample"):
    lane, time, probability = replay.sample(config.learner.batch_size)
  if reanalyse is not None:
    with part("search"):
      reanalyse(replay, lane, time)
  with part("sample"):
    batch = replay.make_batch(lane, time, probability, learner_step)
    share = min(learner_step / max(config.learner.steps, 1), 1.0)
    beta = config.agent.priority.beta_start + share * (
      config.agent.priority.beta_end - config.agent.priority.beta_start
    )
    weight = importance_weights(probability, beta)
  with part("gather"):
    gathered = gather(replay, batch, weight)
  known = batch.targets.policy_mask > 0
  ages = batch.age[known]
  return Fed(
    batch=gathered,
    lane=lane,
    time=time,
    age=float(ages.mean()) if ages.size else 0.0,
    age_max=float(ages.max(initial=0)),
    host_bytes=host_bytes(gathered.frames) + sum(x.nbytes for x in gathered[1:]),
  )


def gather(replay: Replay, batch: Batch, weight: np.ndarray) -> LearnerBatch:
  """Adds the frames of K+1 states and their stacks. What was evicted since the batch was drawn is masked."""
  tails = replay.tails
  frames = replay.windows(batch.lane, batch.time, after=batch.action.shape[1], spread=True)
  held = replay.held(batch.lane, batch.time, tails).astype(np.float32)[:, None]
  targets = batch.targets
  return LearnerBatch(
    frames=frames,
    action=batch.action,
    weight=weight,
    value=targets.value,
    value_prefix=targets.value_prefix,
    policy=targets.policy,
    value_mask=targets.value_mask * held,
    prefix_mask=targets.prefix_mask * held,
    policy_mask=targets.policy_mask * held,
    consistency_mask=targets.consistency_mask * held,
  )
