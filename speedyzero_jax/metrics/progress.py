"""Progress display: a live screen on a terminal, a line now and then anywhere else.

A closed pipe makes it quiet instead of failing; a killed process leaves its terminal usable.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.board import Board

TERMINAL = "SPEEDYZERO_TERMINAL"  # variable: open descriptor to show on, where stdout is a log
PLAIN_INTERVAL = 10.0  # seconds between plain lines
REFRESHES_PER_SECOND = 2  # of the live screen


class Display:
  """The progress of a run on one or more streams. A context manager; thread-safe.

  Args:
    config: of the run.
    folder: of the run.
    streams: where to show it, by default standard output and what `TERMINAL` names. Capable
      terminals outside CI get a live screen, others plain lines.
    clock: seconds, from any origin.
  """

  def __init__(
    self,
    config: Config,
    folder: str,
    streams: Sequence[TextIO] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._board, self._clock = Board(config, folder), clock
    self._lock = threading.Lock()
    self._live: list[Live] = []
    self._plain: list[Console] = []
    for stream in _default_streams() if streams is None else streams:
      console = Console(file=cast(TextIO, _QuietStream(stream)), highlight=False)
      if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        self._live.append(self._screen(console, stream is sys.stdout))
      else:
        self._plain.append(console)
    self._next_line = -math.inf
    self._unshown = False

  def __enter__(self) -> "Display":
    for live in self._live:
      live.start(refresh=True)
      live.console.show_cursor(True)  # rich hides it, and a killed process could not bring it back
    self._print(self._plain, f"{self._board.title}  {self._board.folder}")
    return self

  def __exit__(self, *unused: object) -> None:
    for live in self._live:
      live.stop()
    if self._unshown:
      self._print(self._plain, self._board.line())

  def update(self, values: Mapping[str, Any]) -> None:
    """Takes new values; others stay. A plain line follows if one is due and there is progress."""
    with self._lock:
      before, now = self._board.progress(), self._clock()
      self._board.update(values)
      self._unshown = now < self._next_line or self._board.progress() == before
      if not self._unshown:
        self._next_line = now + PLAIN_INTERVAL
        self._print(self._plain, self._board.line())

  def message(self, text: str) -> None:
    """Shows an event at once."""
    self._print([*self._plain, *(live.console for live in self._live)], text)

  def _print(self, consoles: Sequence[Console], text: str) -> None:
    for console in consoles:
      console.print(text, markup=False, soft_wrap=True)

  def _screen(self, console: Console, owns_stdout: bool) -> Live:
    def render() -> RenderableType:
      with self._lock:
        return self._board.screen()

    return Live(
      get_renderable=render,
      console=console,
      refresh_per_second=REFRESHES_PER_SECOND,
      redirect_stdout=owns_stdout,  # so that prints and warnings scroll by above it too
      redirect_stderr=owns_stdout,
    )


def _default_streams() -> list[TextIO]:
  terminal = os.environ.get(TERMINAL)
  return [sys.stdout, *([os.fdopen(int(terminal), "w", closefd=False)] if terminal else [])]


class _QuietStream:
  """A text stream that falls silent, instead of raising, once it cannot be written."""

  def __init__(self, stream: TextIO):
    self._stream = stream
    self._broken = False

  def __getattr__(self, name: str) -> Any:  # encoding, isatty and fileno, which rich asks for
    return getattr(self._stream, name)

  def write(self, text: str) -> int:
    encoding = getattr(self._stream, "encoding", None) or "utf-8"
    self._attempt(lambda: self._stream.write(text.encode(encoding, "replace").decode(encoding)))
    return len(text)

  def flush(self) -> None:
    self._attempt(self._stream.flush)

  def _attempt(self, call: Callable[[], object]) -> None:
    if not self._broken:
      try:
        call()
      except (OSError, ValueError):  # ValueError: closed
        self._broken = True
