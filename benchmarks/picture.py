"""Figures of learning curves in README.md and docs/: python benchmarks/picture.py

Plots training returns from `results/`: the mean over seeds, and a band from lowest to highest. For
Breakout it plots the evaluations of each seed.
"""

import collections
import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speedyzero_jax.envs.scores import table
from speedyzero_jax.report.charts import HEIGHT, WIDTH, Line, line_chart
from speedyzero_jax.report.curves import common_grid
from speedyzero_jax.report.elements import element
from speedyzero_jax.run.run_dir import safe_name

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
CATCH = {"quickstart": "SpeedyZero", "dqn": "DQN", "r2d2": "R2D2", "ppo": "PPO", "impala": "IMPALA"}
AGENTS = {
  "speedyzero": "SpeedyZero", "dqn": "DQN", "r2d2": "R2D2", "ppo": "PPO", "impala": "IMPALA",
  "a2c": "A2C", "appo": "APPO", "c51": "C51", "apex": "Ape-X", "a3c": "A3C",
}  # fmt: skip
ACTORS = {
  "threads": "thread", "actors1": "1 process", "actors2": "2 processes",
  "central2": "central, 2", "central4": "central, 4",
}  # fmt: skip
KRULL = {
  "speedyzero": "SpeedyZero", "dqn": "DQN", "ppo": "PPO", "ppo_300k": "PPO, 300,000",
  "appo_300k": "APPO, 300,000",
}  # fmt: skip
_RETURNS = "mean return of the last 100 training games"
_COLORS = (
  "#0072b2", "#d55e00", "#009e73", "#b8558f", "#c98b00", "#56b4e9", "#555555", "#8a3b12", "#6a51a3",
  "#7fa51d",
)  # fmt: skip
_STYLE = """
svg { font-family: system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif }
text { font-size: 11px; fill: #444b52 } .key { font-size: 12px; fill: #1c2024 }
.x { text-anchor: middle } .y { text-anchor: end }
.grid { stroke: #d9dde1; stroke-width: .7 } .axis { stroke: #5c646c; stroke-width: .8 }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round } .band { opacity: .15 }
"""

Curve = tuple[np.ndarray, np.ndarray]  # agent steps and training return of a run


def of_presets(names: Mapping[str, str], game: str) -> dict[str, list[Curve]]:
  """Curves of all seeds by name, from a result file for each preset; `names` is by preset."""
  results = {name: _read(f"{preset}-{game}") for preset, name in names.items()}
  return {
    name: [curve_of(result, run) for run in result["runs"]] for name, result in results.items()
  }


def of_study(result: str, names: Mapping[str, str], limit: float) -> dict[str, list[Curve]]:
  """Curves of all seeds by name, up to `limit` agent steps, from the result file of a study.

  `names` is by variant, with which the names of run folders begin: VARIANT-GAME-sSEED.
  """
  content, curves = _read(result), collections.defaultdict(list)
  for run in content["runs"]:
    x, y = curve_of(content, run)
    curves[names[variant_of(run)]].append((x[x <= limit], y[x <= limit]))
  return {name: curves[name] for name in names.values()}


def of_evaluations(result: str) -> dict[str, list[Curve]]:
  """Mean returns of evaluations by seed, and the human's score, from a result file of one game."""
  curves, runs = {}, _read(result)["runs"]
  for run in runs:
    scores = {step: mean for step, mean, _ in run["evaluations"]}
    scores[run["evaluation_step"]] = run["evaluation_mean"]
    steps = np.array(list(scores))  # an agent step per learner step
    curves[f"seed {run['seed']}"] = [(steps, np.array(list(scores.values())))]
  human = table()["human"][run["game"]]
  return curves | {"human": [(steps[[0, -1]], np.array([human, human]))]}


def _read(result: str) -> dict[str, Any]:
  return json.loads((RESULTS / f"{result}.json").read_text())


def variant_of(run: dict[str, Any]) -> str:
  """The variant of a study's run, from its folder's name VARIANT-GAME-sSEED."""
  return Path(run["path"]).name.removesuffix(safe_name(f"-{run['game']}-s{run['seed']}"))


def curve_of(result: dict[str, Any], run: dict[str, Any]) -> Curve:
  """The learning curve of a result's run, written by launch/suite.py or its predecessor."""
  columns = result.get("curve_columns") or run["training"]["columns"]
  rows = np.array(run["curve"] if "curve_columns" in result else run["training"]["rows"])
  return rows[:, columns.index("env_steps")], rows[:, -1]


def draw(curves: Mapping[str, list[Curve]], game: str, values: str = _RETURNS) -> str:
  """Draws the curves of several seeds by name as SVG; `values` describes the vertical axis."""
  style, keys, x = _STYLE, [], 34
  for number, name in enumerate(curves):
    color = _COLORS[number]
    style += f".c{number} polyline {{ stroke: {color} }} .band.c{number} {{ fill: {color} }}\n"
    keys.append(element("line", x1=x, x2=x + 18, y1=20, y2=20, stroke=color, stroke_width=3))
    keys.append(element("text", name, class_="key", x=x + 24, y=24))
    x += 42 + 7 * len(name)
  lines = [_line(number, name, seeds) for number, (name, seeds) in enumerate(curves.items())]
  chart = line_chart(lines, f"agent steps; {game}, {values}")
  width = max(WIDTH, x - 20)
  height = HEIGHT * width // WIDTH
  chart.attrib |= {"x": "15", "y": "34", "width": str(width), "height": str(height)}
  size = {"width": width + 50, "height": height + 42}
  card = element("rect", rx=10, fill="#fff", stroke="#d9dde1", **size)
  box = f"0 0 {size['width']} {size['height']}"
  drawn = element("svg", element("style", style), card, *keys, chart, viewBox=box, role="img")
  drawn.set("xmlns", "http://www.w3.org/2000/svg")
  ET.indent(drawn, " ")
  return ET.tostring(drawn, encoding="unicode") + "\n"


def _line(number: int, name: str, seeds: list[Curve]) -> Line:
  grid = common_grid(seeds)
  y = np.array([np.interp(grid, *curve) for curve in seeds])
  return Line(number, name, grid, y.mean(0), y.min(0), y.max(0))


def figures() -> dict[Path, str]:
  """All figures by the file that they belong in."""
  drawn = {
    "catch": draw(of_presets(CATCH, "Catch"), "Catch"),
    "breakout": draw(of_evaluations("atari_small-Breakout"), "Breakout", "mean of 32 games"),
    "agents": draw(of_study("agents", AGENTS, 60_000), "CartPole"),
    "krull": draw(of_study("krull", KRULL, 60_000), "Krull"),
    "actors": draw(of_study("actors", ACTORS, 60_000), "Catch"),
  }
  return {IMAGES / f"{name}.svg": figure for name, figure in drawn.items()}


if __name__ == "__main__":
  for path, figure in figures().items():
    path.write_text(figure)
    print(path)
