"""Exact comparison of nested arrays and of replays."""

import jax
import numpy as np


def assert_same(a, b):
  """Asserts that nested containers of arrays are equal bit for bit, including their dtypes."""

  def same(path, x, y):
    where = jax.tree_util.keystr(path)
    np.testing.assert_array_equal(x, y, where, strict=True)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), where  # -0.0 is not 0.0

  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map_with_path(same, a, b)


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
