"""Rows of the journal: consecutive slots of one lane, encoded as bytes.

Frames are XORed with their predecessors and compressed together with zlib. All other columns are
stored raw, in little-endian order, one after another. A CRC-32 covers everything.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.types import Slots


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
  """Encodes slots with the columns of a schema as rows, and decodes rows."""

  def __init__(self, schema: Schema):
    types = {c.name: (np.dtype(c.dtype).newbyteorder("<"), c.shape) for c in schema.columns}
    self._frame = types.pop("frame")
    self._slots = types

  def encode(self, slots: Slots) -> Row:
    """Encodes consecutive slots of a lane as one row."""
    n = len(slots)
    columns = b"".join(slots[name].astype(t[0]).tobytes() for name, t in self._slots.items())
    pixels = slots["frame"].astype(self._frame[0], copy=False).reshape(n, -1).view(np.uint8)
    changes = pixels.copy()
    changes[1:] ^= pixels[:-1]
    frames = zlib.compress(changes.data, 1)
    place = int(slots.lane[0]), int(slots.time[0]), n
    return Row(*place, _crc(*place, columns, frames), columns, frames)

  def decode(self, row: Row, begin: int, end: int) -> Slots:
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
    return Slots.of_lane(row.lane, begin, {name: array[part] for name, array in arrays.items()})


def runs(slots: Slots) -> Iterator[Slots]:
  """Divides slots into consecutive ones of one lane each, in the order of their first slots.

  Also splits where a lost environment left an episode open.
  """
  order = np.argsort(slots.lane, kind="stable")
  lane, first = slots.lane[order], slots["first"][order]
  ended = (slots["terminated"] | slots["truncated"])[order]
  begins = (np.diff(lane, prepend=-1) != 0) | (first & ~np.roll(ended, 1))
  parts = np.split(order, np.flatnonzero(begins)[1:])
  yield from map(slots.select, sorted(parts, key=lambda part: part[0]))


def _crc(lane: int, start: int, size: int, slots: bytes, frames: bytes) -> int:
  return zlib.crc32(frames, zlib.crc32(slots, zlib.crc32(struct.pack("<3q", lane, start, size))))
