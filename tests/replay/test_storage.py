"""Tests of ring storage against the reference's episodes, and of refused slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from same import assert_same
from speedyzero_jax.replay.storage import NEVER, OPEN
from speedyzero_jax.types import Slots
from tiny_replay import fill, make_store, slots

SEEDS = st.integers(0, 2**32 - 1)


def contents(store):
  arrays = {**store.fields, "frame": store.frame, "head": store.head, "tail": store.tail}
  return {name: array.copy() for name, array in arrays.items()} | {"n": store.num_transitions}


@given(
  lanes=st.integers(1, 3),
  capacity=st.integers(1, 12),
  seed=SEEDS,
  end=st.sampled_from([0.02, 0.2, 0.9]),
)
def test_store_holds_exactly_the_newest_slots(lanes, capacity, seed, end):
  stream, store = reference.Stream(lanes, seed, end), make_store(lanes, capacity)
  fill(store, stream, seed)
  live = stream.live(capacity)
  lane, time = slots(stream, capacity)
  cell = time % capacity
  assert store.num_transitions == stream.transitions
  assert (store.head - store.tail).sum() == len(live)
  np.testing.assert_array_equal(store.head, stream.heads)
  np.testing.assert_array_equal(store.time_of(lane, cell), time)
  for (l, t), c in zip(live, cell, strict=True):
    episode, place = stream.find(l, t)
    slot, ends = episode.slots[place], place == len(episode.slots) - 1
    expected = {
      "frame": np.reshape(slot.frame, reference.FRAME_SHAPE),
      "first": place == 0,
      "terminated": ends and episode.ending == "terminated",
      "truncated": ends and episode.ending == "truncated",
      "episode_start": episode.slots[0].time,
      "episode_end": OPEN if episode.ending == "open" else episode.slots[-1].time,
      **dict.fromkeys(("policy_step", "value_step", "bootstrap_step", "step"), slot.policy_step),
      **{name: getattr(slot, name) for name in ("action", "reward", "search_value", "policy")},
      **dict.fromkeys(("value", "bootstrap"), slot.value),
    }
    for name, value in expected.items():
      held = store.frame if name == "frame" else store[name]
      np.testing.assert_array_equal(held[l, c], value, err_msg=name)
  last = [stream.find(l, t)[0].slots[-1].time for l, t in live]
  np.testing.assert_array_equal(store.last(lane, time), last)
  assert store.stored_transitions == (store.action[lane, cell] >= 0).sum()
  unused = np.arange(capacity) >= (store.head - store.tail)[:, None]
  assert (store["policy_step"][unused] == NEVER).all()


@given(capacity=st.integers(1, 12), seed=SEEDS, before=st.integers(0, 4), after=st.integers(0, 6))
def test_windows_repeat_the_episodes_edges(capacity, seed, before, after):
  stream, store = reference.Stream(2, seed), make_store(2, capacity)
  fill(store, stream, seed)
  lane, time = slots(stream, capacity)
  cells = store.window_cells(lane, time, before, after)
  frames = store.gather(np.broadcast_to(lane[:, None], cells.shape), cells)
  assert frames.shape == (len(lane), before + 1 + after, *reference.FRAME_SHAPE)
  live = stream.live(capacity)
  expected = [reference.window(stream, l, t, before, after, capacity) for l, t in live]
  np.testing.assert_array_equal(frames.reshape(len(live), -1, 3), expected)


@given(seed=SEEDS)
def test_inserted_counts_transitions_of_all_lanes_in_order(seed):
  stream, store = reference.Stream(3, seed), make_store(3, 100)
  fill(store, stream, seed, longest=4)
  for l, t in stream.live(100):
    assert store.inserted[l, t] == stream.slot(l, t).inserted


def bad(slots, **changes):
  """The slots with arrays replaced: name=(index, value), or name=whole."""
  arrays = {"lane": slots.lane, "time": slots.time, **slots.columns}
  for name, change in changes.items():
    if isinstance(change, tuple):
      arrays[name] = arrays[name].copy()
      arrays[name][change[0]] = change[1]
    else:
      arrays[name] = change
  return Slots(arrays.pop("lane"), arrays.pop("time"), arrays)


def without(slots, name):
  return Slots(slots.lane, slots.time, {k: x for k, x in slots.columns.items() if k != name})


# Four slots of lane 1, of which the second ends the open episode, then two of lane 0.
REFUSED = {
  "lane too large": lambda s: bad(s, lane=(s.lane == 1, 2)),
  "lane negative": lambda s: bad(s, lane=(s.lane == 0, -1)),
  "lane type": lambda s: bad(s, lane=s.lane.astype(np.int32)),
  "lanes too short": lambda s: bad(s, lane=s.lane[:-1]),
  "lanes of two dimensions": lambda s: bad(s, lane=s.lane[:, None]),
  "start ahead": lambda s: bad(s, time=s.time + (s.lane == 1)),
  "start behind": lambda s: bad(s, time=s.time - (s.lane == 1)),
  "time repeated": lambda s: bad(s, time=(1, s.time[0])),
  "time skipped": lambda s: bad(s, time=(3, s.time[3] + 1)),
  "times not in order": lambda s: bad(s, time=s.time[[0, 2, 1, 3, 4, 5]]),
  "time type": lambda s: bad(s, time=s.time.astype(float)),
  "times too short": lambda s: bad(s, time=s.time[:-1]),
  "empty": lambda s: s.select(slice(0)),
  "frame shape": lambda s: bad(s, frame=s["frame"][..., :2]),
  "frame type": lambda s: bad(s, frame=s["frame"].astype(np.float32)),
  "reward too short": lambda s: bad(s, reward=s["reward"][:-1]),
  "reward type": lambda s: bad(s, reward=s["reward"].astype(np.float64)),
  "reward NaN": lambda s: bad(s, reward=(1, np.nan)),
  "column missing": lambda s: without(s, "value"),
  "base column missing": lambda s: without(s, "first"),
  "column unknown": lambda s: bad(s, color=s["reward"]),
  "value infinite": lambda s: bad(s, value=(0, np.inf)),
  "policy NaN": lambda s: bad(s, policy=((1, 2), np.nan)),
  "policy width": lambda s: bad(s, policy=s["policy"][:, :2]),
  "action too large": lambda s: bad(s, action=(0, reference.NUM_ACTIONS)),
  "action below -1": lambda s: bad(s, action=(0, -2)),
  "no action amid an episode": lambda s: bad(s, action=(0, -1)),
  "action at an end": lambda s: bad(s, terminated=(3, True)),
  "end unmarked": lambda s: bad(s, terminated=(1, False), truncated=(1, False)),
  "first amid an episode": lambda s: bad(s, first=(1, True)),
  "first missing after an end": lambda s: bad(s, first=(2, False)),
  "first though an episode is open": lambda s: bad(s, first=(0, True)),
  "step negative": lambda s: bad(s, step=(0, -1)),
  "step of an empty cell": lambda s: bad(s, step=(0, NEVER)),
  "step type": lambda s: bad(s, step=s["step"].astype(np.int64)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_slots_change_nothing(name):
  stream, store = reference.Stream(2, 0, end_probability=0.0), make_store(2, 8)
  store.append(Slots.concatenate([stream.play(0, 3), stream.play(1, 6)]))
  fine, end = stream.play(0, 2), np.array([False, True, False, False])
  good = bad(
    stream.play(1, 4, 1),
    terminated=end,
    first=np.roll(end, 1),
    action=np.where(end, -1, 1).astype(np.int32),
  )
  both = Slots.concatenate([good, fine])
  before = contents(store)
  for call in (store.check, store.append):
    with pytest.raises(ValueError):
      call(REFUSED[name](both))
  store.check(both)
  assert_same(contents(store), before)
  store.append(both)  # what was refused was really the change
  np.testing.assert_array_equal(store.head, [5, 10])


@given(seed=SEEDS)
def test_slots_of_several_lanes_may_be_interleaved_in_any_way(seed):
  """If those of each lane are in order; they are returned by lane."""
  rng, stream = np.random.default_rng(seed), reference.Stream(3, seed)
  store, sorted_store = make_store(3, 20), make_store(3, 20)
  for step in range(4):
    by_lane = Slots.concatenate([stream.play(lane, rng.integers(1, 9), step) for lane in range(3)])
    order = np.empty(len(by_lane), int)  # the places of lanes are random
    order[np.argsort(rng.permutation(by_lane.lane), kind="stable")] = np.arange(len(by_lane))
    interleaved = by_lane.select(order)
    for returned in (store.check(interleaved), store.append(interleaved)):
      assert_same(vars(returned), vars(by_lane))
    sorted_store.append(by_lane)
    assert_same(contents(store), contents(sorted_store))


def test_more_slots_of_a_lane_than_its_ring_has_are_refused():
  stream, store = reference.Stream(2, 0), make_store(2, 4)
  full, more = [stream.play(lane, 4) for lane in range(2)], stream.play(1, 1)
  with pytest.raises(ValueError, match="at most 4 slots per lane, got 5 of lane 1"):
    store.append(Slots.concatenate([*full, more]))
  assert not store.head.any()
  store.append(Slots.concatenate(full))
  store.append(more)
  assert store.head.tolist() == [4, 5]


def test_truncate_ends_the_open_episode_and_lets_a_new_one_begin():
  stream, store = reference.Stream(1, 0, end_probability=0.0), make_store(1, 10)
  store.append(stream.play(0, 4))
  for _ in range(2):  # the second time nothing is open
    store.truncate(0)
    assert store.action[0, 3] == -1 and store.reward[0, 3] == 0
    assert store.truncated[0, :4].tolist() == [False, False, False, True]
    assert store.episode_end[0, :4].tolist() == [3, 3, 3, 3]
    assert store.stored_transitions == 3
  fresh = reference.Stream(1, 1, end_probability=0.0).play(0, 2)
  store.append(bad(fresh, time=fresh.time + 4))
  assert store.episode_start[0, 4:6].tolist() == [4, 4]
