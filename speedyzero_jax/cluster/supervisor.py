"""Supervisor of a run's processes on this machine: starts, watches and restarts them.

Vital processes (learners) share collectives, so if one dies, all processes are restarted. An actor
or refresher is restarted alone; `ActorService.join` then truncates the lost actor's episodes and
releases its grant. No process outlives the supervisor, however the supervisor ends.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from speedyzero_jax.cluster.child import Child, Process
from speedyzero_jax.run.signals import STOP_SIGNALS, handling
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR
from speedyzero_jax.system.files import write_atomically

# Seconds within which a repeated signal is the same signal: timeout(1) signals both the process and
# its group.
_DUPLICATE_SECONDS = 0.3
_CAUSE_SECONDS = 0.5  # in which another vital process may turn out to be the cause of a failure
_ALL = ""  # stands for all children, in place of a child's name


@dataclasses.dataclass(frozen=True)
class Limits:
  """Restart limits, and timeouts in seconds.

  A death counts as a failure if it is not caused from outside: a nonzero exit code, SIGABRT,
  SIGSEGV and the like, but not SIGKILL (as from the out-of-memory killer) or a stop signal.
  """

  # Consecutive failures or deaths that end the run, of a non-vital process or of all vital ones:
  max_failures: int = 5
  max_deaths: int = 60
  # Uptime that resets counts and pause, of vital processes only after progress; longer than
  # compilation takes:
  reset_after: float = 600.0
  pause: float = 1.0  # before a restart; doubles with every consecutive death
  longest_pause: float = 30.0
  grace: float = 20.0  # for the other processes to end once all vital ones have finished
  save_patience: float = 300.0  # for vital processes to save after a signal
  kill_after: float = 5.0  # between SIGTERM and SIGKILL


class Supervisor:
  """Runs processes with distinct names until the vital ones (one or more) have finished.

  `report` shows a text to the user. `progress` returns a number that is higher for a later state
  from which restarted vital processes continue, such as the step of their last checkpoint. A
  child's output goes to `logs/NAME.log`, reports also to `logs/supervisor.log`.
  `logs/supervisor.json` holds
  {pid, children: [{name, pid, started, restarts}]}; pid and started (Unix time) are null while a
  child is not running. The attribute `restarts` is the number of restarts of each child, by name.
  """

  def __init__(
    self,
    children: Sequence[Child],
    logs: Path,
    report: Callable[[str], None],
    limits: Limits | None = None,
    progress: Callable[[], int] | None = None,
  ):
    self._children = {child.name: child for child in children}
    self._logs, self._show = logs, report
    self._limits, self._progress = limits or Limits(), progress
    self.restarts: dict[str, int] = {}
    self._running: dict[str, Process] = {}
    self._signals: list[signal.Signals] = []  # received and not yet handled
    self._signaled = -_DUPLICATE_SECONDS  # when the last one was received

  def run(self) -> int:
    """Starts the processes and returns when all have ended. Call it once, from the main thread.

    SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup) are passed to the vital processes,
    which may save; a later SIGINT kills everything.

    Returns 0 if all vital processes ended with 0; 128 + n if signal n stopped them; the exit code
    of a vital process that failed; USAGE_ERROR if another process exited with it; FAILED if
    processes died too often, or were killed because they did not save in time. Raises OSError if
    logs can't be written or processes can't be started.
    """
    self._logs.mkdir(parents=True, exist_ok=True)
    with _signal_pipe() as pipe, selectors.DefaultSelector() as self._selector:
      self._selector.register(pipe, selectors.EVENT_READ)
      try:
        return self._run()
      except OSError as error:  # a process can't be restarted; let learners save
        if self._running:
          self._report(f"error: {error}")
          self._stop(signal.SIGTERM)
        raise
      finally:
        self._kill_all()

  def _run(self) -> int:
    streaks = {_ALL: _Streak(self._limits, self._progress)}
    due = {_ALL: 0.0}  # pending starts: times by name of the child, or _ALL
    while not self._signals:
      now = time.monotonic()
      for name in [name for name, at in due.items() if at <= now]:
        del due[name]
        for child in self._children.values() if name == _ALL else [self._children[name]]:
          self._start(child)
        if name == _ALL:
          streaks = {_ALL: streaks[_ALL]}
      failed = [process for process in self._wait(min(due.values(), default=None)) if process.code]
      if self._signals:
        break
      if vital := [process for process in failed if process.child.vital]:
        cause = self._cause(vital)
        if not cause.end_signal:
          return self._fail(cause)
        self._kill_all()
        failed, due = [cause], {}
      elif not self._vital() and _ALL not in due:
        self._await(self._running.values(), self._limits.grace)
        self._end(self._running.values(), signal.SIGTERM, self._limits.kill_after)
        return 0
      for process in failed:
        name = _ALL if process.child.vital else process.child.name
        streak = streaks.setdefault(name, _Streak(self._limits))
        pause, verdict = streak.add(process)
        if verdict or process.code == USAGE_ERROR:
          self._report(process.exit_report() + verdict)
          if self._running:
            self._stop(signal.SIGTERM)
          return USAGE_ERROR if process.code == USAGE_ERROR else FAILED
        self._report(f"{process}; restarting {name or 'all processes'} in {pause:g} s")
        due[name] = time.monotonic() + pause
    return self._stop(self._signals.pop(0))

  def _cause(self, failed: list[Process]) -> Process:
    """Finds the vital process that made others fail, among those that failed or soon will."""
    # A process that loses a peer aborts or exits, which may be noticed before the peer's end.
    until = time.monotonic() + _CAUSE_SECONDS
    while time.monotonic() < until and self._vital() and not self._signals:
      if any(process.killed_by_signal for process in failed):
        break
      failed += [process for process in self._wait(until) if process.child.vital and process.code]
    return min(failed, key=lambda p: (not p.killed_by_signal, p.end_signal == signal.SIGABRT))

  def _fail(self, cause: Process) -> int:
    """Ends the run after a vital process exited with an error. Returns its code."""
    self._report(cause.exit_report())
    if cause.code - 128 in STOP_SIGNALS:  # only it got the signal: let the others save as well
      return self._stop(signal.Signals(cause.code - 128))
    self._end(self._running.values(), signal.SIGTERM, self._limits.kill_after)
    return cause.code

  def _stop(self, number: signal.Signals) -> int:
    """Stops all processes, vital ones first so that they can save. Returns the exit code."""
    vital = self._vital()
    names = ", ".join(process.child.name for process in vital)
    waiting = f": waiting for {names} to save; another SIGINT kills them" if names else ""
    self._report(f"stopping ({number.name}){waiting}")
    self._end(vital, number, self._limits.save_patience)
    self._end(self._running.values(), signal.SIGTERM, self._limits.kill_after)
    unsaved = [process for process in vital if process.code not in (0, 128 + number, -number)]
    for process in unsaved:
      self._report(process.exit_report())
    by_user = not unsaved or signal.SIGINT in self._signals  # which kills all that still save
    code = 128 + number if by_user else FAILED
    return next((process.code for process in unsaved if not process.end_signal), code)

  def _end(self, processes: Iterable[Process], number: signal.Signals, patience: float) -> None:
    """Sends processes a signal, waits up to `patience` seconds for their end, kills the rest."""
    processes = list(processes)
    for process in processes:
      process.send(number)
    self._await(processes, patience)
    for process in processes:
      if process.running:
        self._report(f"{process.child.name} has not ended in {patience:g} s and is killed")
        process.kill()
    while any(process.running for process in processes):
      self._wait(None)

  def _await(self, processes: Iterable[Process], patience: float) -> None:
    """Waits up to `patience` seconds for processes to end.

    Kills everything on SIGINT, or on any signal if no vital process is running.
    """
    processes, until = list(processes), time.monotonic() + patience
    while any(process.running for process in processes) and time.monotonic() < until:
      self._wait(until)
      if signal.SIGINT in self._signals or (self._signals and not self._vital()):
        self._kill_all()

  def _kill_all(self) -> None:
    for process in self._running.values():
      process.kill()
    while self._running:
      self._wait(None)

  def _start(self, child: Child) -> None:
    process = self._running[child.name] = Process(child, self._logs / f"{child.name}.log")
    self._selector.register(process, selectors.EVENT_READ)
    self.restarts[child.name] = self.restarts.get(child.name, -1) + 1
    self._write_status()

  def _wait(self, until: float | None) -> list[Process]:
    """Waits for an event, at most until `until` (monotonic). Returns the processes that ended."""
    ended = []
    timeout = None if until is None else max(until - time.monotonic(), 0.0)
    for key, _ in self._selector.select(timeout):
      process = key.fileobj
      if isinstance(process, Process):
        self._selector.unregister(process)
        del self._running[process.child.name]
        process.reap()
        ended.append(process)
        continue
      for number in os.read(key.fd, 4096):
        now = time.monotonic()
        if number in STOP_SIGNALS and now - self._signaled > _DUPLICATE_SECONDS:
          self._signals.append(signal.Signals(number))
          self._signaled = now
    if ended:
      self._write_status()
    return ended

  def _report(self, text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"
    with contextlib.suppress(OSError), (self._logs / "supervisor.log").open("ab") as log:
      log.write(line.encode("utf-8", "backslashreplace"))
    with contextlib.suppress(OSError):  # a closed terminal must not stop the supervisor
      try:
        self._show(text)
      except UnicodeEncodeError:  # the terminal's encoding lacks a character
        self._show(ascii(text))

  def _vital(self) -> list[Process]:
    return [process for process in self._running.values() if process.child.vital]

  def _write_status(self) -> None:
    children = []
    for name, restarts in self.restarts.items():
      process = self._running.get(name)
      pid, started = (process.pid, process.started) if process else (None, None)
      children.append({"name": name, "pid": pid, "started": started, "restarts": restarts})
    status = json.dumps({"pid": os.getpid(), "children": children}, indent=2)
    with contextlib.suppress(OSError):  # the children report a full disk
      write_atomically(self._logs / "supervisor.json", status + "\n")


class _Streak:
  """Consecutive deaths of one process, or of the vital ones together."""

  def __init__(self, limits: Limits, progress: Callable[[], int] | None = None):
    self._limits, self._progress, self._reached = limits, progress, -1
    self._advanced()
    self._deaths = self._failures = 0

  def add(self, process: Process) -> tuple[float, str]:
    """Counts a death. Returns the pause in seconds and, if a limit is reached, a line about it."""
    limits, verdict = self._limits, ""
    if self._advanced() and process.uptime >= limits.reset_after:
      self._deaths = self._failures = 0
    else:
      self._deaths += 1
      self._failures = self._failures + 1 if process.failed_by_itself else 0
    if self._failures >= limits.max_failures:
      verdict = f"\nGiving up after {self._failures} consecutive failures."
    elif self._deaths >= limits.max_deaths:
      each = f"each after less than {limits.reset_after:g} s"
      each += " or without progress" if self._progress else ""
      verdict = f"\nGiving up after {self._deaths} consecutive deaths, {each}."
    doublings = max(self._deaths - 1, 0)
    return min(limits.pause * 2**doublings, limits.longest_pause), verdict

  def _advanced(self) -> bool:
    """Whether there has been progress since the last call; true if it is unknown."""
    before = self._reached
    with contextlib.suppress(OSError):
      self._reached = max(before, self._progress() if self._progress else before + 1)
    return self._reached > before


@contextlib.contextmanager
def _signal_pipe() -> Iterator[int]:
  """Yields a pipe that receives the numbers of stop signals, which have no other effect."""
  out, into = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
  wakeup = signal.set_wakeup_fd(into)
  try:
    with handling(lambda *_: None):
      yield out
  finally:
    signal.set_wakeup_fd(wakeup)
    os.close(out)
    os.close(into)
