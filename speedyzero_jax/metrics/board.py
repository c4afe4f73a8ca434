"""The latest of a run's numbers and how they read: in one line, and on one screen.

Knows the names of metrics, nothing of where they come from or of where they are shown.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from speedyzero_jax.metrics import names

# Processes that come and go: how many are there, and how often one came back.
_PROCESSES = (
  ("actors", names.PRESENT_ACTORS, names.RESTARTS_ACTORS),
  ("reanalysers", names.PRESENT_REANALYSERS, names.RESTARTS_REANALYSERS),
)


@dataclasses.dataclass(frozen=True)
class Header:
  """What a run is called."""

  game: str
  preset: str
  run_dir: str
  seed: int


class Board:
  """The latest values and how they read. Not thread-safe.

  Args:
    header: what the run is called.
    totals: by metric, what it is when all is done or there.
    clock: seconds, from any origin.
  """

  def __init__(self, header: Header, totals: Mapping[str, int], clock: Callable[[], float]):
    self.header = header
    self.clock = clock
    self._totals = totals
    self._rates = {
      names.ENV_STEPS: names.AGENT_STEPS_PER_SECOND,
      names.STEP: names.LEARNER_STEPS_PER_SECOND,
    }
    self._values: dict[str, Any] = {}
    self._elapsed = 0.0  # of the run, at ...
    self._measured = clock()

  def update(self, values: Mapping[str, Any]) -> None:
    """Takes new values; metrics not among them keep their last one."""
    self._values.update(values)
    time_ = _float(values.get(names.TIME))
    if time_ is not None and math.isfinite(time_):
      self._elapsed, self._measured = time_, self.clock()

  def moving(self) -> list[str]:
    """What shows whether anything goes on: of everything else a change alone is worth no line."""
    parts = [f"agent {self._progress(names.ENV_STEPS)}", f"learner {self._progress(names.STEP)}"]
    for label, there, again in _PROCESSES:
      if self._totals[there]:
        restarts = f" (restarts {self._text(again)})" if self._values.get(again) else ""
        parts.append(f"{label} {self._there(there)}{restarts}")
    return parts

  def line(self) -> str:
    """The state in one line of text."""
    text = self._text
    parts = [
      _clock_time(self._now()),
      *self.moving(),
      f"return {text(names.EPISODE_RETURN)} (best {text(names.EPISODE_RETURN_BEST)})",
      f"loss {text(names.LOSS_TOTAL)}",
      f"{text(names.AGENT_STEPS_PER_SECOND)} agent/s",
      f"{text(names.LEARNER_STEPS_PER_SECOND)} learner/s",
      f"target age {text(names.TARGET_AGE_MEAN)}",
      f"priority age {text(names.PRIORITY_AGE_MEAN)}",
      f"eta {self._eta(names.STEP)}",
    ]
    return "  ".join(parts)

  def screen(self) -> RenderableType:
    """The state as a panel, made for 80 x 24 and better off with more columns."""
    text = self._text
    bars = Table.grid(padding=(0, 1), expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(ratio=1)
    bars.add_column(no_wrap=True, justify="right")
    bars.add_column(no_wrap=True, justify="right")
    for label, name in (("agent steps", names.ENV_STEPS), ("learner steps", names.STEP)):
      total = max(self._totals[name], 1)
      bar = ProgressBar(total=total, completed=min(_float(self._values.get(name)) or 0.0, total))
      bars.add_row(label, bar, self._progress(name), f"eta {self._eta(name)}")
    evaluation = "-"
    if names.EVALUATION_MEAN in self._values:
      evaluation = f"{text(names.EVALUATION_MEAN)} ± {text(names.EVALUATION_STD)}"
    play = [
      ("return", text(names.EPISODE_RETURN)),
      ("best", text(names.EPISODE_RETURN_BEST)),
      ("latest", text(names.EPISODE_RETURN_LAST)),
      ("length", text(names.EPISODE_LENGTH)),
      ("games", text(names.EPISODES)),
      ("eval", evaluation),
    ]
    rates = [
      ("agent steps", text(names.AGENT_STEPS_PER_SECOND)),
      ("learner steps", text(names.LEARNER_STEPS_PER_SECOND)),
      ("samples", text(names.SAMPLES_PER_SECOND)),
      ("reanalysed", text(names.REANALYSED_PER_SECOND)),
      ("refreshed", text(names.REFRESHED_PER_SECOND)),
      ("samples/insert", text(names.SAMPLES_PER_INSERT)),
    ]
    losses = [
      ("total", text(names.LOSS_TOTAL)),
      ("value", text(names.LOSS_VALUE)),
      ("policy", text(names.LOSS_POLICY)),
      ("value prefix", text(names.LOSS_VALUE_PREFIX)),
      ("consistency", text(names.LOSS_CONSISTENCY)),
      ("TD error", text(names.TD_ERROR)),
    ]
    replay = [
      ("transitions", text(names.REPLAY_TRANSITIONS)),
      ("memory", f"{text(names.REPLAY_MEMORY)} GB"),
      ("checkpoint", text(names.CHECKPOINT_STEP)),
      ("eval at step", text(names.EVALUATION_STEP)),
    ]
    ages = [
      ("target", f"{text(names.TARGET_AGE_MEAN)} / {text(names.TARGET_AGE_MAX)}"),
      ("priority", f"{text(names.PRIORITY_AGE_MEAN)} / {text(names.PRIORITY_AGE_MAX)}"),
      ("policy lag", f"{text(names.POLICY_LAG)} / {text(names.POLICY_LAG_MAX)}"),
    ]
    optimiser = [
      ("gradient norm", text(names.GRADIENT_NORM)),
      ("trust ratio", text(names.TRUST_RATIO_MEAN)),
      ("  min / max", f"{text(names.TRUST_RATIO_MIN)} / {text(names.TRUST_RATIO_MAX)}"),
      ("learning rate", text(names.LEARNING_RATE)),
    ]
    there = [
      (label, self._there(name) if self._totals[name] else "-") for label, name, _ in _PROCESSES
    ]
    waits = [
      ("learner", text(names.LEARNER_WAIT)),
      ("actor", text(names.ACTOR_WAIT)),
      ("reanalyser", text(names.REANALYSER_WAIT)),
    ]
    restarts = [
      ("learners", text(names.RESTARTS_LEARNERS)),
      *((label, text(name)) for label, _, name in _PROCESSES),
    ]
    columns = Table.grid(padding=(0, 2), expand=True)
    for _ in range(3):
      columns.add_column(ratio=1)
    columns.add_row(
      _pairs("games, last 100", play), _pairs("per second", rates), _pairs("losses", losses)
    )
    columns.add_row("", "", "")
    columns.add_row(
      _pairs("replay", replay),
      _pairs("age, steps: mean / max", ages),
      _pairs("optimiser", optimiser),
    )
    columns.add_row("", "", "")
    columns.add_row(
      _pairs("processes there", there),
      _pairs("waits, seconds", waits),
      _pairs("restarts", restarts),
    )
    header = self.header
    return Panel(
      Group(bars, "", columns),
      title=Text(
        f"SpeedyZero  {header.game}  {header.preset}  seed {header.seed}",
        style="bold",
        no_wrap=True,
      ),
      subtitle=Text(
        f"{header.run_dir}  {_clock_time(self._now())}", overflow="ellipsis", no_wrap=True
      ),
      border_style="cyan",
    )

  def _now(self) -> float:
    return self._elapsed + self.clock() - self._measured

  def _text(self, name: str) -> str:
    if name not in self._values:
      return "-"
    value = self._values[name]
    return "nan" if value is None else format_number(_float(value))

  def _there(self, name: str) -> str:
    return f"{self._text(name)}/{self._totals[name]}"

  def _progress(self, name: str) -> str:
    done, total = _float(self._values.get(name)) or 0.0, self._totals[name]
    share = f" {done / total:.0%}" if total else ""
    return f"{format_number(done)}/{format_number(total)}{share}"

  def _eta(self, name: str) -> str:
    done, rate = _float(self._values.get(name)), _float(self._values.get(self._rates[name]))
    if done is None or not rate or not 0 < rate < math.inf:
      return "-"
    return _clock_time(max(self._totals[name] - done, 0) / rate)


def _pairs(title: str, rows: list[tuple[str, str]]) -> RenderableType:
  table = Table.grid(padding=(0, 1), expand=True)
  table.add_column(no_wrap=True)
  table.add_column(no_wrap=True, justify="right", ratio=1)
  for label, value in rows:
    table.add_row(Text(label, style="dim"), value)
  return Group(Text(title, style="bold cyan", no_wrap=True), table)


def _float(value: Any) -> float | None:
  try:
    return float(value)
  except (TypeError, ValueError):
    return None


def format_number(value: float | None) -> str:
  """A number in few characters: whole from 1,000 on, otherwise to two to four significant digits; None is -."""
  if value is None:
    return "-"
  if not math.isfinite(value):
    return str(value)
  if abs(value) >= 1e7:
    return f"{value:.2e}"
  if abs(value) >= 1000 or value == int(value):
    return f"{value:,.0f}"
  return (
    f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
  )


def _clock_time(seconds: float) -> str:
  minutes, seconds_ = divmod(int(min(seconds, 1e9)), 60)
  return f"{minutes // 60}:{minutes % 60:02d}:{seconds_:02d}"
