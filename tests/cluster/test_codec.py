"""Messages as bytes: the same message, or an error."""

import jax
import msgpack
import numpy as np
import pytest
from flax import serialization
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import samples
from samples import KINDS
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.codec import WireError, decode, encode
from speedyzero_jax.cluster.messages import FramesRequest, Grant, Result, Step, WeightsRequest

EACH = samples.one_of_each()
ENCODED = {kind: encode(one) for kind, one in EACH.items()}
raw = msgpack.packb


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_is_what_was_encoded(kind):
  assert samples.leaves(decode(kind, ENCODED[kind])) == samples.leaves(EACH[kind])


@given(st.data())
def test_any_array_arrives_as_it_was(data):
  dtype = np.dtype(data.draw(st.sampled_from("?bBhHiIlLefd")))
  shape = data.draw(npst.array_shapes(min_dims=0, max_dims=4, min_side=0))
  sent = data.draw(npst.arrays(dtype, shape)).T  # not contiguous
  got = decode(FramesRequest, encode(FramesRequest(0, 0, sent))).heads
  assert samples.leaves(got) == samples.leaves(sent)


@pytest.mark.parametrize("array", [np.array([7], np.uint8).view(bool), np.zeros(1, "M8[s]")])
def test_arrays_of_neither_numbers_nor_truth_values_are_refused(array):
  fields = FramesRequest(0, 0, array)._asdict()
  with pytest.raises(WireError, match="heads: not a valid value"):
    decode(FramesRequest, serialization.msgpack_serialize({"FramesRequest": fields}))


@given(samples.damaged(tuple(ENCODED.values())))
def test_damage_is_an_error_or_another_message(data):
  for kind in KINDS:
    try:
      message = decode(kind, data)
    except WireError as error:
      assert len(str(error)) < 500
    else:
      assert encode(message)


@pytest.mark.parametrize(
  ("data", "why"),
  [
    (b"noise", "not a message"),
    (ENCODED[Grant], "must be WeightsRequest, got {'Grant'"),
    (raw({"WeightsRequest": {}, "Grant": {}}), "must be WeightsRequest"),
    (raw({"WeightsRequest": 3}), "missing or unknown names 3"),
    (raw({"WeightsRequest": {"number": 0}}), "missing or unknown names {'subscriber'}"),
    (raw({"WeightsRequest": {"number": 0, "subscriber": "a", "x": 1}}), "unknown names {'x'}"),
    (ENCODED[WeightsRequest] + b"\x00", "not a message"),
    (ENCODED[WeightsRequest][:-1], "not a message"),
    (b"\x81" * 100 + b"\xdd\xff\xff\xff\xff" + bytes(50), "not a message"),  # a vast list
    (b"\x91" * 50_000 + b"\xc0", "not a message"),  # nested
    (raw({"__msgpack_chunked_array__": True, "shape": {}, "chunks": {}}), "arrays in chunks"),
  ],
)
def test_bytes_that_are_no_message(data, why):
  with pytest.raises(WireError, match=why):
    decode(WeightsRequest, data)


@pytest.mark.parametrize(
  ("kind", "field", "value"),
  [
    (Grant, "steps", True), (Grant, "steps", -1), (Grant, "steps", 2**63), (Grant, "steps", 1.0),
    (Grant, "steps", None), (Grant, "closing", 1), (Grant, "progress", True),
    (Grant, "progress", "0.5"), (WeightsRequest, "subscriber", 5),
    (Step, "segments", None), (Result, "arrays", {"policy": 3}),
  ],
)  # fmt: skip
def test_a_field_of_another_type_is_neither_taken_nor_sent(kind, field, value):
  fields = EACH[kind]._asdict() | {field: value}
  fields = {name: None if isinstance(x, np.ndarray) else x for name, x in fields.items()}
  with pytest.raises(WireError, match=f"{kind.__name__}.{field}: not a valid value"):
    encode(EACH[kind]._replace(**{field: value}))
  with pytest.raises(WireError):
    decode(kind, raw({kind.__name__: fields}, default=str))


def test_arrays_of_objects_are_not_sent():
  with pytest.raises(WireError, match="heads: not a valid value"):
    encode(FramesRequest(0, 0, np.zeros(2, "O")))


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
