"""Service for refresher processes: assigns blocks of states, stores results and sends frames."""

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from speedyzero_jax.agents.base import Work
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.workers.sweeper import split, write_results

_POLL = 1.0  # seconds between checks whether a refresher is alive
_START_TIMEOUT = 600.0  # seconds for which the first batch waits for refreshers that compile


@dataclasses.dataclass
class _Assignment:
  """A block that a refresher is computing."""

  work: Work
  holder: Helper
  deadline: float
  batch: "_Batch | None"  # None: a sweep's block, or one of a batch that no longer waits
  repeat: bool = True  # whether the block is assigned again if the holder is lost


@dataclasses.dataclass(eq=False)
class _Batch:
  """A sampled batch that waits for its work."""

  left: int  # unfinished pieces of work


class RefresherService:
  """Answers the calls of refreshers. Thread-safe."""

  def __init__(self, experiment: Experiment, roster: Roster):
    topology = experiment.config.topology
    self._experiment, self._tasks = experiment, experiment.agent.tasks
    self._replay, self._limiter = experiment.replay, experiment.limiter
    self._sweepers = experiment.sweepers
    self._block_timeout, self._bound_age = topology.block_timeout, topology.bound_age
    self._roster, self._refreshers = roster, roster.counts["refresher"]
    self._lock = threading.Lock()  # guards the following attributes
    self._numbers = itertools.count(1)
    self._waiting: deque[tuple[Work, _Batch | None]] = deque()
    self._assigned: dict[int, _Assignment] = {}
    self._ready: set[int] = set()  # refreshers that have requested work
    self._waited = False  # whether the first batch has waited for all refreshers

  def work(
    self, helper: Helper, request: messages.Results, seconds: float
  ) -> messages.Block | None:
    """Writes results and returns the next block, of a batch in preparation or of a due sweep.

    Returns None if there is no block within `seconds`.
    """
    self._write(helper, request)
    self._ready.add(helper.number)
    self._roster.waits(helper)
    found = self._limiter.wait_for(lambda: self._assign(helper) or self._roster.over, seconds)
    if not isinstance(found, tuple):
      self._roster.enter(helper)
      return None
    self._roster.served(helper)
    return self._block(*found)

  def _assign(self, helper: Helper) -> tuple[int, Work] | None:
    """Assigns the next block, if there is one."""
    with self._lock:
      now = time.monotonic()
      for block, assignment in list(self._assigned.items()):
        # Overdue for a batch, or lost with its answer or with an older incarnation. A sweep's block
        # whose holder does not return is visited again one pass later.
        overdue = assignment.batch is not None and assignment.deadline < now
        if overdue or assignment.holder.number == helper.number:
          del self._assigned[block]
          if assignment.repeat:
            self._waiting.appendleft((assignment.work, assignment.batch))
      work, batch = self._waiting.popleft() if self._waiting else (self._due_work(), None)
      if work is None:
        return None
      block = next(self._numbers)
      self._assigned[block] = _Assignment(work, helper, now + self._block_timeout, batch)
    return block, work

  def _block(self, number: int, work: Work) -> messages.Block:
    task, states = self._tasks[work.task], (work.lane, work.time, work.real.shape[1] - 1)
    cell, heads = self._replay.window_cells(*states)
    return messages.Block(
      block=number,
      task=work.task,
      lane=work.lane.astype(np.int32),
      cell=cell.astype(np.int32),
      step=self._experiment.weights.latest(task.subscription).step,
      heads=heads,
      columns=task.inputs(self._replay, *states),
    )

  def _due_work(self) -> Work | None:
    if not self._experiment.sweeping():
      return None
    # In the order of the agent's tasks: an earlier sweep may also renew what a later one does.
    for sweeper in self._sweepers:
      if sweeper.due(self._replay, self._limiter.learner_steps):
        return sweeper.next(self._replay)
    return None

  def _write(self, helper: Helper, request: messages.Results) -> None:
    """Writes results, unless the block has since been assigned to another refresher."""
    with self._lock:
      assignment = self._assigned.get(request.block)
      if assignment is None or assignment.holder != helper:
        return
    work, task = assignment.work, self._tasks[assignment.work.task]
    newest = self._experiment.weights.latest(task.subscription).step
    if not 0 <= request.step <= newest:
      raise ValueError(f"results.step must be in 0..{newest}, got {request.step}")
    write_results(self._replay, task, work, request.arrays, request.step)
    with self._lock:
      if self._assigned.pop(request.block, None) is not None and assignment.batch is not None:
        assignment.batch.left -= 1
    self._experiment.count_states(task, int(work.real.sum()))
    self._limiter.notify()

  def execute(self, works: Sequence[Work], learner_step: int) -> None:
    """Queues a sampled batch's work for the refreshers and waits until it is done.

    Without `topology.bound_age`, the wait has a timeout, and ends if no refresher is alive or may
    still be computing a block of the batch. It also ends with the run. The first batch is not given
    up while refreshers compile their programs.
    """
    parts = [part for work in works for part in split(work, self._refreshers)]
    batch = _Batch(len(parts))
    with self._lock:
      self._waiting.extend((part, batch) for part in parts)
    self._limiter.notify()
    self._wait_for_refreshers(batch)
    # Twice the timeout, so that a lost block can be assigned once more.
    until = math.inf if self._bound_age else time.monotonic() + 2 * self._block_timeout

    def done() -> bool:
      return not batch.left or self._limiter.unpaced or self._limiter.stopping

    while not done() and time.monotonic() < until:
      if not (self._bound_age or self._roster.alive("refresher") or self._computing(batch)):
        break
      self._limiter.wait_for(done, min(_POLL, until - time.monotonic()))
    with self._lock:  # late results are still written, but blocks are not assigned again
      self._waiting = deque(item for item in self._waiting if item[1] is not batch)
      for assignment in self._assigned.values():
        if assignment.batch is batch:
          assignment.batch, assignment.repeat = None, False

  def _computing(self, batch: _Batch) -> bool:
    """Whether a refresher has a block of the batch; it makes no call while it computes."""
    now = time.monotonic()
    with self._lock:
      return any(a.batch is batch and now < a.deadline for a in self._assigned.values())

  def _wait_for_refreshers(self, batch: _Batch) -> None:
    """Waits, in the first call only, until the batch is done or every refresher requested work."""
    until = time.monotonic() + _START_TIMEOUT

    def done() -> bool:
      ready = len(self._ready) == self._refreshers
      return not batch.left or ready or self._limiter.unpaced or self._limiter.stopping

    if not self._waited and not done():
      self._experiment.logger.message("waiting for refreshers to compile their programs")
    while not self._waited and not done() and time.monotonic() < until:
      self._limiter.wait_for(done, _POLL)
    self._waited = True

  def frames(self, helper: Helper, request: messages.FramesRequest) -> messages.FramesChunk:
    """Returns frames of slots that a refresher does not have yet."""
    replay = self._replay
    if (request.heads.shape, request.heads.dtype) != (replay.heads.shape, np.int64):
      raise ValueError(f"heads must be int64 [{replay.store.lanes}]")
    most = messages.frames_per_chunk(replay.schema)
    heads, lane, cell, frame = replay.frames_since(request.heads, most)
    return messages.FramesChunk(heads, lane.astype(np.int32), cell.astype(np.int32), frame)
