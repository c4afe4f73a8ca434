"""What a profile says: as JSON, and as tables of text."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(path: Path, profile: dict[str, Any]) -> None:
  """Writes a profile as JSON, in which what is not known is null."""
  path.write_text(json.dumps(without_nan(profile), indent=1) + "\n")


def without_nan(value: Any) -> Any:
  """The same with None for numbers that are none, for which JSON has no word."""
  if isinstance(value, dict):
    return {name: without_nan(x) for name, x in value.items()}
  if isinstance(value, list):
    return [without_nan(x) for x in value]
  return None if isinstance(value, float) and math.isnan(value) else value


def table(profile: dict[str, Any]) -> str:
  """A profile as text."""
  seconds, peak, bandwidth = (
    profile["seconds_per_step"],
    profile["peak_flops"],
    profile["peak_bytes_per_second"],
  )
  first, last = profile["learner_steps"]
  flops = math.fsum(f["flops"] * f["calls"] for f in profile["functions"])
  lines = [
    f"profile of learner steps {first} to {last} ({profile['mode']}, {profile['transitions']:,} transitions), "
    f"{profile['device']}:",
    f"  {seconds * 1e3:.1f} ms a step, {profile['samples_per_second']:.0f} samples/s, "
    f"{profile['host_to_device_bytes_per_step'] / 1e6:.2f} MB to devices for each batch; "
    f"{_number(flops / 1e9)} GFLOP a step: {_percent(flops / seconds, peak)} of the peak",
    f"  peak measured: {peak / 1e12:.2f} TFLOP/s (matrix product, {profile['dtype']}), {bandwidth / 1e9:.0f} GB/s "
    "(read and written)",
    "",
    *_align(
      [["part", "thread", "ms/step", "of a step"]]
      + [
        [
          row["part"],
          row["thread"],
          f"{row['seconds'] * 1e3:.1f}",
          _percent(row["seconds"], seconds),
        ]
        for row in profile["parts"]
      ],
      left=2,
    ),
    "",
    *_align(
      [
        [
          "function",
          "calls/step",
          "compile s",
          "run ms",
          "GFLOP",
          "GFLOP/s",
          "of peak",
          "GB",
          "GB/s",
          "of copy",
        ]
      ]
      + [_function_row(row, peak, bandwidth) for row in profile["functions"]],
      left=1,
    ),
    "",
    "  also compiled: {} programs in {:.1f} s".format(
      sum(other["count"] for other in profile["other_compilations"].values()),
      math.fsum(other["seconds"] for other in profile["other_compilations"].values()),
    ),
  ]
  if profile["compiled_meanwhile"]:
    lines.append(
      f"  warning: compiled while it was profiled: {', '.join(profile['compiled_meanwhile'])}"
    )
  return "\n".join(lines)


def _function_row(row: dict[str, Any], peak: float, bandwidth: float) -> list[str]:
  flops, moved, seconds = row["flops"], row["bytes"], row["seconds"]
  return [
    row["name"], f"{row['calls']:.2f}", _number(row["compile_seconds"]), f"{seconds * 1e3:.2f}",
    _number(flops / 1e9), _number(flops / seconds / 1e9), _percent(flops / seconds, peak),
    _number(moved / 1e9), _number(moved / seconds / 1e9), _percent(moved / seconds, bandwidth),
  ]  # fmt: skip


def _number(value: float) -> str:
  return "-" if math.isnan(value) else f"{value:.3g}"


def _percent(value: float, whole: float) -> str:
  return "-" if math.isnan(value) else f"{value / whole:.1%}"


def _align(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
  """Columns as wide as they need; the first `left` begin at the left, the others end at the right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return [
    "  "
    + "  ".join(
      c.ljust(w) if i < left else c.rjust(w)
      for i, (c, w) in enumerate(zip(row, widths, strict=True))
    )
    for row in rows
  ]
