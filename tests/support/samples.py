"""Sample messages of every kind, and damaged messages."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.messages import CALLS
from speedyzero_jax.types import Slots

KINDS = tuple(
  dict.fromkeys(kind for call in CALLS.values() for kind in (call.request, call.answer))
)


def slots(lane: int = 0, start: int = 0, n: int = 1) -> Slots:
  """Plausible slots of one lane."""
  no = np.zeros(n, bool)
  columns = {
    "frame": np.full((n, 2, 1, 3), 7, np.uint8), "first": no, "terminated": no, "truncated": no,
    "action": np.ones(n, np.int32), "reward": np.zeros(n, np.float32),
    "step": np.full(n, 4, np.int32), "policy": np.full((n, 2), 0.5, np.float32),
  }  # fmt: skip
  return Slots.of_lane(lane, start, columns)


def one_of_each() -> dict[type, Any]:
  """One message of every kind; deterministic."""
  frames = np.arange(12, dtype=np.uint8).reshape(2, 2, 1, 3)
  lane, cell = np.array([0, 2], np.int32), np.array([4, 1], np.int32)
  heads = np.array([20, 0, 7], np.int64)
  played = vars(Slots.concatenate([slots(0, 5, 2), slots(2, 9)]))
  weights = {"['b']": np.array([1.5, -2], jnp.bfloat16), "['n']": np.array(3, np.int32)}
  all_kinds = [
    messages.Join(),
    messages.Welcome(1, np.array([5, 6], np.int64), 2**32 - 1),
    messages.Step(3, played, np.array([[np.nan, 7]])),
    messages.Grant(4, True, 11, 0.25, False),
    messages.Gradient(
      3, 9, np.array([[1.0, 7]]), 12, {"['b']": np.ones(2, np.float32)}, {"x": 0.5}
    ),
    messages.WeightsRequest("actor"),
    messages.Weights(12, weights),
    messages.Block(6, "search", lane, np.array([[0, 1, 2], [3, 4, 4]], np.int32), 10, heads, {}),
    messages.Results(6, 10, {"policy": np.ones((2, 3, 2), np.float32)}),
    messages.FramesRequest(heads),
    messages.FramesChunk(heads, lane, cell, frames),
  ]
  return {type(one): one for one in all_kinds}


def leaves(value: Any) -> Any:
  """Converts a message to comparable values: arrays become dtype, shape and bytes (NaN == NaN)."""
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
