"""Figures of learning curves in README.md and docs/: python benchmarks/picture.py

Plots training returns from `results/`: the mean over seeds, and a band from lowest to highest.
"""

import collections
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speedyzero_jax.report.charts import HEIGHT, WIDTH, Line, line_chart
from speedyzero_jax.report.curves import common_grid
from speedyzero_jax.report.elements import element

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
STEPS, MINUTES = ("env_steps", 1.0), ("time", 1 / 60)  # columns of curves, and units
CATCH = {"quickstart": "SpeedyZero", "dqn": "DQN", "r2d2": "R2D2", "ppo": "PPO", "impala": "IMPALA"}
AGENTS = {
  "speedyzero": "SpeedyZero", "dqn": "DQN", "r2d2": "R2D2", "ppo": "PPO", "impala": "IMPALA",
  "a2c": "A2C", "appo": "APPO",
}  # fmt: skip
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8558f", "#c98b00", "#56b4e9", "#555555")
_STYLE = """
svg { font-family: system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif }
text { font-size: 11px; fill: #444b52 } .key { font-size: 12px; fill: #1c2024 }
.x { text-anchor: middle } .y { text-anchor: end }
.grid { stroke: #d9dde1; stroke-width: .7 } .axis { stroke: #5c646c; stroke-width: .8 }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round } .band { opacity: .15 }
"""

Curve = tuple[np.ndarray, np.ndarray]


class Panel(NamedTuple):
  """A chart: curves of each seed by variant, over one axis."""

  curves: Mapping[str, list[Curve]]
  title: str  # of the x axis


def of_presets(names: Mapping[str, str], game: str) -> dict[str, list[Curve]]:
  """Training returns over agent steps, from one result file per preset; keys are `names`."""
  files = {name: f"{preset}-{game}" for preset, name in names.items()}
  return {name: _curves(_read(file), STEPS) for name, file in files.items()}


def of_study(
  result: str, names: Mapping[str, str], axis: tuple[str, float], limit: float
) -> dict[str, list[Curve]]:
  """Training returns up to `limit` on the axis, from the result file of a study.

  `names` has the names by variant, which begin the names of run folders: VARIANT-GAME-sSEED.
  """
  content = _read(result)
  by_variant = collections.defaultdict(list)
  for run in content["runs"]:
    by_variant[re.sub(r"-\w+-s\d+$", "", Path(run["path"]).name)].append(run)
  return {
    name: [(x[x <= limit], y[x <= limit]) for x, y in _curves(content, axis, by_variant[variant])]
    for variant, name in names.items()
  }


def _read(result: str) -> dict[str, Any]:
  return json.loads((RESULTS / f"{result}.json").read_text())


def _curves(
  result: dict[str, Any], axis: tuple[str, float], runs: list[dict[str, Any]] | None = None
) -> list[Curve]:
  column, unit = axis
  parts = []
  for run in result["runs"] if runs is None else runs:
    # Written by launch/suite.py or, in older results, by its predecessor.
    columns = result.get("curve_columns") or run["training"]["columns"]
    rows = np.array(run["curve"] if "curve_columns" in result else run["training"]["rows"])
    parts.append((unit * rows[:, columns.index(column)], rows[:, -1]))
  return parts


def draw(*panels: Panel) -> str:
  """Draws panels below each other, with one legend, as SVG."""
  style, keys, x = _STYLE, [], 34
  for number, name in enumerate(panels[0].curves):
    color = _COLORS[number]
    style += f".c{number} polyline {{ stroke: {color} }} .band.c{number} {{ fill: {color} }}\n"
    keys.append(element("line", x1=x, x2=x + 18, y1=20, y2=20, stroke=color, stroke_width=3))
    keys.append(element("text", name, class_="key", x=x + 24, y=24))
    x += 42 + 7 * len(name)
  size = {"width": max(WIDTH + 50, x), "height": 34 + (HEIGHT + 8) * len(panels)}
  charts = []
  for row, panel in enumerate(panels):
    lines = [_line(i, name, seeds) for i, (name, seeds) in enumerate(panel.curves.items())]
    charts.append(line_chart(lines, panel.title))
    place = {"x": "15", "y": str(34 + (HEIGHT + 8) * row), "height": str(HEIGHT)}
    charts[-1].attrib |= place | {"width": str(size["width"] - 50)}
  card = element("rect", rx=10, fill="#fff", stroke="#d9dde1", **size)
  box = f"0 0 {size['width']} {size['height']}"
  drawn = element("svg", element("style", style), card, *keys, *charts, viewBox=box, role="img")
  drawn.set("xmlns", "http://www.w3.org/2000/svg")
  ET.indent(drawn, " ")
  return ET.tostring(drawn, encoding="unicode") + "\n"


def _line(number: int, name: str, seeds: list[Curve]) -> Line:
  grid = common_grid(seeds)
  y = np.array([np.interp(grid, *curve) for curve in seeds])
  return Line(number, name, grid, y.mean(0), y.min(0), y.max(0))


def main() -> None:
  returns = "mean return of the last 100 training games"
  figures = {
    "catch": [Panel(of_presets(CATCH, "Catch"), f"agent steps; Catch, {returns}")],
    "agents": [
      Panel(of_study("agents", AGENTS, STEPS, 60_000), f"agent steps; CartPole, {returns}"),
      Panel(of_study("agents", AGENTS, MINUTES, 3), "minutes on one CPU core"),
    ],
  }
  for name, panels in figures.items():
    (IMAGES / f"{name}.svg").write_text(draw(*panels))
    print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
  main()
