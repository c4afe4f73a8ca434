"""Schema of a stored step: every column that actors append.

Storage, journal and messages are derived from a `Schema`. An agent adds its own columns (`extra`)
to those common to all agents, such as a search policy or a value estimate (see
`agents/efficientzero/agent.py`). `LaneStore` adds columns derived from them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from speedyzero_jax.types import Slots


class Column(NamedTuple):
  """A named array with one value per slot."""

  name: str
  dtype: str  # numpy dtype name
  shape: tuple[int, ...] = ()  # of one value
  fill: float = 0.0  # value in slots played at random

  @property
  def nbytes(self) -> int:
    """Bytes of one value."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize


_COMMON = (  # columns common to all agents, besides the frame
  Column("first", "bool"),  # the frame starts an episode
  Column("terminated", "bool"),  # the frame ends its episode; its value is 0
  Column("truncated", "bool"),  # the frame ends its episode; bootstrap from its value
  Column("action", "int32"),  # taken after the frame; -1 where the frame ends an episode
  Column("reward", "float32"),  # received for the action; clipped if configured
  Column("step", "int32"),  # learner step of the weights that chose the action
)


class Schema(NamedTuple):
  """Columns of a slot.

  `copies` maps names of further columns to their sources. They are not appended: in the replay each
  starts as a copy of its source and is rewritten later. `stamps` names further columns that hold
  the learner step of the weights that computed a slot's values: one for each set of columns that
  are rewritten together.
  """

  frame: Column
  num_actions: int
  extra: tuple[Column, ...]  # the agent's columns
  copies: Mapping[str, str] = {}
  stamps: tuple[str, ...] = ()

  @property
  def columns(self) -> tuple[Column, ...]:
    """Columns that are appended, the frame first."""
    return (self.frame, *_COMMON, *self.extra)

  @property
  def slot_bytes(self) -> int:
    """Bytes of one slot's columns, without copies and stamps."""
    return sum(column.nbytes for column in self.columns)

  def check(self, slots: Slots) -> None:
    """Raises ValueError unless slots have exactly these columns, with their shapes and dtypes."""
    columns = (Column("lane", "int64"), Column("time", "int64"), *self.columns)
    arrays = {"lane": slots.lane, "time": slots.time, **slots.columns}
    if arrays.keys() != {column.name for column in columns}:
      names = sorted(arrays.keys() ^ {column.name for column in columns})
      raise ValueError(f"slots: missing or unknown columns {names}")
    for column in columns:
      array, shape = arrays[column.name], (slots.lane.size, *column.shape)
      if array.shape != shape or array.dtype != column.dtype:
        raise ValueError(
          f"slots: {column.name} must be {column.dtype}{list(shape)}, "
          f"got {array.dtype}{list(array.shape)}"
        )


def make_schema(
  frame_shape: Sequence[int],
  frame_dtype: np.dtype | type | str,
  num_actions: int,
  extra: Sequence[Column] = (),
  **others: Any,
) -> Schema:
  """Makes a schema; `others` are `copies` and `stamps`."""
  frame = Column("frame", np.dtype(frame_dtype).name, tuple(frame_shape))
  return Schema(frame, num_actions, tuple(extra), **others)
