"""Heartbeats of a unit's actors and refreshers: which are alive, their restarts and waiting times.

Every request counts as a heartbeat. Each process asks for weights every `grpc_server.POLL_SECONDS`,
so one that is silent for `TIMEOUT` is dead or hangs.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping

from speedyzero_jax.run.topology import Kind

TIMEOUT = 10.0  # seconds of silence after which a process does not count as alive


@dataclasses.dataclass
class _State:
  """One process."""

  last_beat: float = -math.inf
  joins: int = 0
  waiting_since: float | None = None


class Heartbeats:
  """The processes that serve one unit. Thread-safe; an unknown process raises ValueError.

  Args:
    counts: processes of each kind.
    mean: takes metrics that are averaged: `queue/KIND_wait_seconds`, once for each wait.
    clock: seconds, from any origin.
  """

  def __init__(
    self,
    counts: Mapping[Kind, int],
    mean: Callable[[Mapping[str, float]], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._states = {kind: [_State() for _ in range(n)] for kind, n in counts.items()}
    self._mean, self._clock = mean, clock
    self._lock = threading.Lock()

  def beat(self, kind: Kind, number: int) -> None:
    """Records a sign of life."""
    self._state(kind, number).last_beat = self._clock()

  def joined(self, kind: Kind, number: int) -> None:
    """Records the start of a new process."""
    with self._lock:
      state = self._state(kind, number)
      state.joins, state.waiting_since = state.joins + 1, None

  def waits(self, kind: Kind, number: int) -> None:
    """Records that a process waits for an answer; a repeated request continues the same wait."""
    with self._lock:
      state = self._state(kind, number)
      state.waiting_since = self._clock() if state.waiting_since is None else state.waiting_since

  def served(self, kind: Kind, number: int) -> None:
    """Ends a wait, if there was one."""
    with self._lock:
      state = self._state(kind, number)
      since, state.waiting_since = state.waiting_since, None
    if since is not None:
      self._mean({f"queue/{kind}_wait_seconds": self._clock() - since})

  def any_alive(self, kind: Kind) -> bool:
    """Whether a process of this kind gave a recent sign of life."""
    return self._alive(kind) > 0

  def summary(self) -> dict[str, float]:
    """Metrics `present/KINDs` and `restarts/KINDs`, for the kinds that the unit has."""
    with self._lock:
      found = dict[str, float]()
      for kind, states in self._states.items():
        if states:
          found[f"present/{kind}s"] = self._alive(kind)
          found[f"restarts/{kind}s"] = sum(max(state.joins - 1, 0) for state in states)
    return found

  def _alive(self, kind: Kind) -> int:
    since = self._clock() - TIMEOUT
    return sum(state.last_beat >= since for state in self._states[kind])

  def _state(self, kind: Kind, number: int) -> _State:
    states = self._states.get(kind, [])
    if number >= len(states):
      raise ValueError(f"there are {len(states)} {kind}s, this is number {number}")
    return states[number]
