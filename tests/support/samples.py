"""What the tests of the cluster share: a small form, and messages of every kind that fit it."""

import struct
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.types import Segment

FORM = codec.Form(
  lanes=3,
  capacity=5,
  actions=2,
  frame_shape=(2, 1, 3),
  frame_dtype=np.uint8,
  weights={
    "['b']": jax.ShapeDtypeStruct((2,), jnp.bfloat16),
    "['h'].k": jax.ShapeDtypeStruct((2, 3), np.float32),
    "['n']": jax.ShapeDtypeStruct((), np.int32),
  },
  max_bytes=1 << 16,
)

_SIZES = {"lanes": 3, "capacity": 5, "actions": 2}


def _array(spec: messages.Spec, dims: dict[str, int]) -> st.SearchStrategy[np.ndarray]:
  shape: tuple[int, ...] = ()
  for dim in spec.dims:
    shape += FORM.frame_shape if dim == "frame" else (2,) if dim == "actions" else (dims[dim],)
  dtype = np.dtype("uint8" if spec.dtype == "frame" else spec.dtype)
  if dtype.kind == "i" and spec.low is not None:
    top = _SIZES[spec.below] - 1 if spec.below else np.iinfo(dtype).max
    return npst.arrays(dtype, shape, elements=st.integers(spec.low, top))
  return npst.arrays(dtype, shape)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
  """One segment of one or two slots."""
  dims = {"n": draw(st.integers(1, 2))}
  slots = {
    name: draw(_array(spec, dims)) for name, spec in messages.SEGMENTS.items() if "n" in spec.dims
  }
  return Segment(lane=draw(st.integers(0, 2)), start=draw(st.integers(0, 2**63 - 1)), **slots)


@st.composite
def message(draw: st.DrawFn, kind: type) -> Any:
  """A valid message of this kind."""
  dims = {letter: draw(st.integers(0, 3)) for letter in "elmnkw"}
  values: list[Any] = []
  for hint in get_type_hints(kind, include_extras=True).values():
    if hint is int:
      values.append(draw(st.integers(0, 2**63 - 1)))
    elif hint is float:
      values.append(draw(st.floats(allow_nan=False, allow_infinity=False)))
    elif hint is bool:
      values.append(draw(st.booleans()))
    elif hint is str:
      values.append(draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)))
    elif get_origin(hint) is Annotated and get_args(hint)[0] is int:
      values.append(draw(st.integers(-1, 2**63 - 1)))
    elif get_origin(hint) is Annotated:
      values.append(draw(_array(get_args(hint)[1], dims)))
    elif get_origin(hint) is list:
      values.append(draw(st.lists(segments(), max_size=3)))
    else:
      values.append(weights(draw(st.integers(0, 99))))
  return kind(*values)


def weights(seed: int) -> dict[str, np.ndarray]:
  """Arrays that fit the form's."""
  rng = np.random.default_rng(seed)
  return {
    name: np.asarray(100 * rng.normal(size=of.shape)).astype(of.dtype)
    for name, of in FORM.weights.items()
  }


def segment(lane: int = 0, start: int = 0, n: int = 1) -> Segment:
  """A plausible segment."""
  zeros = np.zeros(n, np.float32)
  no = np.zeros(n, bool)
  return Segment(
    lane, start, np.full((n, 2, 1, 3), 7, np.uint8), no, no, no, np.ones(n, np.int32), zeros,
    np.full((n, 2), 0.5, np.float32), zeros, zeros, np.full(n, 4, np.int32),
  )  # fmt: skip


def one_of_each() -> dict[type, Any]:
  """One message of every kind, the same every time."""
  frames = np.arange(12, dtype=np.uint8).reshape(2, 2, 1, 3)
  lane, cell = np.array([0, 2], np.int32), np.array([4, 1], np.int32)
  found = [
    messages.ActorJoin(1, 2),
    messages.ActorWelcome(1, np.array([5, 6], np.int64)),
    messages.ReanalyserJoin(2, 3),
    messages.ReanalyserWelcome("/proc/7/fd/5", "/memfd:frames (deleted)"),
    messages.Append(1, 2, 3, [segment(0, 5, 2), segment(2, 9)], np.array([1.5]), np.array([7], np.int64)),
    messages.Acknowledged(np.array([7, 8], np.int64)),
    messages.GrantRequest(1, 2, 3, 4),
    messages.Grant(4, True, 11, 0.25, False),
    messages.WeightsRequest(1, "actor", -1),
    messages.Weights(12, weights(0)),
    messages.WorkRequest(2, 3),
    messages.Block(6, True, "reanalyser", lane, np.array([[0, 1, 2], [3, 4, 4]], np.int32), 10, 20),
    messages.Result(2, 3, 6, 10, np.ones((2, 3, 2), np.float32), np.ones((2, 3), np.float32),
                    np.zeros((2, 3), np.float32)),
    messages.FramesRequest(2, 3, 20),
    messages.FramesChunk(20, lane, cell, frames),
    messages.Ok(),
  ]  # fmt: skip
  return {type(one): one for one in found}


def leaves(value: Any) -> list[Any]:
  """A message as what it is made of, comparable: arrays by type, shape and bytes (so that NaN equals NaN)."""
  if isinstance(value, np.ndarray):
    return [value.dtype.name, value.shape, value.tobytes()]
  if isinstance(value, dict):
    return [sorted(value), [leaves(value[name]) for name in sorted(value)]]
  if isinstance(value, tuple | list):
    return [type(value).__name__, *map(leaves, value)]
  return [type(value), repr(value)]


@st.composite
def damaged(draw: st.DrawFn, originals: tuple[bytes, ...]) -> bytes:
  """One of these messages after a few accidents, half of the time with its length put right and so looked at longer."""
  data = bytearray(draw(st.sampled_from(originals)))
  for _ in range(draw(st.integers(1, 3))):
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    accident = draw(st.sampled_from(("flip", "cut", "insert", "remove", "number", "kind")))
    if accident == "flip" and data:
      data[at] ^= 1 << draw(st.integers(0, 7))
    elif accident == "cut":
      del data[at:]
    elif accident == "insert":
      data[at:at] = draw(st.binary(min_size=1, max_size=16))
    elif accident == "remove":
      del data[at : at + draw(st.integers(1, 16))]
    elif accident == "number" and len(data) >= 8:
      value = draw(
        st.sampled_from((0, 1, 2, 255, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**63, 2**64 - 1))
      )
      at = min(at // 8 * 8, len(data) - 8)
      data[at : at + 8] = struct.pack("<Q", value)
    elif accident == "kind" and len(data) > 5:
      data[5] = draw(st.integers(0, 255))
  if len(data) >= 16 and draw(st.booleans()):
    data[8:16] = struct.pack("<Q", len(data))
  return bytes(data)
