"""Files that only grow: appended whole or not at all, read back even when damaged. Knows nothing of what is in them.

A killed process leaves a torn last line and a full disk half a record; neither may spoil what comes before or after.
"""

import json
import os
import pathlib
from typing import Any

from speedyzero_jax.metrics import names


class AppendFile:
  """A file to which records are appended in one piece, visible to readers as soon as `append` returns.

  Not thread-safe. The constructor raises OSError when the file cannot be opened.
  """

  def __init__(self, path: str | os.PathLike[str]):
    self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    self._size = os.fstat(self._fd).st_size  # bytes of whole records
    self._torn = False

  def append(self, record: bytes) -> None:
    """Appends one record. Raises OSError when it cannot be written; the next call first removes what got through."""
    if self._torn:
      os.ftruncate(self._fd, self._size)
    self._torn = True
    rest = memoryview(record)
    while rest:
      rest = rest[os.write(self._fd, rest) :]
    self._torn = False
    self._size += len(record)

  def close(self) -> None:
    """Closes the file. A torn record is removed if that is possible."""
    try:
      if self._torn:
        os.ftruncate(self._fd, self._size)
    except OSError:
      pass  # readers skip a torn record
    finally:
      os.close(self._fd)


def parse_row(line: bytes) -> dict[str, Any] | None:
  """A line of `metrics.jsonl` as a dict with an integer `step`, or None if it is damaged."""
  try:
    row = json.loads(line.decode())
  except ValueError:  # not UTF-8, or not JSON
    return None
  if not isinstance(row, dict) or type(row.get(names.STEP)) is not int:
    return None
  return row


def read_rows(path: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], int]:
  """Reads `metrics.jsonl`.

  Returns:
    The undamaged rows in file order, and the number of damaged lines. A last line without its newline is being written
    or was torn by a kill: it is left out and not counted.

  Raises:
    OSError: the file cannot be read.
  """
  *lines, _ = pathlib.Path(path).read_bytes().split(b"\n")
  rows = [parse_row(line) for line in lines]
  good = [row for row in rows if row is not None]
  return good, len(rows) - len(good)


def drop_after(path: str | os.PathLike[str], step: int) -> float:
  """Removes damaged lines and those of later learner steps than `step`, atomically. A missing file is an empty one.

  Returns:
    The seconds the run had been running when its last line was written, removed or not: that time was spent.

  Raises:
    OSError: the file cannot be read, or cannot be replaced; it is then as it was.
  """
  path = pathlib.Path(path)
  content = path.read_bytes() if path.exists() else b""
  *lines, _ = content.split(b"\n")
  kept = []
  elapsed = 0.0
  for line in lines:
    row = parse_row(line)
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
