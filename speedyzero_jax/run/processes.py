"""Whole runs as processes of launch/multihost.py, several at a time."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from speedyzero_jax.run import run_dir

WRONG_USE = 2  # exit code of the launcher
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
    self._stopping = threading.Event()

  @property
  def running(self) -> set[Path]:
    """The folders of the runs in training."""
    return set(self._processes)

  def stop(self) -> None:
    """Interrupts all runs, which save and end; `train` raises Interrupted. For signal handlers."""
    self._stopping.set()
    for process in tuple(self._processes.values()):
      process.send_signal(signal.SIGTERM)

  def train(self, path: Path, new: Sequence[str], changes: Sequence[str] = ()) -> int:
    """Trains or resumes a run once there is a place, and returns the launcher's exit code.

    Its output goes to a log beside its folder.

    Args:
      path: of the run folder.
      new: the launcher's arguments for a run that does not exist yet, but for its folder.
      changes: `key=value` for a new and for a resumed run.

    Raises Interrupted after `stop`.
    """
    place = self._free.get()
    try:
      code = self._call(path, new, changes, place)
    finally:
      self._free.put(place)
    if self._stopping.is_set():
      raise Interrupted
    return code

  def _call(self, path: Path, new: Sequence[str], changes: Sequence[str], place: Place) -> int:
    if self._stopping.is_set():
      return -signal.SIGTERM
    if path.exists():  # a process that a killed parent left behind
      run_dir.wait_until_free(path)
    exists = (path / "config.yaml").exists()
    first = ["--resume", str(path)] if exists else [*new, f"run.dir={path}"]
    with log_of(path).open("a") as log:
      process = subprocess.Popen(
        ["taskset", "-c", ",".join(map(str, place.cores)), sys.executable, str(_LAUNCHER), *first,
         *changes],
        env=os.environ | place.variables, stdout=log, stderr=log, start_new_session=True,
      )  # fmt: skip
      self._processes[path] = process
      if self._stopping.is_set():
        process.send_signal(signal.SIGTERM)
      try:
        return process.wait()
      finally:
        del self._processes[path]


def log_of(path: Path) -> Path:
  """The log beside a run folder. Names may have dots."""
  return path.with_name(f"{path.name}.log")
