"""The replay: batches, what is refused, what is restored, and copies of the frames."""

import threading

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lanes import bad
from tiny_replay import (
  CONFIG,
  DISCOUNT,
  LANES,
  STACK,
  TD,
  UNROLL,
  assert_same,
  eligible,
  make_replay,
  play,
  slots,
)

from speedyzero_jax.config.schema import ReplayConfig
from speedyzero_jax.replay import snapshot


@given(
  capacity=st.integers(7, 25), seed=st.integers(0, 2**32 - 1), end=st.sampled_from([0.05, 0.2, 0.5])
)
def test_sampled_unrolls_never_cross_an_episode_unmasked(capacity, seed, end):
  """Seen from the raw stream of flags, which knows nothing of episodes' bounds."""
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed, end)
  for step in range(8):
    play(replay, stream, rng, step, longest=7)
  if not replay.num_eligible:
    return
  batch = replay.make_batch(*replay.sample(32), learner_step=8)
  frames = replay.windows(batch.lane, batch.time, after=UNROLL)
  for i, (l, t) in enumerate(zip(batch.lane, batch.time, strict=True)):
    for k in range(UNROLL):
      following = stream.slot(l, t + k + 1) if t + k + 1 < stream.heads[l] else None
      crossed = following is None or any(stream.find(l, u)[1] == 0 for u in range(t + 1, t + k + 2))
      assert batch.targets.consistency_mask[i, k] == (not crossed)
      if not crossed:
        assert tuple(frames[i, STACK + k].ravel()) == following.frame
      if batch.targets.policy_mask[i, k]:
        assert batch.action[i, k] == stream.slot(l, t + k).action
      assert 0 <= batch.action[i, k] < reference.NUM_ACTIONS
      if crossed and stream.find(l, t)[0].ending != "terminated":
        assert batch.targets.value_mask[i, k + 1] == 0
        assert batch.targets.policy_mask[i, k + 1] == 0


@given(
  capacity=st.integers(7, 25),
  seed=st.integers(0, 2**32 - 1),
  value_target=st.sampled_from(["bootstrap", "mixed"]),
)
def test_batches_follow_reanalysis(capacity, seed, value_target):
  """Written searches and bootstraps reach the targets unless older than what is there; ages tell the steps."""
  rng = np.random.default_rng(seed)
  replay = make_replay(capacity, value_target=value_target, mixed_start=10, mixed_newest=8)
  stream = reference.Stream(LANES, seed)
  newest_bootstrap: dict[tuple[int, int], int] = {}
  for step in range(10):
    play(replay, stream, rng, step)
    lane, time = slots(stream, capacity)
    chosen = rng.permutation(len(lane))[:8]
    lane, time, weights = lane[chosen], time[chosen], int(rng.integers(0, step + 3))
    policy = rng.dirichlet(np.ones(reference.NUM_ACTIONS), len(lane)).astype(np.float32)
    search, value, other = rng.normal(size=(3, len(lane))).astype(np.float32)
    replay.write_search(lane, time, policy, search, value, weights)
    replay.write_bootstrap(lane[:3], time[:3], other[:3], weights + 1)
    for i, key in enumerate(zip(lane, time, strict=True)):
      slot = stream.slot(*key)
      if weights >= slot.policy_step:
        if weights >= newest_bootstrap.get(key, slot.policy_step):
          slot.bootstrap, newest_bootstrap[key] = float(value[i]), weights
        slot.policy, slot.search_value, slot.policy_step = (
          policy[i].tolist(),
          float(search[i]),
          weights,
        )
      elif weights >= newest_bootstrap.get(key, slot.policy_step):
        slot.bootstrap, newest_bootstrap[key] = float(value[i]), weights
      if i < 3 and weights + 1 >= newest_bootstrap.get(key, slot.policy_step):
        slot.bootstrap, newest_bootstrap[key] = float(other[i]), weights + 1
  if not replay.num_eligible:
    return
  batch = replay.make_batch(*replay.sample(20), learner_step=12)
  expected = [
    reference.targets(
      stream,
      l,
      t,
      unroll=UNROLL,
      prefix_horizon=2,
      td_steps=TD,
      age_interval=CONFIG.age_interval,
      discount=DISCOUNT,
      value_target=value_target,
      mixed_start=10,
      mixed_newest=8,
      learner_step=12,
    )
    for l, t in zip(batch.lane, batch.time, strict=True)
  ]
  for name, array in batch.targets._asdict().items():
    np.testing.assert_allclose(
      array, [e[name] for e in expected], rtol=1e-5, atol=1e-6, err_msg=name
    )
  for i, (l, t) in enumerate(zip(batch.lane, batch.time, strict=True)):
    episode, place = stream.find(l, t)
    for k in range(UNROLL + 1):
      real = place + k < len(episode.slots)
      assert batch.age[i, k] == (12 - episode.slots[place + k].policy_step if real else 0)


def test_what_a_batch_needs_searched_and_bootstrapped():
  """One terminated episode of 4 frames, then an open one."""
  replay, stream = make_replay(30, ratio=0.5), reference.Stream(LANES, 0, end_probability=0.0)
  episode = stream.segment(0, 4)
  end = np.array([False, False, False, True])
  replay.append(episode._replace(terminated=end, action=np.where(end, -1, 1).astype(np.int32)))
  replay.append(stream.segment(0, 20)._replace(first=np.arange(20) == 0))
  lane, time = np.array([0, 0, 0, 0]), np.array([1, 5, 2, 0])
  at, states = replay.states_to_search(lane, time)
  assert states.tolist() == [[1, 2, 3, 3], [5, 6, 7, 8]]
  assert at.shape == states.shape
  _, ends = replay.states_to_bootstrap(lane, time)
  # 23 transitions so far, n shrinks by one for each 12: n = 1 for the first eleven.
  assert ends.tolist() == [[2, 3, 3, 3], [6, 7, 8, 9], [3, 3, 3, 3], [1, 2, 3, 3]]


@settings(max_examples=25)
@given(
  capacity=st.integers(7, 30), seed=st.integers(0, 2**32 - 1), end=st.sampled_from([0.02, 0.2, 0.6])
)
def test_stats_and_the_oldest_steps_are_those_of_a_look_at_all_slots(capacity, seed, end):
  """While slots are appended, evicted, searched, refreshed, trained on; after an environment is lost and a restore."""
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed, end)

  def check(replay, step):
    state, stats = replay.state_dict(), replay.stats(step)
    held = state["priority"] > 0
    assert stats["slots"] == len(held) and stats["eligible"] == held.sum()
    assert stats["transitions"] == (state["slot_action"] >= 0).sum()
    assert replay.oldest_step("refresh") == state["slot_value_step"].min()
    assert replay.oldest_step("reanalyse") == state["slot_policy_step"].min()
    for name, ages in (
      ("priority_age", step - state["priority_step"][held]),
      ("target_age", step - state["slot_policy_step"]),
    ):
      assert stats[f"{name}_mean"] == pytest.approx(ages.mean() if ages.size else 0.0)
      assert stats[f"{name}_max"] == ages.max(initial=0)

  for step in range(15):
    play(replay, stream, rng, max(step - int(rng.integers(4)), 0), longest=7)
    lane, time = replay.next_block("refresh", 16)
    replay.write_values(lane, time, rng.normal(size=16), step)
    replay.refresh_priorities(lane, time, step)
    lane, time = replay.next_block("reanalyse", 16)
    replay.write_search(lane, time, np.full((16, 3), 1 / 3), np.zeros(16), np.zeros(16), step)
    if replay.num_eligible:
      lane, time, _ = replay.sample(9)
      replay.set_priorities(lane, time, rng.normal(size=9), step)
    check(replay, step + 2)
  replay.truncate(0)
  check(replay, 20)
  state, other = replay.state_dict(), make_replay(capacity)
  state["priority_step"][state["priority"] == 0] = 0  # says nothing
  other.import_slots(replay.export_slots(np.zeros(LANES)))
  other.load_state_dict(state)
  check(other, 20)


def twin(replay, exports, capacity, **kwargs):
  other = make_replay(capacity, seed=999, **kwargs)
  for exported in exports:
    other.import_slots(exported)
  other.load_state_dict(replay.state_dict())
  return other


@settings(max_examples=30)
@given(capacity=st.integers(7, 40), seed=st.integers(0, 2**32 - 1))
def test_a_restored_replay_behaves_alike_bit_for_bit(capacity, seed):
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed)
  exports, saved = [], np.zeros(LANES, int)

  def work(step, *replays):
    """The same random day for all replays; returns what each of them showed."""
    lanes = rng.permutation(LANES)[: rng.integers(1, LANES + 1)]
    segments = [stream.segment(int(l), int(rng.integers(1, 6)), step) for l in lanes]
    noise = rng.normal(size=(3, 16))
    shown = []
    for r in replays:
      r.append_many(segments)
      lane, time = r.next_block("refresh", 16)
      r.write_values(lane, time, noise[0], step)
      r.refresh_priorities(lane, time, step)
      searched = r.next_block("reanalyse", 16)
      r.write_search(*searched, np.full((16, 3), 1 / 3), noise[1], noise[2], step)
      seen = {"block": lane, "time": time}
      if r.num_eligible:
        drawn = r.sample(8)
        batch = r.make_batch(*drawn, learner_step=step)
        r.set_priorities(*drawn[:2], noise[0, :8], step)
        seen |= {
          k: v for k, v in batch._asdict().items() if k != "targets"
        } | batch.targets._asdict()
        seen["frames"] = r.windows(*drawn[:2], after=UNROLL)
      shown.append(seen)
    return shown

  for step in range(int(rng.integers(1, 15))):
    work(step, replay)
    if rng.random() < 0.3:  # an incremental save
      exports.append(replay.export_slots(saved))
      saved = replay.heads
  exports.append(replay.export_slots(saved))
  other = twin(replay, exports, capacity)
  assert_same(other.state_dict(), replay.state_dict())
  assert all(isinstance(v, np.ndarray) for v in replay.state_dict().values())
  for step in range(15, 20):
    mine, theirs = work(step, replay, other)
    assert_same(mine, theirs)
  assert_same(other.state_dict(), replay.state_dict())
  assert_same(other.export_slots(np.zeros(LANES)), replay.export_slots(np.zeros(LANES)))


def test_restoring_refuses_what_does_not_fit():
  replay, stream = make_replay(20), reference.Stream(LANES, 0)
  rng = np.random.default_rng(0)
  for step in range(6):
    play(replay, stream, rng, step)
  exported, state = replay.export_slots(np.zeros(LANES)), replay.state_dict()
  other = make_replay(20)
  with pytest.raises(ValueError, match="not of the slots"):
    other.load_state_dict(state)
  for broken in (
    exported | {"frame": exported["frame"][:-1]},
    exported | {"frame": exported["frame"].astype(float)},
    exported | {"start": exported["start"][:1]},
  ):
    with pytest.raises(ValueError, match="exported"):
      other.import_slots(broken)
  assert not other.heads.any()
  other.import_slots(exported)
  with pytest.raises(ValueError, match="do not follow"):
    other.import_slots(exported)
  with pytest.raises(ValueError, match="slot_reward"):
    other.load_state_dict(state | {"slot_reward": state["slot_reward"][:-1]})
  with pytest.raises(ValueError, match="new replay"):
    replay.import_slots(exported)
  other.load_state_dict(state)
  assert_same(other.state_dict(), state)


def test_refused_segments_change_nothing():
  replay, stream = make_replay(20), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 9))
  before, frames = replay.state_dict(), replay.export_slots(np.zeros(LANES))
  good, fine = stream.segment(0, 4), stream.segment(1, 4)
  for refused in (bad(good, reward=(1, np.nan)), bad(good, action=(2, -1)), good._replace(start=8)):
    for call in (replay.check, replay.append_many):
      with pytest.raises(ValueError, match="lane 0"):
        call([fine, refused])
  replay.check([fine, good])
  assert_same(replay.state_dict(), before)
  assert_same(replay.export_slots(np.zeros(LANES)), frames)
  replay.append_many([fine, good])


@pytest.mark.parametrize(
  "call",
  [
    lambda r, l, t: r.write_values(l, t, np.array([1.0, np.nan]), 5),
    lambda r, l, t: r.write_values(l, t, np.zeros(3), 5),
    lambda r, l, t: r.write_values(l, t + 99, np.zeros(2), 5),
    lambda r, l, t: r.write_bootstrap(l, t, np.array([np.inf, 0.0]), 5),
    lambda r, l, t: r.write_search(l, t, np.zeros((2, 2)), np.zeros(2), np.zeros(2), 5),
    lambda r, l, t: r.write_search(l, t, np.zeros((2, 3)), np.zeros(2), np.array([0.0, np.nan]), 5),
    lambda r, l, t: r.set_priorities(l, t, np.array([np.nan, 0.0]), 5),
    lambda r, l, t: r.windows(l, t + 99),
    lambda r, l, t: r.truncate(7),
  ],
)
def test_refused_writes_change_nothing(call):
  replay, stream = make_replay(20), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 12))
  before = replay.state_dict()
  with pytest.raises(ValueError):
    call(replay, np.array([0, 0]), np.array([1, 3]))
  assert_same(replay.state_dict(), before)


def test_an_empty_replay_says_so():
  replay = make_replay(20)
  with pytest.raises(ValueError, match="nothing to sample"):
    replay.sample(4)
  with pytest.raises(ValueError, match="empty"):
    replay.oldest_step("refresh")
  with pytest.raises(ValueError, match="empty"):
    replay.next_block("refresh", 32)
  replay.append_many([])
  assert replay.stats(0)["slots"] == 0


@pytest.mark.parametrize(
  "kwargs, message",
  [
    ({"capacity": 6}, "capacity"),
    ({"capacity": 20, "lanes": 0}, "lanes"),
    ({"capacity": 20, "config": ReplayConfig(min_priority=0.0)}, "min_priority"),
    ({"capacity": 20, "config": ReplayConfig(td_steps=0)}, "td_steps"),
  ],
)
def test_impossible_sizes_are_refused(kwargs, message):
  with pytest.raises(ValueError, match=message):
    make_replay(**kwargs)


def test_samples_evicted_before_their_batch_is_made_are_masked():
  replay, stream = make_replay(12), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 12))
  lane, time, probability = np.zeros(2, int), np.array([1, 5]), np.array([0.1, 0.1])
  replay.append(stream.segment(0, 3))
  targets = replay.make_batch(lane, time, probability, learner_step=0).targets
  for name in ("value_mask", "prefix_mask", "policy_mask", "consistency_mask"):
    assert getattr(targets, name)[0].tolist() == [0.0] * getattr(targets, name).shape[1]
    assert getattr(targets, name)[1].all()


def test_truncate_makes_an_abandoned_episode_usable():
  replay, stream = make_replay(20), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.segment(0, 4, step=2))
  assert replay.num_eligible == 0
  replay.truncate(0)
  assert replay.num_eligible == 3  # the transition out of the last frame is lost
  assert set(replay.sample(50)[1]) == {0, 1, 2}
  assert replay.stats(10)["priority_age_max"] == 8
  replay.truncate(0)
  replay.truncate(1)
  assert replay.num_eligible == 3
  replay.append(reference.Stream(1, 1, 0.0).segment(0, 2)._replace(start=4))


def test_threads_may_append_sample_and_refresh_at_once():
  replay, stream = make_replay(30), reference.Stream(LANES, 0)
  rng = np.random.default_rng(0)
  for step in range(10):
    play(replay, stream, rng, step)
  failures: list[Exception] = []
  done = threading.Event()

  def consume():
    try:
      while not done.is_set():
        batch = replay.make_batch(*replay.sample(8), learner_step=0)
        replay.set_priorities(batch.lane, batch.time, np.full(8, 2.0), 50)
        lane, time = replay.next_block("refresh", 16)
        assert replay.windows(lane, time).shape[1] == STACK
        replay.write_values(lane, time, np.ones(16), 40)
        replay.refresh_priorities(lane, time, 40)
    except Exception as error:
      failures.append(error)

  threads = [threading.Thread(target=consume) for _ in range(3)]
  for thread in threads:
    thread.start()
  for step in range(10, 150):
    play(replay, stream, rng, step)
  done.set()
  for thread in threads:
    thread.join()
  assert not failures
  expected = eligible(stream, 30)
  np.testing.assert_array_equal(replay.state_dict()["priority"] > 0, expected)
  assert replay.num_eligible == expected.sum()


def test_the_generator_survives_in_full():
  """Odd numbers of 32-bit draws leave half a word behind, which counts too."""
  rng = np.random.Generator(np.random.PCG64(5))
  rng.integers(0, 7, 3, np.int32)
  other = snapshot.unpack_rng(snapshot.pack_rng(rng))
  assert other.bit_generator.state == rng.bit_generator.state
  assert rng.bit_generator.state["has_uint32"] == 1
  np.testing.assert_array_equal(other.integers(0, 7, 9, np.int32), rng.integers(0, 7, 9, np.int32))


def follow(replay, number, copy):
  """Brings a copy of the frames up to date; returns the number to go on from."""
  while True:
    number, lane, cell, frames = replay.frames_since(number, 3)
    if not len(lane):
      return number
    copy[lane, cell] = frames


@given(capacity=st.integers(7, 20), seed=st.integers(0, 2**32 - 1))
def test_a_copy_of_the_frames_shows_the_same_windows(capacity, seed):
  """Also where one lane is played more than others, and after a restart."""
  rng = np.random.default_rng(seed)
  replay, stream = make_replay(capacity), reference.Stream(LANES, seed)
  copy, late, restarted = (
    np.zeros((LANES, capacity, *reference.FRAME_SHAPE), np.uint8) for _ in range(3)
  )
  number = 0
  for step in range(12):
    if step < 4 or rng.random() < 0.2:
      play(replay, stream, rng, step)
    else:
      replay.append(stream.segment(0, int(rng.integers(1, 6)), step))
    if rng.random() < 0.5:
      number = follow(replay, number, copy)
  assert (
    follow(replay, number, copy)
    == follow(replay, 0, late)
    == replay.frames_written
    == sum(stream.heads)
  )
  other = make_replay(capacity)
  other.import_slots(replay.export_slots(np.zeros(LANES)))
  other.load_state_dict(replay.state_dict())
  follow(other, 0, restarted)
  lane, time = slots(stream, capacity)
  wanted = replay.windows(lane, time, after=UNROLL)
  for made, held in ((replay, copy), (replay, late), (other, restarted)):
    cells, written = made.window_cells(lane, time, UNROLL)
    assert written == made.frames_written
    np.testing.assert_array_equal(held[lane[:, None], cells], wanted)


def test_frames_are_where_others_can_see_them():
  memory = np.zeros((LANES, 9, *reference.FRAME_SHAPE), np.uint8)
  replay, stream = make_replay(9, frame_memory=memory), reference.Stream(LANES, 5)
  for step in range(9):
    play(replay, stream, np.random.default_rng(step), step)
  lane, time = slots(stream, 9)
  cells, _ = replay.window_cells(lane, time, 2)
  np.testing.assert_array_equal(memory[lane[:, None], cells], replay.windows(lane, time, after=2))
  assert memory.any()
