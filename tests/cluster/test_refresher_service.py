"""Tests of the refreshers' blocks, results and frames when refreshers die, repeat or are late."""

import threading
from collections import Counter

import jax
import numpy as np
import pytest

from same import assert_same_replays
from small_unit import BATCH, SWEEP
from speedyzero_jax.agents.refresh import REFRESHED_STATES
from speedyzero_jax.cluster import messages, refresher_service
from speedyzero_jax.cluster.roster import TIMEOUT
from speedyzero_jax.metrics import names
from speedyzero_jax.run import steps
from supervised import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """A learner that waits looks for lost refreshers more often."""
  monkeypatch.setattr(refresher_service, "_POLL", 0.1)


@pytest.mark.parametrize(
  ("task", "reuse"), [("refresh", False), ("reanalyse", False), ("reanalyse", True)]
)
def test_a_sweep_by_refreshers_is_the_local_one(make_unit, task, reuse):
  unit = make_unit(SWEEP[task], *["reanalyse.reuse=true"] * reuse, durable=True)
  unit.fill(20)
  with unit.twin() as local:
    unit.publish(6)
    local.weights.publish(6, unit.agent.init(number=6))
    assert unit.work() is None  # nothing is owed
    unit.learn(8)
    blocks, block = 0, unit.work()
    while block:
      assert (block.task, block.step, block.heads.tolist()) == (task, 6, unit.replay.heads.tolist())
      block = unit.result(block)
      blocks += 1
    (sweeper,) = local.sweepers
    for _ in range(blocks):
      assert sweeper.due(local.replay, 8)
      steps.sweep(local, sweeper)
    assert blocks > 1 and not sweeper.due(local.replay, 8)
    assert_same_replays(unit.replay, local.replay, besides={"rng"})


def test_a_sweep_returns_to_the_states_of_a_lost_block(make_unit):
  unit = make_unit(SWEEP["refresh"], refreshers=2)
  unit.fill(20)
  unit.publish(8)
  unit.learn(8)
  assert unit.work(0)
  while unit.replay.oldest_step("value_step") < 8:
    unit.result(unit.work(1), 1)


def test_a_restarted_refresher_gets_its_block_of_a_sweep_again(make_unit):
  unit = make_unit(SWEEP["refresh"], refreshers=2)
  unit.fill(20)
  unit.publish(8)
  unit.learn(8)
  lost, other = unit.work(0), unit.work(1)
  again = unit.work(0)
  assert (again.lane.tolist(), again.cell.tolist()) == (lost.lane.tolist(), lost.cell.tolist())
  assert (other.lane.tolist(), other.cell.tolist()) != (lost.lane.tolist(), lost.cell.tolist())
  unit.result(again, 0)
  assert (unit.replay.store["value_step"][lost.lane[:, None], lost.cell] == 8).all()


def test_a_late_block_of_a_sweep_is_used(make_unit, clock):
  unit = make_unit(SWEEP["refresh"], "topology.block_timeout=60", refreshers=2)
  unit.fill(20)
  unit.publish(8)
  unit.learn(8)
  late = unit.work(0)
  clock.now += 61
  assert unit.work(1)
  unit.result(late, 0)
  assert (unit.replay.store["value_step"][late.lane[:, None], late.cell] == 8).all()


def test_a_sweep_far_behind_owes_one_pass(make_unit):
  unit = make_unit(SWEEP["refresh"], "refresh.max_age=20")
  unit.fill(20)
  unit.publish(400)
  unit.learn(400)  # without refreshers
  (sweeper,) = unit.experiment.sweepers
  assert sweeper.due(unit.replay, 400) and sweeper.behind(unit.replay, 400)
  blocks = 0
  while sweeper.behind(unit.replay, 400):
    steps.sweep(unit.experiment, sweeper)
    blocks += 1
  states = (unit.replay.heads - unit.replay.tails).sum()
  assert blocks <= states // sweeper.block + 3
  assert unit.replay.oldest_step("value_step") == 400


def test_results_of_a_sweep_wake_a_learner_that_waits_for_them_and_are_counted(
  make_unit, monkeypatch
):
  unit, counted = make_unit(SWEEP["refresh"]), {}
  unit.fill(20)
  unit.publish(8)
  unit.learn(8)
  block = unit.work()

  def recomputed():
    return (unit.replay.store["value_step"] == 8).any()

  waiting = threading.Thread(target=unit.limiter.wait_for, args=(recomputed, 20.0), daemon=True)
  waiting.start()
  waiting.join(0.05)
  assert waiting.is_alive()
  monkeypatch.setattr(unit.experiment.logger, "count", counted.__setitem__)
  unit.result(block)
  waiting.join(5)
  assert not waiting.is_alive()
  assert counted == {
    REFRESHED_STATES + suffix: 32 for suffix in (names.RATE_SUFFIX, names.PER_STEP_SUFFIX)
  }


def batch_unit(make_unit, *overrides, refreshers=1, durable=False):
  """A unit for sampled batches, with refreshers that have made their first call."""
  unit = make_unit(*BATCH, *overrides, refreshers=refreshers, durable=durable)
  unit.fill(20)
  unit.publish(3)
  for number in range(refreshers):
    assert unit.work(number) is None
  return unit


class Clock:
  """Replacement of the service's clock, which tests advance."""

  def __init__(self):
    self.now, self._reads = 0.0, Counter()

  def monotonic(self):
    now = self.now
    self._reads[threading.current_thread()] += 1
    return now

  def advance_once_waiting(self, thread, seconds):
    """Advances when a thread that executes a batch has computed until when it waits."""
    wait_for(lambda: self._reads[thread] >= 2)
    self.now += seconds


@pytest.fixture
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(refresher_service, "time", clock)
  return clock


def newest(unit):
  return unit.replay.state_dict()["slot_policy_step"].max()


def same_states(a, b):
  return a.lane.tolist() == b.lane.tolist() and a.cell.tolist() == b.cell.tolist()


def test_a_batch_is_split_and_waited_for_and_computed_as_by_one_process(make_unit):
  unit = batch_unit(make_unit, refreshers=2, durable=True)
  with unit.twin() as local:
    local.weights.publish(3, unit.agent.init(number=3))
    works, thread, done = unit.executing(5)
    blocks = [unit.work(number, seconds=5) for number in (0, 1, 0, 1)]
    # Asking again means that a block was lost, so the last two are the first two.
    assert [len(block.lane) for block in blocks[:2]] == [3, 2] and newest(unit) == 0
    assert same_states(blocks[0], blocks[2]) and same_states(blocks[1], blocks[3])
    for number, block in enumerate(blocks[2:]):
      unit.result(block, number)
    blocks = [unit.work(0, seconds=5), unit.work(1, seconds=5)]
    assert [block.task for block in blocks] == ["bootstrap"] * 2
    unit.result(blocks[0], 0)
    thread.join(0.05)
    assert not done
    unit.result(blocks[1], 1)
    thread.join(10)
    assert done and unit.work() is None
    for work in works:
      local.run_task(work, jax.random.key(5))
    assert_same_replays(unit.replay, local.replay, besides={"rng"})


def test_a_batch_wakes_a_refresher_that_waits_for_work(make_unit):
  unit, found = batch_unit(make_unit), []
  waiting = threading.Thread(target=lambda: found.append(unit.work(seconds=20)), daemon=True)
  waiting.start()
  waiting.join(0.05)
  assert not found
  unit.executing()
  waiting.join(5)
  assert found[0].task == "reanalyse"


def test_the_learner_waits_for_a_batch_only_so_long(make_unit, clock):
  unit = batch_unit(make_unit, "topology.block_timeout=60")
  _, thread, done = unit.executing()
  held = unit.work(seconds=5)
  thread.join(0.1)
  assert not done
  clock.advance_once_waiting(thread, 121)
  thread.join(10)
  assert done and newest(unit) == 0
  unit.result(held)  # late results are written
  assert newest(unit) == 3
  assert unit.work() is None  # but what the learner no longer waits for is not handed out
  _, thread, done = unit.executing()
  unit.work(seconds=5)
  clock.advance_once_waiting(thread, 121)
  thread.join(10)
  assert done and unit.work() is None  # nor handed out again
  _, thread, done = unit.executing()
  for _ in range(2):
    unit.result(unit.work(seconds=5))
  thread.join(10)
  assert done


def test_the_first_batch_waits_for_refreshers_that_compile(make_unit, clock):
  unit = make_unit(*BATCH, refreshers=2)
  unit.fill(20)
  unit.publish(3)
  _, thread, done = unit.executing()
  clock.advance_once_waiting(thread, 599)
  assert not done
  block = unit.work(0, seconds=5)
  unit.now += TIMEOUT + 1
  thread.join(0.3)
  assert not done
  while block:
    block = unit.result(block, 0)
  thread.join(10)
  assert done and newest(unit) == 3


def test_the_learner_waits_for_live_refreshers_only(make_unit, clock):
  unit = make_unit(*BATCH)
  unit.fill(20)
  _, thread, done = unit.executing()
  clock.advance_once_waiting(thread, 601)
  thread.join(10)
  assert done  # none has called
  assert unit.work() is None
  _, thread, done = unit.executing()
  unit.work(seconds=5)
  thread.join(0.1)
  assert not done
  unit.now += TIMEOUT + 1  # it computes
  thread.join(0.3)
  assert not done
  clock.now += 31  # it hangs: topology.block_timeout is 30
  thread.join(10)
  assert done


def test_with_bound_age_the_learner_waits_until_the_end_of_the_run(make_unit):
  unit = batch_unit(make_unit, "topology.block_timeout=0.1", "topology.bound_age=true")
  _, thread, done = unit.executing()
  held = unit.work(seconds=5)
  unit.now += TIMEOUT + 1
  thread.join(0.3)
  assert not done
  unit.result(held)
  unit.result(unit.work(seconds=5))
  thread.join(10)
  assert done
  _, thread, done = unit.executing()
  unit.limiter.stop_pacing()
  thread.join(10)
  assert done


def test_a_result_of_impossible_weights_changes_nothing(make_unit):
  unit = batch_unit(make_unit)
  unit.executing()
  held = unit.work(seconds=5)
  for step in (4, 2**31, 2**62, -1):
    unit.refuses(lambda step=step: unit.result(held, step=step), r"results\.step must be in 0\.\.3")
  unit.result(held)
  assert newest(unit) == 3


def test_results_that_do_not_fit_are_refused(make_unit):
  unit = batch_unit(make_unit)
  unit.executing(1)
  block = unit.work(seconds=5)
  n, k = 1, 3
  good = {
    "policy": np.ones((n, k, 3), np.float32), "search_value": np.ones((n, k), np.float32),
    "value": np.ones((n, k), np.float32),
  }  # fmt: skip
  for arrays, match in (
    ({"value": good["value"]}, "policy"),
    (good | {"value": good["value"][:, :2]}, "value must be"),
    (good | {"value": good["value"] * np.nan}, "must be finite"),
    (good | {"policy": good["policy"] * np.inf}, "must be finite"),
    (good | {"value": np.full(good["value"].shape, 1e300)}, "must be finite float32"),
    (good | {"reward": good["value"]}, "results must be"),
  ):
    unit.refuses(lambda arrays=arrays: unit.result(block, arrays=arrays), match)
  unit.result(block, arrays=good)


def test_an_overdue_block_is_handed_out_again_and_its_late_result_is_dropped(make_unit, clock):
  unit = batch_unit(make_unit, "topology.block_timeout=60", refreshers=2)
  _, thread, done = unit.executing(1)
  held = unit.work(0, seconds=5)
  unit.result(unit.work(1, seconds=5), 1)  # of the task bootstrap
  clock.now += 59
  assert unit.work(1) is None
  clock.now += 2
  again = unit.work(1)
  assert same_states(again, held) and again.block != held.block
  before = unit.replay.store["policy"].copy()
  unit.result(held, 0)
  unit.result(again, 0)  # not by its holder
  np.testing.assert_array_equal(unit.replay.store["policy"], before)
  unit.result(again, 1)
  thread.join(10)
  assert done and newest(unit) == 3


def test_a_block_of_a_dead_refresher_is_handed_to_its_successor(make_unit):
  unit = batch_unit(make_unit)
  _, thread, done = unit.executing(2)
  held = unit.work(seconds=5)
  again = unit.work(0, 1, seconds=5)
  assert same_states(held, again)
  for call in (lambda: unit.result(held), unit.frames):
    unit.refuses(call, "refresher 0 has incarnation 1 now, this is 0")
  unit.result(unit.result(again, 0, 1, seconds=5), 0, 1)
  thread.join(10)
  assert done and newest(unit) == 3


def test_waits_and_presence_are_reported(make_unit):
  unit = batch_unit(make_unit)
  assert unit.work() is None and unit.work() is None  # one wait
  unit.now += 3
  unit.executing()
  assert unit.work(seconds=5) and unit.waits == [{names.wait("refresher"): 3}]
  assert unit.roster.summary()["present/refreshers"] == 1


# --- frames


def fetch(unit, copy, heads=None):
  """Copies all frames newer than `heads`; returns the heads from which to continue."""
  while len((chunk := unit.frames(heads)).lane):
    assert heads is None or (chunk.heads >= heads).all()
    copy[chunk.lane, chunk.cell], heads = chunk.frame, chunk.heads
  return heads


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_of_the_frames_follows_lanes_that_forget(make_unit, seed):
  """With lanes that advance unevenly and evict frames, and copies that start late."""
  rng = np.random.default_rng(seed)
  unit = make_unit("actor.lanes=3", "replay.capacity=30", actors=3)
  copy, heads = np.zeros_like(unit.replay.store.frame), None
  for actor in range(3):
    player = unit.player(actor, seed)
    for _ in range(int(rng.choice([1, 5, 40]))):
      slots, _ = unit.play(player, messages.Grant(99, False, 0, 0.0, False))
      unit.collector.take(slots, [], granted=0)
      if seed % 2 and rng.random() < 0.3:
        heads = fetch(unit, copy, heads)
  heads = fetch(unit, copy, heads)
  np.testing.assert_array_equal(copy, unit.replay.store.frame)
  np.testing.assert_array_equal(heads, unit.replay.heads)
  for wrong in (heads[:2], heads.astype(np.int32)):
    unit.refuses(lambda wrong=wrong: unit.frames(wrong), "heads must be")
