"""Reading and repair of `metrics.jsonl`, which a killed process may have left incomplete."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from speedyzero_jax.metrics import names
from speedyzero_jax.system.files import write_atomically

_END_BYTES = 1 << 16  # longer than any row


def line(row: Mapping[str, Any]) -> bytes:
  """Serializes a row. Raises ValueError if a value is NaN or infinite."""
  return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_rows(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
  """Returns the valid rows of `metrics.jsonl` in file order, and the number of damaged lines.

  A last line without newline is still being written, or was cut off by a kill: it is ignored.
  """
  *lines, _ = pathlib.Path(path).read_bytes().split(b"\n")
  rows = []
  for text in lines:
    try:
      row = json.loads(text.decode())
    except ValueError:  # not UTF-8, or not JSON
      continue
    if isinstance(row, dict) and type(row.get(names.STEP)) is int:
      rows.append(row)
  return rows, len(lines) - len(rows)


def last_row(path: pathlib.Path) -> dict[str, Any]:
  """The last row, or {} if there is none. Reads only the end of the file."""
  try:
    with path.open("rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
      *lines, _ = file.read().split(b"\n")
    row = json.loads(lines[-1])
  except (OSError, IndexError, ValueError):
    return {}
  return row if isinstance(row, dict) and type(row.get(names.STEP)) is int else {}


def drop_after(path: pathlib.Path, step: int) -> float:
  """Atomically removes damaged lines and lines of learner steps after `step`.

  If lines are removed, the last remaining one gets the run's last time, which would otherwise be
  lost if the run stopped again before it writes a line. If no line remains, it is lost then.

  Returns:
    The run's elapsed seconds at its last line; 0 if the file is missing.
  """
  if not path.exists():
    return 0.0
  rows, _ = read_rows(path)
  elapsed = max((row.get(names.TIME, 0.0) for row in rows), default=0.0)
  kept = [row for row in rows if row[names.STEP] <= step]
  if kept and len(kept) < len(rows):
    kept[-1][names.TIME] = elapsed
  write_atomically(path, "".join(line(row).decode() for row in kept))
  return elapsed
