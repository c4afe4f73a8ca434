"""Tests of message encoding: round trips and damaged messages."""

import jax
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import samples
from samples import KINDS
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.messages import (
  FramesRequest,
  Grant,
  WeightsRequest,
  decode,
  encode,
)

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
  got = decode(FramesRequest, encode(FramesRequest(sent))).heads
  assert samples.leaves(got) == samples.leaves(sent)


@given(samples.damaged(tuple(ENCODED.values())))
def test_damage_is_an_error_or_another_message(data):
  for kind in KINDS:
    try:
      assert type(decode(kind, data)) is kind
    except ValueError as error:
      assert len(str(error)) < 500


@pytest.mark.parametrize(
  "data",
  [
    b"noise", ENCODED[Grant], raw({"WeightsRequest": 3}), raw({"WeightsRequest": {}}),
    raw({"WeightsRequest": {"subscriber": "a", "x": 1}}), ENCODED[WeightsRequest] + b"\x00",
    ENCODED[WeightsRequest][:-1], b"\x81" * 100 + b"\xdd\xff\xff\xff\xff" + bytes(50),
    b"\x91" * 50_000 + b"\xc0",  # nested
  ],
)  # fmt: skip
def test_bytes_that_are_no_message(data):
  with pytest.raises(ValueError, match="not a message of kind WeightsRequest"):
    decode(WeightsRequest, data)


def test_a_tree_comes_back_from_its_names():
  tree = {"h": [np.zeros(2), np.ones(3)], "f": (np.array(4),)}
  arrays = messages.named(tree)
  assert set(arrays) == {"['h'][0]", "['h'][1]", "['f'][0]"}
  back = messages.unnamed(jax.eval_shape(lambda: tree), arrays)
  assert jax.tree.structure(back) == jax.tree.structure(tree)
  assert all(a is b for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True))
  with pytest.raises(KeyError):
    messages.unnamed({"other": 0}, arrays)
