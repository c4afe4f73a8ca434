"""What goes from the replay to the learner, while actors append."""

import hypothesis.strategies as st
import numpy as np
import reference
from hypothesis import given
from tiny_replay import LANES, UNROLL, make_replay, play

from speedyzero_jax.run import batch_pipeline


@given(
  seed=st.integers(0, 2**32 - 1),
  when=st.sampled_from(["before", "while"]),
  end=st.sampled_from([0.05, 0.4]),
)
def test_a_sample_evicted_before_its_frames_are_copied_is_masked(seed, when, end):
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(20), reference.Stream(LANES, seed, end)
  while not replay.num_eligible or rng.random() < 0.8:
    play(replay, stream, rng, 0)
  lane, time, probability = replay.sample(30)
  batch = replay.make_batch(lane, time, probability, 1)
  wanted = replay.windows(lane, time, after=UNROLL)
  cells = replay.window_cells

  def late(*args):
    """An actor appends between the moment cells are known and that in which they are copied."""
    found = cells(*args)
    play(replay, stream, rng, 1)
    return found

  if when == "before":
    play(replay, stream, rng, 1)
  else:
    replay.window_cells = late
  fed = batch_pipeline.gather(replay, batch, np.ones(len(lane), np.float32))
  replay.window_cells = cells
  now = replay.windows(lane, time, after=UNROLL)  # the beginning of a stack may have been evicted
  live = time >= replay.tails[lane]
  masks = [name for name in fed._fields if name.endswith("_mask")]
  for i, frames in enumerate(fed.frames):
    if (frames == wanted[i]).all() or (live[i] and (frames == now[i]).all()):
      continue
    assert all((getattr(fed, name)[i] == 0).all() for name in masks)
  if (replay.tails[lane] == 0).all():  # nothing was evicted, and nothing more is masked
    assert all((getattr(fed, name) == getattr(batch.targets, name)).all() for name in masks)
