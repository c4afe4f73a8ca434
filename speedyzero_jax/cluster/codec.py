"""Messages as bytes and back: a msgpack map `{kind: fields}`, in which an array is a list
`[dtype, *shape, numbers]`.

`decode` checks the kind, the names and the types of fields, so nothing but the messages' own types
comes out of it. Whoever uses an array checks its dtype, shape and values.
"""

import math
import reprlib
from typing import Any, TypeVar, get_type_hints

import jax.numpy as jnp
import msgpack
import numpy as np

from speedyzero_jax.cluster.messages import CALLS, Arrays

_DTYPES = {np.dtype(x).name: np.dtype(x) for x in (*"?bBhHiIlLefd", jnp.bfloat16)}
_HINTS = {
  kind: get_type_hints(kind) for call in CALLS.values() for kind in (call.request, call.answer)
}

_LIMITS = {"max_array_len": 16, "max_map_len": 10_000, "max_str_len": 4096}  # of memory, too

Message = TypeVar("Message")


class WireError(ValueError):
  """Bytes that are not the expected message, or a message that cannot be sent."""


def encode(message: Any) -> bytes:
  """A message of `messages` as bytes. Raises WireError if a field is not of its type."""
  kind, fields = type(message), message._asdict()
  _check(kind, fields)
  return msgpack.packb({kind.__name__: fields}, default=_plain)


def decode(kind: type[Message], data: bytes) -> Message:
  """The message of this kind in `data`; arrays are read-only. Raises WireError otherwise."""
  try:
    found = msgpack.unpackb(data, list_hook=_array, **_LIMITS)
  except (ValueError, OverflowError, msgpack.UnpackException) as error:
    raise WireError(f"not a message: {error}"[:300]) from None
  if not isinstance(found, dict) or [*found] != [kind.__name__]:
    raise WireError(f"must be {kind.__name__}, got {_brief(found)}")
  fields = found[kind.__name__]
  _check(kind, fields)
  return kind(**fields)


def _plain(value: Any) -> Any:
  """A numpy number or array in types of msgpack."""
  if isinstance(value, np.generic):
    return value.item()
  if _DTYPES.get(value.dtype.name) != value.dtype:
    raise WireError(f"arrays of {value.dtype} cannot be sent")
  numbers = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
  return [value.dtype.name, *value.shape, numbers.data]


def _array(form: list[Any]) -> np.ndarray:
  dtype = _DTYPES.get(form[0]) if form and isinstance(form[0], str) else None
  shape, data = form[1:-1], form[-1] if form else None
  if (
    dtype is None
    or not isinstance(data, bytes)
    or not all(type(size) is int and size >= 0 for size in shape)
    or dtype.itemsize * math.prod(shape) != len(data)
  ):
    raise WireError(f"{_brief(form[:-1])} is no array")
  if dtype.kind == "b" and data.translate(None, b"\0\1"):
    raise WireError("bool must be 0 or 1")
  return np.ndarray(shape, dtype, data)


def _check(kind: type, fields: Any) -> None:
  hints = _HINTS[kind]
  if not isinstance(fields, dict) or fields.keys() != hints.keys():
    wrong = fields.keys() ^ hints.keys() if isinstance(fields, dict) else fields
    raise WireError(f"{kind.__name__}: missing or unknown names {_brief(wrong)}")
  for name, hint in hints.items():
    if not _fits(fields[name], hint):
      raise WireError(f"{kind.__name__}.{name}: not a valid value: {_brief(fields[name])}")


def _fits(value: Any, hint: Any) -> bool:
  """Whether a value has the type of its annotation; integers must not be negative."""
  if hint == Arrays:
    return isinstance(value, dict) and all(
      isinstance(name, str) and isinstance(array, np.ndarray) for name, array in value.items()
    )
  if isinstance(value, bool | np.bool_):
    return hint is bool
  if isinstance(value, int | np.integer):
    return hint in (int, float) and 0 <= int(value) < 1 << 63
  if isinstance(value, np.ndarray):
    return hint is np.ndarray
  return isinstance(value, hint)


def _brief(value: Any) -> str:
  return reprlib.repr(value)[:200]  # safe for values of any depth
