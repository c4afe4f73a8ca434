"""Starts, watches and restarts the processes of a run on this machine. Knows nothing of jax, or of what they do.

Processes are vital (learners: they share collectives, so one that is lost takes all with it) or not (they are started
again alone). None outlives the supervisor, however that ends: `child.py` has how one is started.
"""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from speedyzero_jax.cluster.child import FAILED, STOPS, WRONG_USE, Child, Process

_ECHO = 0.3  # seconds in which a repeated signal is the same one: timeout(1) sends it to the process and to its group
_SETTLE = 0.5  # seconds for which a failed vital process waits for another that may be the cause


class Supervisor:
  """Runs processes until the vital ones have finished. All times are in seconds.

  What a process says goes to `logs/NAME.log`, what is reported to `logs/supervisor.log` too. `logs/supervisor.json`
  holds {pid, children: [{name, pid, started, restarts}]}; pid and started (Unix time) are null while a child is not
  running.

  Attributes:
    restarts: how often each child was started again, by name.

  Args:
    make: gives the children, at least one of them vital, with distinct names; called before the first start with False
      and before each start of all again with True (they should go on from what is saved).
    logs: a folder, made if it is not there.
    report: is told what people should know, mostly single lines. Where a child draws on the same terminal, that may not
      last: an obituary that decides the run's end is told again when nobody is left.
    settled: who lived longer is in order, its deaths are counted anew; less would miss what fails after compiling.
    max_failures: of a process that is not vital, in a row, before the run fails. A failure is a death by an exit code,
      SIGABRT, SIGSEGV and the like, not by SIGKILL or a signal that stops.
    max_restarts: of all processes, in a row after vital ones that failed, before the run fails.
    max_deaths: of whatever cause in a row, of one that is not vital or of vital ones together, before the run fails:
      where memory is short, the kernel sends SIGKILL.
    pause: before a process is started again; doubles with every death in a row up to `longest_pause`.
    healthy: the pause is short again for who lived as long.
    grace: for which the others may go on when all vital ones have ended.
    save_patience: for which vital processes may save after a signal.
    kill_after: between SIGTERM and SIGKILL.
  """

  def __init__(
    self,
    make: Callable[[bool], Sequence[Child]],
    logs: Path,
    report: Callable[[str], None],
    *,
    settled: float = 600.0,
    max_failures: int = 5,
    max_restarts: int = 20,
    max_deaths: int = 60,
    pause: float = 1.0,
    longest_pause: float = 30.0,
    healthy: float = 60.0,
    grace: float = 20.0,
    save_patience: float = 300.0,
    kill_after: float = 5.0,
  ):
    self._make, self._logs, self._tell = make, logs, report
    self._new_streak = lambda max_failures: _Streak(
      settled, max_failures, max_deaths, healthy=healthy, pause=pause, longest_pause=longest_pause
    )
    self._max_failures, self._max_restarts = max_failures, max_restarts
    self._grace, self._save_patience, self._kill_after = grace, save_patience, kill_after
    self.restarts: dict[str, int] = {}
    self._running: dict[str, Process] = {}
    self._signals: list[signal.Signals] = []  # received and not yet acted upon
    self._verdict = ""  # to be told again

  def run(self) -> int:
    """Starts the processes and returns when none is left. Call it once, from the main thread.

    SIGINT, SIGTERM and SIGHUP (unless it is ignored: nohup) are passed to the vital processes, which may save; a second
    one kills everything.

    Returns:
      0 when all vital processes ended with 0; 128 + n when signal n stopped them; the code of a vital process that
      failed; WRONG_USE when another's was that; FAILED when something died too often.

    Raises:
      ValueError: `make` gave no vital child, or two of the same name.
      OSError: the logs can't be written, or processes not be started.
    """
    self._logs.mkdir(parents=True, exist_ok=True)
    with _Inbox() as self._inbox, selectors.DefaultSelector() as self._selector:
      self._selector.register(self._inbox, selectors.EVENT_READ)
      try:
        code = self._run()
      finally:
        self._kill_all()
    if self._verdict:
      self._say(self._verdict)
    return code

  def _run(self) -> int:
    streak = self._new_streak(self._max_restarts + 1)
    self._start_all(resume=False)
    while True:
      outcome = self._watch()
      if isinstance(outcome, int):
        return outcome
      self._kill_all()  # nothing of theirs is needed
      pause = streak.add(outcome)
      if streak.verdict:
        self._decide(outcome.obituary() + streak.verdict)
        return FAILED
      self._report(f"{outcome}; starting all again in {pause:g} s")
      until = time.monotonic() + pause
      while time.monotonic() < until and not self._signals:
        self._wait(until)
      if self._signals:
        return self._stop(self._signals.pop(0))
      self._start_all(resume=True)

  def _watch(self) -> int | Process:
    """Returns the exit code, or the lost vital process for which all must start again."""
    due: list[tuple[float, Child]] = []  # when to start whom again
    streaks = {name: self._new_streak(self._max_failures) for name in self._running}
    while True:
      ended = self._wait(min((at for at, _ in due), default=None))
      if self._signals:
        return self._stop(self._signals.pop(0))
      failed = [process for process in ended if process.child.vital and process.code]
      if failed:
        return self._judge(failed)
      if not self._vital():
        self._end_all(self._grace)
        return 0
      for process in ended:
        if not process.code:
          continue
        streak = streaks[process.child.name]
        pause = streak.add(process)
        if process.code == WRONG_USE or streak.verdict:
          self._decide(process.obituary() + streak.verdict)
          self._stop(signal.SIGTERM)
          return WRONG_USE if process.code == WRONG_USE else FAILED
        self._report(f"{process}; starting it again in {pause:g} s")
        due.append((time.monotonic() + pause, process.child))
      now = time.monotonic()
      for at, child in due:
        if at <= now:
          self._start(child)
      due = [(at, child) for at, child in due if at > now]

  def _judge(self, failed: list[Process]) -> int | Process:
    """What becomes of the run now that vital processes have failed. As `_watch`."""
    # Who loses a peer aborts, or fails, and may be seen before the peer is.
    until = time.monotonic() + _SETTLE
    while (
      time.monotonic() < until
      and not self._signals
      and self._vital()
      and not any(process.was_shot for process in failed)
    ):
      failed += [process for process in self._wait(until) if process.child.vital and process.code]
    cause = min(
      failed, key=lambda process: (not process.was_shot, process.killed_by == signal.SIGABRT)
    )
    if cause.killed_by:
      return cause
    self._decide(cause.obituary())
    if cause.code - 128 in STOPS:  # somebody told it alone to stop
      self._stop(signal.Signals(cause.code - 128))
    else:
      self._end_all(0.0)
    return cause.code

  def _stop(self, number: signal.Signals) -> int:
    """Ends all, the vital ones first: they save. Returns the exit code."""
    vital = self._vital()
    names = ", ".join(process.child.name for process in vital)
    what = (
      f"waiting for {names} to save; a second signal kills" if names else "nothing has to be saved"
    )
    self._report(f"stopping ({number.name}): {what}")
    for process in vital:
      process.send(number)
    self._await(vital, self._save_patience)
    for process in vital:
      if process.running:
        self._report(
          f"{process.child.name} has not ended in {self._save_patience:g} s and is killed"
        )
        process.kill()
    self._end_all(0.0)  # all is saved, and who is left may wait for others that never come
    unsaved = [process for process in vital if process.code not in (0, 128 + number, -number)]
    for process in unsaved:
      self._report(process.obituary())
    return next((process.code for process in unsaved if not process.killed_by), 128 + number)

  def _end_all(self, grace: float) -> None:
    """Ends everything that runs, which has `grace` seconds to do so by itself."""
    self._await(self._running.values(), grace)
    for process in self._running.values():
      process.send(signal.SIGTERM)
    self._await(self._running.values(), self._kill_after)
    self._kill_all()

  def _await(self, processes: Iterable[Process], patience: float) -> None:
    """Waits until these have ended, for at most `patience` seconds; a signal meanwhile kills everything."""
    processes, until = list(processes), time.monotonic() + patience
    while any(process.running for process in processes) and time.monotonic() < until:
      self._wait(until)
      if self._signals:
        self._kill_all()

  def _kill_all(self) -> None:
    for process in self._running.values():
      process.kill()
    while self._running:
      self._wait(None)

  def _start_all(self, resume: bool) -> None:
    children = self._make(resume)
    if len({child.name for child in children}) < len(children) or not any(
      child.vital for child in children
    ):
      raise ValueError("children need distinct names, and one of them must be vital")
    for child in children:
      self._start(child)

  def _start(self, child: Child) -> None:
    process = self._running[child.name] = Process(child, self._logs / f"{child.name}.log")
    self._selector.register(process, selectors.EVENT_READ)
    self.restarts[child.name] = self.restarts.get(child.name, -1) + 1
    self._write_status()

  def _wait(self, until: float | None) -> list[Process]:
    """Waits for the end of a process, for a signal, or until then (monotonic); None: as long as it takes.

    Returns the processes that ended; `_signals` has the signals.
    """
    ended = []
    for key, _ in self._selector.select(
      None if until is None else max(until - time.monotonic(), 0.0)
    ):
      if isinstance(key.fileobj, Process):
        process = key.fileobj
        self._selector.unregister(process)
        del self._running[process.child.name]
        process.bury()
        ended.append(process)
      else:
        self._signals += self._inbox.take()
    if ended:
      self._write_status()
    return ended

  def _decide(self, obituary: str) -> None:
    """Reports what the run ends of: again in the end, unless nobody is left to draw or say anything after it."""
    self._report(obituary)
    self._verdict = obituary if self._running else ""

  def _report(self, text: str) -> None:
    # A full disk and a closed terminal are no reason to stop: there is more to do than to say so.
    with contextlib.suppress(OSError), (self._logs / "supervisor.log").open("a") as log:
      log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
    self._say(text)

  def _say(self, text: str) -> None:
    with contextlib.suppress(OSError):
      self._tell(text)

  def _vital(self) -> list[Process]:
    return [process for process in self._running.values() if process.child.vital]

  def _write_status(self) -> None:
    children = []
    for name, restarts in self.restarts.items():
      process = self._running.get(name)
      pid, started = (process.pid, process.started) if process else (None, None)
      children.append({"name": name, "pid": pid, "started": started, "restarts": restarts})
    path = self._logs / "supervisor.json"
    new = path.with_suffix(".new")
    with contextlib.suppress(OSError):  # of a full disk, whose owners can say so themselves
      new.write_text(json.dumps({"pid": os.getpid(), "children": children}, indent=2) + "\n")
      new.replace(path)


class _Streak:
  """The deaths of one in a row: whether they are too many, and how long to wait after each. Arguments as above."""

  verdict = ""  # once they are too many: why

  def __init__(
    self,
    settled: float,
    max_failures: int,
    max_deaths: int,
    *,
    healthy: float,
    pause: float,
    longest_pause: float,
  ):
    self._settled, self._max_failures, self._max_deaths = settled, max_failures, max_deaths
    self._healthy, self._first, self._longest = healthy, pause, longest_pause
    self._next = pause
    self._deaths = self._failures = 0

  def add(self, process: Process) -> float:
    """Counts a death, returns the pause in seconds."""
    if process.lived >= self._settled:
      self._deaths = self._failures = 0
    else:
      self._deaths += 1
      self._failures = self._failures + 1 if process.own_doing else 0
    if self._failures >= self._max_failures:
      self.verdict = f"\nIt was the last of {self._failures} failures in a row."
    elif self._deaths >= self._max_deaths:
      self.verdict = f"\nIt was the last of {self._deaths} deaths in a row, each after less than {self._settled:g} s."
    pause = self._first if process.lived >= self._healthy else self._next
    self._next = min(2 * pause, self._longest)
    return pause


class _Inbox:
  """Inside this context, the signals that stop a run do nothing but arrive here; readable when one has."""

  def __enter__(self) -> "_Inbox":
    self._out, self._in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    self._last = -_ECHO
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    self._before = {number: signal.signal(number, _do_nothing) for number in set(STOPS) - ignored}
    self._fd_before = signal.set_wakeup_fd(self._in)
    return self

  def __exit__(self, *_: object) -> None:
    signal.set_wakeup_fd(self._fd_before)
    for number, handler in self._before.items():
      signal.signal(number, handler)
    os.close(self._out)
    os.close(self._in)

  def fileno(self) -> int:
    return self._out

  def take(self) -> list[signal.Signals]:
    """What has arrived, without echoes."""
    taken = []
    for number in os.read(self._out, 4096):
      now = time.monotonic()
      if number in STOPS and now - self._last > _ECHO:
        taken.append(signal.Signals(number))
        self._last = now
    return taken


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
  """A handler that exists so that Python writes the number into the pipe."""
