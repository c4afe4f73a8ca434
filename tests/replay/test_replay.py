"""Tests of the replay: frames and targets, refusals, exact restores, and copies of the frames."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage import SEEDS, bad

import reference
from same import assert_same, frames_of
from speedyzero_jax.replay.storage import NEVER
from speedyzero_jax.types import Slots
from tiny_replay import (
  LANES,
  STACK,
  UNROLL,
  copy_frames,
  make_agent,
  make_replay,
  play,
  set_priorities,
  slots,
  some,
  write,
)

ALL = np.zeros(LANES)  # from the first slot on


@given(capacity=st.integers(7, 25), seed=SEEDS, end=st.sampled_from([0.05, 0.2, 0.5]))
def test_sampled_unrolls_never_cross_an_episode_unmasked(capacity, seed, end):
  """Checked on the raw stream of flags, without the episodes' bounds."""
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed, end)
  for step in range(8):
    play(replay, stream, rng, step, longest=7)
  if not replay.ready(1):
    return
  drawn = replay.select(32)
  batch, _ = make_agent().assemble(replay, drawn, 8)
  frames, beyond = replay.windows(drawn.lane, drawn.time, after=UNROLL), []
  for i, (l, t) in enumerate(zip(drawn.lane, drawn.time, strict=True)):
    for k in range(UNROLL):
      following = stream.slot(l, t + k + 1) if t + k + 1 < stream.heads[l] else None
      crossed = following is None or any(stream.find(l, u)[1] == 0 for u in range(t + 1, t + k + 2))
      assert batch["consistency_mask"][i, k] == (not crossed)
      if not crossed:
        assert tuple(frames[i, STACK + k].ravel()) == following.frame
      if batch["policy_mask"][i, k]:
        assert batch["action"][i, k] == stream.slot(l, t + k).action
      assert 0 <= batch["action"][i, k] < reference.NUM_ACTIONS
      if crossed:
        beyond.append(batch["action"][i, k])
      if crossed and stream.find(l, t)[0].ending != "terminated":
        assert batch["value_mask"][i, k + 1] == batch["policy_mask"][i, k + 1] == 0
  assert len(beyond) < 25 or len(set(beyond)) > 1


class Worked:
  """A random sequence of operations, the same for several replays."""

  def __init__(self, seed):
    self.rng, self.stream = np.random.default_rng(seed), reference.Stream(LANES, seed)

  def __call__(self, step, *replays):
    """Applies the next operations; returns the outputs of each replay."""
    rng = self.rng
    played = some(self.stream, rng, step, longest=5)
    noise = rng.normal(size=(3, 16)).astype(np.float32)
    policy = np.full((16, 3), 1 / 3, np.float32)
    shown = []
    for replay in replays:
      replay.append(played)
      lane, time = replay.next_block("refresh", 16)
      write(replay, "refresh", lane, time, step, value=noise[0])
      searched = {"policy": policy, "search_value": noise[1], "value": noise[2]}
      write(replay, "reanalyse", *replay.next_block("reanalyse", 16), step, **searched)
      seen = {"block": lane, "time": time}
      if replay.ready(8):
        drawn = replay.select(8)
        batch, _ = make_agent().assemble(replay, drawn, step)
        replay.update(drawn, noise[0, :8], step)
        frames = replay.windows(drawn.lane, drawn.time, after=UNROLL)
        seen |= {**drawn._asdict(), **batch, "frames": frames}
      shown.append(seen)
    return shown


@settings(max_examples=20)
@given(capacity=st.integers(7, 40), seed=SEEDS)
def test_a_restored_replay_behaves_alike_bit_for_bit(capacity, seed):
  work, replay, other = Worked(seed), make_replay(capacity), make_replay(capacity, seed=999)
  for step in range(int(work.rng.integers(1, 15))):
    work(step, replay)
  copy_frames(replay, other)
  state = replay.state_dict()
  assert all(isinstance(x, np.ndarray) for x in state.values())
  other.load_state_dict(state)
  assert_same(other.state_dict(), state)
  assert all(other.is_older(x, replay.oldest_step(x) + 1) for x in ("value_step", "policy_step"))
  assert other.stats(20) == replay.stats(20)
  for step in range(15, 20):
    assert_same(*work(step, replay, other))
  assert_same(other.state_dict(), replay.state_dict())
  assert_same(frames_of(other), frames_of(replay))


@settings(max_examples=15)
@given(capacity=st.integers(7, 30), seed=SEEDS)
def test_stats_and_the_oldest_steps_are_those_of_a_look_at_all_slots(capacity, seed):
  """During appends, evictions, searches, refreshes and training, and after a truncation."""
  work, replay = Worked(seed), make_replay(capacity)
  for step in range(16):
    work(max(step - int(work.rng.integers(4)), 0), replay)
    if step == 15:
      replay.truncate(0)
    state, stats = replay.state_dict(), replay.stats(step + 2)
    held = state["priority"] > 0
    ages = step + 2 - state["priority_step"][held]
    assert stats["transitions"] == (state["slot_action"] >= 0).sum()
    assert stats["priority_age_mean"] == pytest.approx(ages.mean() if ages.size else 0.0)
    assert stats["priority_age_max"] == ages.max(initial=0)
    assert replay.selector.count == held.sum()
    for stamp in ("value_step", "policy_step", "bootstrap_step"):
      oldest = replay.oldest_step(stamp)
      assert oldest == state[f"slot_{stamp}"].min()
      for other in work.rng.integers(0, 18, 3).tolist():  # in no order
        assert replay.is_older(stamp, other) == (oldest < other)


def test_restoring_refuses_what_does_not_fit():
  replay, stream = make_replay(20), reference.Stream(LANES, 0)
  for step in range(6):
    play(replay, stream, np.random.default_rng(step), step)
  state, other = replay.state_dict(), make_replay(20)
  with pytest.raises(ValueError, match="not match the slots"):
    other.load_state_dict(state)
  copy_frames(replay, other)
  with pytest.raises(ValueError, match="slot_reward"):
    other.load_state_dict(state | {"slot_reward": state["slot_reward"][:-1]})
  other.load_state_dict(state)
  assert_same(other.state_dict(), state)


def from_the_start():
  stream = reference.Stream(LANES, 0, end_probability=0.0)
  return Slots.concatenate([stream.play(1, 4), stream.play(0, 4)])


@pytest.mark.parametrize(
  "call",
  [
    lambda r, l, t: r.rewrite("value_step", l, t + 99, 5, {"value": np.zeros(2)}),
    lambda r, *at: set_priorities(r, *at, np.array([np.nan, 0.0]), 5),
    lambda r, l, t: r.windows(l, t + 99),
    lambda r, *at: r.append(from_the_start()),
  ],
)
def test_refused_calls_change_nothing(call):
  replay, stream = make_replay(20), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 12))
  before, held = replay.state_dict(), frames_of(replay)
  with pytest.raises(ValueError):
    call(replay, np.array([0, 0]), np.array([1, 3]))
  assert_same(replay.state_dict(), before)
  assert_same(frames_of(replay), held)


def test_rewriting_keeps_newer_values_and_drops_those_of_evicted_slots():
  replay, stream = make_replay(10), reference.Stream(LANES, 0, end_probability=0.0)
  for _ in range(2):
    replay.append(stream.play(0, 6, step=4))
  lane, time = np.zeros(3, int), np.array([1, 5, 6])
  replay.rewrite("value_step", lane[:2], time[:2], 6, {"value": np.array([1.0, 2.0])})
  replay.rewrite("value_step", lane[1:], time[1:], 5, {"value": np.array([3.0, 4.0])})
  replay.rewrite("value_step", lane[2:], time[2:], 3, {"value": np.array([5.0])})
  store = replay.store
  assert store["value"][0, [5, 6]].tolist() == [2.0, 4.0]
  assert store["value_step"][0, [5, 6]].tolist() == [6, 5]
  assert store["value"][0, 1] == np.float32(stream.slot(0, 11).value)  # in the cell of slot 1


def test_an_empty_replay_is_not_ready():
  replay = make_replay(20)
  assert not replay.ready(1) and replay.stats(0)["transitions"] == 0
  with pytest.raises(ValueError, match="nothing to sample"):
    replay.select(4)
  assert replay.oldest_step("value_step") == NEVER
  with pytest.raises(ValueError, match="empty"):
    replay.next_block("refresh", 32)


def test_truncate_makes_an_abandoned_episode_usable():
  replay, stream = make_replay(20), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 4, step=2))
  assert not replay.ready(1)
  replay.truncate(0)
  assert set(replay.select(50).time) == {0, 1, 2}  # the transition out of the last frame is lost
  assert replay.stats(10)["priority_age_max"] == 8
  replay.truncate(0)
  replay.truncate(1)
  assert replay.selector.count == 3
  fresh = reference.Stream(1, 1, 0.0).play(0, 2)
  replay.append(bad(fresh, time=fresh.time + 4))


@pytest.mark.parametrize(
  "call",
  [
    lambda r, *at: r.append(reference.Stream(LANES, 0, 0.0).play(1, 2)),
    lambda r, *at: r.truncate(0),
    lambda r, *at: r.select(2),
    lambda r, *at: set_priorities(r, *at, np.ones(2), 5),
    lambda r, *at: r.rewrite("value_step", *at, 5, {"value": np.ones(2)}),
    lambda r, *at: r.next_block("refresh", 16),
    lambda r, *at: r.values(r.schema.extra, *at),
    lambda r, *at: r.windows(*at),
    lambda r, *at: r.trajectories(*at, 1),
    lambda r, *at: r.frames_since(ALL.astype(int), 5),
    lambda r, *at: r.intact(*at, ALL),
    lambda r, *at: r.stats(5),
    lambda r, *at: r.state_dict(),
  ],
)
def test_a_call_waits_while_the_lock_is_held(call):
  replay = make_replay(20)
  replay.append(reference.Stream(LANES, 0, end_probability=0.0).play(0, 12))
  done, at = threading.Event(), (np.array([0, 0]), np.array([1, 3]))
  thread = threading.Thread(target=lambda: (call(replay, *at), done.set()))
  with replay.lock:
    thread.start()
    assert not done.wait(0.02)
  thread.join(10)
  assert done.is_set()


def test_the_seed_decides_what_is_drawn():
  played = reference.Stream(LANES, 0, end_probability=0.0).play(0, 18)
  drawn = []
  for seed in (1, 1, 2):
    replay = make_replay(20, seed=seed)
    replay.append(played)
    drawn.append(replay.select(50).time.tolist())
  assert drawn[0] == drawn[1] != drawn[2]


def test_the_generator_survives_in_full():
  """An odd number of 32-bit draws leaves half a word, which is part of the generator's state."""
  replay, other = make_replay(20), make_replay(20, seed=999)
  replay.rng.integers(0, 7, 3, np.int32)
  other.load_state_dict(replay.state_dict())
  assert replay.rng.bit_generator.state["has_uint32"] == 1
  assert other.rng.bit_generator.state == replay.rng.bit_generator.state


def follow(replay, heads, copy):
  """Brings a copy of the frames up to date; returns the heads to continue from."""
  while True:
    heads, lane, cell, frames = replay.frames_since(heads, 3)
    if not len(lane):
      return heads
    copy[lane, cell] = frames


@given(capacity=st.integers(7, 20), seed=SEEDS)
def test_a_copy_of_the_frames_shows_the_same_windows(capacity, seed):
  """Also with one lane played more than others, and after a restart."""
  rng = np.random.default_rng(seed)
  copy, late, restarted = np.zeros((3, LANES, capacity, *reference.FRAME_SHAPE), np.uint8)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed)
  none = heads = np.zeros(LANES, np.int64)
  for step in range(12):
    if step < 4 or rng.random() < 0.2:
      play(replay, stream, rng, step)
    else:
      replay.append(stream.play(0, int(rng.integers(1, 6)), step))
    if rng.random() < 0.5:
      heads = follow(replay, heads, copy)
  for followed in (follow(replay, heads, copy), follow(replay, none, late), replay.heads):
    assert followed.tolist() == list(stream.heads)
  other = make_replay(capacity)
  copy_frames(replay, other)
  other.load_state_dict(replay.state_dict())
  follow(other, none, restarted)
  lane, time = slots(stream, capacity)
  wanted = replay.windows(lane, time, after=UNROLL)
  assert wanted.any()
  for made, held in ((replay, copy), (replay, late), (other, restarted)):
    cells, needed = made.window_cells(lane, time, UNROLL)
    assert (needed == made.heads).all()
    np.testing.assert_array_equal(held[lane[:, None], cells], wanted)
