"""Exact comparison of nested arrays and of replays."""

import numpy as np


def assert_same(a, b, where=""):
  """Asserts that nested dicts and sequences of arrays are equal, including their dtypes."""
  if hasattr(a, "_asdict"):
    a, b = a._asdict(), b._asdict()
  if isinstance(a, dict):
    assert a.keys() == b.keys(), where
    for key in a:
      assert_same(a[key], b[key], f"{where}/{key}")
  elif isinstance(a, list | tuple):
    assert len(a) == len(b), where
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
      assert_same(x, y, f"{where}/{i}")
  else:
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=where, strict=True)


def frames_of(replay):
  """Frames of all stored slots by lane."""
  return {
    str(lane): replay.store.frame[lane, replay.store.cell(np.arange(tail, head))]
    for lane, (tail, head) in enumerate(zip(replay.tails, replay.heads, strict=True))
  }


def assert_same_replays(ours, theirs, *, besides=()):
  """Asserts that two replays have equal contents and state."""
  a, b = (
    {name: array for name, array in replay.state_dict().items() if name not in besides}
    for replay in (ours, theirs)
  )
  assert_same(a, b)
  assert_same(frames_of(ours), frames_of(theirs))
