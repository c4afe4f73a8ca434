"""The actors and refreshers of a unit: their incarnations, waits and signs of life.

Each process calls at every step or block, and every `grpc_server.POLL_SECONDS` while it waits for
one: if it is silent for `TIMEOUT`, it is dead, hangs or compiles.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.metrics import names
from speedyzero_jax.run.topology import Kind

TIMEOUT = 30.0  # seconds of silence after which a process does not count as alive


class Worker(NamedTuple):
  """An actor or a refresher."""

  kind: Kind
  number: int

  def __str__(self) -> str:
    return f"{self.kind} {self.number}"


@dataclasses.dataclass
class _State:
  """What is known of a worker."""

  incarnation: int = -1
  last_beat: float = -math.inf
  waiting_since: float | None = None
  present: bool = False  # it has joined, and not yet heard that nothing is left to do


class Roster:
  """The workers that serve one unit. Thread-safe; an unknown worker raises ValueError.

  `counts` has the workers of each kind; `mean` takes the metric `queue/KIND_wait_seconds` once for
  each wait.
  """

  def __init__(
    self,
    counts: Mapping[Kind, int],
    mean: Callable[[Mapping[str, float]], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self.over = False  # the run has ended
    self._states = {Worker(kind, i): _State() for kind, n in counts.items() for i in range(n)}
    self._counts, self._mean, self._clock = counts, mean, clock
    self._changed = threading.Condition()

  def beat(self, worker: Worker) -> None:
    """Records a sign of life."""
    if worker not in self._states:
      count = self._counts.get(worker.kind, 0)
      raise ValueError(f"there are {count} {worker.kind}s, this is number {worker.number}")
    self._states[worker].last_beat = self._clock()

  def enter(self, worker: Worker) -> None:
    """Records a sign of life. Raises RunOver if the run has ended."""
    self.beat(worker)
    if self.over:
      self.dismiss(worker)
      raise RunOver("the run has ended")

  def check(self, worker: Worker, incarnation: int) -> None:
    """Raises ValueError unless this is the worker's newest incarnation."""
    known = self._states[worker].incarnation
    if incarnation != known:
      raise ValueError(f"{worker} has incarnation {known} now, this is {incarnation}")

  def join(self, worker: Worker, incarnation: int) -> bool:
    """Records a start. Returns False for a repeated one; an older incarnation is a ValueError."""
    with self._changed:
      state = self._states[worker]
      new = incarnation > state.incarnation
      if new:
        state.incarnation, state.waiting_since = incarnation, None
      self.check(worker, incarnation)
      state.present = True
      return new

  def waits(self, worker: Worker) -> None:
    """Records that a worker waits for an answer; a repeated request continues the same wait."""
    with self._changed:
      state = self._states[worker]
      state.waiting_since = self._clock() if state.waiting_since is None else state.waiting_since

  def served(self, worker: Worker) -> None:
    """Ends a wait, if there was one."""
    with self._changed:
      state = self._states[worker]
      since, state.waiting_since = state.waiting_since, None
    if since is not None:
      self._mean({names.wait(worker.kind): self._clock() - since})

  def dismiss(self, worker: Worker) -> None:
    """Records that a worker has heard that nothing is left to do."""
    with self._changed:
      self._states[worker].present = False
      self._changed.notify_all()

  def wait_for_dismissal(self, seconds: float) -> None:
    """Waits until every worker that has joined has also heard that nothing is left to do."""
    with self._changed:
      self._changed.wait_for(
        lambda: not any(state.present for state in self._states.values()), seconds
      )

  def alive(self, kind: Kind) -> int:
    """Number of workers of this kind that gave a recent sign of life."""
    since = self._clock() - TIMEOUT
    return sum(w.kind == kind and s.last_beat >= since for w, s in self._states.items())

  def summary(self) -> dict[str, float]:
    """The metric of processes present, for each kind that the unit has."""
    return {names.present(kind): self.alive(kind) for kind, count in self._counts.items() if count}
