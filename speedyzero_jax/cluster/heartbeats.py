"""Who of a unit's actors and reanalysers is there, how often each came back, and how long they wait.

All of it from what they ask the hub anyway: each asks for weights again every `service.POLL_SECONDS`, whatever else it
does, so who says nothing for longer has died or hangs.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping

from speedyzero_jax.metrics import names
from speedyzero_jax.run.topology import Kind

SILENCE = 10.0  # seconds after which nobody counts on a process any more

_PRESENT: Mapping[Kind, str] = {
  "actor": names.PRESENT_ACTORS,
  "reanalyser": names.PRESENT_REANALYSERS,
}
_RESTARTS: Mapping[Kind, str] = {
  "actor": names.RESTARTS_ACTORS,
  "reanalyser": names.RESTARTS_REANALYSERS,
}
_WAIT: Mapping[Kind, str] = {"actor": names.ACTOR_WAIT, "reanalyser": names.REANALYSER_WAIT}


@dataclasses.dataclass
class _Seen:
  """What is known of one of them."""

  heard: float = -math.inf  # when, last
  joins: int = 0
  asked: float | None = None  # since when it waits


class Presence:
  """Of one unit. Thread-safe; all calls raise ValueError for a process that there is none of.

  Args:
    counts: how many there are of each kind.
    mean: takes metrics, one value for each time that somebody has waited.
    clock: seconds, from any origin.
  """

  def __init__(
    self,
    counts: Mapping[Kind, int],
    mean: Callable[[Mapping[str, float]], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._seen: dict[Kind, list[_Seen]] = {
      kind: [_Seen() for _ in range(n)] for kind, n in counts.items()
    }
    self._mean, self._clock = mean, clock
    self._lock = threading.Lock()

  def heard(self, kind: Kind, number: int) -> None:
    """It said something."""
    self._of(kind, number).heard = self._clock()

  def joined(self, kind: Kind, number: int) -> None:
    """It is a new process."""
    with self._lock:
      seen = self._of(kind, number)
      seen.joins, seen.asked = seen.joins + 1, None

  def asks(self, kind: Kind, number: int) -> None:
    """It waits from now on, if it did not already."""
    with self._lock:
      seen = self._of(kind, number)
      seen.asked = self._clock() if seen.asked is None else seen.asked

  def served(self, kind: Kind, number: int) -> None:
    """It got what it asked for."""
    with self._lock:
      seen = self._of(kind, number)
      asked, seen.asked = seen.asked, None
    if asked is not None:
      self._mean({_WAIT[kind]: self._clock() - asked})

  def anybody(self, kind: Kind) -> bool:
    """Whether one of them was heard of lately."""
    since = self._clock() - SILENCE
    return any(seen.heard >= since for seen in self._seen[kind])

  def summary(self) -> dict[str, float]:
    """How many are there, and how often one came back, of the kinds that the unit has."""
    with self._lock:
      since, found = self._clock() - SILENCE, dict[str, float]()
      for kind, processes in self._seen.items():
        if processes:
          found[_PRESENT[kind]] = sum(seen.heard >= since for seen in processes)
          found[_RESTARTS[kind]] = sum(max(seen.joins - 1, 0) for seen in processes)
    return found

  def _of(self, kind: Kind, number: int) -> _Seen:
    processes = self._seen.get(kind, [])
    if number >= len(processes):
      raise ValueError(f"there are {len(processes)} {kind}s, this is number {number}")
    return processes[number]
