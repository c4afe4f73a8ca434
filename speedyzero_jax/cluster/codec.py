"""Messages as bytes and back. Knows no sockets; believes nothing that comes in.

A message is a header (magic, version, kind, total length) and its fields in order, each an array: type, rank, sizes,
then raw little-endian numbers, padded with zeros to 8 bytes. There is one way to write a message: whatever decodes,
encodes to the same bytes again. Sizes are checked against the message's own length before anything is made of them, and
arrays are views of the message, so decoding takes no memory worth mentioning.
"""

import dataclasses
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.cluster.messages import KINDS, SEGMENTS, Spec
from speedyzero_jax.types import Segment

VERSION = 1

_HEADER = struct.Struct("<4sBBHQ")  # magic, version, kind, zero, total length
_MAGIC = b"SZJx"
_ARRAY = struct.Struct("<BBHI")  # type, rank, zero, zero; then the sizes, 8 bytes each
_ALIGNMENT = 8
_MAX_RANK = 8
_DTYPES = tuple(
  map(np.dtype, ("bool", "uint8", "int32", "int64", "float32", "float64", jnp.bfloat16))
)
_SCALARS = {
  int: Spec("int64", low=0),
  float: Spec("float64"),
  bool: Spec("bool"),
  str: Spec("uint8", ("",)),
}

Message = TypeVar("Message")


class WireError(ValueError):
  """These bytes are not the message that was expected, or this message cannot be sent."""


@dataclasses.dataclass(frozen=True)
class Form:
  """The sizes that all messages of a unit share; both ends have them from the configuration.

  `weights` are exactly the arrays of `Weights`; where none are sent there are none.
  """

  lanes: int
  capacity: int  # slots per lane
  actions: int
  frame_shape: tuple[int, ...]
  frame_dtype: np.dtype | type
  weights: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
  max_bytes: int = 64 << 20  # of any message


class _Field(NamedTuple):
  name: str
  hint: Any  # int, float, bool, str, np.ndarray, list or dict
  spec: Spec | None  # of what is one array on the wire


def _fields_of(kind: type) -> tuple[_Field, ...]:
  """What a message's annotations say."""
  fields = []
  for name, hint in get_type_hints(kind, include_extras=True).items():
    if get_origin(hint) is Annotated:
      fields.append(_Field(name, *get_args(hint)))
    else:
      fields.append(_Field(name, get_origin(hint) or hint, _SCALARS.get(hint)))
  return tuple(fields)


_FIELDS = {kind: _fields_of(kind) for kind in KINDS}


def encode(message: Any, form: Form) -> bytes:
  """A message of `messages.py` as bytes.

  Raises:
    WireError: it does not fit the form, or is too long.
  """
  writer = _Writer(form)
  for field, value in zip(_FIELDS[type(message)], message, strict=True):
    if field.hint is list:
      writer.segments(field.name, value)
    elif field.hint is dict:
      writer.named_arrays(value)
    else:
      assert field.spec is not None
      writer.array(field.name, field.spec, _to_array(field, value))
  return writer.message(KINDS.index(type(message)))


def decode(kind: type[Message], data: bytes, form: Form) -> Message:
  """The message of this kind that `data` holds; its arrays are read-only views of `data`.

  Raises:
    WireError: it holds anything else.
  """
  reader = _Reader(data, KINDS.index(kind), form)
  values: list[Any] = []
  for field in _FIELDS[kind]:
    if field.hint is list:
      values.append(reader.segments(field.name))
    elif field.hint is dict:
      values.append(reader.named_arrays())
    else:
      assert field.spec is not None
      values.append(_from_array(field, reader.array(field.name, field.spec)))
  reader.end()
  return kind(*values)


def _to_array(field: _Field, value: Any) -> np.ndarray:
  try:
    if field.hint is int:
      return np.array(operator.index(value), np.int64)
    if field.hint is str:
      return np.frombuffer(value.encode(), np.uint8)
    if field.hint is np.ndarray:
      return np.asarray(value)
    return np.array(value, field.hint)
  except (OverflowError, UnicodeEncodeError) as error:
    raise WireError(f"{field.name}: {error}") from None


def _from_array(field: _Field, array: np.ndarray) -> Any:
  if field.hint is np.ndarray:
    return array
  if field.hint is not str:
    return array.item()
  try:
    return array.tobytes().decode()
  except UnicodeDecodeError:
    raise WireError(f"{field.name}: not UTF-8") from None


class _Checks:
  """What holds for each array, in whichever direction it goes."""

  def __init__(self, form: Form):
    self.form = form
    self.dims: dict[str, int] = {}  # letters bound so far

  def form_of(self, name: str, spec: Spec, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Checks type and shape, and binds letters."""
    if dtype != self.dtype(spec):
      raise WireError(f"{name}: must be {self.dtype(spec)}, got {dtype}")
    expected: list[int | None] = []
    letters: list[str | None] = []
    for dim in spec.dims:
      fixed = self._fixed(dim)
      expected += [self.dims.get(dim)] if fixed is None else fixed
      letters += [dim] if fixed is None else [None] * len(fixed)
    if len(shape) != len(expected) or any(
      b not in (None, a) for a, b in zip(shape, expected, strict=True)
    ):
      wanted_shape = ", ".join(
        str(letter if size is None else size)
        for letter, size in zip(letters, expected, strict=True)
      )
      raise WireError(f"{name}: must be [{wanted_shape}], got {list(shape)}")
    self.dims |= {letter: size for letter, size in zip(letters, shape, strict=True) if letter}

  def dtype(self, spec: Spec) -> np.dtype:
    return np.dtype(self.form.frame_dtype if spec.dtype == "frame" else spec.dtype)

  def _fixed(self, dim: str) -> list[int] | None:
    if dim == "frame":
      return list(self.form.frame_shape)
    return [self.form.actions] if dim == "actions" else None

  def values(self, name: str, spec: Spec, array: np.ndarray) -> None:
    """Checks the range of integers; a number on its own must be finite."""
    if array.size == 0:
      return
    if spec.low is not None and array.min() < spec.low:
      raise WireError(f"{name}: must be at least {spec.low}, got {array.min()}")
    if spec.below is not None and array.max() >= getattr(self.form, spec.below):
      raise WireError(
        f"{name}: must be below {spec.below} ({getattr(self.form, spec.below)}), got {array.max()}"
      )
    if array.ndim == 0 and array.dtype.kind == "f" and not math.isfinite(array.item()):
      raise WireError(f"{name}: must be finite, got {array}")

  def weights(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Checks one of the weights' arrays against the network's."""
    known = self.form.weights.get(name)
    if known is None:
      raise WireError(f"weights: the network has no {name!r}")
    if dtype != known.dtype or shape != known.shape:
      raise WireError(
        f"weights: {name} must be {known.dtype}{list(known.shape)}, got {dtype}{list(shape)}"
      )


class _Writer(_Checks):
  """Collects the parts of a message."""

  def __init__(self, form: Form):
    super().__init__(form)
    self._parts: list[Any] = [b""]  # the first is the header's place
    self._length = _HEADER.size

  def array(self, name: str, spec: Spec, array: np.ndarray) -> None:
    self.form_of(name, spec, array.dtype, array.shape)
    self.values(name, spec, array)
    self._put(array)

  def segments(self, name: str, segments: Sequence[Segment]) -> None:
    size = [len(segment.frame) for segment in segments]
    for column, spec in SEGMENTS.items():
      where = f"{name}.{column}"
      if spec.dims == ("segments",):
        numbers = size if column == "size" else [getattr(segment, column) for segment in segments]
        array = np.array(
          [_to_array(_Field(where, int, spec), number) for number in numbers], np.int64
        )
        self.values(where, spec, array)
        self.array(where, spec, array.astype(spec.dtype))  # checked above, so nothing wraps around
      elif segments:
        arrays = [np.asarray(getattr(segment, column)) for segment in segments]
        if any(array.shape[:1] != (n,) for array, n in zip(arrays, size, strict=True)):
          raise WireError(f"{where}: not as long as its frames")
        try:
          array = np.concatenate(arrays, dtype=self.dtype(spec), casting="no")
        except (TypeError, ValueError) as error:
          raise WireError(f"{where}: {error}") from None
        self.array(where, spec, array)
      else:
        shape = [n for dim in spec.dims[1:] for n in self._fixed(dim) or ()]
        self.array(where, spec, np.zeros((0, *shape), self.dtype(spec)))

  def named_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
    if arrays.keys() != self.form.weights.keys():
      raise WireError(
        f"weights: not the network's, {sorted(arrays.keys() ^ self.form.weights.keys())[:3]} differ"
      )
    for name, leaf in arrays.items():
      array = np.asarray(leaf)
      self.weights(name, array.dtype, array.shape)
      self.array("weights", _SCALARS[str], _to_array(_Field("weights", str, None), name))
      self._put(array)

  def _put(self, array: np.ndarray) -> None:
    head = _ARRAY.pack(_DTYPES.index(array.dtype), array.ndim, 0, 0) + struct.pack(
      f"<{array.ndim}Q", *array.shape
    )
    padding = bytes(-array.nbytes % _ALIGNMENT)
    self._parts += [head, np.ascontiguousarray(array), padding]
    self._length += len(head) + array.nbytes + len(padding)

  def message(self, kind: int) -> bytes:
    if self._length > self.form.max_bytes:
      raise WireError(f"{self._length} bytes, more than the {self.form.max_bytes} that may be sent")
    self._parts[0] = _HEADER.pack(_MAGIC, VERSION, kind, 0, self._length)
    return b"".join(self._parts)


class _Reader(_Checks):
  """Takes a message apart, from front to back."""

  def __init__(self, data: bytes, kind: int, form: Form):
    super().__init__(form)
    if len(data) > form.max_bytes:
      raise WireError(f"{len(data)} bytes, more than the {form.max_bytes} that may be sent")
    if len(data) < _HEADER.size:
      raise WireError(f"{len(data)} bytes are too few for any message")
    magic, version, number, zero, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or zero:
      raise WireError("not a message of this program")
    if version != VERSION:
      raise WireError(f"version {version}, this is version {VERSION}")
    if number != kind:
      got = KINDS[number].__name__ if number < len(KINDS) else f"kind {number}"
      raise WireError(f"expected {KINDS[kind].__name__}, got {got}")
    if length != len(data):
      raise WireError(f"{len(data)} bytes of a message of {length}")
    self._data, self._at = data, _HEADER.size

  def array(self, name: str, spec: Spec) -> np.ndarray:
    dtype, shape = self._head(name)
    self.form_of(name, spec, dtype, shape)
    array = self._body(name, dtype, shape)
    self.values(name, spec, array)
    return array

  def segments(self, name: str) -> list[Segment]:
    columns = {column: self.array(f"{name}.{column}", spec) for column, spec in SEGMENTS.items()}
    lane, start, size = (columns.pop(column) for column in ("lane", "start", "size"))
    stops = np.cumsum(size, dtype=np.int64).tolist()
    slots = len(columns["frame"])
    if slots != (stops[-1] if stops else 0):
      raise WireError(f"{name}: sizes {size.tolist()[:8]} do not add up to {slots} slots")
    found = []
    begin = 0
    for one, when, stop in zip(lane.tolist(), start.tolist(), stops, strict=True):
      found.append(Segment(one, when, *(array[begin:stop] for array in columns.values())))
      begin = stop
    return found

  def named_arrays(self) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for _ in self.form.weights:  # each once, so all of them
      name = _from_array(_Field("weights", str, None), self.array("weights", _SCALARS[str]))
      if name in arrays:
        raise WireError(f"weights: {name} comes twice")
      dtype, shape = self._head(name)
      self.weights(name, dtype, shape)
      arrays[name] = self._body(name, dtype, shape)
    return arrays

  def end(self) -> None:
    """Nothing may be left."""
    if self._at != len(self._data):
      raise WireError(f"{len(self._data) - self._at} bytes too many")

  def _head(self, name: str) -> tuple[np.dtype, tuple[int, ...]]:
    """Type and shape of the array that comes next; the rest of the message is long enough for it."""
    code, rank, *zeros = self._unpack(name, _ARRAY)
    if code >= len(_DTYPES) or rank > _MAX_RANK or any(zeros):
      raise WireError(f"{name}: not an array")
    dtype = _DTYPES[code]
    shape = self._unpack(name, struct.Struct(f"<{rank}Q"))
    if math.prod(shape) * dtype.itemsize > len(self._data) - self._at:
      raise WireError(f"{name}: {dtype}{list(shape)} is larger than what is left of the message")
    if (
      math.prod(max(size, 1) for size in shape) * dtype.itemsize > self.form.max_bytes
    ):  # an empty one, [0, 2 ** 60]
      raise WireError(f"{name}: {dtype}{list(shape)} is out of all bounds")
    return dtype, shape

  def _unpack(self, name: str, layout: struct.Struct) -> tuple[int, ...]:
    if layout.size > len(self._data) - self._at:
      raise WireError(f"{name}: the message ends before it")
    self._at += layout.size
    return layout.unpack_from(self._data, self._at - layout.size)

  def _body(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers that follow `_head`."""
    count = math.prod(shape)
    stop = self._at + count * dtype.itemsize
    padded = stop + -stop % _ALIGNMENT
    if any(self._data[stop:padded]) or padded > len(self._data):
      raise WireError(f"{name}: not padded with zeros")
    truth = dtype.kind == "b"
    array = np.frombuffer(self._data, np.uint8 if truth else dtype, count, self._at).reshape(shape)
    if truth:
      if array.max(initial=0) > 1:
        raise WireError(f"{name}: truth values must be 0 or 1, got {array.max()}")
      array = array.view(bool)
    self._at = padded
    return array
