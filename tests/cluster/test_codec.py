import os
import struct
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from samples import FORM

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.codec import WireError, decode, encode
from speedyzero_jax.cluster.messages import KINDS, SEGMENTS, Append, Grant, Result, WeightsRequest
from speedyzero_jax.types import Segment

EXAMPLES = int(os.environ.get("SPEEDYZERO_FUZZ_EXAMPLES", "1500"))
EACH = samples.one_of_each()
ENCODED = tuple(encode(one, FORM) for one in EACH.values())


def arrays_of(value: Any) -> list[np.ndarray]:
  if isinstance(value, np.ndarray):
    return [value]
  if isinstance(value, dict):
    value = list(value.values())
  return (
    [array for part in value for array in arrays_of(part)]
    if isinstance(value, list | tuple)
    else []
  )


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_is_decoded_is_what_was_encoded(kind, data):
  message = data.draw(samples.message(kind))
  encoded = encode(message, FORM)
  decoded = decode(kind, encoded, FORM)
  assert samples.leaves(decoded) == samples.leaves(message)
  whole = np.frombuffer(encoded, np.uint8)
  for array in arrays_of(decoded):
    assert not array.flags.writeable
    assert array.size == 0 or np.shares_memory(array, whole)


def test_all_kinds_have_a_sample():
  assert set(EACH) == set(KINDS)


def decode_any(data: bytes) -> None:
  """As whichever kind the bytes claim to be, and as another: a WireError, or a message that is these very bytes."""
  claimed = data[5] if len(data) > 5 and data[5] < len(KINDS) else 0
  for kind in (KINDS[claimed], KINDS[claimed - 1]):
    try:
      message = decode(kind, data, FORM)
    except WireError as error:
      assert len(str(error)) < 500
    else:
      event("still a message")
      assert encode(message, FORM) == data


@settings(max_examples=EXAMPLES)
@given(samples.damaged(ENCODED))
def test_damage_is_an_error_or_another_message(data):
  decode_any(data)


@settings(max_examples=max(EXAMPLES // 10, 100))
@given(st.binary(max_size=200), st.integers(0, len(KINDS) - 1))
def test_noise_is_an_error(noise, kind):
  decode_any(noise)
  decode_any(codec._HEADER.pack(b"SZJx", codec.VERSION, kind, 0, 16 + len(noise)) + noise)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_an_error(kind):
  data = encode(EACH[kind], FORM)
  for length in range(len(data)):
    cut = data[:length]
    with pytest.raises(WireError):
      decode(kind, cut, FORM)
    if length >= 16:
      with pytest.raises(WireError):
        decode(kind, cut[:8] + struct.pack("<Q", length) + cut[16:], FORM)


@pytest.mark.parametrize(
  "shape",
  [(2**40,), (2**64 - 1,), (0, 2**62), (2**33, 2**33), (2**63, 0), (1,) * 8, (), (2**64 - 1,) * 8],
)
@pytest.mark.parametrize("code", range(7))
def test_claimed_sizes_cost_nothing(code, shape):
  """Whatever an array claims to be, it is refused before memory is asked for."""
  body = (
    struct.pack("<BBHI", code, len(shape), 0, 0)
    + struct.pack(f"<{len(shape)}Q", *shape)
    + bytes(64)
  )
  kind = KINDS.index(messages.Acknowledged)
  data = codec._HEADER.pack(b"SZJx", codec.VERSION, kind, 0, 16 + len(body)) + body
  tracemalloc.start()
  try:
    with pytest.raises(WireError):
      decode(messages.Acknowledged, data, FORM)
    assert tracemalloc.get_traced_memory()[1] < 100_000
  finally:
    tracemalloc.stop()


def test_a_message_must_be_as_long_as_its_arrays():
  body = struct.pack("<BBHI", 3, 1, 0, 0) + struct.pack("<Q", 9) + bytes(64)  # int64[9] needs 72
  kind = KINDS.index(messages.Acknowledged)
  data = codec._HEADER.pack(b"SZJx", codec.VERSION, kind, 0, 16 + len(body)) + body
  with pytest.raises(
    WireError, match=r"heads: int64\[9\] is larger than what is left of the message"
  ):
    decode(messages.Acknowledged, data, FORM)


def test_an_empty_array_of_vast_shape_is_an_error():
  """[0, 2**60, actions] has no bytes, so only its shape can give it away; numpy would raise an error of its own."""
  data = encode(
    Result(0, 0, 0, 0, *(np.zeros(s, np.float32) for s in ((0, 1, 2), (0, 1), (0, 1)))), FORM
  )
  shape = struct.pack("<3Q", 0, 1, 2)
  assert data.count(shape) == 1
  with pytest.raises(WireError, match="out of all bounds"):
    decode(Result, data.replace(shape, struct.pack("<3Q", 0, 2**60, 2)), FORM)


def append(*segments: Segment) -> Append:
  return EACH[Append]._replace(segments=list(segments))


def segment(**changes: Any) -> Append:
  return append(samples.segment(), samples.segment(1, n=2)._replace(**changes))


def result(**changes: Any) -> Result:
  return EACH[Result]._replace(**changes)


def weights(**changes: Any) -> messages.Weights:
  return messages.Weights(0, samples.weights(0) | changes)


WRONG = {
  "lane beyond": (segment(lane=3), "segments.lane: must be below lanes"),
  "lane negative": (segment(lane=-1), "segments.lane: must be at least 0"),
  "lane wraps": (segment(lane=2**32), "segments.lane: must be below lanes"),
  "lane huge": (segment(lane=2**64), "segments.lane"),
  "start negative": (segment(start=-1), "segments.start: must be at least 0"),
  "no slots": (append(samples.segment(n=0)), "segments.size: must be at least 1"),
  "action beyond": (
    segment(action=np.array([0, 2], np.int32)),
    "segments.action: must be below actions",
  ),
  "action low": (
    segment(action=np.array([0, -2], np.int32)),
    "segments.action: must be at least -1",
  ),
  "action type": (segment(action=np.zeros(2, np.int64)), "segments.action"),
  "step": (segment(step=np.array([0, -1], np.int32)), "segments.step: must be at least 0"),
  "frame shape": (segment(frame=np.zeros((2, 2, 2, 3), np.uint8)), "segments.frame"),
  "frame type": (segment(frame=np.zeros((2, 2, 1, 3), np.float32)), "segments.frame"),
  "policy": (segment(policy=np.zeros((2, 3), np.float32)), "segments.policy"),
  "shorter": (segment(value=np.zeros(1, np.float32)), "segments.value: not as long as its frames"),
  "one frame's type": (segment(frame=np.zeros((2, 2, 1, 3), np.int8)), "segments.frame"),
  "flag type": (segment(first=np.zeros(2, np.uint8)), "segments.first"),
  "int": (messages.ActorJoin(-1, 0), "actor: must be at least 0"),
  "int too large": (messages.ActorJoin(2**63, 0), "actor"),
  "have": (WeightsRequest(0, "actor", -2), "have: must be at least -1"),
  "not finite": (Grant(1, False, 0, float("nan"), False), "progress: must be finite"),
  "surrogate": (WeightsRequest(0, "\ud800", 0), "subscriber"),
  "letters": (
    result(search_value=np.zeros((2, 4), np.float32)),
    r"search_value: must be \[2, 3\], got \[2, 4\]",
  ),
  "rank": (result(value=np.zeros(2, np.float32)), r"value: must be \[n, 3\], got \[2\]"),
  "actions": (result(policy=np.zeros((2, 3, 4), np.float32)), r"policy: must be \[m, k, 2\]"),
  "float64": (result(value=np.zeros((2, 3))), "value: must be float32"),
  "cell": (
    EACH[messages.FramesChunk]._replace(cell=np.array([0, 5], np.int32)),
    "cell: must be below capacity",
  ),
  "weight missing": (messages.Weights(0, {}), "weights: not the network's"),
  "weight unknown": (weights(x=np.zeros(1, np.float32)), "weights: not the network's"),
  "weight type": (
    weights(**{"['b']": np.zeros(2, np.float32)}),
    r"weights: \['b'\] must be bfloat16\[2\]",
  ),
  "weight shape": (
    weights(**{"['b']": np.zeros(3, jnp.bfloat16)}),
    r"weights: \['b'\] must be bfloat16\[2\]",
  ),
  "too long": (append(samples.segment(n=2000)), "more than the 65536"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_not_sent(name):
  message, why = WRONG[name]
  with pytest.raises(WireError, match=why):
    encode(message, FORM)


# What a form without these limits lets through; the others are no message at all.
LAX = codec.Form(9, 9, 3, (2, 1, 3), np.uint8, {"['b']": jax.ShapeDtypeStruct((2,), np.float32)})


@pytest.mark.parametrize(
  "message",
  [
    segment(lane=3),
    segment(action=np.array([0, 2], np.int32), policy=np.zeros((2, 3), np.float32)),
    EACH[messages.FramesChunk]._replace(cell=np.array([0, 5], np.int32)),
    messages.Weights(0, {"['b']": np.zeros(2, np.float32)}),
    append(samples.segment(n=2000)),
  ],
)
def test_another_unit_s_message_is_an_error(message):
  wide = [
    s._replace(policy=np.zeros((len(s.frame), 3), np.float32))
    for s in (message.segments if isinstance(message, Append) else [])
  ]
  data = encode(message._replace(segments=wide) if wide else message, LAX)
  decode(type(message), data, LAX)
  with pytest.raises(WireError):
    decode(type(message), data, FORM)


@pytest.mark.parametrize(
  ("at", "value", "why"),
  [(0, b"x", "not a message"), (4, b"\x02", "version 2"), (5, b"\x01", "got ActorWelcome"), (5, b"\xff", "kind 255"),
   (6, b"\x01", "not a message"), (8, b"\x01", "of a message of")],
)  # fmt: skip
def test_every_part_of_the_header_is_checked(at, value, why):
  data = encode(EACH[messages.ActorJoin], FORM)
  with pytest.raises(WireError, match=why):
    decode(messages.ActorJoin, data[:at] + value + data[at + 1 :], FORM)


def patched(message: Any, old: bytes, new: bytes) -> bytes:
  data = encode(message, FORM)
  assert data.count(old) == 1 and len(old) == len(new)
  return data.replace(old, new)


def test_truth_values_are_0_or_1():
  data = patched(
    Grant(4, True, 11, 0.25, False), b"\x01" + bytes(7) + b"\x03", b"\x02" + bytes(7) + b"\x03"
  )
  with pytest.raises(WireError, match="closing: truth values must be 0 or 1, got 2"):
    decode(Grant, data, FORM)


def test_padding_and_the_end_are_checked():
  data = encode(WeightsRequest(0, "actor", 0), FORM)
  at = data.index(b"actor") + 7
  with pytest.raises(WireError, match="not padded with zeros"):
    decode(WeightsRequest, data[:at] + b"x" + data[at + 1 :], FORM)
  longer = data[:8] + struct.pack("<Q", len(data) + 8) + data[16:] + bytes(8)
  with pytest.raises(WireError, match="8 bytes too many"):
    decode(WeightsRequest, longer, FORM)


def test_sizes_must_add_up():
  message = append(samples.segment(0, n=2), samples.segment(1, n=1))
  with pytest.raises(WireError, match="do not add up to 3 slots"):
    decode(Append, patched(message, struct.pack("<2i", 2, 1), struct.pack("<2i", 2, 2)), FORM)


def test_a_weight_that_comes_twice_is_an_error():
  form = codec.Form(
    1, 1, 1, (1,), np.uint8, {name: jax.ShapeDtypeStruct((), np.int32) for name in ("ab", "cd")}
  )
  data = encode(
    messages.Weights(0, {"ab": np.array(1, np.int32), "cd": np.array(2, np.int32)}), form
  )
  with pytest.raises(WireError, match="ab comes twice"):
    decode(messages.Weights, data.replace(b"cd", b"ab"), form)


def test_names_must_be_utf_8():
  with pytest.raises(WireError, match="not UTF-8"):
    decode(WeightsRequest, patched(WeightsRequest(0, "actor", 0), b"actor", b"\xff\xfftor"), FORM)


def test_arrays_need_not_be_contiguous():
  policy = np.arange(24, dtype=np.float32).reshape(4, 3, 2)[::2]
  sent = result(policy=policy, value=np.arange(6, dtype=np.float32).reshape(3, 2).T)
  assert samples.leaves(decode(Result, encode(sent, FORM), FORM)) == samples.leaves(sent)


def test_a_tree_comes_back_from_its_names():
  tree = {"h": [np.zeros(2), np.ones(3)], "f": (np.array(4),)}
  arrays = messages.named(tree)
  assert set(arrays) == {"['h'][0]", "['h'][1]", "['f'][0]"}
  back = messages.unnamed(jax.eval_shape(lambda: tree), arrays)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))
  with pytest.raises(KeyError):
    messages.unnamed({"other": 0}, arrays)


def test_segments_are_checked_field_by_field():
  """A field added to `types.Segment` must be added to the wire."""
  assert tuple(name for name in SEGMENTS if name != "size") == Segment._fields
