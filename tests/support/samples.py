"""Messages of every kind, and a small wire format that they fit."""

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.messages import CALLS, Spec
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.types import Segment

KINDS = tuple(
  dict.fromkeys(kind for call in CALLS.values() for kind in (call.request, call.answer))
)
WIRE = codec.WireFormat(
  lanes=3,
  capacity=5,
  schema=make_schema((2, 1, 3), np.uint8, 2, [Column("policy", "float32", (2,))]),
  weights={
    "['b']": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
    "['h'].k": jax.ShapeDtypeStruct((2, 3), np.float32),
    "['n']": jax.ShapeDtypeStruct((), np.int32),
  },
  results={
    "search": {
      "policy": Column("policy", "float32", (2,)),
      "best": Column("best", "int32", low=-1, below=2),
    },
    "values": {"value": Column("value", "float32")},
  },
  max_bytes=1 << 16,
)


def _array(spec: Spec, dims: dict[str, int]) -> st.SearchStrategy[np.ndarray]:
  shape = tuple(dims[size] if isinstance(size, str) else size for size in spec.shape)
  below = {"lanes": 3, "capacity": 5}.get(spec.below, spec.below)
  if spec.low is None:
    return npst.arrays(spec.dtype, shape)
  top = np.iinfo(spec.dtype).max if below is None else below - 1
  return npst.arrays(spec.dtype, shape, elements=st.integers(spec.low, top))


def _column(column: Column, dims: dict[str, int], *letters: str) -> st.SearchStrategy[np.ndarray]:
  return _array(Spec(column.dtype, letters + column.shape, column.low, column.below), dims)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
  """One segment of one or two slots."""
  dims = {"n": draw(st.integers(1, 2))}
  arrays = {column.name: draw(_column(column, dims, "n")) for column in WIRE.schema.columns}
  return Segment.of(draw(st.integers(0, 2)), draw(st.integers(0, 2**63 - 1)), arrays)


_SCALARS = {
  int: st.integers(0, 2**63 - 1),
  float: st.floats(allow_nan=False, allow_infinity=False),
  bool: st.booleans(),
  str: st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
  list[Segment]: st.lists(segments(), max_size=3),
  Annotated[int, Spec("int64", low=-1)]: st.integers(-1, 2**63 - 1),
  Annotated[str, "task"]: st.sampled_from(tuple(WIRE.results)),
}


@st.composite
def message(draw: st.DrawFn, kind: type) -> Any:
  """A valid message of this kind."""
  dims = {letter: draw(st.integers(0, 3)) for letter in "elnkw"}
  values: dict[str, Any] = {}
  for name, hint in get_type_hints(kind, include_extras=True).items():
    extra = get_args(hint)[1] if get_origin(hint) is Annotated else None
    if hint in _SCALARS:
      values[name] = draw(_SCALARS[hint])
    elif extra == "weights":
      values[name] = weights(draw(st.integers(0, 99)))
    elif extra == "results":
      columns = WIRE.results[values["task"]]
      values[name] = {key: draw(_column(of, dims, "n", "k")) for key, of in columns.items()}
    elif extra == "frame":
      values[name] = draw(_column(WIRE.schema.frame, dims, "n"))
    else:
      values[name] = draw(_array(extra, dims))
  return kind(**values)


def weights(seed: int) -> dict[str, np.ndarray]:
  """Arrays that fit the format's."""
  rng = np.random.default_rng(seed)
  return {
    name: np.asarray(100 * rng.normal(size=of.shape)).astype(of.dtype)
    for name, of in WIRE.weights.items()
  }


def segment(lane: int = 0, start: int = 0, n: int = 1) -> Segment:
  """A plausible segment."""
  no = np.zeros(n, bool)
  return Segment(
    lane, start, np.full((n, 2, 1, 3), 7, np.uint8), no, no, no, np.ones(n, np.int32),
    np.zeros(n, np.float32), np.full(n, 4, np.int32), {"policy": np.full((n, 2), 0.5, np.float32)},
  )  # fmt: skip


def one_of_each() -> dict[type, Any]:
  """One message of every kind, the same every time."""
  frames = np.arange(12, dtype=np.uint8).reshape(2, 2, 1, 3)
  lane, cell = np.array([0, 2], np.int32), np.array([4, 1], np.int32)
  found = [
    messages.ActorJoin(1, 2),
    messages.ActorWelcome(1, np.array([5, 6], np.int64)),
    messages.RefresherJoin(2, 3),
    messages.RefresherWelcome("/proc/7/fd/5", "/memfd:frames (deleted)"),
    messages.Append(
      1, 2, 3, [segment(0, 5, 2), segment(2, 9)], np.array([1.5]), np.array([7], np.int64)
    ),
    messages.Acknowledged(np.array([7, 8], np.int64)),
    messages.GrantRequest(1, 2, 3, 4),
    messages.Grant(4, True, 11, 0.25, False),
    messages.WeightsRequest(1, "actor", -1),
    messages.Weights(12, weights(0)),
    messages.WorkRequest(2, 3),
    messages.Block(6, "search", lane, np.array([[0, 1, 2], [3, 4, 4]], np.int32), 10, 20),
    messages.Result(
      2, 3, 6, "search", 10,
      {"policy": np.ones((2, 3, 2), np.float32), "best": np.ones((2, 3), np.int32)},
    ),
    messages.FramesRequest(2, 3, 20),
    messages.FramesChunk(20, lane, cell, frames),
    messages.Ok(),
  ]  # fmt: skip
  return {type(one): one for one in found}


def leaves(value: Any) -> Any:
  """A message as comparable parts: arrays by dtype, shape and bytes, so that NaN equals NaN."""
  if isinstance(value, np.ndarray):
    return [value.dtype.name, value.shape, value.tobytes()]
  if isinstance(value, dict):
    return {name: leaves(part) for name, part in value.items()}
  if isinstance(value, tuple | list):
    return [type(value).__name__, *map(leaves, value)]
  return [type(value), repr(value)]


@st.composite
def damaged(draw: st.DrawFn, originals: tuple[bytes, ...]) -> bytes:
  """One of these messages with a few bytes changed, inserted or removed."""
  data = bytearray(draw(st.sampled_from(originals)))
  for _ in range(draw(st.integers(1, 3))):
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    accident = draw(st.sampled_from(("flip", "byte", "cut", "insert", "remove", "number")))
    if accident == "flip" and data:
      data[at] ^= 1 << draw(st.integers(0, 7))
    elif accident == "byte" and data:
      data[at] = draw(st.integers(0, 255))
    elif accident == "cut":
      del data[at:]
    elif accident == "insert":
      data[at:at] = draw(st.binary(min_size=1, max_size=16))
    elif accident == "remove":
      del data[at : at + draw(st.integers(1, 16))]
    elif accident == "number":  # a msgpack integer of 64 bits
      value = draw(st.sampled_from((0, 255, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)))
      data[at : at + 1] = b"\xcf" + value.to_bytes(8, "big")
  return bytes(data)
