"""Progress display: bars that move on a terminal, a line now and then anywhere else.

A closed pipe makes it quiet instead of failing; a killed process leaves its terminal usable.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, cast

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names

TERMINAL = "SPEEDYZERO_TERMINAL"  # variable: open descriptor to show on, where stdout is a log
PLAIN_INTERVAL = 10.0  # seconds between plain lines
REFRESHES_PER_SECOND = 2  # of the bars

_SHOWN = (
  ("return {}", names.EPISODE_RETURN),
  ("best {}", names.EPISODE_RETURN_BEST),
  ("loss {}", names.LOSS_TOTAL),
  ("{} agent/s", names.AGENT_STEPS_PER_SECOND),
  ("{} learner/s", names.LEARNER_STEPS_PER_SECOND),
  ("{} samples/s", names.SAMPLES_PER_SECOND),
  ("policy lag {}", names.POLICY_LAG),
  ("replay {}", names.REPLAY_BYTES),
  ("evaluation {}", names.EVALUATION_MEAN),
)


class Display:
  """The progress of a run on one or more streams. A context manager; thread-safe.

  Streams are by default standard output and what `TERMINAL` names. Capable terminals outside CI get
  bars, others plain lines.
  """

  def __init__(
    self,
    config: Config,
    folder: str,
    streams: Sequence[TextIO] | None = None,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._config, self._clock = config, clock
    self._title = f"{config.agent.name}  {config.env.game}  seed {config.run.seed}  {folder}"
    self._lock = threading.Lock()
    self._values: dict[str, Any] = {}  # the latest; metrics that no longer come keep their last
    self._bars: list[_Bars] = []
    self._plain: list[Console] = []
    for stream in _default_streams() if streams is None else streams:
      console = Console(file=cast(TextIO, _QuietStream(stream)), highlight=False)
      if console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI"):
        self._bars.append(_Bars(config, console, stream is sys.stdout))
      else:
        self._plain.append(console)
    self._next_line = -math.inf
    self._unshown = False

  def __enter__(self) -> "Display":
    for bars in self._bars:
      bars.start()
      bars.console.show_cursor(True)  # rich hides it, and a killed process could not bring it back
    self.message(self._title)
    return self

  def __exit__(self, *unused: object) -> None:
    for bars in self._bars:
      bars.stop()
    if self._unshown:
      self._print(self._plain, self._line())

  def update(self, values: Mapping[str, Any]) -> None:
    """Takes new values; others stay. A plain line follows if one is due and there is progress."""
    with self._lock:
      before, now = self._steps_and_processes(), self._clock()
      self._values.update(values)
      for bars in self._bars:
        bars.show(self._values, "  ".join([*self._processes(), *self._numbers()]))
      self._unshown = now < self._next_line or self._steps_and_processes() == before
      if not self._unshown:
        self._next_line = now + PLAIN_INTERVAL
        self._print(self._plain, self._line())

  def message(self, text: str) -> None:
    """Shows an event at once."""
    self._print([*self._plain, *(bars.console for bars in self._bars)], text)

  def _print(self, consoles: Sequence[Console], text: str) -> None:
    for console in consoles:
      console.print(text, markup=False, soft_wrap=True)

  def _line(self) -> str:
    step, rate, elapsed = (
      self._values.get(name) or 0
      for name in (names.STEP, names.LEARNER_STEPS_PER_SECOND, names.TIME)
    )
    left = _clock_time(max(self._config.learner.steps - step, 0) / rate) if rate > 0 else "-"
    return "  ".join(
      [_clock_time(elapsed), *self._steps_and_processes(), *self._numbers(), f"eta {left}"]
    )

  def _steps_and_processes(self) -> list[str]:
    """A change of these shows that the run is alive."""
    parts = []
    for label, name, total in _steps(self._config):
      done = self._values.get(name) or 0
      parts.append(f"{label} {format_number(done)}/{format_number(total)} {done / total:.0%}")
    return parts + self._processes()

  def _processes(self) -> list[str]:
    topology = self._config.topology
    counts = {"actor": topology.actors, "refresher": topology.refreshers}
    present = {kind: self._text(names.present(kind)) for kind in counts}
    return [f"{kind}s {present[kind]}/{count}" for kind, count in counts.items() if count]

  def _numbers(self) -> list[str]:
    return [form.format(self._text(name)) for form, name in _SHOWN]

  def _text(self, name: str) -> str:
    value = self._values.get(name)
    if value is None:
      return "nan" if name in self._values else "-"
    return (
      f"{format_number(value / 1e9)} GB" if name == names.REPLAY_BYTES else format_number(value)
    )


class _Bars(Progress):
  """A bar for each kind of step, and a text below."""

  def __init__(self, config: Config, console: Console, owns_stdout: bool):
    self._below = ""
    super().__init__(
      TextColumn("{task.description}"),
      BarColumn(None),
      MofNCompleteColumn(),
      TimeRemainingColumn(),
      console=console,
      expand=True,
      refresh_per_second=REFRESHES_PER_SECOND,
      redirect_stdout=owns_stdout,  # so that prints and warnings scroll by above them too
      redirect_stderr=owns_stdout,
    )
    self._of = {name: self.add_task(label, total=n) for label, name, n in _steps(config)}

  def show(self, values: Mapping[str, Any], below: str) -> None:
    """Shows the steps in the values, with the next refresh."""
    self._below = below
    for name, task in self._of.items():
      self.update(task, completed=values.get(name) or 0)

  def get_renderables(self) -> Iterable[RenderableType]:
    yield from super().get_renderables()
    yield Text(self._below)


def _steps(config: Config) -> tuple[tuple[str, str, int], ...]:
  """Label, metric and total of each kind of step."""
  return ("agent", names.ENV_STEPS, config.run.env_steps), (
    "learner",
    names.STEP,
    config.learner.steps,
  )


def format_number(value: float | None) -> str:
  """A number in few characters: whole from 1,000 on, else two to four digits; None is -."""
  if value is None or not math.isfinite(value):
    return "-" if value is None else str(value)
  size = abs(value)
  if size >= 1e7:
    return f"{value:.2e}"
  if size >= 1000 or value == int(value):
    return f"{value:,.0f}"
  return f"{value:.2g}" if size < 0.01 else f"{value:.3g}" if size < 100 else f"{value:.1f}"


def _clock_time(seconds: float) -> str:
  minutes, rest = divmod(int(min(seconds, 1e9)), 60)
  return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


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
