"""The report page: one HTML file with tables and charts, without scripts or network access."""

import datetime
import importlib.resources
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from typing import Any

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.progress import format_number
from speedyzero_jax.report import curves, elements, scores
from speedyzero_jax.report.charts import COLORS, Line, line_chart
from speedyzero_jax.report.elements import element, table
from speedyzero_jax.report.groups import Method, differences, methods
from speedyzero_jax.report.runs import Run

_FEW = 10  # most runs of a method that are also drawn as single lines

_RATES = ("_per_second",)
_AGES = (
  "_age_mean", "_age_max", "_lag", "_lag_mean", "_lag_max", "_staleness", "_staleness_max",
  "_wait_seconds",
)  # fmt: skip

Lines = Callable[[str], list[Line]]  # axis -> lines


def render(runs: Sequence[Run]) -> bytes:
  """Renders the page of these runs."""
  compared = methods(runs)
  style = (importlib.resources.files("speedyzero_jax.report") / "page.css").read_text()
  games = sorted({str(run.game) for method in compared for run in method.runs})
  existing = sum(run.problems != ["no run here"] for run in runs)
  title = ", ".join([_count(existing, "run"), _count(len(compared), "method"), *games[:4]])
  title += f" and {len(games) - 4} more games" if len(games) > 4 else ""
  head = element(
    "head",
    element("meta", charset="utf-8"),
    element("meta", name="viewport", content="width=device-width, initial-scale=1"),
    element(
      "meta",
      http_equiv="Content-Security-Policy",
      content="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    ),
    element("link", rel="icon", href="data:,"),
    element("title", title),
    element("style", style),
  )
  written = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
  sections = [
    _problems(runs), *_human_normalized(compared), _learning(compared, games), _scores(compared),
    _system(compared), _time(compared), _settings(compared), _machines(runs), _runs(runs),
  ]  # fmt: skip
  body = element(
    "body",
    element("header", element("h1", title), element("p", f"Written {written}", class_="note")),
    _controls(compared),
    element("main", *sections),
  )
  return elements.write(element("html", head, body, lang="en"))


def _controls(compared: Sequence[Method]) -> ET.Element:
  """Legend of the methods, and radio buttons for the x axis, which the style sheet evaluates."""
  keys = [
    element(
      "li",
      element("span", class_=f"key c{i % COLORS}"),
      f"{method.name} ({_count(len(method.runs), 'run')})",
    )
    for i, method in enumerate(compared)
  ]
  choices = []
  for i, axis in enumerate(curves.AXES):
    choice = element("input", type="radio", name="axis", id=f"x{i}")
    if i == 0:
      choice.set("checked", "")
    choices.append(element("label", choice, axis))
  legend = element("legend", "x axis")
  return element("nav", element("ul", *keys), element("fieldset", legend, *choices))


def _section(title: str, note: str, *children: ET.Element | None) -> ET.Element:
  text = element("p", note, class_="note") if note else None
  return element("section", element("h2", title), text, *children)


def _chart(title: str, lines: Lines, from_zero: bool = False) -> ET.Element | None:
  """Draws a chart for each axis, one of which is visible; None if no line has two points."""
  drawn = {axis: lines(axis) for axis in curves.AXES}
  if all(len(line.x) < 2 for axis_lines in drawn.values() for line in axis_lines):
    return None
  figures = [
    element("div", line_chart(axis_lines, axis, from_zero), class_=f"x{i}")
    if (axis_lines := drawn[axis])
    else element("div", f"no {axis} recorded", class_=f"x{i} empty")
    for i, axis in enumerate(curves.AXES)
  ]
  return element("figure", element("figcaption", title), *figures)


def _grid(charts: Sequence[ET.Element | None]) -> ET.Element:
  return element("div", *charts, class_="charts")


def _metric_chart(
  compared: Sequence[Method], name: str, title: str, game: str | None = None
) -> ET.Element | None:
  """Draws a metric of all methods, over the runs of one game or all games."""

  def lines(axis: str) -> list[Line]:
    drawn = []
    for i, method in enumerate(compared):
      runs = method.runs if game is None else method.games().get(game, [])
      single = game is not None and len(runs) <= _FEW
      drawn += curves.lines(runs, name, axis, i, method.name, single)
    return drawn

  return _chart(title, lines, from_zero=game is None)


def _problems(runs: Sequence[Run]) -> ET.Element | None:
  items = [
    element("li", element("b", run.path), f" {'; '.join(run.problems)}")
    for run in runs
    if run.problems
  ]
  return _section("Problems", "", element("ul", *items, class_="problems")) if items else None


def _learning(compared: Sequence[Method], games: Sequence[str]) -> ET.Element:
  charts = [
    _metric_chart(compared, name, f"{game}: {what}", game)
    for game in games
    for name, what in (
      (names.EPISODE_RETURN, "return of the last 100 training games"),
      (names.EVALUATION_MEAN, "mean return of evaluations"),
    )
  ]
  note = (
    "Raw returns. Thick lines: mean over seeds; bands: lowest to highest seed, over the range that "
    "all have reached; thin lines: single seeds. Device-minutes are wall-clock minutes times "
    "the number of the learner processes' devices; devices of separate actors and refreshers are "
    "not counted."
  )
  return _section("Learning curves", note, _grid(charts))


def _scores(compared: Sequence[Method]) -> ET.Element:
  note = (
    "Mean raw returns in the evaluation of the last checkpoint: mean, lowest and highest over "
    "seeds. Minutes and device-minutes of a whole run: mean over seeds."
  )
  return _section("Scores", note, table(*scores.by_game(compared), words=2))


def _left_out(compared: Sequence[Method], common: Sequence[str]) -> str:
  """Names the games outside `common`, and the methods that have not evaluated them."""
  scored = [method for method in compared if method.scores()]
  others = {game for method in scored for game in method.scores()} - {*common}
  lacking = {
    game: ", ".join(method.name for method in scored if game not in method.scores())
    for game in sorted(others)
  }
  texts = [f"{game} (not evaluated: {those})" for game, those in lacking.items()]
  return f", without {'; '.join(texts)}" if texts else ""


def _human_normalized(compared: Sequence[Method]) -> list[ET.Element]:
  if not any(method.scores() for method in compared):
    return []
  note = "Raw returns: mean ± standard error over seeds. Sources: see atari100k_scores.json."
  published = table(*scores.published_table(compared))
  sections = [_section("Comparison with published scores", note, published)]
  common = scores.common_games(compared)
  if not common:
    text = "The methods have no evaluated game in common, so no scores are aggregated."
    return [_section("Human-normalized scores", text), *sections]
  metric = scores.training_metric(compared, common)
  kind = "evaluations" if metric == names.EVALUATION_MEAN else "training games"
  charts = [
    _chart(
      f"IQM of human-normalized scores of {kind}",
      lambda axis: scores.training_lines(compared, common, metric, axis),
    ),
    scores.profile_chart(compared, common),
  ]
  note = (
    f"Over the {_count(len(common), 'game')}, of 26, that every method has evaluated"
    f"{_left_out(compared, common)}. 0 is random "
    "play, 1 human play. In brackets: 95% stratified bootstrap interval over seeds within games, "
    "if every game has at least two seeds. Definitions: Agarwal et al. 2021. Published scores are "
    "one number per game, so they have no IQM or optimality gap over single runs."
  )
  aggregates = table(*scores.aggregate_table(compared, common))
  return [_section("Human-normalized scores", note, aggregates, _grid(charts)), *sections]


def _system(compared: Sequence[Method]) -> ET.Element:
  metrics = {name for method in compared for run in method.runs for row in run.rows for name in row}
  children = []
  for title, endings in (("Rates", _RATES), ("Ages, lags and waits", _AGES)):
    charts = [_metric_chart(compared, x, x) for x in sorted(metrics) if x.endswith(endings)]
    children += [element("h3", title), _grid(charts)] if charts else []
  note = (
    "Lines: mean over all runs of a method; bands: lowest to highest run. Ages and lags are in "
    "learner steps, waits in seconds."
  )
  return _section("System", note, *children)


def _time(compared: Sequence[Method]) -> ET.Element:
  shares = [_time_shares(method.runs) for method in compared]
  parts = dict.fromkeys(part for each in shares for part in each)
  rows = [[part, *(_bar(each.get(part)) for each in shares)] for part in parts]
  note = (
    "Share of wall-clock time that threads spend in each part of their work. Threads run in "
    "parallel, so shares may sum to more than 100%. The time until the first line of metrics "
    "covers compilation and collecting the first experience."
  )
  return _section("Where the time goes", note, table(["part", *_names(compared)], rows))


def _time_shares(runs: Sequence[Run]) -> dict[str, float]:
  """Seconds of each part divided by wall-clock seconds, over all runs."""
  seconds = {"until the first line": 0.0}
  total = 0.0
  for run in runs:
    step, clock = 0.0, [row[names.TIME] for row in run.rows if names.TIME in row]
    if not clock:
      continue
    total += clock[-1]
    seconds["until the first line"] += clock[0]
    for row in run.rows:
      for name in (name for name in row if name.startswith(names.TIME_PREFIX)):
        part = name.removeprefix(names.TIME_PREFIX)
        seconds[part] = seconds.get(part, 0.0) + row[name] * (row[names.STEP] - step)
      step = row[names.STEP]
  return {part: spent / total for part, spent in seconds.items()} if total else {}


def _bar(share: float | None) -> ET.Element | str:
  if share is None:
    return "-"
  return element("span", f"{share:.1%}", class_="bar", style=f"--share:{min(max(share, 0), 1):.3f}")


def _settings(compared: Sequence[Method]) -> ET.Element:
  different = differences([method.runs for method in compared])
  within = dict.fromkeys(key for each in compared for key in differences([[x] for x in each.runs]))
  by_game = f"Settings that differ between games: {', '.join(within)}. " if within else ""
  if not different:
    equal = "All runs have the same settings, except game and seed: see a run's config.yaml."
    return _section("Settings", by_game or equal)
  rows = [[key, *map(_setting, values)] for key, values in different.items()]
  drawn = table(["setting", *_names(compared)], rows, words=len(compared) + 1)
  note = f"{by_game}The table has those that differ between methods; all others are equal."
  return _section("Settings", note, drawn)


def _setting(value: Any) -> str:
  text = "-" if value is None else str(value)
  return text if len(text) <= 60 else text[:59] + "…"


def _machines(runs: Sequence[Run]) -> ET.Element:
  users: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
  for run in runs:
    for start in run.starts:
      shown = {"devices": f"{start['devices']} x {start.get('device', '-')}"}
      shown |= {key: str(start.get(key, "-")) for key in ("cpu", "host", "system")}
      users.setdefault(tuple((shown | start["versions"]).items()), {})[run.path] = None
  heads = list(dict.fromkeys(key for machine in users for key, _ in machine))
  rows = [
    [_few(list(paths)), *(dict(machine).get(key) or "-" for key in heads)]
    for machine, paths in users.items()
  ]
  note = (
    "The learner processes' devices, the first one's machine, and versions, as recorded at every "
    "start."
  )
  return _section("Hardware and versions", note, table(["runs", *heads], rows, len(heads) + 1))


def _few(paths: Sequence[str]) -> str:
  more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
  return ", ".join(paths[:2]) + more


def _runs(runs: Sequence[Run]) -> ET.Element:
  heads = ["run", "game", "seed", "learner steps", "agent steps", "minutes", "device-minutes",
           "training return", "evaluation", "episodes", "at step", "human-normalized"]  # fmt: skip
  rows = []
  for run in runs:
    minutes = [None if x is None else x / 60 for x in (run.wall_seconds, run.device_seconds)]
    numbers = run.seed, run.steps, run.env_steps, *minutes, run.training_return, run.evaluation_mean
    last = map(format_number, (run.evaluation_step, run.human_normalized))
    rows.append([run.path, run.game or "-", *map(format_number, numbers), run.episodes, *last])
  return _section("Runs", "", table(heads, rows, words=2))


def _names(compared: Sequence[Method]) -> list[str]:
  return [method.name for method in compared]


def _count(number: int, what: str) -> str:
  return f"{number} {what}{'s' * (number != 1)}"
