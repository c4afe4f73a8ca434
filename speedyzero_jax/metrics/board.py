"""Layout of a run's latest numbers: one line of text, and one screen."""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names

# Sections of the screen: a title, and patterns of the metrics shown, at most six in that order.
_SECTIONS = (
  ("episodes, last 100", ("charts/episode_return*", "charts/episode*")),
  ("per second", ("charts/*_per_second", "*_per_second")),
  ("losses", ("losses/total", "losses/*")),
  ("replay", (names.REPLAY_TRANSITIONS, names.REPLAY_BYTES, "replay/*age*", "replay/*")),
  ("run", (names.SAMPLES_PER_INSERT, "stats/*", "evaluation/mean", "*/std", "checkpoint/*")),
  ("waits, seconds", ("queue/*",)),
)
_ROWS = 6  # of a section: all of them fit 24 lines
_COLUMNS = 3
_NOT_IN_LABELS = re.compile(
  r"^charts/(episode_)?|^(losses|replay|stats|queue)/|_per_second$|_wait_seconds$"
)


class Board:
  """The latest values of a run and their layout. Not thread-safe."""

  def __init__(self, config: Config, folder: str):
    self.folder, self._config = folder, config
    self.title = f"{config.agent.name}  {config.env.game}  seed {config.run.seed}"
    self._values: dict[str, Any] = {}

  def update(self, values: Mapping[str, Any]) -> None:
    """Takes new values; metrics not among them keep their last one."""
    self._values.update(values)

  def progress(self) -> list[str]:
    """Steps taken and processes present; a change of these shows that the run is alive."""
    parts = [
      f"agent {self._share(names.ENV_STEPS, self._config.run.env_steps)}",
      f"learner {self._share(names.STEP, self._config.learner.steps)}",
    ]
    topology = self._config.topology
    for kind, count in (("actor", topology.actors), ("refresher", topology.refreshers)):
      if count:
        again = names.restarts(kind)
        restarts = f" (restarts {self._text(again)})" if self._values.get(again) else ""
        parts.append(f"{kind}s {self._text(names.present(kind))}/{count}{restarts}")
    return parts

  def line(self) -> str:
    """The state in one line of text."""
    text = self._text
    parts = [
      self._elapsed(),
      *self.progress(),
      f"return {text(names.EPISODE_RETURN)} (best {text(names.EPISODE_RETURN_BEST)})",
      f"loss {text(names.LOSS_TOTAL)}",
      f"{text(names.AGENT_STEPS_PER_SECOND)} agent/s",
      f"{text(names.LEARNER_STEPS_PER_SECOND)} learner/s",
      f"{text(names.SAMPLES_PER_SECOND)} samples/s",
      f"policy lag {text(names.POLICY_LAG)}",
      f"replay {text(names.REPLAY_BYTES)}",
      f"evaluation {text(names.EVALUATION_MEAN)}",
      f"eta {self._eta(names.STEP, names.LEARNER_STEPS_PER_SECOND, self._config.learner.steps)}",
    ]
    return "  ".join(parts)

  def screen(self) -> RenderableType:
    """The state as a panel that fits 80 x 24."""
    bars = Table.grid("", "", "", "", padding=(0, 1), expand=True)
    bars.columns[1].ratio = 1
    agent_steps, learner_steps = self._config.run.env_steps, self._config.learner.steps
    for label, name, rate, total in (
      ("agent steps", names.ENV_STEPS, names.AGENT_STEPS_PER_SECOND, agent_steps),
      ("learner steps", names.STEP, names.LEARNER_STEPS_PER_SECOND, learner_steps),
    ):
      bar = ProgressBar(total=total, completed=min(self._number(name), total))
      bars.add_row(label, bar, self._share(name, total), f"eta {self._eta(name, rate, total)}")
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(_COLUMNS):
      grid.add_column(ratio=1)
    sections = [self._section(title, patterns) for title, patterns in _SECTIONS]
    for first in range(0, len(sections), _COLUMNS):
      grid.add_row(*sections[first : first + _COLUMNS])
      grid.add_row()
    processes = Text("  ".join(self.progress()[2:]), no_wrap=True)
    return Panel(
      Group(bars, "", grid, processes),
      title=Text(self.title, style="bold", no_wrap=True),
      subtitle=Text(f"{self.folder}  {self._elapsed()}", overflow="ellipsis", no_wrap=True),
      border_style="cyan",
    )

  def _section(self, title: str, patterns: Sequence[str]) -> RenderableType:
    found = dict.fromkeys(
      name for pattern in patterns for name in fnmatch.filter(self._values, pattern)
    )  # in order, each once
    table = Table.grid("", "", padding=(0, 1), expand=True)
    table.columns[1].no_wrap, table.columns[1].justify = True, "right"
    for name in list(found)[:_ROWS]:
      label = _NOT_IN_LABELS.sub("", name).replace("_", " ")
      table.add_row(Text(label, "dim", no_wrap=True, overflow="ellipsis"), self._text(name))
    return Group(Text(title, style="bold cyan", no_wrap=True), table)

  def _number(self, name: str) -> float:
    """The latest value, 0 if there is none."""
    return float(self._values.get(name) or 0.0)

  def _text(self, name: str) -> str:
    if self._values.get(name) is None:
      return "nan" if name in self._values else "-"
    if name.endswith("bytes"):
      return f"{format_number(self._number(name) / 1e9)} GB"
    return format_number(self._number(name))

  def _share(self, name: str, total: int) -> str:
    done = self._number(name)
    return f"{format_number(done)}/{format_number(total)} {done / total:.0%}"

  def _elapsed(self) -> str:
    return _clock_time(self._number(names.TIME))

  def _eta(self, name: str, rate_name: str, total: int) -> str:
    rate = self._number(rate_name)
    return _clock_time(max(total - self._number(name), 0) / rate) if rate > 0 else "-"


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
