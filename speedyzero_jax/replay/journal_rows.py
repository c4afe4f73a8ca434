"""Rows of the journal: consecutive slots of one lane, encoded as bytes.

Frames are XORed with their predecessors and compressed together with zlib. All other columns are
stored raw, in little-endian order, one after another. A CRC-32 covers everything.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.types import Segment


class Row(NamedTuple):
  """Slots start <= t < start + size of a lane."""

  lane: int
  start: int
  size: int
  crc: int  # of all other fields
  slots: bytes  # all columns but the frames
  frames: bytes

  def intact(self) -> bool:
    """Whether the CRC matches. Fields may have any type, as a damaged file can return any."""
    try:
      return all(type(x) is int for x in self[:4]) and self.crc == _crc(*self[:3], *self[4:])
    except (TypeError, struct.error):
      return False


class RowCodec:
  """Encodes segments with the columns of a schema as rows, and decodes rows."""

  def __init__(self, schema: Schema):
    types = {c.name: (np.dtype(c.dtype).newbyteorder("<"), c.shape) for c in schema.columns}
    self._frame = types.pop("frame")
    self._slots = types

  def encode(self, run: Sequence[Segment]) -> Row:
    """Encodes consecutive segments of a lane as one row."""
    parts = [segment.arrays() for segment in run]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    size = len(arrays["frame"])
    slots = b"".join(arrays[name].astype(t[0]).tobytes() for name, t in self._slots.items())
    pixels = arrays["frame"].astype(self._frame[0], copy=False).reshape(size, -1).view(np.uint8)
    changes = pixels.copy()
    changes[1:] ^= pixels[:-1]
    frames = zlib.compress(changes.data, 1)
    place = run[0].lane, run[0].start, size
    return Row(*place, _crc(*place, slots, frames), slots, frames)

  def decode(self, row: Row, begin: int, end: int) -> Segment:
    """Decodes slots begin <= t < end, which an intact row must contain."""
    arrays, offset = {}, 0
    for name, (dtype, shape) in self._slots.items():
      length = row.size * int(np.prod(shape, dtype=int))
      values = np.frombuffer(row.slots, dtype, length, offset)
      arrays[name] = values.reshape(row.size, *shape)
      offset += values.nbytes
    changes = np.frombuffer(zlib.decompress(row.frames), np.uint8).reshape(row.size, -1)
    dtype, shape = self._frame
    pixels = np.bitwise_xor.accumulate(changes, axis=0)
    arrays["frame"] = pixels.view(dtype).reshape(row.size, *shape)
    part = slice(begin - row.start, end - row.start)
    return Segment.of(row.lane, begin, {name: array[part] for name, array in arrays.items()})


def runs(segments: Sequence[Segment]) -> list[list[Segment]]:
  """Groups consecutive segments by lane; splits where a lost environment left an episode open."""
  result: list[list[Segment]] = []
  latest: dict[int, list[Segment]] = {}
  for segment in segments:
    run = latest.get(segment.lane)
    ended = run is not None and (run[-1].terminated[-1] or run[-1].truncated[-1])
    if run is None or (segment.first[0] and not ended):
      run = latest[segment.lane] = []
      result.append(run)
    run.append(segment)
  return result


def _crc(lane: int, start: int, size: int, slots: bytes, frames: bytes) -> int:
  return zlib.crc32(frames, zlib.crc32(slots, zlib.crc32(struct.pack("<3q", lane, start, size))))
