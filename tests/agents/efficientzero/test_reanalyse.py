"""Tests of reanalysis and Priority Refresh: states recomputed, values written, schedule."""

from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

import reference
import tiny
import tiny_replay
from speedyzero_jax.agents.base import Work
from speedyzero_jax.agents.efficientzero import targets
from speedyzero_jax.agents.efficientzero.reanalyse import REANALYSER
from speedyzero_jax.agents.refresh import REFRESHER
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.sweeper import Sweeper, make_sweepers, run_task, write_results
from speedyzero_jax.workers.weights import ACTOR, WeightsStore
from tiny_replay import (
  AGE_INTERVAL,
  ALPHA,
  DISCOUNT,
  LANES,
  MIN_PRIORITY,
  TD,
  UNROLL,
  make_agent,
  make_replay,
  play,
  slots,
  write,
)

SEEDS = st.integers(0, 2**32 - 1)
FIXED = "loss.age_interval=0"  # n does not shrink


# --- which states


def states_of(work):
  """(lane, time) of all real states of a piece of work."""
  time = (work.time[:, None] + np.arange(work.real.shape[1]))[work.real]
  lane = np.broadcast_to(work.lane[:, None], work.real.shape)[work.real]
  return set(zip(lane.tolist(), time.tolist(), strict=True))


@settings(max_examples=20)
@given(seed=SEEDS, ratio=st.sampled_from([1.0, 0.5, 0.0]))
def test_batch_work_is_exactly_the_states_that_the_targets_are_made_from(seed, ratio):
  agent = make_agent(f"reanalyse.ratio={ratio}")
  replay, stream = make_replay(25), reference.Stream(LANES, seed)
  for step in range(10):
    play(replay, stream, np.random.default_rng([seed, step]), step)
  if not replay.ready(1):
    return
  drawn = replay.select(16)
  searched, ends = set(), set()
  for i, (l, t) in enumerate(zip(drawn.lane.tolist(), drawn.time.tolist(), strict=True)):
    episode, place = stream.find(l, t)
    age = stream.transitions - episode.slots[place].inserted
    n = reference.horizon(age, TD, AGE_INTERVAL)
    last = episode.slots[-1].time
    if i < round(16 * ratio):
      searched |= {(l, u) for u in range(t, min(t + UNROLL, last) + 1)}
    ends |= {(l, min(u, last)) for u in range(t + n, t + n + UNROLL + 1)}
  works = {work.task: states_of(work) for work in agent.batch_work(replay, drawn)}
  assert works == ({"reanalyse": searched} if ratio else {}) | {"bootstrap": ends}
  assert not make_agent("reanalyse.schedule=sweep").batch_work(replay, drawn)
  agent = make_agent(f"reanalyse.ratio={ratio}", "reanalyse.value_target=search")
  works.pop("bootstrap")  # no target uses it
  assert {work.task: states_of(work) for work in agent.batch_work(replay, drawn)} == works
  assert agent.tasks.keys() >= works.keys() and "bootstrap" not in agent.tasks


def test_batch_work_is_of_stored_states_if_samples_are_evicted_meanwhile():
  agent = make_agent()
  replay, stream = make_replay(12), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 12))
  drawn = Selection(np.zeros(2, int), np.array([1, 4]), np.ones(2))
  replay.append(stream.play(0, 3))
  searched, _ = agent.batch_work(replay, drawn)
  assert states_of(searched) == {(0, time) for time in range(3, 4 + UNROLL + 1)}


def test_which_sweeps_a_configuration_needs():
  def sweeps(*overrides):
    agent = make_agent("reanalyse.schedule=sweep", *overrides)
    return [name for name, task in agent.tasks.items() if task.max_age]

  assert sweeps() == ["reanalyse", "refresh"]  # the reanalysis is slower than the bound
  assert sweeps("reanalyse.max_age=6") == ["reanalyse"]  # one does for both
  assert sweeps("refresh.enabled=false") == ["reanalyse"]
  assert sweeps("reanalyse.schedule=batch") == ["refresh"]
  assert sweeps("reanalyse.schedule=off") == ["refresh"]
  assert sweeps("reanalyse.schedule=off", "refresh.enabled=false") == []


# --- what is written


class Played:
  """A replay of games played by a `ChecksumAgent`, and a runner of its tasks, each with its
  weights."""

  def __init__(self, *overrides):
    agent, inference = tiny.checksum_parts(*overrides)
    self.agent, sweeps = agent, {n: task.phases for n, task in agent.tasks.items() if task.max_age}
    sizes = {"lanes": 3, "capacity": 60, "frame_stack": 2, "rng_seed": 0}
    self.replay = Replay(agent.schema, agent.make_selector, **sizes, sweeps=sweeps)
    names = {ACTOR: 1, REFRESHER: 2, REANALYSER: 3}
    self.weights = WeightsStore(names, SingleDeviceSharding(jax.devices()[0]), agent.init())
    config, key = tiny.config(*overrides), jax.random.key(0)
    self._player = Actor(config, agent, tiny.FakeEnv(3), inference, key)
    self.play(70)  # the first slots are evicted
    for step in (2, 3):
      self.weights.publish(step, agent.init(number=100 * step))
    self._inference = inference
    self.slots = [(l, t) for l in range(3) for t in range(self.replay.tails[l], 70)]
    self.before = self.column_state()

  def play(self, steps):
    for _ in range(steps):
      version = self.weights.latest(ACTOR)
      played, _ = self._player.step(version, budget=999, progress=0.0, random=False)
      self.replay.append(played)

  def run(self, work, seed=0):
    task, key = self.agent.tasks[work.task], jax.random.key(seed)
    return run_task(task, self._inference, self.replay, self.weights, work, key)

  def column_state(self):
    return {k: x.copy() for k, x in self.replay.store.fields.items()}

  def said(self, lane, time):
    """Outputs of the agent with weights 0 for a state, computed from its frames alone."""
    stack = self.replay.windows(np.array([lane]), np.array([time]))
    return tuple(part[0] for part in tiny.of_stacks(stack))

  def check(self, task, written, number):
    """Asserts that slots of `written` hold outputs of this agent and that no others changed."""
    columns = {
      "policy": "policy_step",
      "search_value": "policy_step",
      "bootstrap": "bootstrap_step",
    }
    after = self.column_state()
    for lane, time in self.slots:
      at = lane, time % 60
      policy, search_value, value = self.said(lane, time)
      if (lane, time) in written:
        expected = {"bootstrap": value + number}
        if task == "reanalyse":
          expected |= {"policy": policy, "search_value": search_value + number}
      else:
        expected = {name: self.before[name][at] for name in columns}
      for name, x in expected.items():
        np.testing.assert_allclose(after[name][at], x, rtol=1e-6)
        stamp = number // 100 if (lane, time) in written else self.before[columns[name]][at]
        assert after[columns[name]][at] == stamp
    self.before = after


def test_batch_reanalysis_writes_exactly_the_states_of_the_batch():
  played = Played("reanalyse.schedule=batch", "refresh.enabled=false")
  drawn = played.replay.select(6)
  works = played.agent.batch_work(played.replay, drawn)
  assert [work.task for work in works] == ["reanalyse", "bootstrap"]
  for work in works:
    count = played.run(work, 1)
    assert count == work.real.sum()
    played.check(work.task, states_of(work), 300)


def test_results_of_samples_that_are_evicted_meanwhile_are_of_the_states_they_are_written_to():
  """Windows of evicted states begin with the oldest stored one."""
  played = Played("reanalyse.schedule=batch", "refresh.enabled=false")
  replay, lane = played.replay, np.repeat(np.arange(3), 3)
  time = replay.tails[lane] + np.tile([0, 1, 20], 3)
  works = played.agent.batch_work(replay, Selection(lane, time, np.ones(9)))
  played.play(2)
  for work in works:
    played.run(work)
  store, written = replay.store, 0
  for l, t in played.slots:
    if t >= replay.tails[l]:
      _, search_value, value = played.said(l, t)
      for stamp, name, x in (
        ("policy_step", "search_value", search_value),
        ("bootstrap_step", "bootstrap", value),
      ):
        if store[stamp][l, t % 60] == 3:
          assert store[name][l, t % 60] == pytest.approx(x + 300)
          written += 1
  assert written > 6


@pytest.mark.parametrize("name", ["refresh", "reanalyse"])
def test_a_sweep_recomputes_the_whole_replay_with_its_own_weights(name):
  played = Played()
  sweepers = {sweeper.name: sweeper for sweeper in make_sweepers(played.agent, 2)}
  sweeper, step = sweepers[name], {"refresh": 2, "reanalyse": 3}[name]
  for _ in range(12 // 2 + 1):  # 3 lanes of 4 chunks, 2 in a block of 32
    played.run(sweeper.next(played.replay), 1)
  store = played.replay.store
  assert (store["value_step"] == step).all()
  for lane, time in played.slots:
    value = played.said(lane, time)[2]
    for column in ("value", "bootstrap"):
      assert store[column][lane, time % 60] == pytest.approx(value + 100 * step)
  if name == "reanalyse":
    played.check(name, set(played.slots), 300)
  assert played.replay.oldest_step(sweeper.task.stamp) == step
  stats = played.replay.stats(9)
  assert stats["priority_age_max"] == stats["priority_age_mean"] == 9 - step


def test_a_sweep_without_refresh_leaves_values_and_priorities_alone():
  played = Played("refresh.enabled=false")
  (sweeper,) = make_sweepers(played.agent, 2)
  before = played.replay.state_dict()
  for _ in range(12 // 2):
    played.run(sweeper.next(played.replay))
  after = played.replay.state_dict()
  assert (after["slot_policy_step"] == 3).all()
  for name in ("slot_value", "slot_value_step", "priority", "priority_step"):
    np.testing.assert_array_equal(after[name], before[name], err_msg=name)


# --- priorities


def refreshed(stream, lane, time, target):
  """|v - z| of a transition, and the learner step of the oldest value used, by brute force."""
  episode, place = stream.find(lane, time)
  slot, end = episode.slots[place], min(place + TD, len(episode.slots) - 1)
  if target == "search":
    return abs(slot.value - slot.search_value), slot.value_step
  error = abs(slot.value - reference.n_step(episode, place, TD, DISCOUNT, field="value"))
  terminal = episode.ending == "terminated" and end == len(episode.slots) - 1
  return error, slot.value_step if terminal else min(slot.value_step, episode.slots[end].value_step)


@given(capacity=st.integers(7, 30), seed=SEEDS, target=st.sampled_from(["n_step", "search"]))
def test_refreshed_priorities_equal_brute_force(capacity, seed, target):
  """After any values change, priorities computed from them match the stored values."""
  rng = np.random.default_rng(seed)
  overrides = (FIXED, f"reanalyse.value_target={target}", "reanalyse.schedule=sweep")
  replay, stream = make_replay(capacity, *overrides), reference.Stream(LANES, seed)
  for step in range(8):
    play(replay, stream, rng, step)
  lane, time = slots(stream, capacity)
  for episodes in stream.episodes:
    for slot in (slot for episode in episodes for slot in episode.slots):
      slot.value_step = slot.policy_step
  task = "reanalyse" if target == "search" else "refresh"
  for step in range(8, 15):
    start, n = int(rng.integers(len(lane))), int(rng.integers(1, 6))
    block = slice(0, None) if step == 8 else slice(start, start + n)
    results = dict(
      zip(("value", "search_value"), rng.normal(size=(2, len(lane[block]))), strict=True)
    )
    policy = np.full((len(lane[block]), reference.NUM_ACTIONS), 1 / reference.NUM_ACTIONS)
    write(replay, task, lane[block], time[block], step, *overrides, policy=policy, **results)
    for i, key in enumerate(zip(lane[block], time[block], strict=True)):
      slot = stream.slot(*key)
      slot.value, slot.value_step = float(np.float32(results["value"][i])), step
      slot.search_value = float(np.float32(results["search_value"][i]))
  state = replay.state_dict()
  held = tiny_replay.eligible(stream, capacity)
  np.testing.assert_array_equal(state["priority"] > 0, held)
  for i in np.flatnonzero(held):
    error, step = refreshed(stream, lane[i], time[i], target)
    assert state["priority"][i] == pytest.approx((error + MIN_PRIORITY) ** ALPHA, rel=1e-4)
    assert state["priority_step"][i] == step


@pytest.mark.parametrize("schedule", ["batch", "off"])
@pytest.mark.parametrize("target", ["n_step", "search"])
def test_a_refresh_without_a_sweep_that_searches(schedule, target):
  """It uses no search older than its values; without reanalysis, it uses training targets."""
  overrides = (f"reanalyse.schedule={schedule}", f"reanalyse.value_target={target}", FIXED)
  replay, stream = make_replay(60, *overrides), reference.Stream(LANES, 3)
  for l in range(LANES):
    replay.append(stream.play(l, 50, step=0))
  lane, time = slots(stream, 60)
  values = np.random.default_rng(0).normal(size=len(lane)).astype(np.float32)
  write(replay, "refresh", lane, time, 30, *overrides, value=values)
  held = tiny_replay.eligible(stream, 60)
  expected = []
  for l, t, value in zip(lane, time, values, strict=True):
    stream.slot(l, t).value, stream.slot(l, t).value_step = float(value), 30
  for l, t in np.array(stream.live(60))[held]:
    episode, place = stream.find(l, t)
    slot = episode.slots[place]
    if schedule == "off" and target == "search":
      expected.append(abs(slot.value - slot.search_value))
    elif schedule == "off":  # ends in what was stored when it was collected
      expected.append(abs(slot.value - reference.n_step(episode, place, TD, DISCOUNT)))
    else:
      expected.append(refreshed(stream, l, t, "n_step")[0])
  state = replay.state_dict()
  priority = (np.array(expected) + MIN_PRIORITY) ** ALPHA
  np.testing.assert_allclose(state["priority"][held], priority, rtol=1e-4)
  assert held.sum() > 50 and (state["priority_step"][held] == 30).all()


@pytest.mark.parametrize("schedule", ["batch", "off"])
def test_without_reanalysis_a_priority_is_as_old_as_the_value_of_its_state(schedule):
  """With it, as the older one of this value and the value from which the return bootstraps."""
  overrides = (f"reanalyse.schedule={schedule}", FIXED)
  replay, stream = make_replay(20, *overrides), reference.Stream(LANES, 0, end_probability=0.0)
  replay.append(stream.play(0, 12, step=3))
  write(replay, "refresh", np.array([0]), np.array([4]), 8, *overrides, value=np.ones(1))
  step = replay.state_dict()["priority_step"]
  assert step[[3, 4, 5]].tolist() == [3, 8 if schedule == "off" else 3, 3]


# --- the schedule of sweeps


@pytest.mark.parametrize(("actor_interval", "delay"), [(2, 3), (4, 4)])
def test_credit_is_earned_by_learner_steps_and_survives_a_restart(actor_interval, delay):
  played = Played()
  sweeper, other = make_sweepers(played.agent, actor_interval)  # of weights every 3 and 2 steps
  replay, blocks = played.replay, 0
  quota = replay.quota(sweeper.name, 32, sweeper.max_age, delay)
  for step in range(1, 5):
    while sweeper.due(replay, step):
      played.run(sweeper.next(replay))
      blocks += 1
  assert sweeper.credited == 4 and blocks == 4 * quota // 32
  late = make_sweepers(played.agent, actor_interval)[0]
  whole = quota * (sweeper.max_age - delay - 1) + 32  # the credit of a pass
  assert late.due(replay, 4) and late.credit == min(4 * quota, max(whole, 3 * quota + 32))
  owed = [sweeper.credit + steps * quota > 32 + 2 * quota for steps in range(6)]
  assert [sweeper.behind(replay, 4 + steps) for steps in range(6)] == owed
  assert owed == sorted(owed) and {*owed} == {False, True}
  counters = sweeper.state_dict()
  other.load_state_dict(counters)
  assert other.state_dict() == counters


def test_a_bound_on_age_shorter_than_a_pass_is_refused():
  agent = Played().agent
  task = agent.tasks["refresh"]
  shortest = task._replace(max_age=5 + 2)
  assert Sweeper("own", shortest, 5, 3).calls_per_step(100) > 0
  with pytest.raises(ValueError, match="own: max_age must be at least 7, got 6"):
    Sweeper("own", task._replace(max_age=6), 5, 3)


def test_what_is_overdue_is_due_without_credit():
  played = Played()
  sweeper = next(s for s in make_sweepers(played.agent, 2) if s.name == "refresh")
  replay, blocks = played.replay, 0
  assert not sweeper.overdue(replay, 5) and sweeper.overdue(replay, 6)  # stamps 0, bound 6
  sweeper.load_state_dict({"calls": 0, "credit": 0, "credited": 6})
  while sweeper.due(replay, 6):
    played.run(sweeper.next(replay))
    blocks += 1
  assert blocks == 12 // 2 and sweeper.credit == 0
  assert replay.oldest_step("value_step") == 2


def test_a_sweep_searches_with_the_edges_known_before_each_block():
  """`ChecksumAgent` adds them to its search values."""
  overrides = ("reanalyse.reuse=true",)
  played = Played(*overrides)
  sweeper = next(s for s in make_sweepers(played.agent, 2) if s.name == "reanalyse")
  store, known = played.replay.store, 0
  for _ in range(12 // 2 + 2):  # 3 lanes of 4 chunks: 8 of them in 4 phases, and again the first
    work = sweeper.next(played.replay)
    lane, time = work.lane, work.time
    edges = targets.known_edges(store, lane, time, 0, tiny.config(*overrides))
    played.run(work)
    for l, t, action, qvalue in zip(lane, time, *edges, strict=True):
      value = (played.said(l, t)[1] + 300 + action[0] + qvalue[0]) % 1000
      np.testing.assert_allclose(store["search_value"][l, t % 60], value, rtol=1e-4)
      known += action[0] >= 0
  assert known > 160  # of 256; 88 if a chunk were searched in one block


def test_tasks_read_and_write_while_nothing_is_appended():
  replay, task, free = make_replay(30), make_agent().tasks["refresh"], []
  play(replay, reference.Stream(LANES, 0), np.random.default_rng(0), 0)
  lane, time = replay.next_block("refresh", 16)
  work = Work("refresh", lane, time, np.ones((16, 1), bool))

  def locked(*_):
    """Notes whether another thread, such as an actor's, could take the lock."""
    with ThreadPoolExecutor(1) as pool:
      free.append(pool.submit(replay.lock.acquire, blocking=False).result())
    return {}

  results = {column.name: np.zeros((16, 1, *column.shape), column.dtype) for column in task.results}
  write_results(replay, task._replace(write=locked), work, results, 3)
  task._replace(read=locked).inputs(replay, lane, time, 0)
  assert free == [False, False]
