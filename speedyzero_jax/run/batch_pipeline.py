"""The batch pipeline from the replay to the learner: select, recompute, assemble, gather."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from speedyzero_jax.agents.base import Agent, Arrays, Work
from speedyzero_jax.metrics.aggregation import PartTimes
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection

Execute = Callable[[list[Work], int], None]  # runs the work for the batch of a learner step


class PreparedBatch(NamedTuple):
  """A batch ready for training."""

  arrays: Arrays  # input of the loss, [B, ...] each
  selection: Selection
  info: dict[str, float]  # metrics


class BatchPipeline:
  """Prepares batches.

  Args:
    agent: selects and assembles.
    replay: to draw from.
    batch_size: B, of this process.
    execute: runs the work that the agent requests for a batch, here or in other processes.
    times: measures the parts sample, search and gather.
  """

  def __init__(
    self, agent: Agent, replay: Replay, batch_size: int, execute: Execute, times: PartTimes
  ):
    self._agent, self._replay, self._batch_size = agent, replay, batch_size
    self._execute, self._times = execute, times

  def ready(self) -> bool:
    """Whether a batch can be drawn."""
    return self._replay.ready(self._batch_size)

  def draw(self, learner_step: int) -> PreparedBatch:
    """The batch of learner step `learner_step` (from 0).

    Raises ValueError if too little is stored.
    """
    agent, replay, part = self._agent, self._replay, self._times.part
    with part("sample"):
      selection = replay.select(self._batch_size)
      with replay.lock:
        works = agent.batch_work(replay, selection)
    if works:
      with part("search"):
        self._execute(works, learner_step)
    with part("sample"), replay.lock:
      arrays, info = agent.assemble(replay, selection, learner_step)
    with part("gather"):
      arrays = self._gather(arrays, selection)
    return PreparedBatch(arrays, selection, info)

  def _gather(self, arrays: Arrays, selection: Selection) -> Arrays:
    """Adds frames, and masks samples evicted since they were selected."""
    window, replay = self._agent.window, self._replay
    tails = replay.tails
    lane, time = selection.lane, selection.time
    if window.within_episode:
      frames = replay.windows(lane, time, after=window.after)
    else:
      frames, stack = replay.trajectories(lane, time, window.after)
      arrays = arrays | {"stack": stack}
    held = replay.held(lane, time, tails).astype(np.float32)[:, None]
    masked = {name: x * held for name, x in arrays.items() if name.endswith("_mask")}
    return {"frames": frames, **arrays, **masked}
