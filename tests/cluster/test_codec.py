import dataclasses
import os
import struct
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
import samples
from hypothesis import event, given, settings
from hypothesis import strategies as st
from samples import KINDS, WIRE

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.codec import WireError, WireFormat, decode, encode
from speedyzero_jax.cluster.messages import (
  Acknowledged,
  Append,
  Block,
  Grant,
  Result,
  Weights,
  WeightsRequest,
)
from speedyzero_jax.replay.schema import Column, make_schema

EXAMPLES = int(os.environ.get("SPEEDYZERO_FUZZ_EXAMPLES", "1500"))
EACH = samples.one_of_each()
ENCODED = {kind: encode(one, WIRE) for kind, one in EACH.items()}


def raw(head: Any, arrays: bytes = b"") -> bytes:
  """A message with this content, valid or not; a head of bytes stands for itself."""
  head = head if isinstance(head, bytes) else msgpack.packb(head)
  return struct.pack("<4sI", b"SZJ2", len(head)) + head + bytes(-len(head) % 8) + arrays


def arrays_of(value: Any) -> list[np.ndarray]:
  if isinstance(value, np.ndarray):
    return [value]
  parts = value.values() if isinstance(value, dict) else value
  return [a for x in parts for a in arrays_of(x)] if isinstance(value, dict | list | tuple) else []


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_is_decoded_is_what_was_encoded(kind, data):
  message = data.draw(samples.message(kind))
  encoded = encode(message, WIRE)
  decoded = decode(kind, encoded, WIRE)
  assert samples.leaves(decoded) == samples.leaves(message)
  whole = np.frombuffer(encoded, np.uint8)
  for array in arrays_of(decoded):
    assert not array.flags.writeable and array.flags.aligned
    assert array.size == 0 or np.shares_memory(array, whole)


def decode_any(data: bytes) -> None:
  """A WireError for every kind, or a message that fits the format."""
  for kind in KINDS:
    try:
      message = decode(kind, data, WIRE)
    except WireError as error:
      assert len(str(error)) < 500
    else:
      event("still a message")
      assert samples.leaves(decode(kind, encode(message, WIRE), WIRE)) == samples.leaves(message)


@settings(max_examples=EXAMPLES)
@given(samples.damaged(tuple(ENCODED.values())))
def test_damage_is_an_error_or_another_message(data):
  decode_any(data)


_VALUES = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9)
  | st.text(max_size=9) | st.sampled_from((*WIRE.weights, *WIRE.schema._fields, "float32", "task")),
  lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=4),
)  # fmt: skip


@settings(max_examples=max(EXAMPLES // 5, 100))
@given(st.data())
def test_any_value_of_a_field_is_an_error_or_a_message(data):
  """Well-formed msgpack in which some fields hold anything else."""
  kind = data.draw(st.sampled_from(KINDS))
  size = int.from_bytes(ENCODED[kind][4:8], "little")
  fields = msgpack.unpackb(ENCODED[kind][8 : 8 + size])[kind.__name__]
  name = data.draw(st.sampled_from((*fields, "other")))
  value = data.draw(_VALUES)
  if isinstance(fields.get(name), dict) and data.draw(st.booleans()):
    fields[name] |= {data.draw(st.sampled_from((*fields[name], "other"))): value}
  else:
    fields[name] = value
  decode_any(raw({kind.__name__: fields}, ENCODED[kind][8 + size + -size % 8 :]))


@settings(max_examples=max(EXAMPLES // 10, 100))
@given(st.binary(max_size=200))
def test_noise_is_an_error(noise):
  decode_any(noise)
  decode_any(raw(noise))


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_an_error(kind):
  data = ENCODED[kind]
  end = 8 + int.from_bytes(data[4:8], "little")
  for length in range(len(data)):
    with pytest.raises(WireError):
      decode(kind, data[:length], WIRE)
    if 8 <= length < end:
      with pytest.raises(WireError):
        decode(kind, raw(data[8:length]), WIRE)


@pytest.mark.parametrize("number", range(9))
def test_declared_sizes_cost_nothing(number):
  """Refused before memory is taken, whatever the sizes that a message declares."""
  vast = [[2**40], [2**64 - 1], [0, 2**62], [2**33, 2**33], [2**63, 0], [0] + 14 * [2**64 - 1]]
  attacks = [
    *(raw({"Acknowledged": {"heads": ["l", *shape]}}, bytes(64)) for shape in vast),
    raw(b"\x81" * 100 + b"\xdd\xff\xff\xff\xff" + bytes(50)),  # a list of 2**32 - 1 values
    raw(900 * b"\xdd\x00\x00\xea\x60" + bytes(60_000)),  # lists of 60000 values, in one another
    raw(1000 * b"\xdf\xff\xff\xff\xff\xa0"),  # maps of as many, in one another
  ]
  tracemalloc.start()
  try:
    with pytest.raises(WireError):
      decode(Acknowledged, attacks[number], WIRE)
    assert tracemalloc.get_traced_memory()[1] < 500_000
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa0", b"\x81\xa0\x91"])
@pytest.mark.parametrize("depth", [10, 500, 1000, 100_000])
def test_deep_nesting_is_an_error(nested, depth):
  heads = b"\x81\xacAcknowledged\x81\xa5heads"
  for head in (nested * depth + b"\xc0", heads + nested * depth + b"\xc0"):
    with pytest.raises(WireError):
      decode(Acknowledged, raw(head), WIRE)


NOT_MESSAGES = {
  "no preamble": (b"SZJ2", "not a message"),
  "magic": (b"SZJ1" + ENCODED[Acknowledged][4:], "not a message of this version"),
  "kind": (ENCODED[Grant], "must be Acknowledged, got {'Grant'"),
  "two kinds": (raw({"Acknowledged": {}, "Grant": {}}), "must be Acknowledged"),
  "no map": (raw({"Acknowledged": 3}), "Acknowledged: missing or unknown names 3"),
  "missing": (raw({"Acknowledged": {}}), "missing or unknown names {'heads'}"),
  "extra": (raw({"Acknowledged": {"heads": ["l", 0], "x": 1}}), "unknown names {'x'}"),
  "no array": (raw({"Acknowledged": {"heads": 5}}), r"heads: must be int64\[l\], got 5"),
  "dtype": (raw({"Acknowledged": {"heads": ["O", 1]}}, bytes(8)), "not an array"),
  "bool size": (raw({"Acknowledged": {"heads": ["l", True]}}, bytes(8)), "not an array"),
  "negative size": (raw({"Acknowledged": {"heads": ["l", -1]}}, bytes(8)), "not an array"),
  "too small": (raw({"Acknowledged": {"heads": ["l", 9]}}, bytes(64)), r"\[9\] is larger"),
  "rest": (ENCODED[Acknowledged] + bytes(8), "arrays end at byte"),
  "bytes": (raw({"Acknowledged": {"heads": b"abc"}}), "not msgpack"),
  "extension": (raw(b"\x81\xacAcknowledged\xd6\xff" + bytes(4)), "not msgpack"),
  "rest of map": (raw(msgpack.packb({"Acknowledged": {}}) + b"\x00"), "not msgpack"),
  "not UTF-8": (raw(b"\x81\xacAcknowledge\xff\x80"), "not msgpack"),
  "key": (raw(b"\x81\x01\x80"), "not msgpack"),
  "too long": (bytes(WIRE.max_bytes + 1), "more than the 65536"),
}


@pytest.mark.parametrize("name", NOT_MESSAGES)
def test_bytes_that_are_no_message(name):
  data, why = NOT_MESSAGES[name]
  with pytest.raises(WireError, match=why):
    decode(Acknowledged, data, WIRE)


@pytest.mark.parametrize(
  ("kind", "field", "value"),
  [
    (Grant, "steps", True), (Grant, "steps", -1), (Grant, "steps", 2**63), (Grant, "steps", 1.0),
    (Grant, "closing", 1), (Grant, "progress", float("nan")), (Grant, "progress", float("inf")),
    (Grant, "progress", True), (Grant, "progress", "0.5"), (WeightsRequest, "have", -2),
    (WeightsRequest, "subscriber", 5), (WeightsRequest, "subscriber", 5000 * "x"),
    (Block, "task", "other"), (Block, "task", {}), (Append, "segments", None),
  ],
)  # fmt: skip
def test_a_field_of_another_type_or_out_of_range_is_an_error(kind, field, value):
  size = int.from_bytes(ENCODED[kind][4:8], "little")
  fields = msgpack.unpackb(ENCODED[kind][8 : 8 + size])[kind.__name__] | {field: value}
  with pytest.raises(WireError):
    decode(kind, raw({kind.__name__: fields}, ENCODED[kind][8 + size + -size % 8 :]), WIRE)


def append(*segments) -> Append:
  return EACH[Append]._replace(segments=list(segments))


def segment(**changes: Any) -> Append:
  """Two segments, of which the second has these changes."""
  return append(samples.segment(), samples.segment(1, n=2)._replace(**changes))


def result(**arrays: np.ndarray) -> Result:
  return EACH[Result]._replace(arrays=EACH[Result].arrays | arrays)


def weights(**changes: Any) -> Weights:
  return Weights(0, samples.weights(0) | changes)


WRONG = {
  "lane beyond": (segment(lane=3), "_lane: must be below 3"),
  "lane negative": (segment(lane=-1), "_lane: must be at least 0"),
  "lane huge": (segment(lane=2**64), "_lane: must be int64"),
  "lane is no int": (segment(lane=0.5), "_lane: must be int64"),
  "start negative": (segment(start=-1), "_start: must be at least 0"),
  "no slots": (append(samples.segment(n=0)), "_size: must be at least 1"),
  "action beyond": (segment(action=np.array([0, 2], np.int32)), "action: must be below 2"),
  "action low": (segment(action=np.array([0, -2], np.int32)), "action: must be at least -1"),
  "action type": (segment(action=np.zeros(2, np.int64)), "action must be int32"),
  "step": (segment(step=np.array([0, -1], np.int32)), "step: must be at least 0"),
  "frame shape": (segment(frame=np.zeros((2, 2, 2, 3), np.uint8)), "frame must be uint8"),
  "frame type": (segment(frame=np.zeros((2, 2, 1, 3), np.int8)), "frame must be uint8"),
  "policy": (segment(extra={"policy": np.zeros((2, 3), np.float32)}), "policy must be"),
  "no policy": (segment(extra={}), "missing or unknown"),
  "shorter": (segment(reward=np.zeros(1, np.float32)), "reward must be"),
  "flag type": (segment(first=np.zeros(2, np.uint8)), "first must be bool"),
  "int": (messages.ActorJoin(-1, 0), "actor: must be a valid int, got -1"),
  "int too large": (messages.ActorJoin(2**63, 0), "actor: must be a valid int"),
  "bool for int": (messages.ActorJoin(True, 0), "actor: must be a valid int, got True"),
  "have": (WeightsRequest(0, "actor", -2), "have: must be a valid int"),
  "not finite": (Grant(1, False, 0, float("nan"), False), "progress: must be a valid float"),
  "surrogate": (WeightsRequest(0, "\ud800", 0), "surrogates"),
  "letters": (
    result(best=np.zeros((2, 4), np.int32)),
    r"best: must be int32\[2, 3\], got int32\[2, 4\]",
  ),
  "rank": (result(best=np.zeros(2, np.int32)), r"best: must be int32\[2, 3\], got int32\[2\]"),
  "trailing": (result(policy=np.zeros((2, 3, 4), np.float32)), r"must be float32\[n, k, 2\]"),
  "float64": (result(policy=np.zeros((2, 3, 2))), "policy: must be float32"),
  "byte order": (result(best=np.zeros((2, 3), ">i4")), "best: must be int32"),
  "result range": (result(best=np.full((2, 3), 2, np.int32)), "best: must be below 2"),
  "result unknown": (result(other=np.zeros((2, 3))), "arrays: missing or unknown names {'other'}"),
  "task": (EACH[Result]._replace(task="values"), "arrays: missing or unknown names"),
  "no task": (EACH[Block]._replace(task="other"), "task: unknown task 'other'"),
  "cell": (
    EACH[messages.FramesChunk]._replace(cell=np.array([0, 5], np.int32)),
    "cell: must be below 5",
  ),
  "weight missing": (Weights(0, {}), "arrays: missing or unknown names"),
  "weight unknown": (weights(x=np.zeros(1)), "arrays: missing or unknown names {'x'}"),
  "weight type": (weights(**{"['b']": np.zeros(2, np.float32)}), r"must be bfloat16\[2\]"),
  "weight shape": (weights(**{"['b']": np.zeros(3, jnp.bfloat16)}), r"must be bfloat16\[2\]"),
  "too long": (append(samples.segment(n=4000)), "more than may be sent"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_not_sent(name):
  message, why = WRONG[name]
  with pytest.raises(WireError, match=why):
    encode(message, WIRE)


OTHER = WireFormat(
  9,
  9,
  make_schema((2, 1, 3), np.uint8, 9, [Column("policy", "float32", (2,))]),
  {"['b']": jax.ShapeDtypeStruct((2,), np.float32)},
  {"other": {}, "search": {"policy": Column("policy", "float32", (3,))}},
)


@pytest.mark.parametrize(
  "message",
  [
    segment(lane=3),
    segment(action=np.array([0, 2], np.int32)),
    EACH[messages.FramesChunk]._replace(cell=np.array([0, 5], np.int32)),
    Weights(0, {"['b']": np.zeros(2, np.float32)}),
    append(samples.segment(n=4000)),
    EACH[Block]._replace(task="other"),
    EACH[Result]._replace(arrays={"policy": np.zeros((2, 3, 3), np.float32)}),
  ],
)
def test_another_run_s_message_is_an_error(message):
  data = encode(message, OTHER)
  decode(type(message), data, OTHER)
  with pytest.raises(WireError):
    decode(type(message), data, WIRE)


def replaced(message: Any, old: bytes, new: bytes) -> bytes:
  data = encode(message, WIRE)
  assert data.count(old) == 1 and len(old) == len(new)
  return data.replace(old, new)


def test_bools_are_0_or_1():
  flags = np.array([True, False, True])
  data = replaced(append(samples.segment(n=3)._replace(first=flags)), b"\1\0\1" + bytes(5),
                  b"\1\0\2" + bytes(5))  # fmt: skip
  with pytest.raises(WireError, match="bool must be 0 or 1, got 2"):
    decode(Append, data, WIRE)


def test_an_empty_array_of_vast_shape_is_an_error():
  shape = {"policy": ["f", 0, 2**40, 2], "best": ["i", 0, 2**40]}
  fields = EACH[Result]._asdict() | {"arrays": shape}
  with pytest.raises(WireError, match="larger than the rest"):
    decode(Result, raw({"Result": fields}), WIRE)


def test_the_map_is_limited_whatever_a_message_may_be():
  wide = dataclasses.replace(WIRE, max_bytes=1 << 20)
  with pytest.raises(WireError, match="not a message"):
    decode(Acknowledged, raw({"Acknowledged": {str(i): None for i in range(60_000)}}), wide)


def test_sizes_must_add_up():
  message = append(samples.segment(0, n=2), samples.segment(1, n=1))
  with pytest.raises(WireError, match="do not add up"):
    decode(Append, replaced(message, struct.pack("<2q", 2, 1), struct.pack("<2q", 2, 2)), WIRE)


def test_numpy_scalars_and_arrays_that_are_not_contiguous_can_be_sent():
  policy = np.arange(24, dtype=np.float32).reshape(4, 3, 2)[::2]
  best = np.arange(6, dtype=np.int32).reshape(3, 2).T % 2
  sent = result(policy=policy, best=best)._replace(step=np.int64(7))
  got = decode(Result, encode(sent, WIRE), WIRE)
  assert got.step == 7 and type(got.step) is int
  np.testing.assert_array_equal(got.arrays["policy"], policy)
  np.testing.assert_array_equal(got.arrays["best"], best)


def test_a_tree_comes_back_from_its_names():
  tree = {"h": [np.zeros(2), np.ones(3)], "f": (np.array(4),)}
  arrays = messages.named(tree)
  assert set(arrays) == {"['h'][0]", "['h'][1]", "['f'][0]"}
  back = messages.unnamed(jax.eval_shape(lambda: tree), arrays)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))
  with pytest.raises(KeyError):
    messages.unnamed({"other": 0}, arrays)
