"""Training runs as subprocesses of launch/multihost.py, several at a time."""

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

from speedyzero_jax.run import run_dir

_POLL_SECONDS = 0.5
ALONE = "SPEEDYZERO_ALONE"  # variable of processes that must not join others of a cluster
_LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "multihost.py"


class MachineShare(NamedTuple):
  """The part of a machine that trains one run at a time."""

  variables: dict[str, str]  # environment variables
  cores: list[int]


class Interrupted(Exception):
  """A signal stopped the runs; they saved checkpoints, unless a second SIGINT killed them.

  The argument is the signal's number.
  """


class RunProcesses:
  """Trains runs in subprocesses, one in each share at a time. Thread-safe, for a thread per run."""

  def __init__(self, shares: Sequence[MachineShare]):
    self.count = len(shares)
    self._free: queue.Queue[MachineShare] = queue.Queue()
    for share in shares:
      self._free.put(share)
    self._processes: dict[Path, subprocess.Popen] = {}
    self.received: int | None = None  # the first signal

  @property
  def running(self) -> set[Path]:
    """Folders of the runs in training."""
    return set(self._processes)

  def stop(self, number: int, _frame: object) -> None:
    """Signal handler: all runs save and stop; a later SIGINT stops them without saving."""
    sent = signal.SIGTERM if self.received is None else number
    self.received = self.received or number
    for process in tuple(self._processes.values()):
      process.send_signal(sent)

  def train(
    self,
    path: Path,
    new: Sequence[str],
    changes: Sequence[str] = (),
    finished: Callable[[], bool] = lambda: False,
  ) -> int:
    """Trains or resumes a run once a share is free, and returns the launcher's exit code.

    Output goes to a log beside the run folder `path`. This call waits for the locks of the log and
    of the folder: another study or a user may train the run, or a process that has outlived its
    killed parent. With the log's lock, `finished` tells whether the run is trained. The launcher
    gets the arguments `new` for a new run, and the overrides `changes` for any.

    Raises Interrupted after `stop`, and OSError if the process can't be started.
    """
    share = self._free.get()
    try:
      if self.received is None:
        with log_of(path).open("a") as log:
          self._wait(path, log)
          code = 0 if self.received or finished() else self._call(path, new, changes, share, log)
    finally:
      self._free.put(share)
    if self.received is not None:
      raise Interrupted(self.received)
    return code

  def _wait(self, path: Path, log: IO) -> None:
    """Locks the log and waits until the run folder is not in use; gives up on `stop`."""

    def free() -> bool:
      return _locked(log) and not run_dir.in_use(path)

    if not free():
      with contextlib.suppress(OSError):  # a closed terminal
        print(f"{path}: in use by another process; waiting for it to finish", flush=True)
    while self.received is None and not free():
      time.sleep(_POLL_SECONDS)

  def _call(
    self, path: Path, new: Sequence[str], changes: Sequence[str], share: MachineShare, log: IO
  ) -> int:
    exists = (path / "config.yaml").exists()
    first = ["--resume", str(path)] if exists else [*new, f"run.dir={path}"]
    os.sched_setaffinity(0, share.cores)  # of this thread; the process inherits it
    process = subprocess.Popen(
      [sys.executable, str(_LAUNCHER), *first, *changes], stdout=log, stderr=log,
      env=os.environ | share.variables | {ALONE: "1"}, start_new_session=True,
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
  """Path of the log beside a run folder, whose name may contain dots."""
  return path.with_name(f"{path.name}.log")
