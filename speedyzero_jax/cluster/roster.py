"""The roster of a unit's actors and refreshers: their incarnations, waits and liveness.

Each helper calls at every step or block, and every `grpc_server.POLL_SECONDS` while it waits for
one. A helper that is silent for `TIMEOUT` is dead, hangs or compiles.
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping

from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.metrics import names
from speedyzero_jax.run.topology import Kind

TIMEOUT = 30.0  # seconds of silence after which a helper does not count as alive


@dataclasses.dataclass
class _State:
  """State of a helper."""

  incarnation: int = -1
  last_call: float = -math.inf
  waiting_since: float | None = None
  present: bool = False  # it has called and is not dismissed yet


class Roster:
  """The helpers that serve one unit. Thread-safe; an unknown helper raises ValueError.

  `counts` is the number of helpers of each kind; `log` is called with the metric
  `queue/KIND_wait_seconds` after each wait.
  """

  def __init__(
    self,
    counts: Mapping[Kind, int],
    log: Callable[[Mapping[str, float]], None],
    clock: Callable[[], float] = time.monotonic,
  ):
    self.over = False  # the run has ended
    self._states = {(kind, i): _State() for kind, n in counts.items() for i in range(n)}
    self.counts, self._log, self._clock = counts, log, clock
    self._changed = threading.Condition()

  def enter(self, helper: Helper) -> None:
    """Records a call. Raises RunFinished if the run has ended.

    Raises ValueError if a newer incarnation of the helper has called.
    """
    with self._changed:
      state = self._states.get(helper[:2])
      if state is None:
        count = self.counts.get(helper.kind, 0)
        raise ValueError(f"there are {count} {helper.kind}s, got number {helper.number}")
      known = state.incarnation
      if helper.incarnation < known:
        raise ValueError(f"{helper} has incarnation {known} now, this is {helper.incarnation}")
      if helper.incarnation > known:
        state = self._states[helper[:2]] = _State(helper.incarnation, present=True)
      state.last_call = self._clock()
    if self.over:
      self.dismiss(helper)
      raise RunFinished("the run has ended")

  def waits(self, helper: Helper) -> None:
    """Records that a helper waits for an answer; a repeated request continues the same wait."""
    with self._changed:
      state = self._states[helper[:2]]
      state.waiting_since = self._clock() if state.waiting_since is None else state.waiting_since

  def served(self, helper: Helper) -> None:
    """Ends a helper's wait, if there was one, and logs its duration."""
    with self._changed:
      state = self._states[helper[:2]]
      since, state.waiting_since = state.waiting_since, None
    if since is not None:
      self._log({names.wait(helper.kind): self._clock() - since})

  def dismiss(self, helper: Helper) -> None:
    """Marks a helper as dismissed: it was answered that no work is left."""
    with self._changed:
      state = self._states[helper[:2]]
      state.present &= state.incarnation != helper.incarnation  # a newer one may have called
      self._changed.notify_all()

  def wait_for_dismissal(self, seconds: float) -> None:
    """Waits until every helper that has called is dismissed, at most `seconds`."""
    with self._changed:
      self._changed.wait_for(
        lambda: not any(state.present for state in self._states.values()), seconds
      )

  def silence(self, kind: Kind, number: int) -> float:
    """Seconds since a helper's last call."""
    return self._clock() - self._states[kind, number].last_call

  def alive(self, kind: Kind) -> int:
    """Number of helpers of this kind that have called recently."""
    since = self._clock() - TIMEOUT
    return sum(w[0] == kind and s.last_call >= since for w, s in self._states.items())

  def summary(self) -> dict[str, float]:
    """Returns the number of live helpers as a metric, for each kind that the unit has."""
    return {names.present(kind): self.alive(kind) for kind, count in self.counts.items() if count}
