"""Tests of the trajectory queue: order, eviction, pace and restarts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedyzero_jax.replay.replay import Selection
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.replay.trajectory_queue import TrajectoryQueue
from speedyzero_jax.types import Slots

_SCHEMA = make_schema((1, 1, 1), "uint8", 2)
_RNG = np.random.default_rng(0)
SKIPPED = "skipped_trajectories"


def append(store, lane, ends):
  """Appends slots of a lane; `ends` [n] marks the last ones of their episodes."""
  n, head = len(ends), int(store.head[lane])
  closed = head == 0 or store.action[lane, (head - 1) % store.capacity] < 0
  columns = {c.name: np.zeros((n, *c.shape), c.dtype) for c in _SCHEMA.columns}
  columns["first"] = np.array([closed, *ends[:-1]])
  columns["truncated"] = np.array(ends)
  columns["action"] = np.where(ends, -1, 0).astype(np.int32)
  store.append(Slots.of_lane(lane, head, columns))


def append_some(store, rng, longest):
  """Appends slots of a random lane; episodes end after ten of them on average."""
  lane, n = int(rng.integers(store.lanes)), int(rng.integers(1, longest + 1))
  append(store, lane, (rng.random(n) < 0.1).tolist())


def windows(selection):
  return list(zip(selection.lane.tolist(), selection.time.tolist(), strict=True))


def trained(queue, selection):
  queue.update(selection, np.zeros(len(selection.lane)), 0)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**32 - 1))


@settings(max_examples=25)
@given(sizes)
def test_every_window_once_and_lanes_take_turns(size):
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 1000)
  queue = TrajectoryQueue(store, length)
  found = []
  for _ in range(30):
    append_some(store, rng, 3 * length)
    n = int(rng.integers(1, 4))
    expected = sum(max(head - 1, 0) // length for head in store.head.tolist()) - len(found)
    assert queue.count == expected and queue.ready(n) == (expected >= n)
    if not queue.ready(n):
      with pytest.raises(ValueError, match=f"requested {n} trajectories, only {expected}"):
        queue.select(n, rng)
      continue
    selected = windows(queue.select(n, rng))
    for i, (lane, _) in enumerate(selected):  # nobody twice while another waits
      passed = selected[:i][::-1]
      since = passed[: [l for l, _ in passed].index(lane)] if lane in dict(passed) else None
      if since is not None:
        for other in range(lanes):
          taken = sum(l == other for l, _ in found + selected[:i])
          waits = (store.head[other] - 1) // length > taken
          assert not waits or other in dict(since) or other == lane
    found += selected
  for lane in range(lanes):
    times = [time for l, time in found if l == lane]
    assert times == [i * length for i in range(len(times))]
  assert queue.stats(0) == {"queued_trajectories": queue.count, SKIPPED: 0}


@settings(max_examples=25)
@given(sizes, st.integers(1, 3), st.integers(0, 9))
def test_no_window_is_selected_whose_frames_are_evicted(size, stack, spare):
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 2 * length + stack + spare)
  queue = TrajectoryQueue(store, length, stack=stack)
  found = []
  for _ in range(40):
    append_some(store, rng, 2 * length)
    if queue.ready(1) and rng.random() < 0.3:
      selection = queue.select(1, rng)
      ((lane, time),) = windows(selection)
      assert time % length == 0 and time + length < store.head[lane]
      assert time - (stack - 1) >= store.tail[lane] or store.tail[lane] == 0
      assert (lane, time) not in found
      trained(queue, selection)
      found.append((lane, time))
  state = queue.state_dict()
  assert sum(state["queue_next"]) // length == len(found) + state["queue_skipped"]


@settings(max_examples=25)
@given(sizes, st.floats(0.3, 1))
def test_windows_beyond_the_pace_are_skipped_and_no_others(size, share):
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 2000)
  pace = share / length
  queue, found, oldest = TrajectoryQueue(store, length, pace=pace), 0, np.zeros(lanes)
  for _ in range(60):
    append_some(store, rng, 2 * length)
    needed, complete = store.num_transitions * pace, ((store.head - 1) // length).clip(0).sum()
    available = queue.count + found
    assert available <= needed + lanes + 1
    assert available >= min(needed, complete) - 1e-9
    assert queue.stats(0)[SKIPPED] == complete - available
    if queue.ready(1):
      ((lane, time),) = windows(queue.select(1, rng))
      assert time >= oldest[lane]
      oldest[lane], found = time + length, found + 1


@settings(max_examples=25)
@given(sizes, st.booleans())
def test_a_restart_repeats_what_was_not_trained_on(size, finished):
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 300)
  queue = TrajectoryQueue(store, length, pace=0.8 / length)
  last = None
  for _ in range(30):
    append_some(store, rng, 2 * length)
    if queue.ready(2):
      if last is not None:
        trained(queue, last)
      last = queue.select(2, rng)
  if last is not None and finished:
    trained(queue, last)
  state, again = queue.state_dict(), TrajectoryQueue(store, length, pace=0.8 / length)
  again.load_state_dict(state)
  n = queue.count
  rest = windows(queue.select(n, rng))
  if finished or last is None:
    assert again.count == n and windows(again.select(n, rng)) == rest
    return
  surplus = again.stats(0)[SKIPPED] - state["queue_skipped"][0]
  repeated = windows(again.select(again.count, rng))
  assert len((set(windows(last)) | set(rest)) - set(repeated)) <= surplus
  for lane in range(lanes):
    times = [time for l, time in repeated if l == lane]
    assert times == sorted(times)


def test_what_is_ready_can_be_selected_although_evicted_meanwhile():
  store = LaneStore(_SCHEMA, 1, 7)
  queue = TrajectoryQueue(store, 3)
  append(store, 0, [False] * 7)
  assert queue.ready(2)
  append(store, 0, [False] * 2)
  assert not queue.ready(2)
  assert windows(queue.select(2, _RNG)) == [(0, 0), (0, 3)]


@settings(max_examples=25)
@given(sizes, st.floats(0.3, 1), st.integers(1, 3))
def test_what_is_ready_can_be_selected_whatever_is_appended_meanwhile(size, share, n):
  """Episode ends, evictions and reports make windows surplus, or remove them."""
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 3 * length + 1)
  queue = TrajectoryQueue(store, length, pace=share / length)
  for _ in range(40):
    append_some(store, rng, 2 * length)
    if queue.ready(n):
      append_some(store, rng, 2 * length)
      queue.stats(0), queue.state_dict(), queue.ready(n)
      selection = queue.select(n, rng)
      assert len(set(windows(selection))) == n


def test_selections_have_lanes_times_and_no_probabilities():
  store = LaneStore(_SCHEMA, 2, 20)
  queue = TrajectoryQueue(store, 4)
  for lane in (1, 0):
    append(store, lane, [False] * 9)
  selection = queue.select(3, _RNG)
  assert isinstance(selection, Selection)
  np.testing.assert_array_equal(selection.lane, [0, 1, 0])
  np.testing.assert_array_equal(selection.time, [0, 0, 4])
  np.testing.assert_array_equal(selection.probability, 1)


# --- blocks of windows that are used several times


@settings(max_examples=25)
@given(sizes, st.integers(1, 4), st.integers(1, 3))
def test_every_epoch_of_a_block_has_each_of_its_windows_once(size, minibatches, epochs):
  lanes, length, seed = size
  rng, n = np.random.default_rng(seed), 3
  block = minibatches * n
  store, plain = (LaneStore(_SCHEMA, lanes, 2000) for _ in range(2))
  queue = TrajectoryQueue(store, length, block=block, epochs=epochs)
  in_order = TrajectoryQueue(plain, length)
  selected = 0
  for _ in range(30):
    lane, ends = int(rng.integers(lanes)), (rng.random(3 * length) < 0.1).tolist()
    append(store, lane, ends), append(plain, lane, ends)
    if in_order.count < block:
      assert not queue.ready(n) and queue.count == 0
      continue
    expected = sorted(windows(in_order.select(block, rng)))
    orders = []
    for epoch in range(epochs):
      found = []
      for i in range(minibatches):
        left = epochs * block * (1 + in_order.count // block) - n * (epoch * minibatches + i)
        assert queue.count == left and queue.ready(n)
        found += windows(queue.select(n, rng))
      orders.append(found)
      assert sorted(found) == expected
    selected += epochs * block
  assert queue.stats(0)[SKIPPED] == 0


@settings(max_examples=25)
@given(sizes, st.floats(0.1, 2), st.integers(1, 3), st.integers(0, 30))
def test_replayed_windows_are_stored_ones_that_were_new_before(size, share, epochs, spare):
  lanes, length, seed = size
  rng = np.random.default_rng(seed)
  store = LaneStore(_SCHEMA, lanes, 8 * length + 2 + spare)
  queue = TrajectoryQueue(store, length, stack=2, block=2, epochs=epochs, replayed=share)
  old, blocks, replayed = set(), 0, 0
  for _ in range(40):
    append_some(store, rng, length)
    while queue.ready(1):
      count, tail = queue.count, store.tail.copy()
      found = [windows(queue.select(1, rng))[0]]
      blocks += 1
      more = int(2 * blocks * share) - int(2 * (blocks - 1) * share)
      found += [windows(queue.select(1, rng))[0] for _ in range(epochs * (2 + more) - 1)]
      assert queue.count == count - len(found)
      passes = [sorted(found[i : i + 2 + more]) for i in range(0, len(found), 2 + more)]
      assert passes == [passes[0]] * epochs
      new = set(passes[0]) - old
      assert len(new) == 2
      old |= new
      replayed += more
      for lane, time in passes[0]:
        assert time % length == 0 and time + length < store.head[lane]
        assert time - 1 >= tail[lane] or tail[lane] == 0
  assert replayed == int(2 * blocks * share)


@settings(max_examples=25)
@given(sizes, st.booleans())
def test_a_restart_within_a_block_goes_on_with_it(size, finished):
  lanes, length, seed = size
  rng, arguments = np.random.default_rng(seed), {"block": 4, "epochs": 3, "replayed": 0.25}
  store = LaneStore(_SCHEMA, lanes, 600)
  queue = TrajectoryQueue(store, length, **arguments)
  for _ in range(20):
    append_some(store, rng, 4 * length)
    if queue.ready(10):
      trained(queue, queue.select(6, rng))
      last = queue.select(2, rng)
      if finished:
        trained(queue, last)
      again, state = TrajectoryQueue(store, length, **arguments), queue.state_dict()
      again.load_state_dict(state)
      if not finished:
        assert windows(again.select(2, rng)) == windows(last)
      rngs = [np.random.default_rng(seed) for _ in range(2)]
      n = queue.count
      assert again.count == n
      rest = [windows(q.select(n, r)) for q, r in zip((queue, again), rngs, strict=True)]
      assert rest[0] == rest[1]
      return
