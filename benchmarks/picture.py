"""Figure of the learning curves in README.md: python benchmarks/picture.py

Plots training returns from `results/`: the mean over seeds, and a band from lowest to highest.
"""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speedyzero_jax.report.charts import HEIGHT, WIDTH, Line, line_chart
from speedyzero_jax.report.curves import common_grid
from speedyzero_jax.report.elements import element

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "catch.svg"
AGENTS = {
  "quickstart": ("SpeedyZero", "#0072b2"), "dqn": ("DQN", "#d55e00"), "r2d2": ("R2D2", "#009e73"),
  "ppo": ("PPO", "#b8558f"), "impala": ("IMPALA", "#c98b00"),
}  # fmt: skip
_STYLE = """
svg { font-family: system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif }
text { font-size: 11px; fill: #444b52 } .key { font-size: 12px; fill: #1c2024 }
.x { text-anchor: middle } .y { text-anchor: end }
.grid { stroke: #d9dde1; stroke-width: .7 } .axis { stroke: #5c646c; stroke-width: .8 }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round } .band { opacity: .15 }
"""


def curves(preset: str) -> list[tuple[np.ndarray, np.ndarray]]:
  """Training return over agent steps on Catch, for each seed of a preset."""
  result = json.loads((ROOT / "benchmarks" / "results" / f"{preset}-Catch.json").read_text())
  parts = []
  for run in result["runs"]:
    # Written by launch/suite.py or, in older results, by its predecessor.
    columns = result.get("curve_columns") or run["training"]["columns"]
    rows = np.array(run["curve"] if "curve_columns" in result else run["training"]["rows"])
    parts.append((rows[:, columns.index("env_steps")], rows[:, -1]))
  return parts


def draw() -> str:
  """Draws the figure as SVG."""
  lines, keys, style, x = [], [], _STYLE, 34
  for number, (preset, (name, color)) in enumerate(AGENTS.items()):
    found = curves(preset)
    grid = common_grid(found)
    y = np.array([np.interp(grid, *curve) for curve in found])
    lines.append(Line(number, name, grid, y.mean(0), y.min(0), y.max(0)))
    style += f".c{number} polyline {{ stroke: {color} }} .band.c{number} {{ fill: {color} }}\n"
    keys.append(element("line", x1=x, x2=x + 18, y1=20, y2=20, stroke=color, stroke_width=3))
    keys.append(element("text", name, class_="key", x=x + 24, y=24))
    x += 46 + 7 * len(name)
  chart = line_chart(lines, "agent steps; Catch, mean return of the last 100 training games")
  chart.attrib |= {"x": "15", "y": "34", "width": str(WIDTH), "height": str(HEIGHT)}
  size = {"width": WIDTH + 50, "height": HEIGHT + 42}
  card = element("rect", rx=10, fill="#fff", stroke="#d9dde1", **size)
  box = f"0 0 {size['width']} {size['height']}"
  drawn = element("svg", element("style", style), card, *keys, chart, viewBox=box, role="img")
  drawn.set("xmlns", "http://www.w3.org/2000/svg")
  ET.indent(drawn, " ")
  return ET.tostring(drawn, encoding="unicode") + "\n"


if __name__ == "__main__":
  PICTURE.write_text(draw())
  print(PICTURE)
