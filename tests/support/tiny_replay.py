"""What the tests of the replay share: a small one, and play to fill it."""

import numpy as np
import reference

from speedyzero_jax.config.schema import ReanalyseConfig, ReplayConfig
from speedyzero_jax.replay import Replay

LANES, UNROLL, STACK, TD, DISCOUNT = 2, 3, 2, 2, 0.9
CONFIG = ReplayConfig(alpha=0.7, min_priority=0.01, td_steps=TD, age_interval=12)


def make_replay(
  capacity, seed=0, config=CONFIG, lanes=LANES, device_frames=None, frame_memory=None, **reanalyse
):
  return Replay(
    lanes=lanes,
    capacity=capacity,
    frame_shape=reference.FRAME_SHAPE,
    frame_dtype=np.uint8,
    num_actions=reference.NUM_ACTIONS,
    replay=config,
    reanalyse=ReanalyseConfig(**reanalyse),
    unroll_steps=UNROLL,
    value_prefix_horizon=2,
    frame_stack=STACK,
    discount=DISCOUNT,
    rng_seed=seed,
    device_frames=device_frames,
    frame_memory=frame_memory,
  )


def play(replay, stream, rng, step, longest=5):
  lanes = rng.permutation(len(stream.heads))[: rng.integers(1, len(stream.heads) + 1)]
  replay.append_many(
    [stream.segment(int(l), int(rng.integers(1, longest + 1)), step) for l in lanes]
  )


def slots(stream, capacity):
  """(lane, time) arrays of all live slots, in the order of `Replay.state_dict`."""
  live = stream.live(capacity)
  return tuple(np.array(x) for x in zip(*live, strict=True))


def eligible(stream, capacity):
  return np.array(
    [stream.eligible(l, t, capacity, STACK, UNROLL, TD) for l, t in stream.live(capacity)]
  )


def assert_same(a, b):
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key], b[key], err_msg=key)
