"""A process that a supervisor starts, and its end. Knows nothing of why it is started, or of what then happens.

It never outlives the supervisor, however that ends: it is started as `python child.py ...`, which asks the kernel for
that and then turns into the command. So this file imports nothing of ours.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FAILED, WRONG_USE = 1, 2  # exit codes, of processes and of the supervisor
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask to end

_TAIL_LINES, _TAIL_BYTES = 20, 1 << 16  # how much of a log is shown
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Child(NamedTuple):
  """A process to start: its name, e.g. actor-3; command; variables on top of this environment; whether it is vital;
  open files that it inherits under the same numbers."""

  name: str
  command: list[str]
  env: Mapping[str, str]
  vital: bool
  files: tuple[int, ...] = ()


class Process:
  """A started child. It leads a process group of its own, so that a terminal's Ctrl-C reaches it only through us.

  Args:
    child: what to start.
    log: a file that its output is appended to.

  Raises:
    OSError: the log can't be written, or the process not be started.
  """

  running = True
  code = 0  # once it has ended; -n: killed by signal n
  lived = 0.0  # seconds, likewise

  def __init__(self, child: Child, log: Path):
    self.child, self.log, self.started = child, log, time.time()
    self._begin = time.monotonic()
    bootstrap = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
    with log.open("ab") as out:
      self._process = subprocess.Popen(
        bootstrap + child.command,
        env=os.environ | child.env,
        stdin=subprocess.DEVNULL,  # reading a terminal from the background would stop it
        stdout=out,
        stderr=subprocess.STDOUT,
        pass_fds=child.files,
        process_group=0,
      )
    self.pid = self._process.pid
    self._pidfd = os.pidfd_open(self.pid)

  def fileno(self) -> int:
    """Readable once the process has ended."""
    return self._pidfd

  def send(self, number: signal.Signals) -> None:
    """To the process alone: what else is in its group is its own business."""
    signal.pidfd_send_signal(self._pidfd, number)

  def kill(self) -> None:
    """Kills its whole group. Only before `bury`: until then its number is nobody else's."""
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)

  def bury(self) -> None:
    """After its end: kills what it left behind, sets `code` and `lived`."""
    self.kill()
    self.code, self.running = self._process.wait(), False
    self.lived = time.monotonic() - self._begin
    os.close(self._pidfd)

  @property
  def killed_by(self) -> int | None:
    """The signal that ended it, also where a shell reports that; exits after catching one that stops don't count."""
    if self.code < 0:
      return -self.code
    return self.code - 128 if 128 < self.code <= 192 and self.code - 128 not in STOPS else None

  @property
  def own_doing(self) -> bool:
    """Whether it failed by itself: not by SIGKILL, nor by a signal that stops, also if it caught that and exited."""
    return (-self.code if self.code < 0 else self.code - 128) not in (signal.SIGKILL, *STOPS)

  @property
  def was_shot(self) -> bool:
    """Whether a signal ended it; not an abort, which may follow another's death."""
    return self.killed_by not in (None, signal.SIGABRT)

  def obituary(self) -> str:
    """How it ended, with the last lines of its log."""
    lines = "\n".join(f"  {line}" for line in _tail(self.log))
    return f"{self}; the end of {self.log}:\n{lines}"

  def __str__(self) -> str:
    """How it ended."""
    if self.code < 0:
      how = f"was killed by {_signal_name(-self.code)}"
    else:
      how = f"exited with code {self.code}" + (
        f" ({_signal_name(self.code - 128)})" if self.killed_by else ""
      )
    return f"{self.child.name} {how} after {self.lived:.0f} s"


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:
    return f"signal {number}"


def _tail(path: Path) -> list[str]:
  with path.open("rb") as file:
    file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
    return file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]


def _become(supervisor: int, command: list[str]) -> int:
  """In the new process: binds its life to the supervisor's, then turns into the command. Returns only if it can't."""
  if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
    print(f"error: prctl: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
    return FAILED
  if os.getppid() != supervisor:  # it died before that took effect
    return FAILED
  print(
    f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}: {shlex.join(command)}", flush=True
  )
  try:
    os.execvp(command[0], command)
  except OSError as error:
    print(f"error: can't run {command[0]}: {error.strerror}", file=sys.stderr)
    return WRONG_USE


if __name__ == "__main__":
  sys.exit(_become(int(sys.argv[1]), sys.argv[2:]))
