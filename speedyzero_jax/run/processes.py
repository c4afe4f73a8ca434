"""Whole runs as processes of launch/multihost.py, several at a time."""

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple

_POLL_SECONDS = 0.5
_LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "multihost.py"


class Place(NamedTuple):
  """A run's share of a machine."""

  variables: dict[str, str]  # of its environment
  cores: list[int]


class Interrupted(Exception):
  """A signal stopped the processes, which have saved."""


class RunProcesses:
  """Processes that train runs. Thread-safe: `train` is called from a thread per run.

  Args:
    places: shares of the machine; one run at a time trains in each.
  """

  def __init__(self, places: Sequence[Place]):
    self.count = len(places)
    self._free: queue.Queue[Place] = queue.Queue()
    for place in places:
      self._free.put(place)
    self._processes: dict[Path, subprocess.Popen] = {}
    self.received: int | None = None  # the first signal

  @property
  def running(self) -> set[Path]:
    """The folders of the runs in training."""
    return set(self._processes)

  @property
  def exit_code(self) -> int:
    """The exit code of shells for the signal received."""
    assert self.received is not None
    return 128 + self.received

  def stop(self, number: int, _frame: object) -> None:
    """A signal handler: all runs save and end, or end at once if repeated; see `train`."""
    self.received = self.received or number
    for process in tuple(self._processes.values()):
      process.send_signal(signal.SIGTERM)

  def train(
    self,
    path: Path,
    new: Sequence[str],
    changes: Sequence[str] = (),
    finished: Callable[[], bool] = lambda: False,
  ) -> int:
    """Trains or resumes a run once there is a place, and returns the launcher's exit code.

    Its output goes to a log beside its folder. The log is locked while the run is in training, and
    waited for: a process outlives a parent that was killed, and another study may have the run.

    Args:
      path: of the run folder.
      new: the launcher's arguments for a run that does not exist yet, but for its folder.
      changes: `key=value` for a new and for a resumed run.
      finished: whether there is nothing left to train; called with the log locked.

    Raises Interrupted after `stop`, and OSError if the process can't be started.
    """
    place = self._free.get()
    try:
      if self.received is None:
        with log_of(path).open("a") as log:
          self._lock(log)
          code = 0 if self.received or finished() else self._call(path, new, changes, place, log)
    finally:
      self._free.put(place)
    if self.received is not None:
      raise Interrupted
    return code

  def _lock(self, log: IO) -> None:
    """Locks the log, until all processes that have inherited it end; gives up after `stop`."""
    if not _locked(log):
      with contextlib.suppress(OSError):  # a closed terminal
        print(f"{log.name}: waiting for the process that writes it", flush=True)
    while self.received is None and not _locked(log):
      time.sleep(_POLL_SECONDS)

  def _call(
    self, path: Path, new: Sequence[str], changes: Sequence[str], place: Place, log: IO
  ) -> int:
    exists = (path / "config.yaml").exists()
    first = ["--resume", str(path)] if exists else [*new, f"run.dir={path}"]
    os.sched_setaffinity(0, place.cores)  # of this thread, inherited by the process
    process = subprocess.Popen(
      [sys.executable, str(_LAUNCHER), *first, *changes],
      env=os.environ | place.variables, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    self._processes[path] = process
    if self.received is not None:
      process.send_signal(signal.SIGTERM)
    try:
      return process.wait()
    finally:
      del self._processes[path]


def _locked(log: IO) -> bool:
  try:
    fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True


def log_of(path: Path) -> Path:
  """The log beside a run folder. Names may have dots."""
  return path.with_name(f"{path.name}.log")
