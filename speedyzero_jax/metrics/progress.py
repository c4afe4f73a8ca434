"""Shows a run's progress: one screen that renews itself on a terminal, a line now and then anywhere else.

Showing must never stop training: a closed pipe makes a display quiet, and a killed process leaves its terminal usable.
`board.py` has what is shown.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO, cast

from rich.console import Console, RenderableType
from rich.live import Live

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.board import Board, Header

TERMINAL = "SPEEDYZERO_TERMINAL"  # variable: number of an open file to show on, where standard output is a log
PLAIN_INTERVAL = 10.0  # seconds between plain lines
REFRESHES_PER_SECOND = 2  # of the live screen


class Display:
  """Where progress is shown. This one shows nothing; `make_display` chooses. Thread-safe, and no method raises for
  anything the terminal does."""

  def __enter__(self) -> "Display":
    return self

  def __exit__(self, *unused: object) -> None:
    pass

  def update(self, values: Mapping[str, Any]) -> None:
    """Takes new values, such as the line `Recorder.write` returns. Metrics not among them keep their last value."""

  def refresh(self, values: Mapping[str, Any]) -> None:
    """The same between lines, when there may be nothing new that is worth a line."""

  def message(self, text: str) -> None:
    """Shows an event at once: a checkpoint, an evaluation, a lost actor."""


def make_display(
  header: Header,
  *,
  env_steps_total: int,
  learner_steps_total: int,
  actors_total: int = 0,
  reanalysers_total: int = 0,
  stream: TextIO | None = None,
  force: Literal["auto", "live", "plain", "off"] = "auto",
  clock: Callable[[], float] = time.monotonic,
) -> Display:
  """A display, to be used as a context manager.

  Args:
    header: what the run is called.
    env_steps_total: agent steps at which its bar is full.
    learner_steps_total: learner steps at which its bar is full.
    actors_total: processes that should be there.
    reanalysers_total: likewise.
    stream: where to show it; None is standard output, and what `TERMINAL` names, if it does.
    force: `auto` is live on a capable terminal outside CI and plain elsewhere.
    clock: seconds, from any origin.

  Raises:
    ValueError: `force` is none of these.
  """
  if force not in ("auto", "live", "plain", "off"):
    raise ValueError(f"force is {force!r}, not one of auto, live, plain, off")
  if force == "off":
    return Display()
  totals = {
    names.ENV_STEPS: env_steps_total,
    names.STEP: learner_steps_total,
    names.PRESENT_ACTORS: actors_total,
    names.PRESENT_REANALYSERS: reanalysers_total,
  }

  def on(stream: TextIO) -> Display:
    live = force == "live" or (force == "auto" and _can_redraw(stream))
    return (_LiveDisplay if live else _PlainDisplay)(Board(header, totals, clock), stream)

  terminal = os.environ.get(TERMINAL) if stream is None else None
  displays = [on(sys.stdout if stream is None else stream)]
  if terminal is not None:
    displays.append(on(os.fdopen(int(terminal), "w", closefd=False)))
  return displays[0] if len(displays) == 1 else _Several(displays)


def _can_redraw(stream: TextIO) -> bool:
  try:
    terminal = stream.isatty()
  except ValueError:  # closed
    return False
  return (
    terminal
    and os.environ.get("TERM", "dumb").lower() not in ("", "dumb", "unknown")
    and not os.environ.get("CI")
  )


class _QuietStream:
  """A text stream that falls silent, instead of raising, once its reader is gone or it cannot be written."""

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
    if self._broken:
      return
    try:
      call()
    except BrokenPipeError:
      self._broken = True
      self._discard_rest()
    except (OSError, ValueError):  # ValueError: closed
      self._broken = True

  def _discard_rest(self) -> None:
    # What the stream still buffers would fail again when Python flushes it at exit, and change the exit status.
    try:
      null = os.open(os.devnull, os.O_WRONLY)
      os.dup2(null, self._stream.fileno())
      os.close(null)
    except (OSError, ValueError):
      pass


class _Several(Display):
  """Shows the same on all of them."""

  def __init__(self, displays: Sequence[Display]):
    self._displays = displays

  def __enter__(self) -> Display:
    for display in self._displays:
      display.__enter__()
    return self

  def __exit__(self, *error: object) -> None:
    for display in self._displays:
      display.__exit__(*error)

  def update(self, values: Mapping[str, Any]) -> None:
    for display in self._displays:
      display.update(values)

  def refresh(self, values: Mapping[str, Any]) -> None:
    for display in self._displays:
      display.refresh(values)

  def message(self, text: str) -> None:
    for display in self._displays:
      display.message(text)


class _PlainDisplay(Display):
  """A line of text every `PLAIN_INTERVAL` seconds, and one for each event."""

  def __init__(self, board: Board, stream: TextIO):
    self._board = board
    self._stream = _QuietStream(stream)
    self._next = -math.inf
    self._unshown = False
    self._lock = threading.Lock()

  def __enter__(self) -> Display:
    header = self._board.header
    self.message(
      f"SpeedyZero  {header.game}  {header.preset}  seed {header.seed}  {header.run_dir}"
    )
    return self

  def __exit__(self, *unused: object) -> None:
    with self._lock:
      if self._unshown:
        self._print(self._board.line())
        self._unshown = False

  def update(self, values: Mapping[str, Any]) -> None:
    with self._lock:
      self._board.update(values)
      self._show()

  def refresh(self, values: Mapping[str, Any]) -> None:
    with self._lock:
      before = self._board.moving()
      self._board.update(values)
      if self._board.moving() != before:
        self._show()

  def _show(self) -> None:
    now = self._board.clock()
    self._unshown = now < self._next
    if not self._unshown:
      self._next = now + PLAIN_INTERVAL
      self._print(self._board.line())

  def message(self, text: str) -> None:
    with self._lock:
      self._print(text)

  def _print(self, text: str) -> None:
    self._stream.write(text + "\n")
    self._stream.flush()


class _LiveDisplay(Display):
  """One screen, redrawn in place by rich's thread; messages scroll by above it."""

  def __init__(self, board: Board, stream: TextIO):
    self._board = board
    self._lock = threading.Lock()
    self._console = Console(
      file=cast(TextIO, _QuietStream(stream)), force_terminal=True, highlight=False
    )
    owns_stdout = (
      stream is sys.stdout
    )  # then prints and warnings of others must scroll by above it, too
    self._live = Live(
      get_renderable=self._render,
      console=self._console,
      refresh_per_second=REFRESHES_PER_SECOND,
      redirect_stdout=owns_stdout,
      redirect_stderr=owns_stdout,
    )

  def __enter__(self) -> Display:
    self._live.start(refresh=True)
    self._console.show_cursor(True)  # rich hides it, and a killed process could not bring it back
    return self

  def __exit__(self, *unused: object) -> None:
    self._live.stop()

  def update(self, values: Mapping[str, Any]) -> None:
    with self._lock:
      self._board.update(values)

  refresh = update

  def message(self, text: str) -> None:
    self._console.print(text, markup=False)

  def _render(self) -> RenderableType:
    with self._lock:
      return self._board.screen()
