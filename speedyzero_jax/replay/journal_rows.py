"""Rows of the journal: consecutive slots of one lane, encoded as bytes.

Frames are XORed with their predecessors and compressed together with zlib. All other columns are
stored raw, in little-endian order, one after another. A CRC-32 covers everything.
"""

import itertools
import math
import struct
import zlib
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

  def encode(self, slots: Slots) -> list[Row]:
    """Encodes slots, consecutive within each lane, as rows in the order of the rows' first slots.

    A row ends where the lane does, and where a lost environment left an episode open.
    """
    order = np.argsort(slots.lane, kind="stable")
    lane, time, first = slots.lane[order], slots.time[order], slots["first"][order]
    ended = (slots["terminated"] | slots["truncated"])[order]
    columns = [slots[name][order].astype(dtype) for name, (dtype, _) in self._slots.items()]
    # Bytes of each column, and per slot; slicing bytes is faster than slicing arrays.
    packed = [(column.tobytes(), column.nbytes // len(order)) for column in columns]
    pixels = slots["frame"].astype(self._frame[0], copy=False)
    frames = pixels.reshape(len(order), -1).view(np.uint8)
    begins = np.diff(lane, prepend=-1) != 0
    begins[1:] |= first[1:] & ~ended[:-1]
    rows = {}
    for begin, end in itertools.pairwise([*np.flatnonzero(begins).tolist(), len(order)]):
      values = b"".join([column[begin * n : end * n] for column, n in packed])
      changes = frames[order[begin], None]
      if end - begin > 1:  # copied row by row, as frames are large
        changes = frames[order[begin:end]]
        changes[1:] = changes[1:] ^ changes[:-1]
      compressed = zlib.compress(changes.data, 1)
      place = int(lane[begin]), int(time[begin]), end - begin
      row = Row(*place, _crc(*place, values, compressed), values, compressed)
      rows[int(order[begin])] = row
    return [row for _, row in sorted(rows.items())]

  def decode(self, row: Row, begin: int, end: int) -> Slots:
    """Decodes slots begin <= t < end, which an intact row must contain."""
    arrays, offset = {}, 0
    for name, (dtype, shape) in self._slots.items():
      length = row.size * math.prod(shape)
      values = np.frombuffer(row.slots, dtype, length, offset)
      arrays[name] = values.reshape(row.size, *shape)
      offset += values.nbytes
    changes = np.frombuffer(zlib.decompress(row.frames), np.uint8).reshape(row.size, -1)
    dtype, shape = self._frame
    pixels = np.bitwise_xor.accumulate(changes, axis=0)
    arrays["frame"] = pixels.view(dtype).reshape(row.size, *shape)
    part = slice(begin - row.start, end - row.start)
    return Slots.of_lane(row.lane, begin, {name: array[part] for name, array in arrays.items()})


def _crc(lane: int, start: int, size: int, slots: bytes, frames: bytes) -> int:
  return zlib.crc32(frames, zlib.crc32(slots, zlib.crc32(struct.pack("<3q", lane, start, size))))
