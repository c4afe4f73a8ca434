"""Schema of a stored step: every column that actors append.

Storage, journal and messages are derived from a `Schema`. The base columns are common to all
agents; an agent adds its own (`extra`), such as a search policy or a value estimate.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from speedyzero_jax.types import BASE_COLUMNS, Segment


class Column(NamedTuple):
  """A named array with one value per slot."""

  name: str
  dtype: str  # numpy's name
  shape: tuple[int, ...] = ()  # of one value
  low: int | None = None  # minimum, for integers
  high: int | None = None  # exclusive maximum, for integers
  fill: float = 0.0  # value where the action was random

  @property
  def nbytes(self) -> int:
    """Bytes of one value."""
    return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Schema(NamedTuple):
  """Columns of a slot.

  `copies` are not appended: in the replay each starts as a copy of another column and is rewritten
  later. `stamps` names sets of columns that are rewritten together; for each set the replay stores,
  per slot, the learner step of the weights behind the values.
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
    """Bytes of one slot's columns."""
    return sum(column.nbytes for column in self.columns)

  def check(self, segment: Segment) -> None:
    """Raises ValueError unless the segment holds exactly these columns, in shape and dtype."""
    arrays, slots = segment.arrays(), len(segment.frame)
    if arrays.keys() != {column.name for column in self.columns}:
      names = sorted(arrays.keys() ^ {column.name for column in self.columns})
      raise ValueError(f"segment of lane {segment.lane}: missing or unknown columns {names}")
    for column in self.columns:
      array, shape = arrays[column.name], (slots, *column.shape)
      if array.shape != shape or array.dtype != column.dtype:
        raise ValueError(
          f"segment of lane {segment.lane}: {column.name} must be {column.dtype}{list(shape)}, "
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
  """The base columns (see `types.Segment`) followed by an agent's."""
  base = (
    Column("frame", np.dtype(frame_dtype).name, tuple(frame_shape)),
    Column("first", "bool"),
    Column("terminated", "bool"),
    Column("truncated", "bool"),
    Column("action", "int32", low=-1, high=num_actions),
    Column("reward", "float32"),
    Column("step", "int32", low=0),
  )
  return Schema((*base, *extra), copies or {}, stamps or {})
