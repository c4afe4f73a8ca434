"""Messages as bytes and back, with one check for both directions.

A message is an 8-byte preamble, a msgpack map `{kind: fields}`, and the raw numbers of its arrays.
In the map an array stands as `[dtype.char, *shape]`; the numbers follow in the same order, each
array padded to 8 bytes. The map is limited in size and decoded arrays are views of the message, so
that decoding takes little memory whatever sizes a message declares.
"""

import dataclasses
import functools
import itertools
import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import msgpack
import numpy as np

from speedyzero_jax.cluster.messages import CALLS, Spec
from speedyzero_jax.replay.schema import Column, Schema
from speedyzero_jax.types import Segment

_PREAMBLE = struct.Struct("<4sI")  # magic, bytes of the map
_MAGIC = b"SZJ2"  # changes with the layout
_ALIGNMENT = 8
_MAX_MAP = 256 << 10  # bytes; enough for some thousand named arrays
_DTYPES = {np.dtype(x).char: np.dtype(x) for x in (*"?bBhHiIlLqQefd", jnp.bfloat16)}
_SCALARS: dict[type, Any] = {
  int: int | np.integer,
  float: int | float | np.floating,
  bool: bool | np.bool_,
  str: str,
}

Message = TypeVar("Message")


class WireError(ValueError):
  """Bytes that are not the expected message, or a message that cannot be sent."""


@dataclasses.dataclass(frozen=True)
class WireFormat:
  """Sizes and arrays of a run's messages; both ends take them from the configuration."""

  lanes: int
  capacity: int  # slots per lane
  schema: Schema  # of the replay
  weights: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
  results: Mapping[str, Mapping[str, Column]] = dataclasses.field(default_factory=dict)  # by task
  max_bytes: int = 64 << 20  # of any message

  @functools.cached_property
  def segments(self) -> dict[str, Spec]:
    """Arrays of packed segments."""
    return _INDEX | {column.name: _spec(column, "n") for column in self.schema.columns}


_INDEX = {  # of segments
  "_lane": Spec("int64", ("s",), 0, "lanes"),
  "_start": Spec("int64", ("s",), 0),
  "_size": Spec("int64", ("s",), 1),
}
_FIELDS = {
  kind: get_type_hints(kind, include_extras=True)
  for call in CALLS.values()
  for kind in (call.request, call.answer)
}


def encode(message: Any, wire: WireFormat) -> bytes:
  """A message of `messages` as bytes. Raises WireError if it does not fit the format."""
  kind, fields = type(message), message._asdict()
  parts: list[Any] = []
  if "segments" in fields:
    fields["segments"] = _pack(fields["segments"], wire.schema)
  _Check(wire).fields(kind, fields)

  def default(value: Any) -> Any:
    if isinstance(value, np.generic):
      return value.item()
    parts.extend((np.ascontiguousarray(value).reshape(-1).view(np.uint8), _padding(value.nbytes)))
    return [value.dtype.char, *value.shape]

  try:
    head = msgpack.packb({kind.__name__: fields}, default=default)
  except UnicodeEncodeError as error:
    raise WireError(f"{kind.__name__}: {error}") from None
  parts[:0] = [_PREAMBLE.pack(_MAGIC, len(head)), head, _padding(len(head))]
  size = sum(len(part) for part in parts)
  if size > wire.max_bytes or len(head) > _MAX_MAP:
    raise WireError(f"{size} bytes ({len(head)} without arrays) are more than may be sent")
  return b"".join(parts)


def decode(kind: type[Message], data: bytes, wire: WireFormat) -> Message:
  """The message of this kind in `data`; arrays are read-only views. Raises WireError otherwise."""
  if len(data) > wire.max_bytes:
    raise WireError(f"{len(data)} bytes are more than the {wire.max_bytes} that may be sent")
  magic, size = _PREAMBLE.unpack_from(data) if len(data) >= _PREAMBLE.size else (b"", 0)
  end = _PREAMBLE.size + size
  if magic != _MAGIC or size > _MAX_MAP or end > len(data):
    raise WireError("not a message of this version, or truncated")
  arrays = _Arrays(data, end + len(_padding(size)), wire.max_bytes)
  try:
    found = msgpack.unpackb(
      data[_PREAMBLE.size : end],
      list_hook=arrays.take,
      max_array_len=16,
      max_str_len=4096,
      max_bin_len=0,
      max_ext_len=0,
    )
  except WireError:
    raise
  except (ValueError, msgpack.UnpackException) as error:
    raise WireError(f"not msgpack: {error}") from None
  if not isinstance(found, dict) or [*found] != [kind.__name__]:
    raise WireError(f"must be {kind.__name__}, got {_brief(found)}")
  if arrays.at != len(data):
    raise WireError(f"arrays end at byte {arrays.at} of {len(data)}")
  fields = found[kind.__name__]
  _Check(wire).fields(kind, fields)
  if "segments" in fields:
    fields["segments"] = _unpack(fields["segments"])
  return kind(**fields)


class _Check:
  """Checks a message's fields against their annotations and the wire format."""

  def __init__(self, wire: WireFormat):
    self._wire = wire
    self._letters: dict[int | str, int] = {}  # sizes known so far

  def fields(self, kind: type, fields: Any) -> None:
    """Checks all fields; segments are packed."""
    hints = _FIELDS[kind]
    _check_names(kind.__name__, fields, hints)
    for name, hint in hints.items():
      value = fields[name]
      base, extra = get_args(hint) if get_origin(hint) is Annotated else (hint, None)
      if extra == "task" and not (isinstance(value, str) and value in self._wire.results):
        raise WireError(f"{name}: unknown task {_brief(value)}")
      if extra == "frame":
        self._array(name, value, _spec(self._wire.schema.frame, "n"))
      elif base is np.ndarray:
        self._array(name, value, extra)
      elif get_origin(base):  # named arrays, or segments
        specs = self._specs(extra, fields)
        _check_names(name, value, specs)
        for key, spec in specs.items():
          self._array(f"{name}.{key}", value[key], spec)
      elif not _is_scalar(value, base, extra.low if isinstance(extra, Spec) else 0):
        raise WireError(f"{name}: must be a valid {base.__name__}, got {_brief(value)}")

  def _specs(self, extra: str | None, fields: Mapping[str, Any]) -> dict[str, Spec]:
    if extra is None:
      return self._wire.segments
    if extra == "weights":
      return {name: Spec(str(leaf.dtype), leaf.shape) for name, leaf in self._wire.weights.items()}
    outputs = self._wire.results[fields["task"]]
    return {name: _spec(column, "n", "k") for name, column in outputs.items()}

  def _array(self, name: str, array: Any, spec: Spec) -> None:
    sizes = [self._letters.get(size, size) for size in spec.shape]
    if (
      not isinstance(array, np.ndarray)
      or array.dtype != spec.dtype
      or array.ndim != len(sizes)
      or any(a != b for a, b in zip(sizes, array.shape, strict=True) if isinstance(a, int))
    ):
      got = f"{array.dtype}{[*array.shape]}" if isinstance(array, np.ndarray) else _brief(array)
      raise WireError(f"{name}: must be {spec.dtype}[{', '.join(map(str, sizes))}], got {got}")
    self._letters |= zip(spec.shape, array.shape, strict=True)
    below = getattr(self._wire, spec.below) if isinstance(spec.below, str) else spec.below
    if array.size and spec.low is not None and array.min() < spec.low:
      raise WireError(f"{name}: must be at least {spec.low}, got {array.min()}")
    if array.size and below is not None and array.max() >= below:
      raise WireError(f"{name}: must be below {below}, got {array.max()}")


def _check_names(name: str, got: Any, expected: Mapping[str, Any]) -> None:
  if not isinstance(got, Mapping) or got.keys() != expected.keys():
    wrong = got.keys() ^ expected.keys() if isinstance(got, Mapping) else got
    raise WireError(f"{name}: missing or unknown names {_brief(wrong)}")


def _is_scalar(value: Any, kind: type, low: int | None) -> bool:
  if not isinstance(value, _SCALARS[kind]) or (isinstance(value, bool) and kind is not bool):
    return False
  if kind is float:
    return math.isfinite(value)
  return kind is not int or (low or 0) <= value < 1 << 63


def _spec(column: Column, *letters: str) -> Spec:
  return Spec(column.dtype, (*letters, *column.shape), column.low, column.below)


class _Arrays:
  """The raw numbers of a message, taken from front to back."""

  def __init__(self, data: bytes, at: int, max_bytes: int):
    self._data, self.at, self._max_bytes = data, at, max_bytes

  def take(self, form: list[Any]) -> np.ndarray:
    """The next array, of the form [dtype.char, *shape]."""
    dtype = _DTYPES.get(form[0]) if form and isinstance(form[0], str) else None
    shape = form[1:]
    if dtype is None or not all(type(size) is int and size >= 0 for size in shape):
      raise WireError(f"not an array: {_brief(form)}")
    nbytes = dtype.itemsize * math.prod(shape)
    widest = math.prod(max(size, 1) for size in shape)  # matters for empty arrays
    if nbytes > len(self._data) - self.at or widest > self._max_bytes:
      raise WireError(f"{dtype}{shape} is larger than the rest of the message")
    array = np.ndarray(shape, np.uint8 if dtype.kind == "b" else dtype, self._data, self.at)
    if dtype.kind == "b" and array.max(initial=0) > 1:
      raise WireError(f"bool must be 0 or 1, got {array.max()}")
    self.at += nbytes + len(_padding(nbytes))
    return array.view(dtype)


def _brief(value: Any) -> str:
  return reprlib.repr(value)[:200]  # safe for values of any depth


def _padding(size: int) -> bytes:
  return bytes(-size % _ALIGNMENT)


def _pack(segments: Sequence[Segment], schema: Schema) -> dict[str, np.ndarray]:
  """Segments as one array per column for the slots of all, and three that tell them apart."""
  for segment in segments:
    try:
      schema.check(segment)
    except ValueError as error:
      raise WireError(str(error)) from None
  columns = [segment.arrays() for segment in segments]
  arrays = {
    of.name: np.concatenate([np.zeros((0, *of.shape), of.dtype), *(x[of.name] for x in columns)])
    for of in schema.columns
  }
  index = np.array(
    [(x.lane, x.start, len(x.frame)) for x in segments] or np.zeros((0, 3), np.int64)
  )
  return arrays | dict(zip(_INDEX, index.T, strict=True))


def _unpack(arrays: dict[str, np.ndarray]) -> list[Segment]:
  lanes, starts, sizes = (arrays.pop(name).tolist() for name in _INDEX)
  bounds = [0, *itertools.accumulate(sizes)]
  if bounds[-1] != len(arrays["frame"]):
    raise WireError("segments: sizes do not add up to the slots")
  return [
    Segment.of(lane, start, {name: array[a:b] for name, array in arrays.items()})
    for lane, start, (a, b) in zip(lanes, starts, itertools.pairwise(bounds), strict=True)
  ]
