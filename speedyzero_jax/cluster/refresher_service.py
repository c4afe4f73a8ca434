"""Service for refresher processes: blocks of states to compute, results, and frames."""

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
from speedyzero_jax.cluster.messages import Worker
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.workers.sweeper import write_results

_CHUNK = 32 << 20  # bytes of frames in one answer, about
_POLL = 1.0  # seconds between checks for signs of life


@dataclasses.dataclass
class _Handed:
  """A block that a refresher is computing."""

  work: Work
  holder: Worker
  deadline: float
  batch: "_Batch | None"


@dataclasses.dataclass(eq=False)
class _Batch:
  """Pieces of work of a sampled batch that are not done."""

  left: int


class RefresherService:
  """Answers the calls of refreshers, from any thread."""

  def __init__(self, experiment: Experiment, refreshers: int, roster: Roster):
    topology = experiment.config.topology
    self._experiment, self._tasks = experiment, experiment.agent.tasks
    self._replay, self._limiter = experiment.replay, experiment.limiter
    self._sweepers = experiment.sweepers if refreshers else []
    self._block_timeout, self._patient = topology.block_timeout, topology.bound_age
    self._roster, self._refreshers = roster, refreshers
    self._lock = threading.Lock()  # of what follows
    self._numbers = itertools.count(1)
    self._waiting: deque[tuple[Work, _Batch]] = deque()
    self._handed: dict[int, _Handed] = {}

  def _return(self, block: int) -> None:
    """Makes a block available again. A sweep returns to its states by itself."""
    handed = self._handed.pop(block)
    if handed.batch is not None:
      self._waiting.appendleft((handed.work, handed.batch))

  def work(self, worker: Worker, request: messages.Work, seconds: float) -> messages.Block | None:
    """Writes results; the next block, of a batch that the learner waits for or of a due sweep."""
    self._write(worker, request)
    found: list[messages.Block] = []

    def look() -> bool:
      if block := self._next(worker):
        found.append(block)
      return bool(found) or self._roster.over

    self._roster.waits(worker)
    self._limiter.wait_for(look, seconds)
    if not found:
      self._roster.enter(worker)
      return None
    self._roster.served(worker)
    return found[0]

  def _next(self, worker: Worker) -> messages.Block | None:
    with self._lock:
      now = time.monotonic()
      for block, handed in list(self._handed.items()):
        # Overdue, or lost with its answer or with an older incarnation.
        if handed.deadline < now or handed.holder.number == worker.number:
          self._return(block)
      work, batch = self._waiting.popleft() if self._waiting else (self._due_work(), None)
      if work is None:
        return None
      block = next(self._numbers)
      self._handed[block] = _Handed(work, worker, now + self._block_timeout, batch)
    task, states = self._tasks[work.task], (work.lane, work.time, work.real.shape[1] - 1)
    cell, heads = self._replay.window_cells(*states)
    return messages.Block(
      block=block,
      task=work.task,
      lane=work.lane.astype(np.int32),
      cell=cell.astype(np.int32),
      step=self._experiment.weights.latest(task.subscription).step,
      heads=heads,
      columns=self._replay.values(task.reads, *states),
    )

  def _due_work(self) -> Work | None:
    if not self._experiment.sweeping():
      return None
    for sweeper in self._sweepers:
      if sweeper.due(self._replay, self._limiter.learner_steps):
        return sweeper.next(self._replay)
    return None

  def _write(self, worker: Worker, request: messages.Work) -> None:
    """Writes results, unless the block has been given to another refresher meanwhile."""
    with self._lock:
      handed = self._handed.get(request.block)
      if handed is None or handed.holder != worker:
        return
    work, task = handed.work, self._tasks[handed.work.task]
    newest = self._experiment.weights.latest(task.subscription).step
    if not 0 <= request.step <= newest:
      raise ValueError(f"work.step must be in 0..{newest}, got {request.step}")
    write_results(self._replay, task, work, request.arrays, request.step)
    with self._lock:
      if self._handed.pop(request.block, None) is not None and handed.batch is not None:
        handed.batch.left -= 1
    self._experiment.count_states(task, int(work.real.sum()))
    self._limiter.notify()

  def execute(self, works: Sequence[Work], learner_step: int) -> None:
    """Has a sampled batch's work done by refreshers, and waits for it.

    Unless `topology.bound_age`, for a limited time, and not at all without a live refresher. The
    wait ends when the run does.
    """
    parts = [part for work in works for part in _split(work, self._refreshers)]
    batch = _Batch(len(parts))
    with self._lock:
      self._waiting.extend((part, batch) for part in parts)
    self._limiter.notify()
    # Twice the timeout: a lost block is handed out once more.
    until = math.inf if self._patient else time.monotonic() + 2 * self._block_timeout

    def settled() -> bool:
      return not batch.left or self._limiter.draining or self._limiter.stopping

    while not settled() and time.monotonic() < until:
      if not self._patient and not self._roster.alive("refresher"):
        break
      self._limiter.wait_for(settled, min(_POLL, until - time.monotonic()))
    with self._lock:  # late results are still written, but blocks are not handed out again
      self._waiting = deque(item for item in self._waiting if item[1] is not batch)
      for handed in self._handed.values():
        if handed.batch is batch:
          handed.batch = None

  def frames(self, worker: Worker, request: messages.FramesRequest) -> messages.FramesChunk:
    """Frames of slots that a refresher does not have yet."""
    replay = self._replay
    if (request.heads.shape, request.heads.dtype) != (replay.heads.shape, np.int64):
      raise ValueError(f"heads must be int64 [{replay.store.lanes}]")
    heads, lane, cell, frame = replay.frames_since(
      request.heads, max(1, min(256, _CHUNK // replay.schema.slot_bytes))
    )
    return messages.FramesChunk(heads, lane.astype(np.int32), cell.astype(np.int32), frame)


def _split(work: Work, parts: int) -> list[Work]:
  """The same work in about equal parts."""
  bounds = np.linspace(0, len(work.lane), min(parts, len(work.lane)) + 1).astype(int)
  return [
    work._replace(lane=work.lane[a:b], time=work.time[a:b], real=work.real[a:b])
    for a, b in itertools.pairwise(bounds.tolist())
  ]
