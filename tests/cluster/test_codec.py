import os
import tracemalloc

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import samples
from samples import KINDS
from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.codec import WireError, decode, encode
from speedyzero_jax.cluster.messages import Acknowledged, Append, Grant, Result, WeightsRequest

EXAMPLES = int(os.environ.get("SPEEDYZERO_FUZZ_EXAMPLES", "500"))
EACH = samples.one_of_each()
ENCODED = {kind: encode(one) for kind, one in EACH.items()}
raw = msgpack.packb


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_is_what_was_encoded(kind):
  assert samples.leaves(decode(kind, ENCODED[kind])) == samples.leaves(EACH[kind])


@settings(max_examples=100)
@given(st.data())
def test_any_array_arrives_as_it_was(data):
  dtype = np.dtype(data.draw(st.sampled_from(sorted(set(codec._DTYPES) - {"bfloat16"}))))
  shape = data.draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0))
  sent = data.draw(npst.arrays(dtype, shape)).T  # not contiguous
  got = decode(Acknowledged, encode(Acknowledged(sent))).heads
  assert samples.leaves(got) == samples.leaves(sent)
  assert not got.flags.writeable and got.flags.aligned


def decode_any(data: bytes) -> None:
  """A WireError for every kind, or a message of that kind."""
  for kind in KINDS:
    try:
      message = decode(kind, data)
    except WireError as error:
      assert len(str(error)) < 500
    else:
      event("still a message")
      assert samples.leaves(decode(kind, encode(message))) == samples.leaves(message)


@settings(max_examples=EXAMPLES)
@given(samples.damaged(tuple(ENCODED.values())))
def test_damage_is_an_error_or_another_message(data):
  decode_any(data)


_VALUES = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9)
  | st.text(max_size=9) | st.sampled_from(("float32", "task", "_index")),
  lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=5), x, max_size=4),
)  # fmt: skip


@settings(max_examples=max(EXAMPLES // 5, 100))
@given(st.data())
def test_any_value_of_a_field_is_an_error_or_a_message(data):
  """Well-formed msgpack in which a field holds anything else, or a part of it does."""
  kind = data.draw(st.sampled_from(KINDS))
  fields = msgpack.unpackb(ENCODED[kind])[kind.__name__]
  name = data.draw(st.sampled_from((*fields, "other")))
  value = data.draw(_VALUES)
  if isinstance(fields.get(name), dict) and data.draw(st.booleans()):
    fields[name] |= {data.draw(st.sampled_from((*fields[name], "other"))): value}
  else:
    fields[name] = value
  decode_any(raw({kind.__name__: fields}))


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_an_error(kind):
  for length in range(len(ENCODED[kind])):
    with pytest.raises(WireError):
      decode(kind, ENCODED[kind][:length])


VAST = [[2**40], [2**64 - 1], [0, 2**62], [0, 2**64 - 1], [2**33, 2**33], [2**63, 0], 15 * [2**63]]
NESTED = [b"\x91", b"\x81\xa0", b"\x81\xa0\x91"]
ATTACKS = [
  *(raw({"Acknowledged": {"heads": ["int64", *shape, bytes(64)]}}) for shape in VAST),
  *(raw({"Acknowledged": {"heads": ["int64", *shape, b""]}}) for shape in VAST),
  b"\x81" * 100 + b"\xdd\xff\xff\xff\xff" + bytes(50),  # a list of 2**32 - 1 values
  900 * b"\xdd\x00\x00\xea\x60" + bytes(60_000),  # lists of 60000 values, in one another
  1000 * b"\xdf\xff\xff\xff\xff\xa0",  # maps of as many, in one another
  raw({"Acknowledged": {"heads": dict.fromkeys(map(str, range(20_000)))}}),
  *(nested * depth + b"\xc0" for nested in NESTED for depth in (10, 1000, 50_000)),
]


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_declared_sizes_and_nesting_cost_nothing(number):
  """Refused before memory is taken, whatever the sizes that a message declares."""
  tracemalloc.start()
  try:
    with pytest.raises(WireError):
      decode(Acknowledged, ATTACKS[number])
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
  finally:
    tracemalloc.stop()


def heads(*form: object) -> bytes:
  return raw({"Acknowledged": {"heads": [*form]}})


NOT_MESSAGES = {
  "noise": (b"noise", "not a message"),
  "kind": (ENCODED[Grant], "must be Acknowledged, got {'Grant'"),
  "two kinds": (raw({"Acknowledged": {}, "Grant": {}}), "must be Acknowledged"),
  "no map": (raw({"Acknowledged": 3}), "missing or unknown names 3"),
  "missing": (raw({"Acknowledged": {}}), "missing or unknown names {'heads'}"),
  "extra": (raw({"Acknowledged": {"heads": 1, "x": 1}}), "unknown names {'x'}"),
  "no array": (raw({"Acknowledged": {"heads": 5}}), "Acknowledged.heads: not a valid value: 5"),
  "no parts": (heads(), "no array"),
  "objects": (heads("object", 1, bytes(8)), "no array"),
  "bool size": (heads("int64", True, bytes(8)), "no array"),
  "negative size": (heads("int64", -1, -1, bytes(8)), "no array"),
  "too small": (heads("int64", 9, bytes(64)), "no array"),
  "bools": (heads("bool", 3, b"\0\1\2"), "bool must be 0 or 1"),
  "extension": (raw({"Acknowledged": {"heads": msgpack.ExtType(5, b"")}}), "not a valid value"),
  "rest": (ENCODED[Acknowledged] + b"\x00", "not a message"),
  "not UTF-8": (b"\x81\xacAcknowledge\xff\x80", "not a message"),
  "key": (b"\x81\x01\x80", "not a message"),
}


@pytest.mark.parametrize("name", NOT_MESSAGES)
def test_bytes_that_are_no_message(name):
  data, why = NOT_MESSAGES[name]
  with pytest.raises(WireError, match=why):
    decode(Acknowledged, data)


@pytest.mark.parametrize(
  ("kind", "field", "value"),
  [
    (Grant, "steps", True), (Grant, "steps", -1), (Grant, "steps", 2**63), (Grant, "steps", 1.0),
    (Grant, "steps", None), (Grant, "closing", 1), (Grant, "progress", True),
    (Grant, "progress", "0.5"), (WeightsRequest, "subscriber", 5),
    (Append, "segments", None), (Result, "arrays", {"policy": 3}),
  ],
)  # fmt: skip
def test_a_field_of_another_type_is_neither_taken_nor_sent(kind, field, value):
  fields = msgpack.unpackb(ENCODED[kind])[kind.__name__] | {field: value}
  with pytest.raises(WireError, match=f"{kind.__name__}.{field}: not a valid value"):
    decode(kind, raw({kind.__name__: fields}))
  with pytest.raises(WireError):
    encode(EACH[kind]._replace(**{field: value}))


@pytest.mark.parametrize("dtype", [">i4", "O", "U3", "M8[s]"])
def test_arrays_of_other_dtypes_are_not_sent(dtype):
  with pytest.raises(WireError, match="cannot be sent"):
    encode(Acknowledged(np.zeros(2, dtype)))


def test_numpy_scalars_can_be_sent():
  got = decode(Result, encode(EACH[Result]._replace(step=np.int64(7))))
  assert got.step == 7 and type(got.step) is int


def test_segments_come_back_from_their_columns():
  segments = [samples.segment(2, 9, n=2), samples.segment(0, 5)]
  assert samples.leaves(messages.unpack(messages.pack(segments), 100)) == samples.leaves(segments)
  assert messages.unpack(messages.pack([]), 0) == []
  with pytest.raises(ValueError, match="2 are more than 1"):
    messages.unpack(messages.pack(segments), 1)


@pytest.mark.parametrize(
  "changes",
  [
    {"_index": np.array([[0, 0, 1]])}, {"_index": np.array([[0, 0, 3], [0, 0, -1]])},
    {"_index": np.zeros((0, 3), np.int64)}, {"_index": np.array([[0, 0, 2.0]])},
    {"_index": np.array([2])}, {"_index": np.array(2)}, {"_index": np.array([[0, 0, 2**62]] * 4)},
    {"reward": np.zeros(3)}, {"reward": np.array(0.0)}, {"reward": None}, {"_index": None},
  ],
)  # fmt: skip
def test_sizes_that_do_not_add_up_and_missing_columns_are_errors(changes):
  arrays = messages.pack([samples.segment(n=2)]) | changes
  arrays = {name: array for name, array in arrays.items() if array is not None}
  with pytest.raises(ValueError, match="segments: "):
    messages.unpack(arrays, 100)


def test_a_tree_comes_back_from_its_names():
  tree = {"h": [np.zeros(2), np.ones(3)], "f": (np.array(4),)}
  arrays = messages.named(tree)
  assert set(arrays) == {"['h'][0]", "['h'][1]", "['f'][0]"}
  back = messages.unnamed(jax.eval_shape(lambda: tree), arrays)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))
  with pytest.raises(KeyError):
    messages.unnamed({"other": 0}, arrays)
