"""Messages as bytes and back: msgpack maps `{kind: fields}`, with numpy arrays as flax packs them.

`decode` checks the kind, the names and the types of fields. Whoever uses an array checks its dtype,
shape and values.
"""

import reprlib
from typing import Any, TypeVar, get_type_hints

import numpy as np
from flax import serialization

from speedyzero_jax.cluster.messages import CALLS, STREAM, Arrays

_HINTS = {
  kind: get_type_hints(kind)
  for call in (*CALLS.values(), STREAM[1])
  for kind in (call.request, call.answer)
}

Message = TypeVar("Message")


class WireError(ValueError):
  """Bytes that are not the expected message, or a message that cannot be sent."""


def encode(message: Any) -> bytes:
  """A message of `messages` as bytes. Raises WireError if a field is not of its type."""
  kind, fields = type(message), message._asdict()
  _check(kind, fields)
  return serialization.msgpack_serialize({kind.__name__: fields}, in_place=True)


def decode(kind: type[Message], data: bytes) -> Message:
  """The message of this kind in `data`; arrays are read-only. Raises WireError otherwise."""
  if b"__msgpack_chunked_array__" in data:  # flax joins such arrays, however large they become
    raise WireError("not a message: arrays in chunks")
  try:
    found = serialization.msgpack_restore(data)
  except Exception as error:  # flax and msgpack raise several types
    raise WireError(f"not a message: {error}"[:300]) from None
  if not isinstance(found, dict) or [*found] != [kind.__name__]:
    raise WireError(f"must be {kind.__name__}, got {_brief(found)}")
  fields = found[kind.__name__]
  _check(kind, fields)
  return kind(**fields)


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
      isinstance(name, str) and _fits(array, np.ndarray) for name, array in value.items()
    )
  if isinstance(value, bool | np.bool_):
    return hint is bool
  if isinstance(value, int | np.integer):
    return hint in (int, float) and 0 <= int(value) < 1 << 63
  if isinstance(value, np.ndarray):
    return hint is np.ndarray and _plain(value)
  return isinstance(value, hint)


def _plain(array: np.ndarray) -> bool:
  """Whether an array holds numbers or valid truth values."""
  if array.dtype == bool:
    return bool((array.view(np.uint8) <= 1).all())
  return array.dtype.kind in "iuf" or array.dtype.name == "bfloat16"


def _brief(value: Any) -> str:
  return reprlib.repr(value)[:200]  # safe for values of any depth
