"""Schema of a stored step: every column that actors append.

Storage, journal and messages are derived from a `Schema`. `types.BASE_COLUMNS` are common to all
agents. An agent adds its own (`extra`), such as a search policy or a value estimate (see
`agents/efficientzero/agent.py`). `LaneStore` adds columns derived from them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from speedyzero_jax.types import BASE_COLUMNS, Slots


class Column(NamedTuple):
  """A named array with one value per slot."""

  name: str
  dtype: str  # numpy dtype name
  shape: tuple[int, ...] = ()  # of one value
  low: int | None = None  # minimum, for integers
  high: int | None = None  # exclusive maximum, for integers
  fill: float = 0.0  # value in slots played at random

  @property
  def nbytes(self) -> int:
    """Bytes of one value."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Schema(NamedTuple):
  """Columns of a slot.

  `copies` maps names of further columns to their sources. They are not appended: in the replay each
  starts as a copy of its source and is rewritten later. `stamps` names sets of columns that are
  rewritten together; for each set the replay stores, per slot, the learner step of the weights that
  computed the values.
  """

  columns: tuple[Column, ...]  # frame first, then the other base columns, then the agent's
  copies: Mapping[str, str] = {}
  stamps: Mapping[str, tuple[str, ...]] = {}

  @property
  def frame(self) -> Column:
    return self.columns[0]

  @property
  def num_actions(self) -> int:
    high = next(column.high for column in self.columns if column.name == "action")
    assert high is not None
    return high

  @property
  def extra(self) -> tuple[Column, ...]:
    """The agent's columns."""
    return self.columns[len(BASE_COLUMNS) :]

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
  *,
  copies: Mapping[str, str] | None = None,
  stamps: Mapping[str, tuple[str, ...]] | None = None,
) -> Schema:
  """Makes a schema of `types.BASE_COLUMNS` and an agent's `extra` columns."""
  base = (
    Column("frame", np.dtype(frame_dtype).name, tuple(frame_shape)),
    Column("first", "bool"),
    Column("terminated", "bool"),
    Column("truncated", "bool"),
    Column("action", "int32", low=-1, high=num_actions),
    Column("reward", "float32"),
    Column("step", "int32", low=0),
  )
  assert tuple(column.name for column in base) == BASE_COLUMNS
  return Schema((*base, *extra), copies or {}, stamps or {})
