"""Rows of `metrics.jsonl`, whatever its state after a kill."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from speedyzero_jax.metrics import names

_END_BYTES = 1 << 16  # more than a row


def line(row: Mapping[str, Any]) -> bytes:
  """The line of a row. Raises ValueError if a value is NaN or infinite."""
  return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def read_rows(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
  """The undamaged rows of `metrics.jsonl` in file order, and the number of damaged lines.

  A last line without its newline is being written or was torn by a kill: it is left out and not
  counted.
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


def last_step(path: pathlib.Path) -> int:
  """The learner step of the last row; 0 without one. Reads the end of the file only."""
  try:
    with path.open("rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
      *lines, _ = file.read().split(b"\n")
    return int(json.loads(lines[-1])[names.STEP])
  except (OSError, IndexError, ValueError, KeyError, TypeError):
    return 0


def drop_after(path: pathlib.Path, step: int) -> float:
  """Removes damaged lines and those of later learner steps than `step`, atomically.

  Returns the seconds the run had been running by its last line, removed or not: that time was
  spent. 0 for a missing file.
  """
  if not path.exists():
    return 0.0
  rows, _ = read_rows(path)
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_bytes(b"".join(line(row) for row in rows if row[names.STEP] <= step))
  os.replace(temporary, path)
  return max((row.get(names.TIME, 0.0) for row in rows), default=0.0)
