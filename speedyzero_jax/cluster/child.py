"""A child process of the supervisor: its start, its signals and its exit report."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from speedyzero_jax.run.signals import STOP_SIGNALS
from speedyzero_jax.system.exit_codes import FAILED

_TAIL_LINES, _TAIL_BYTES = 20, 1 << 16  # how much of a log an exit report shows
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def _die_with(supervisor: int) -> None:
  """Makes the kernel kill the calling process when its parent dies."""
  if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != supervisor:
    os._exit(FAILED)  # prctl failed, or the parent died before it took effect


class Child(NamedTuple):
  """A process to start."""

  name: str  # unique among the children, e.g. actor-0.1
  command: list[str]
  env: Mapping[str, str]  # on top of the supervisor's environment
  vital: bool  # all children restart if it dies; the run ends when all vital ones have finished
  files: tuple[int, ...] = ()  # file descriptors to inherit, with the same numbers


class Process:
  """A started child, whose output is appended to `log`. Raises OSError if it can't be started.

  It leads its own process group, so Ctrl-C in a terminal does not reach it directly. The kernel
  kills it when the supervisor dies.
  """

  running = True
  # Set by `reap`:
  code = 0  # exit code; -n: killed by signal n
  end_signal = 0  # signal that killed it; 0 if it exited by itself
  uptime = 0.0  # seconds

  def __init__(self, child: Child, log: Path):
    self.child, self.log, self.started = child, log, time.time()
    self._begin = time.monotonic()
    with log.open("ab", buffering=0) as out:
      now = time.strftime("%Y-%m-%d %H:%M:%S")
      with contextlib.suppress(OSError):  # a full disk
        out.write(f"--- {now}: {shlex.join(child.command)}\n".encode())
      self._process = subprocess.Popen(
        child.command,
        preexec_fn=partial(_die_with, os.getpid()),  # one system call, no locks
        env=os.environ | child.env,
        stdin=subprocess.DEVNULL,  # reading from the terminal in the background would stop it
        stdout=out,
        stderr=subprocess.STDOUT,
        pass_fds=child.files,
        process_group=0,
      )
    self.pid = self._process.pid
    self._pidfd = os.pidfd_open(self.pid)

  def fileno(self) -> int:
    """A descriptor that is readable once the process has ended."""
    return self._pidfd

  def send(self, number: signal.Signals) -> None:
    """Sends a signal to the process, not to its group."""
    signal.pidfd_send_signal(self._pidfd, number)

  def kill(self) -> None:
    """Kills its process group. Do not call it after `reap`, as the id may be reused by then."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)

  def reap(self) -> None:
    """Kills the rest of an ended process' group; sets `code`, `end_signal` and `uptime`."""
    self.kill()
    self.code, self.running = self._process.wait(), False
    self.uptime = time.monotonic() - self._begin
    os.close(self._pidfd)
    self.end_signal = max(-self.code, 0)

  @property
  def failed_by_itself(self) -> bool:
    """Whether it failed by itself, not by SIGKILL or a stop signal (caught or not)."""
    number = self.end_signal or self.code - 128  # the code of a run that a signal has stopped
    return number not in (signal.SIGKILL, *STOP_SIGNALS)

  @property
  def killed_by_signal(self) -> bool:
    """Whether a signal ended it; not SIGABRT, which may follow the death of another process."""
    return self.end_signal not in (0, signal.SIGABRT)

  def exit_report(self) -> str:
    """Describes how it ended, with the last lines of its log."""
    tail = []
    with contextlib.suppress(OSError), self.log.open("rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
      tail = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"{self}; the end of {self.log}:", *(f"  {line}" for line in tail)])

  def __str__(self) -> str:
    name = _SIGNAL_NAMES.get(self.end_signal, f"signal {self.end_signal}")
    how = f"was killed by {name}" if self.end_signal else f"exited with code {self.code}"
    return f"{self.child.name} {how} after {self.uptime:.0f} s"
