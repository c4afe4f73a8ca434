"""Atomic and durable writes of files."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
  """Replaces a file. After an error, a kill or a power failure it has its old or new content.

  Writes through links; to pipes and devices, such as /dev/null, without this guarantee. Raises
  OSError.
  """
  if path.exists() and not path.is_file():
    path.write_text(text)
    return
  path = path.resolve()
  temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
  try:
    with temporary.open("w") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
  """Syncs a folder, all that is in it, and its entry in the parent folder to disk.

  Raises OSError.
  """
  for path in (*folder.rglob("*"), folder, folder.parent):
    file = os.open(path, os.O_RDONLY)
    try:
      os.fsync(file)
    except OSError:
      if path.is_file():  # some network file systems can't sync folders
        raise
    finally:
      os.close(file)
