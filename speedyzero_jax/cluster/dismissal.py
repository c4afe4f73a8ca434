"""Dismissal of workers at the end of a run: tracks those that have not yet heard of it."""

import threading

from speedyzero_jax.cluster.grpc_server import RunOver


class Dismissal:
  """The workers of a unit that have yet to hear that the run is over. Thread-safe."""

  def __init__(self) -> None:
    self.over = False
    self._present: set[str] = set()
    self._changed = threading.Condition()

  def joined(self, worker: str) -> None:
    """A worker has joined."""
    with self._changed:
      self._present.add(worker)

  def dismissed(self, worker: str) -> None:
    """A worker has heard that nothing is left to do."""
    with self._changed:
      self._present.discard(worker)
      self._changed.notify_all()

  def check(self, worker: str) -> None:
    """Raises RunOver for a call after the end of the run."""
    if self.over:
      self.dismissed(worker)
      raise RunOver("the run has ended")

  def wait(self, seconds: float) -> None:
    """Waits until all workers have heard."""
    with self._changed:
      self._changed.wait_for(lambda: not self._present, seconds)


def check_incarnation(known: int, given: int, worker: str) -> None:
  """Raises ValueError for a call of an older, or unknown, incarnation."""
  if given != known:
    raise ValueError(f"{worker} has incarnation {known} now, this is {given}")
