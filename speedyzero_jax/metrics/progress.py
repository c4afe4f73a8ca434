"""Progress display: periodic lines, and one for each event.

Streams that are closed are dropped silently.
"""

import errno
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names

# Environment variable with the descriptor of a terminal, for processes whose stdout is a log file.
TERMINAL = "SPEEDYZERO_TERMINAL"
INTERVAL = 10.0  # seconds between lines

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

_FULL = {errno.ENOSPC, errno.EDQUOT}  # errors of a full disk, which may get space again


class Display:
  """Shows a run's progress on one or more streams. A context manager; thread-safe.

  By default the streams are standard output and the descriptor in `TERMINAL`.
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
    self._streams = _default_streams() if streams is None else list(streams)
    self._lock = threading.RLock()
    self._values: dict[str, Any] = {}  # the latest value of every metric
    self._printed = self._progress()
    self._next_line = -math.inf

  def __enter__(self) -> "Display":
    self.message(self._title)
    return self

  def __exit__(self, *unused: object) -> None:
    self._show()

  def update(self, values: Mapping[str, Any]) -> None:
    """Updates values, and shows them every `INTERVAL` and when the run has taken all its steps."""
    with self._lock:
      self._values.update(values)
      counts = (self._values.get(name) or 0 for name in (names.STEP, names.ENV_STEPS))
      if self._config.complete(*counts) or self._clock() >= self._next_line:
        self._show()

  def _show(self) -> None:
    """Prints a line, unless there has been no progress since the last one."""
    if (progress := self._progress()) != self._printed:
      self._printed, self._next_line = progress, self._clock() + INTERVAL
      self.message(self._line())

  def message(self, text: str) -> None:
    """Prints a line."""
    with self._lock:
      for stream in list(self._streams):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
          print(text.encode(encoding, "replace").decode(encoding), file=stream, flush=True)
        except (OSError, ValueError) as error:  # ValueError: closed
          if getattr(error, "errno", None) not in _FULL:
            self._streams.remove(stream)

  def _line(self) -> str:
    step, rate, elapsed = (
      self._values.get(name) or 0
      for name in (names.STEP, names.LEARNER_STEPS_PER_SECOND, names.TIME)
    )
    left = _clock_time(max(self._config.learner.steps - step, 0) / rate) if rate > 0 else "-"
    numbers = [form.format(self._text(name)) for form, name in _SHOWN]
    return "  ".join([_clock_time(elapsed), *self._progress(), *numbers, f"eta {left}"])

  def _progress(self) -> list[str]:
    """Counts of steps and processes; a change in any of them is progress."""
    config, parts = self._config, []
    for label, name, total in (
      ("agent", names.ENV_STEPS, config.run.env_steps),
      ("learner", names.STEP, config.learner.steps),
    ):
      done = self._values.get(name) or 0
      parts.append(f"{label} {format_number(done)}/{format_number(total)} {done / total:.0%}")
    for kind in ("actor", "refresher"):
      if count := getattr(config.topology, f"{kind}s"):
        parts.append(f"{kind}s {self._text(names.present(kind))}/{count}")
    return parts

  def _text(self, name: str) -> str:
    value = self._values.get(name)
    if value is None:
      return "nan" if name in self._values else "-"
    return (
      f"{format_number(value / 1e9)} GB" if name == names.REPLAY_BYTES else format_number(value)
    )


def format_number(value: float | None) -> str:
  """Formats a number compactly: as an integer from 1,000, else with up to 4 digits; None is `-`."""
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
