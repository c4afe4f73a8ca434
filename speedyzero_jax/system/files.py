"""Atomic writes of files."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
  """Replaces a file, also if the machine fails meanwhile; a kill may leave `path.PID.tmp`.

  Raises OSError; the file is then as it was.
  """
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  with temporary.open("w") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)
