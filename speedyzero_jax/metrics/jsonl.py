"""Append-only files, and the reading of `metrics.jsonl` whatever its state after a kill."""

import contextlib
import errno
import io
import json
import os
import pathlib
from typing import Any

from speedyzero_jax.metrics import names


def append(file: io.FileIO, record: bytes) -> None:
  """Appends a record whole, visible to readers at once.

  Raises:
    OSError: the record cannot be written; what was written of it is removed.
  """
  end = os.fstat(file.fileno()).st_size
  try:
    if file.write(record) < len(record):
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
  except OSError:
    with contextlib.suppress(OSError):
      file.truncate(end)
    raise


def read_rows(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
  """Reads `metrics.jsonl`.

  Returns:
    The undamaged rows in file order, and the number of damaged lines. A last line without its
    newline is being written or was torn by a kill: it is left out and not counted.

  Raises:
    OSError: the file cannot be read.
  """
  *lines, _ = pathlib.Path(path).read_bytes().split(b"\n")
  rows = [row for line in lines if (row := _parse(line)) is not None]
  return rows, len(lines) - len(rows)


def drop_after(path: pathlib.Path, step: int) -> float:
  """Removes damaged lines and those of later learner steps than `step`, atomically.

  Returns:
    The seconds the run had been running by its last line, removed or not: that time was spent. 0
    for a missing file.

  Raises:
    OSError: the file cannot be read, or cannot be replaced; it is then as it was.
  """
  content = path.read_bytes() if path.exists() else b""
  kept, elapsed = [], 0.0
  for line in content.split(b"\n")[:-1]:
    row = _parse(line)
    if row is None:
      continue
    if isinstance(row.get(names.TIME), int | float):
      elapsed = max(elapsed, float(row[names.TIME]))
    if row[names.STEP] <= step:
      kept.append(line + b"\n")
  if b"".join(kept) != content:
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
      file.writelines(kept)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  return elapsed


def _parse(line: bytes) -> dict[str, Any] | None:
  """A line as a dict with an integer `step`, or None if it is damaged."""
  try:
    row = json.loads(line.decode())
  except ValueError:  # not UTF-8, or not JSON
    return None
  return row if isinstance(row, dict) and type(row.get(names.STEP)) is int else None
