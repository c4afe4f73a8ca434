"""Files of frames: each frame of a replay in one of them, written once and never changed. Checkpoints stand on them.

A file is an npz of what `Replay.export_slots` gave; the CRC-32 of its bytes is kept by whoever lists it. Must not know
of checkpoints, or of the replay.
"""

import io
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np


class SlotFile(NamedTuple):
  """What is to be remembered of a file."""

  name: str  # sorted by name, files are in the order they were written
  crc32: int
  heads: list[int]  # [L] where each lane's frames in it end


class SlotFiles:
  """The files in one folder, which is made when there is something to write."""

  def __init__(self, folder: Path):
    self._folder = folder

  def write(self, name: str, slots: Mapping[str, np.ndarray], heads: np.ndarray) -> SlotFile:
    """Writes slots that end at these heads [L]; when it returns they are on disk. Raises OSError, and nothing is left.

    Args:
      name: `slots-*.npz`, sorted behind all before.
      slots: plain arrays.
      heads: to be remembered.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._folder / name
    temporary = path.with_suffix(".tmp")
    archive = io.BytesIO()
    np.savez_compressed(archive, **slots)  # type: ignore[arg-type]
    try:
      with temporary.open("wb") as out:
        out.write(archive.getbuffer())
        out.flush()
        os.fsync(out.fileno())
      os.replace(temporary, path)
    except BaseException:
      temporary.unlink(missing_ok=True)
      raise
    return SlotFile(name, zlib.crc32(archive.getbuffer()), heads.tolist())

  def check(self, file: SlotFile) -> None:
    """Raises ValueError, BadZipFile or OSError unless the file is as it was written. Holds a megabyte of it."""
    path, crc = self._folder / file.name, 0
    with path.open("rb") as content:
      while piece := content.read(2**20):
        crc = zlib.crc32(piece, crc)
    if crc != file.crc32:  # NumPy stops reading before zipfile would compare its own
      raise ValueError(f"checksum of '{file.name}' differs")
    with zipfile.ZipFile(path) as archive:
      for name in archive.namelist():
        with archive.open(name) as array:
          np.lib.format.read_magic(array)
          _, _, dtype = np.lib.format.read_array_header_1_0(array)
          if dtype.hasobject:
            raise ValueError(f"'{file.name}' holds pickled objects")

  def load(self, files: Iterable[SlotFile]) -> Iterator[dict[str, np.ndarray]]:
    """The slots of these files, one file at a time in memory. They should be checked before."""
    for file in files:
      with np.load(self._folder / file.name, allow_pickle=False) as archive:
        yield {key: archive[key] for key in archive.files}

  def names(self) -> set[str]:
    """Of all files there are."""
    return {path.name for path in self._folder.glob("slots-*.npz")}

  def remove(self, names: Iterable[str]) -> None:
    """Deletes the files of these names."""
    for name in names:
      (self._folder / name).unlink()

  def end_with(self, files: Iterable[SlotFile], aside: Path | None) -> None:
    """Moves what is newer than these files to `aside` (None: deletes it), and deletes what is half-written."""
    newest = max((file.name for file in files), default="")
    for path in self._folder.glob("slots-*"):
      if path.suffix != ".tmp" and path.name <= newest:
        continue
      if path.suffix == ".tmp" or aside is None:
        path.unlink()
      else:
        os.replace(path, aside / path.name)
