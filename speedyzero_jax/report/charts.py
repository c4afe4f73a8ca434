"""Line charts as SVG."""

import dataclasses
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence

import numpy as np

from speedyzero_jax.report.elements import element

WIDTH, HEIGHT = 400, 236
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 36  # margins
COLORS = 14  # number of colors in page.css; further lines reuse them
MARKED = 24  # most points of a line that gets a mark at each point

Ticks = Sequence[float]
Place = Callable[[np.ndarray, np.ndarray], list[str]]  # values -> "x,y" in SVG coordinates


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a chart, with a band between `low` and `high` if they are set."""

  color: int  # index of a color
  label: str  # tooltip
  x: np.ndarray
  y: np.ndarray
  low: np.ndarray | None = None
  high: np.ndarray | None = None
  thin: bool = False


def line_chart(lines: Sequence[Line], x_title: str, from_zero: bool = False) -> ET.Element:
  """Draws an SVG chart that scales to its container's width. The x axis begins at 0.

  Args:
    lines: lines of at least one point each, with x >= 0.
    x_title: title of the x axis.
    from_zero: whether the y axis includes 0.
  """
  ys = np.concatenate([y for line in lines for y in (line.y, line.low, line.high) if y is not None])
  y_ticks = ticks(min(0.0, ys.min()) if from_zero else ys.min(), ys.max(), 4)
  y_low, y_span = y_ticks[0], (y_ticks[-1] - y_ticks[0]) or 1.0
  x_high = max(line.x.max() for line in lines) or 1.0
  x_ticks = [tick for tick in ticks(0.0, x_high, 5) if tick <= x_high]

  def place(x: np.ndarray, y: np.ndarray) -> list[str]:
    across = LEFT + x / x_high * (WIDTH - LEFT - RIGHT)
    down = HEIGHT - BOTTOM - (y - y_low) / y_span * (HEIGHT - TOP - BOTTOM)
    return [f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True)]

  drawn = _axes(x_ticks, y_ticks, x_title, place)
  drawn += [_band(line, place) for line in lines if line.low is not None]
  drawn += [_line(line, place) for line in sorted(lines, key=lambda line: not line.thin)]
  return element("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")


def _axes(x_ticks: Ticks, y_ticks: Ticks, x_title: str, place: Place) -> list[ET.Element]:
  drawn, floor = [], HEIGHT - BOTTOM
  for y in y_ticks:
    down = place(np.zeros(1), np.array([y]))[0].split(",")[1]
    drawn.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=down, y2=down))
    drawn.append(element("text", tick_text(y), class_="y", x=LEFT - 6, y=down, dy="0.32em"))
  for x in x_ticks:
    across = place(np.array([x]), np.zeros(1))[0].split(",")[0]
    drawn.append(element("line", class_="axis", x1=across, x2=across, y1=floor, y2=floor + 4))
    drawn.append(element("text", tick_text(x), class_="x", x=across, y=floor + 16))
  middle = (LEFT + WIDTH - RIGHT) / 2
  drawn.append(element("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=floor, y2=floor))
  drawn.append(element("text", x_title, class_="x", x=middle, y=HEIGHT - 4))
  return drawn


def _band(line: Line, place: Place) -> ET.Element:
  assert line.low is not None and line.high is not None
  edges = place(line.x, line.high) + place(line.x, line.low)[::-1]
  return element("polygon", class_=f"band c{line.color % COLORS}", points=" ".join(edges))


def _line(line: Line, place: Place) -> ET.Element:
  points = place(line.x, line.y)
  marks = [] if line.thin or len(points) > MARKED else [point.split(",") for point in points]
  return element(
    "g",
    element("title", line.label),
    element("polyline", points=" ".join(points)),
    *(element("circle", cx=x, cy=y, r=2.2) for x, y in marks),
    class_=f"c{line.color % COLORS}{' thin' * line.thin}",
  )


def ticks(low: float, high: float, about: int) -> list[float]:
  """About `about` round numbers that enclose [low, high]."""
  if high - low <= 1e-9 * max(abs(low), abs(high)) + 1e-290:
    low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
  rough = (high - low) / about
  power = 10.0 ** math.floor(math.log10(rough))
  step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= rough * 0.999)
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_text(value: float) -> str:
  """Formats a number compactly: 1500 is 1.5k."""
  for size, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
    if abs(value) >= size:
      return f"{value / size:.4g}{sign}"
  return f"{value:.4g}"
