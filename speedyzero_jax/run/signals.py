"""Handling of the signals that stop a run: SIGINT, SIGTERM, and SIGHUP of a closed terminal."""

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Seconds within which a SIGINT is the first signal, sent to the process and to its group.
_DUPLICATE_SECONDS = 1.0


class Signals(contextlib.ExitStack):
  """Context manager in which the first signal calls `on_stop` and a later SIGINT ends the process.

  Other signals may be repeated, as schedulers do while a process saves.

  `on_stop` runs in a thread of its own, as the interrupted code may hold locks that it, or a thread
  for which it waits, needs. If SIGHUP is ignored (nohup), it stays ignored.
  """

  def __init__(self) -> None:
    super().__init__()
    self.received: int | None = None
    self.on_stop: Callable[[], None] = lambda: None
    self._when = 0.0
    self._stops: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its `put` is reentrant

  def __enter__(self) -> "Signals":
    threading.Thread(target=self._wait, name="signals", daemon=True).start()
    self.callback(self._stops.put, False)
    self.enter_context(handling(self._stop))
    return self

  def _wait(self) -> None:
    if self._stops.get():
      self.on_stop()

  def _stop(self, number: int, _frame: object) -> None:
    if self.received is None:
      self.received, self._when = number, time.monotonic()
      self._stops.put(True)
    elif number == signal.SIGINT and time.monotonic() - self._when > _DUPLICATE_SECONDS:
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)

  @staticmethod
  def at_once() -> contextlib.AbstractContextManager[None]:
    """Context manager in which signals end the process at once, as there is nothing to save."""
    return handling(signal.SIG_DFL)

  @property
  def exit_code(self) -> int:
    """The exit code for the received signal, as shells report it."""
    assert self.received is not None
    return 128 + self.received


@contextlib.contextmanager
def handling(handler: Any) -> Iterator[None]:
  """Context manager that sets `handler`, as for `signal.signal`, for signals that stop a run."""
  ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
  before = {number: signal.signal(number, handler) for number in {*STOP_SIGNALS} - ignored}
  try:
    yield
  finally:
    for number, former in before.items():
      signal.signal(number, former)
