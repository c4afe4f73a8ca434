import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.replay.staleness import NEVER
from speedyzero_jax.replay.storage import OPEN, LaneStore


def make_store(lanes, capacity):
  return LaneStore(lanes, capacity, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS)


def fill(store, stream, seed, rounds=6, longest=None):
  """Appends random segments to random lanes, several at once."""
  rng = np.random.default_rng(seed)
  for step in range(rounds):
    lanes = rng.permutation(store.lanes)[: rng.integers(1, store.lanes + 1)]
    longest_now = longest or store.capacity
    store.append(
      [stream.segment(int(l), int(rng.integers(1, longest_now + 1)), step) for l in lanes]
    )


def snapshot(store):
  arrays = {**store.fields(), "frame": store.frame, "head": store.head, "tail": store.tail}
  return {name: array.copy() for name, array in arrays.items()} | {"n": store.num_transitions}


@given(
  lanes=st.integers(1, 3),
  capacity=st.integers(1, 12),
  seed=st.integers(0, 2**32 - 1),
  end=st.sampled_from([0.02, 0.2, 0.9]),
)
def test_store_holds_exactly_the_newest_slots(lanes, capacity, seed, end):
  stream, store = reference.Stream(lanes, seed, end), make_store(lanes, capacity)
  fill(store, stream, seed)
  assert store.num_transitions == stream.transitions
  np.testing.assert_array_equal(store.head, stream.heads)
  live = stream.live(capacity)
  assert store.num_slots() == len(live)
  lane, time = (np.array(x) for x in zip(*live, strict=True))
  cell = time % capacity
  assert store.live(lane, time).all()
  assert not store.live(lane, time - capacity).any()
  assert not store.live(lane, time + capacity).any()
  np.testing.assert_array_equal(store.time_of(lane, cell), time)
  for i, (l, t) in enumerate(live):
    episode, place = stream.find(l, t)
    slot, c = episode.slots[place], cell[i]
    assert tuple(store.frame[l, c].ravel()) == slot.frame
    assert store.first[l, c] == (place == 0)
    at_end = place == len(episode.slots) - 1
    assert store.terminated[l, c] == (at_end and episode.ending == "terminated")
    assert store.truncated[l, c] == (at_end and episode.ending == "truncated")
    assert store.episode_start[l, c] == episode.slots[0].time
    assert store.episode_end[l, c] == (OPEN if episode.ending == "open" else episode.slots[-1].time)
    assert (store.action[l, c], store.policy_step[l, c]) == (slot.action, slot.policy_step)
    assert store.value_step[l, c] == store.bootstrap_step[l, c] == slot.policy_step
    assert (store.reward[l, c], store.search_value[l, c]) == (slot.reward, slot.search_value)
    assert store.value[l, c] == store.bootstrap[l, c] == slot.value
    assert store.policy[l, c].tolist() == slot.policy
  np.testing.assert_array_equal(
    store.last(lane, time), [stream.find(l, t)[0].slots[-1].time for l, t in live]
  )
  assert store.stored_transitions == (store.action[lane, cell] >= 0).sum()
  start = np.minimum(store.tail + 2, store.head)
  chosen = time >= start[lane]
  for field in (store.reward, store.frame):
    np.testing.assert_array_equal(store.newest(field, store.tail), field[lane, cell])
    np.testing.assert_array_equal(store.newest(field, start), field[lane[chosen], cell[chosen]])
  unused = np.arange(capacity) >= (store.head - store.tail)[:, None]
  assert (store.policy_step[unused] == NEVER).all()


@given(
  capacity=st.integers(1, 12),
  seed=st.integers(0, 2**32 - 1),
  before=st.integers(0, 4),
  after=st.integers(0, 6),
)
def test_windows_repeat_the_episodes_edges(capacity, seed, before, after):
  stream, store = reference.Stream(2, seed), make_store(2, capacity)
  fill(store, stream, seed)
  live = stream.live(capacity)
  lane, time = (np.array(x) for x in zip(*live, strict=True))
  cells = store.window_cells(lane, time, before, after)
  frames = store.gather(np.broadcast_to(lane[:, None], cells.shape), cells)
  assert frames.shape == (len(live), before + 1 + after, *reference.FRAME_SHAPE)
  expected = [reference.window(stream, l, t, before, after, capacity) for l, t in live]
  np.testing.assert_array_equal(frames.reshape(len(live), -1, 3), expected)


def test_windows_of_what_is_not_stored_are_refused():
  stream, store = reference.Stream(1, 0), make_store(1, 5)
  fill(store, stream, 0, rounds=5)
  for time in (store.tail[0] - 1, store.head[0]):
    with pytest.raises(ValueError, match="not stored"):
      store.window_cells(np.array([0]), np.array([time]), 0, 0)


@given(seed=st.integers(0, 2**32 - 1))
def test_inserted_counts_transitions_of_all_lanes_in_order(seed):
  stream, store = reference.Stream(3, seed), make_store(3, 100)
  fill(store, stream, seed, longest=4)
  for l, t in stream.live(100):
    assert store.inserted[l, t] == stream.slot(l, t).inserted


def bad(segment, **changes):
  """The segment with entries replaced: name=(index, value), or name=whole."""
  fields = segment._asdict()
  for name, change in changes.items():
    if isinstance(change, tuple):
      fields[name] = fields[name].copy()
      fields[name][change[0]] = change[1]
    else:
      fields[name] = change
  return type(segment)(**fields)


REFUSED = {
  "lane too large": lambda s: bad(s, lane=2),
  "lane negative": lambda s: bad(s, lane=-1),
  "start ahead": lambda s: bad(s, start=s.start + 1),
  "start behind": lambda s: bad(s, start=s.start - 1),
  "empty": lambda s: type(s)(s.lane, s.start, *(x[:0] for x in s[2:])),
  "frame shape": lambda s: bad(s, frame=s.frame[..., :2]),
  "frame type": lambda s: bad(s, frame=s.frame.astype(np.float32)),
  "reward too short": lambda s: bad(s, reward=s.reward[:-1]),
  "reward type": lambda s: bad(s, reward=s.reward.astype(np.float64)),
  "reward NaN": lambda s: bad(s, reward=(1, np.nan)),
  "value infinite": lambda s: bad(s, value=(0, np.inf)),
  "search value NaN": lambda s: bad(s, search_value=(2, np.nan)),
  "policy NaN": lambda s: bad(s, policy=((1, 2), np.nan)),
  "policy width": lambda s: bad(s, policy=s.policy[:, :2]),
  "action too large": lambda s: bad(s, action=(0, reference.NUM_ACTIONS)),
  "action below -1": lambda s: bad(s, action=(0, -2)),
  "no action amid an episode": lambda s: bad(s, action=(0, -1)),
  "action at an end": lambda s: bad(s, terminated=(3, True)),
  "end unmarked": lambda s: bad(s, terminated=(1, False), truncated=(1, False)),
  "first amid an episode": lambda s: bad(s, first=(1, True)),
  "first missing after an end": lambda s: bad(s, first=(2, False)),
  "first though an episode is open": lambda s: bad(s, first=(0, True)),
  "step negative": lambda s: bad(s, step=(0, -1)),
  "step type": lambda s: bad(s, step=s.step.astype(np.int64)),
}


def segment_with_an_end(stream, lane):
  """Four slots: the second ends the lane's open episode."""
  s = stream.segment(lane, 4, 1)
  end = np.array([False, True, False, False])
  return s._replace(
    terminated=end,
    truncated=~end & False,
    first=np.array([False, False, True, False]),
    action=np.where(end, -1, 1).astype(np.int32),
  )


@pytest.mark.parametrize("name", REFUSED)
def test_refused_segments_change_nothing(name):
  stream, store = reference.Stream(2, 0, end_probability=0.0), make_store(2, 8)
  store.append([stream.segment(0, 3), stream.segment(1, 6)])
  fine, good = stream.segment(0, 2), segment_with_an_end(stream, 1)
  before = snapshot(store)
  for call in (store.check, store.append):
    with pytest.raises(ValueError):
      call([fine, REFUSED[name](good)])
  store.check([fine, good])
  after = snapshot(store)
  for key, value in before.items():
    np.testing.assert_array_equal(after[key], value, err_msg=key)
  store.append([fine, good])  # what was refused was really the change
  np.testing.assert_array_equal(store.head, [5, 10])


def test_a_lane_twice_or_a_segment_longer_than_the_ring_is_refused():
  stream, store = reference.Stream(1, 0), make_store(1, 4)
  first, second = stream.segment(0, 2), stream.segment(0, 2)
  with pytest.raises(ValueError, match="one segment per lane"):
    store.append([first, second])
  with pytest.raises(ValueError, match="must hold"):
    store.append([reference.Stream(1, 0).segment(0, 5)])
  assert store.head[0] == 0


def test_truncate_ends_the_open_episode_and_lets_a_new_one_begin():
  stream, store = reference.Stream(1, 0, end_probability=0.0), make_store(1, 10)
  store.append([stream.segment(0, 4)])
  store.truncate(0)
  assert store.action[0, :4].tolist()[-1] == -1
  assert store.truncated[0, :4].tolist() == [False, False, False, True]
  assert store.reward[0, 3] == 0
  assert store.episode_end[0, :4].tolist() == [3, 3, 3, 3]
  assert store.stored_transitions == 3
  before = snapshot(store)
  store.truncate(0)  # nothing is open any more
  for key, value in before.items():
    np.testing.assert_array_equal(snapshot(store)[key], value)
  fresh = reference.Stream(1, 1, end_probability=0.0).segment(0, 2)
  store.append([fresh._replace(start=4)])
  assert store.episode_start[0, 4:6].tolist() == [4, 4]


def test_memory_counts_what_is_used_not_what_is_reserved():
  stream, store = reference.Stream(2, 0, end_probability=0.0), make_store(2, 1000)
  store.append([stream.segment(0, 30), stream.segment(1, 10)])
  memory = store.memory()
  assert memory["frame_bytes"] == 40 * 3
  assert memory["reserved_bytes"] == 50 * memory["bytes"]
  assert memory["bytes_per_transition"] == memory["bytes"] / 40


def test_frames_may_be_kept_in_memory_of_others():
  memory = np.zeros((2, 5, *reference.FRAME_SHAPE), np.uint8)
  shared = LaneStore(2, 5, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS, memory)
  own, streams = make_store(2, 5), [reference.Stream(2, 3) for _ in range(2)]
  for store, stream in zip((shared, own), streams, strict=True):
    fill(store, stream, 3)
  assert shared.frame is memory and memory.any()
  np.testing.assert_array_equal(memory, own.frame)
  lane, time = (np.array(x) for x in zip(*streams[0].live(5), strict=True))
  np.testing.assert_array_equal(shared.gather(lane, time % 5), own.gather(lane, time % 5))
  assert shared.memory() == own.memory()


@pytest.mark.parametrize(
  "memory", [np.zeros((2, 5, 1, 1, 3), np.int8), np.zeros((5, 2, 1, 1, 3), np.uint8)]
)
def test_memory_that_does_not_fit_is_refused(memory):
  with pytest.raises(ValueError, match="frame_memory is"):
    LaneStore(2, 5, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS, memory)
