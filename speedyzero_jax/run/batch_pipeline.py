"""The batch pipeline from the replay to the learner: select, recompute, assemble, gather."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from speedyzero_jax.agents.base import Agent, Arrays, Work
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.workers.learner import Gradient

Execute = Callable[[list[Work], int], None]  # runs the work for the batch of a learner step
Part = Callable[[str], contextlib.AbstractContextManager]  # times a named part of the work


class PreparedBatch(NamedTuple):
  """A batch for the learner, or a gradient that an actor has computed."""

  arrays: Arrays  # input of the loss, [B, ...] each
  selection: Selection
  info: dict[str, float]  # metrics
  gradient: Gradient | None = None  # from an actor; arrays and selection are then empty


def draw(
  agent: Agent, replay: Replay, size: int, learner_step: int, execute: Execute, part: Part
) -> PreparedBatch:
  """Returns a batch of B = `size` samples for learner step `learner_step` (from 0).

  `execute` first runs the work that the agent requests, in this process or in others. Time is
  attributed to the parts sample, search and gather. Raises ValueError if too little is stored.
  """
  with part("sample"):
    selection = replay.select(size)
    with replay.lock:
      works = agent.batch_work(replay, selection)
  if works:
    with part("search"):
      execute(works, learner_step)
  with part("sample"), replay.lock:
    arrays, info = agent.assemble(replay, selection, learner_step)
  with part("gather"):
    return PreparedBatch(_with_frames(agent, replay, arrays, selection), selection, info)


def _with_frames(agent: Agent, replay: Replay, arrays: Arrays, selection: Selection) -> Arrays:
  """Adds frames, and masks samples evicted since they were selected."""
  tails, (lane, time, _) = replay.tails, selection
  if agent.window.within_episode:
    frames = replay.windows(lane, time, after=agent.window.after)
  else:
    frames, stack = replay.trajectories(lane, time, agent.window.after)
    arrays = arrays | {"stack": stack}
  intact = replay.intact(lane, time, tails).astype(np.float32)
  masked = {
    name: x * intact.reshape(-1, *[1] * (x.ndim - 1))
    for name, x in arrays.items()
    if name.endswith("_mask")
  }
  return {"frames": frames, **arrays, **masked}
