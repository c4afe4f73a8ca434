"""The hub: what becomes of the work of reanalysers, and of the frames that they follow, whoever dies."""

import threading
import time

import jax
import numpy as np
import pytest
from hub_calls import QUICK, hello, player, unchanged, work
from hypothesis import given, settings
from hypothesis import strategies as st
from small_unit import Seer, Unit, assert_same

from speedyzero_jax.agents.efficientzero.reanalyse import BatchReanalyser, examine
from speedyzero_jax.cluster import messages
from speedyzero_jax.workers.weights import ACTOR


def look(unit, block):
  """What a reanalyser that holds the frames finds in a block."""
  lane = np.broadcast_to(block.lane[:, None], block.cell.shape).astype(np.int64)
  frames = unit.replay._store.gather(lane, block.cell)
  version = unit.weights.latest(block.subscriber)
  return examine(Seer(), version, frames, search=block.search, key=jax.random.key(9), explore=True)


def answer(unit, block, reanalyser=0, incarnation=0, shift=0.0, step=None):
  found = look(unit, block)
  step = found.step if step is None else step
  empty = np.zeros((0, found.value.shape[1]), np.float32)
  policy, search_value = (
    (empty[..., None], empty) if found.policy is None else (found.policy, found.search_value)
  )
  unit.hub.result(
    messages.Result(
      reanalyser, incarnation, block.block, step, policy, search_value, found.value + shift
    )
  )


def same_states(a, b):
  return a.lane.tolist() == b.lane.tolist() and a.cell.tolist() == b.cell.tolist()


@pytest.mark.parametrize("kind", ["refresh", "reanalyse"])
def test_a_sweep_done_by_reanalysers_is_the_local_one(kind):
  unit = Unit("actor.lanes=3", kinds=[kind])
  unit.fill(20)
  other = unit.twin()
  unit.append_to(other)
  unit.publish(6)
  hello(unit)
  assert work(unit) is None  # nothing is owed
  for _ in range(8):
    unit.pacer.add_learner_step()
  blocks = 0
  while block := work(unit):
    assert (block.step, block.frames) == (6, unit.replay.frames_written)
    answer(unit, block)
    blocks += 1
  local = Unit("actor.lanes=3", kinds=[kind])
  local.publish(6)
  for _ in range(blocks):
    local.sweepers[0].due(other, 8)
    local.sweepers[0].sweep(other)
  assert blocks > 1
  assert_same(unit.replay, other)
  assert list(unit.counted.values()) == [32 * blocks]


def test_a_sweeps_block_that_never_comes_back_is_come_round_to():
  unit = Unit("actor.lanes=3", reanalysers=2, kinds=["refresh"], block_timeout=0.1)
  unit.fill(20)
  hello(unit, 0), hello(unit, 1)
  unit.publish(8)
  for _ in range(8):
    unit.pacer.add_learner_step()
  assert work(unit, 0)
  while unit.replay.oldest_step("refresh") < 8:
    answer(unit, work(unit, 1), 1)


def batch_of(unit, size=4):
  """Works of a sampled batch, and a thread that waits for them."""
  lane, at, _ = unit.replay.sample(size)
  works = BatchReanalyser(unit.config, Seer(), unit.weights, jax.random.key(0)).works(
    unit.replay, lane, at
  )
  done = []
  thread = threading.Thread(target=lambda: done.append(unit.hub.reanalyse(works)), daemon=True)
  thread.start()
  return (lane, at), thread, done


def waiting_unit(**kwargs):
  unit = Unit("actor.lanes=3", "reanalyse.schedule=batch", **kwargs)
  unit.fill(20)
  unit.publish(3)
  return unit


def test_a_batch_is_split_and_waited_for_and_is_what_one_process_would_find():
  unit = waiting_unit(reanalysers=2)
  other = unit.twin()
  unit.append_to(other)
  hello(unit, 0), hello(unit, 1)
  (lane, at), thread, done = batch_of(unit, 5)
  blocks = [work(unit, 0, seconds=5), work(unit, 1, seconds=5)]
  assert [len(block.lane) for block in blocks] == [2, 3] and all(block.search for block in blocks)
  for number, block in enumerate(blocks):
    answer(unit, block, number)
  blocks = [work(unit, 0, seconds=5), work(unit, 1, seconds=5)]
  assert not any(block.search for block in blocks)  # the ends of the n-step returns
  answer(unit, blocks[0], 0)
  time.sleep(0.05)
  assert not done
  answer(unit, blocks[1], 1)
  thread.join(10)
  assert done == [True] and work(unit) is None
  BatchReanalyser(unit.config, Seer(), unit.weights, jax.random.key(5))(other, lane, at)
  assert_same(unit.replay, other, besides={"rng"})


def test_without_answers_the_learner_goes_on_and_nobody_is_given_what_it_no_longer_waits_for():
  unit = waiting_unit(block_timeout=0.1)
  hello(unit)
  _, thread, done = batch_of(unit)
  held = work(unit, seconds=5)
  thread.join(10)
  assert done == [False]
  time.sleep(0.1)  # the block is overdue
  assert unit.replay.state_dict()["slot_policy_step"].max() == 0
  answer(unit, held)  # better late than never
  assert unit.replay.state_dict()["slot_policy_step"].max() == 3
  assert work(unit) is None
  _, thread, done = batch_of(unit)
  held = work(unit, seconds=5)
  thread.join(10)
  time.sleep(0.1)
  assert done == [False] and work(unit) is None  # nor what somebody still holds
  _, thread, done = batch_of(unit)
  for _ in range(2):
    answer(unit, work(unit, seconds=5))
  thread.join(10)
  assert done == [True]


def test_nobody_waits_for_reanalysers_that_are_not_there_unless_asked_to(monkeypatch):
  now = [0.0]
  unit = waiting_unit()
  monkeypatch.setattr(unit.presence, "_clock", lambda: now[0])
  _, thread, done = batch_of(unit)
  thread.join(10)
  assert done == [False]  # none has come yet
  hello(unit)
  _, thread, done = batch_of(unit)
  held = work(unit, seconds=5)
  thread.join(0.1)
  assert not done
  now[0] += 11  # it hangs
  thread.join(10)
  assert done == [False]

  unit = waiting_unit(block_timeout=0.1, patient=True)
  hello(unit)
  _, thread, done = batch_of(unit)
  held = work(unit, seconds=5)
  unit.presence.anybody = lambda kind: False
  thread.join(1.5)
  assert not done
  answer(unit, held)
  answer(unit, work(unit, seconds=5))
  thread.join(10)
  assert done == [True]
  _, thread, done = batch_of(unit)
  unit.pacer.hurry()  # the run is to end
  thread.join(10)
  assert done == [False]


def test_a_result_of_weights_that_there_are_none_of_changes_nothing():
  unit = waiting_unit()
  hello(unit)
  _, thread, done = batch_of(unit)
  held = work(unit, seconds=5)
  before = unit.replay.state_dict()
  for step in (4, 2**31, 2**62, -1):
    with pytest.raises(ValueError, match=r"result\.step must be in 0\.\.3"):
      answer(unit, held, step=step)
  for name, array in unit.replay.state_dict().items():
    np.testing.assert_array_equal(array, before[name], err_msg=name)
  answer(unit, held)
  answer(unit, work(unit, seconds=5))
  thread.join(10)
  assert done == [True]


def test_a_block_that_is_overdue_is_given_to_another_and_its_late_result_is_dropped():
  unit = waiting_unit(reanalysers=2, block_timeout=0.5)
  hello(unit, 0), hello(unit, 1)
  _, thread, done = batch_of(unit, 1)
  held = work(unit, 0, seconds=5)
  answer(unit, work(unit, 1), 1)  # the values
  assert work(unit, 1) is None
  time.sleep(0.5)
  again = work(unit, 1, seconds=QUICK)
  assert same_states(again, held) and again.block != held.block
  before = unit.replay.state_dict()["slot_policy"]
  answer(unit, held, 0, shift=5.0)
  answer(unit, again, 0, shift=5.0)  # not the one who has it
  np.testing.assert_array_equal(unit.replay.state_dict()["slot_policy"], before)
  answer(unit, again, 1)
  thread.join(10)
  assert done == [True]


def test_what_a_dead_reanalyser_held_is_given_to_others_at_once():
  unit = waiting_unit(reanalysers=2)
  hello(unit, 0), hello(unit, 1)
  _, thread, done = batch_of(unit, 2)
  held = work(unit, 0, seconds=5)
  hello(unit, 0, 1)
  again = work(unit, 1, seconds=5)
  assert same_states(held, again)
  answer(unit, held, 0)  # by the old one, from the grave
  answer(unit, again, 1)
  for _ in range(3):
    answer(unit, work(unit, 0, 1, seconds=5), 0, 1)
  thread.join(10)
  assert done == [True]


def test_a_block_whose_answer_was_lost_is_given_again_to_who_asks_again():
  unit = waiting_unit(reanalysers=2)
  hello(unit, 0)
  _, thread, done = batch_of(unit, 1)
  lost = work(unit, seconds=5)
  block = work(unit, seconds=5)
  assert same_states(lost, block)
  answer(unit, block)
  answer(unit, work(unit, seconds=5))
  thread.join(10)
  assert done == [True]


def test_findings_that_do_not_fit_are_refused():
  unit = waiting_unit()
  hello(unit)
  _, thread, done = batch_of(unit, 1)
  block = work(unit, seconds=5)
  found = look(unit, block)
  empty = np.zeros((0, 3), np.float32)
  for policy, search_value, value, match in (
    (empty[..., None], empty, found.value, "a search finds policies"),
    (found.policy, found.search_value, found.value[:, :2], "values must be"),
    (found.policy, found.search_value, found.value * np.nan, "must be finite"),
  ):
    result = messages.Result(0, 0, block.block, 3, policy, search_value, value)
    unchanged(unit, lambda result=result: unit.hub.result(result), match)
  answer(unit, block)
  answer(unit, work(unit, seconds=5))
  thread.join(10)
  assert done == [True]


# --- frames


def fetch(unit, sequence=0, copy=None):
  """Follows the frames to where there are no more; returns the copy and the number to go on from."""
  copy = np.zeros_like(unit.replay._store.frame) if copy is None else copy
  while chunk := unit.hub.frames(messages.FramesRequest(0, 0, sequence), 0.0):
    assert len(chunk.lane) and chunk.sequence > sequence
    copy[chunk.lane, chunk.cell] = chunk.frame
    sequence = chunk.sequence
  return copy, sequence


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), late=st.booleans())
def test_frames_that_are_followed_are_the_replays_also_where_lanes_forget(seed, late):
  """However unevenly the lanes are played, and however late somebody comes to copy them."""
  rng = np.random.default_rng(seed)
  unit = Unit("actor.lanes=3", "replay.capacity=30", actors=3)
  hello(unit)
  players = [player(unit, actor, seed % 1000 + actor) for actor in range(3)]
  copy, sequence = None, 0
  for actor in range(3):
    for _ in range(int(rng.choice([1, 5, 40]))):
      segments, _ = players[actor].step(
        unit.weights.latest(ACTOR), budget=99, progress=0.0, random=False, last=False
      )
      unit.take(segments, [], granted=0)
      if not late and rng.random() < 0.3:
        copy, sequence = fetch(unit, sequence, copy)
  copy, sequence = fetch(unit, sequence, copy)
  np.testing.assert_array_equal(copy, unit.replay._store.frame)
  assert sequence == unit.replay.frames_written


def test_who_follows_frames_waits_for_them():
  unit = Unit()
  hello(unit)
  assert unit.hub.frames(messages.FramesRequest(0, 0, 0), QUICK) is None
  got = []
  thread = threading.Thread(
    target=lambda: got.append(unit.hub.frames(messages.FramesRequest(0, 0, 0), 20.0))
  )
  thread.start()
  time.sleep(0.05)
  unit.fill(1)
  thread.join(10)
  assert len(got[0].lane) == 3 == got[0].sequence
