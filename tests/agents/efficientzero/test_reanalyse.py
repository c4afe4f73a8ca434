"""Batch reanalysis, whole-buffer sweeps and the feed, on a real replay with a real network."""

import dataclasses
from time import sleep

import jax
import numpy as np
import pytest
import tiny

from speedyzero_jax.agents.efficientzero.reanalyse import REANALYSER, REFRESHER
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run import batch_pipeline, loops
from speedyzero_jax.run.builders import game_of, make_replay, sweeps
from speedyzero_jax.run.topology import unit_config
from speedyzero_jax.workers.local_actor import Collecting
from speedyzero_jax.workers.weights import ACTOR

UNROLL, TD, STACK = 2, 3, 2


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)


@pytest.fixture
def started(tmp_path):
  """Opens a `Training` of the tiny configuration with these changes, 100 agent steps collected, nothing learned.

  Subscribers have versions of their own, of networks of their own: the actor step 0, the refresher 2, the reanalyser 3.
  """
  opened = []

  def start(*overrides):
    manager = tiny.training(tiny.config(*overrides), tmp_path / "run")
    opened.append(manager)
    training = manager.__enter__()
    while training.pacer.env_steps < 100:
      training.collect()
    assert training.replay.stats(0)["target_age_max"] == 0
    fresh = lambda seed: training.learner.init(jax.random.key(seed)).variables  # noqa: E731
    training.weights.publish(2, perturbed(fresh(2)))
    training.weights.publish(3, perturbed(fresh(3)))
    versions = {name: training.weights.latest(name).step for name in (ACTOR, REFRESHER, REANALYSER)}
    assert versions == {ACTOR: 2, REFRESHER: 2, REANALYSER: 3}
    return training

  yield start
  for manager in opened:
    manager.__exit__(None, None, None)


def perturbed(variables):
  """The same with every parameter moved: the last layers of a fresh network are zero, so all its values are equal."""
  leaves, form = jax.tree.flatten(variables.params)
  keys = jax.random.split(jax.random.key(len(leaves)), len(leaves))
  moved = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
  return variables._replace(params=jax.tree.unflatten(form, moved))


class Slots:
  """What a replay stores, by (lane, time), from its saved state and frames."""

  def __init__(self, replay):
    state = replay.state_dict()
    frames = replay.export_slots(np.zeros_like(replay.heads))["frame"]
    assert not state["tail"].any()
    self.index = [(lane, t) for lane, head in enumerate(state["head"]) for t in range(head)]
    per_slot = {
      name: array for name, array in state.items() if len(self.index) == (array.shape or (0,))[0]
    }
    self.rows = {
      at: {"frame": frames[i]}
      | {name.removeprefix("slot_"): array[i] for name, array in per_slot.items()}
      for i, at in enumerate(self.index)
    }

  def last(self, lane, time):
    """The last stored slot of this one's episode."""
    while self.rows[lane, time]["action"] >= 0 and (lane, time + 1) in self.rows:
      time += 1
    return time

  def stack(self, lane, time):
    """Frames [S, ...] that end at this slot."""
    frames = []
    for _ in range(STACK):
      frames.insert(0, self.rows[lane, time]["frame"])
      time -= not self.rows[lane, time]["first"]
    return np.stack(frames)

  def column(self, name):
    return {at: row[name] for at, row in self.rows.items()}


def states_of(slots, lane, time):
  """The stored states of a sample's unroll, and those that end its n-step returns."""
  last = slots.last(lane, time)
  searched = {(lane, t) for t in range(time, min(time + UNROLL, last) + 1)}
  return searched, {(lane, min(t, last)) for t in range(time + TD, time + UNROLL + TD + 1)}


def values_by(training, variables, slots, states):
  """The network's values of these states."""
  states, values = sorted(states), []
  for begin in range(0, len(states), 32):  # the shape that a sweep compiles too
    stacks = np.stack([slots.stack(*at) for at in states[begin : begin + 32]])
    padded = np.resize(stacks, (32, *stacks.shape[1:]))
    values += np.asarray(training.inference.value(variables, padded))[: len(stacks), 0].tolist()
  return dict(zip(states, values, strict=True))


def assert_close(stored, expected):
  assert len(set(expected.values())) > len(expected) / 3  # the network tells states apart
  for at, value in expected.items():
    assert stored[at] == pytest.approx(value, rel=1e-4, abs=1e-4), at


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.0])
def test_batch_reanalysis_writes_exactly_the_states_of_the_batch(started, ratio):
  training = started(
    "reanalyse.schedule=batch", f"reanalyse.ratio={ratio}", "refresh.enabled=false"
  )
  replay = training.replay
  batch = 16 if ratio == 0.5 else 8
  lane, time, _ = replay.sample(batch)
  before = Slots(replay)
  training.reanalyse(replay, lane, time)
  after = Slots(replay)
  searched, bootstrapped = set(), set()
  for i in range(batch):
    states, ends = states_of(before, int(lane[i]), int(time[i]))
    searched |= states if i < round(batch * ratio) else set()
    bootstrapped |= ends
  step, variables = training.weights.latest(REANALYSER)
  assert {at for at, stamp in after.column("policy_step").items() if stamp} == searched
  assert {
    at for at, stamp in after.column("bootstrap_step").items() if stamp
  } == searched | bootstrapped
  for at in before.index:
    old, new = before.rows[at], after.rows[at]
    assert new["policy_step"] == (step if at in searched else 0)
    changed = {name for name in old if not np.array_equal(old[name], new[name])}
    allowed = {"policy", "policy_step", "search_value"} if at in searched else set()
    allowed |= {"bootstrap", "bootstrap_step"} if at in searched | bootstrapped else set()
    assert changed <= allowed, at
  np.testing.assert_allclose([after.rows[at]["policy"].sum() for at in searched], 1, rtol=1e-5)
  assert_close(
    after.column("bootstrap"), values_by(training, variables, before, searched | bootstrapped)
  )
  assert training.batch_reanalyser.calls == 1


@pytest.mark.parametrize("explore", [True, False])
def test_the_noise_of_reanalysis_is_a_choice(started, monkeypatch, explore):
  training = started("reanalyse.schedule=sweep", f"reanalyse.explore={explore}")
  search, asked = training.inference.search, []

  def spy(*args, explore):
    asked.append(explore)
    return search(*args, explore=True)  # compiled already

  monkeypatch.setattr(training.inference, "search", spy)
  lane, time, _ = training.replay.sample(8)
  training.batch_reanalyser(training.replay, lane, time)
  next(sweeper for sweeper in training.sweepers if sweeper.kind == "reanalyse").sweep(
    training.replay
  )
  assert asked == [explore, explore]


def test_older_weights_do_not_overwrite_newer_results(started):
  training = started("reanalyse.schedule=batch", "refresh.enabled=false")
  lane, time, _ = training.replay.sample(8)
  training.reanalyse(training.replay, lane, time)
  before = training.replay.state_dict()
  old = training.weights.snapshot() | {REANALYSER: training.weights.latest(REFRESHER)}
  training.weights.restore(old)
  training.reanalyse(training.replay, lane, time)
  after = training.replay.state_dict()
  for name in ("slot_policy", "slot_search_value", "slot_bootstrap", "slot_policy_step"):
    np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("kind", ["refresh", "reanalyse"])
def test_a_sweep_recomputes_the_whole_buffer_with_its_own_weights(started, kind):
  training = started()
  (sweeper,) = (s for s in training.sweepers if s.kind == kind)
  replay = training.replay
  passes = -(-len(replay._sweeps[kind]) // (32 // 16))
  for _ in range(passes):
    sweeper.sweep(replay)
  slots = Slots(replay)
  step, variables = training.weights.latest(REFRESHER if kind == "refresh" else REANALYSER)
  assert set(slots.column("value_step").values()) == {step}
  assert set(slots.column("policy_step").values()) == {step if kind == "reanalyse" else 0}
  expected = values_by(training, variables, slots, slots.index)
  assert_close(slots.column("value"), expected)
  if kind == "reanalyse":
    assert_close(slots.column("bootstrap"), expected)
  assert replay.oldest_step(kind) == step
  # All priorities are |v - z| by those values, with z walked along the episode.
  config, checked = training.config, 0
  for lane, time in slots.index:
    row = slots.rows[lane, time]
    if not row["priority"]:
      continue
    z, scale, last = 0.0, 1.0, slots.last(lane, time)
    for t in range(time, min(time + TD, last)):
      z, scale = z + scale * slots.rows[lane, t]["reward"], scale * config.env.discount
    end = slots.rows[lane, min(time + TD, last)]
    z += 0.0 if end["terminated"] else scale * end["value"]
    expected_priority = (
      abs(row["value"] - z) + config.agent.priority.min_priority
    ) ** config.agent.priority.alpha
    assert row["priority"] == pytest.approx(expected_priority, rel=1e-3)
    assert row["priority_step"] == step
    checked += 1
  assert checked == replay.num_eligible > 50


def test_credit_is_earned_by_learner_steps_and_survives_a_restart(started):
  training = started()
  sweeper, other = training.sweepers
  blocks = 0
  for step in range(1, 5):
    while sweeper.due(training.replay, step):
      sweeper.sweep(training.replay)
      blocks += 1
      assert blocks < 100
  assert (
    sweeper.credited == 4
    and blocks >= 4 * len(training.replay._sweeps["refresh"]) // 2 // sweeper.max_age
  )
  counters = sweeper.counters()
  assert sweeper.due(training.replay, 9)
  other.restore(counters)
  assert other.counters() == counters


def test_what_is_overdue_is_due_without_credit(started):
  training = started()
  (sweeper,) = (s for s in training.sweepers if s.kind == "refresh")
  replay = training.replay
  assert not sweeper.overdue(replay, 5) and sweeper.overdue(
    replay, 6
  )  # stamps are 0, the bound is 6
  sweeper.restore({"calls": 0, "credit": 0, "credited": 6})
  assert sweeper.due(replay, 6)
  blocks = 0
  while sweeper.due(replay, 6):
    sweeper.sweep(replay)
    blocks += 1
  assert blocks == -(-len(replay._sweeps["refresh"]) // 2) and sweeper.credit == 0
  assert replay.oldest_step("refresh") == 2


def test_which_passes_a_configuration_needs():
  needs = lambda *overrides: sweeps(tiny.config(*overrides))  # noqa: E731
  assert needs() == [
    "reanalyse",
    "refresh",
  ]  # the reanalysis is slower than the bound on priorities
  assert needs("reanalyse.max_age=6") == ["reanalyse"]  # one does for both
  assert needs("refresh.max_age=8") == ["reanalyse"]
  assert needs("refresh.enabled=false") == ["reanalyse"]
  assert needs("reanalyse.schedule=batch") == ["refresh"]
  assert needs("reanalyse.schedule=off") == ["refresh"]
  assert needs("reanalyse.schedule=off", "refresh.enabled=false") == []


@pytest.mark.parametrize(
  "override", ["refresh.max_age=3", "reanalyse.max_age=4", "refresh.block=15"]
)
def test_bounds_that_no_sweep_can_keep_are_refused(override):
  with pytest.raises(ConfigError, match=override.split("=")[0]):
    tiny.config(override)


BOUNDS = {
  "two sweeps": [],
  "one sweep for both": ["reanalyse.max_age=6", "refresh.max_age=7"],
  "refresh beside batches": ["reanalyse.schedule=batch"],
  "refresh alone, small blocks": [
    "reanalyse.schedule=off",
    "refresh.block=16",
    "refresh.max_age=5",
  ],
  "tight": ["reanalyse.max_age=5", "refresh.max_age=4"],
}


@pytest.mark.parametrize(
  ("mode", "bounds"),
  [*(("lockstep", name) for name in BOUNDS), ("async", "two sweeps"), ("async", "tight")],
)
def test_nothing_stored_is_older_than_the_bound(tmp_path, mode, bounds):
  """At every learner step, while the buffer grows and after: the hard bound of Priority Refresh."""
  config = tiny.config(*BOUNDS[bounds], f"run.mode={mode}", "learner.steps=24", "learner.tail_steps=8",
                       "run.log_interval=1", "run.checkpoint_interval=1000")  # fmt: skip
  ages = []
  with tiny.training(config, tmp_path) as training:
    learn, sweep = training.learn, training.sweep

    def slow(sweeper):
      sleep(0.01 if mode == "async" else 0)  # slower than the learner, who must wait
      sweep(sweeper)

    def checked(fed):
      step = training.pacer.learner_steps
      stats = training.replay.stats(step)
      ages.append(
        (
          stats["priority_age_max"],
          stats["target_age_max"],
          step - training.replay.oldest_step("refresh"),
        )
      )
      return learn(fed)

    training.learn, training.sweep = checked, slow
    assert loops.run(training)
  priority, target, value = np.array(ages).T
  assert len(ages) == 24
  assert (
    priority.max() <= config.agent.refresh.max_age and value.max() <= config.agent.refresh.max_age
  )
  assert priority.max() > 0
  rows, _ = jsonl.read_rows(tmp_path / "metrics.jsonl")
  assert max(row["replay/priority_age_max"] for row in rows) <= config.agent.refresh.max_age
  if config.agent.reanalyse.schedule == "sweep":
    assert target.max() <= config.agent.reanalyse.max_age
    ahead = (
      config.learner.prefetch + 1 if mode == "async" else 0
    )  # batches drawn early get older until they are used
    assert (
      max(row["replay/target_age_max"] for row in rows) <= config.agent.reanalyse.max_age + ahead
    )


def test_the_learner_runs_no_further_ahead_of_a_sweep_than_it_may(tmp_path):
  """It waits for what is owed as it goes, not for all of it when the bound on ages is reached."""
  config = tiny.config("run.mode=async", "refresh.enabled=false", "reanalyse.max_age=1000", "actor.random_steps=100",
                       "learner.steps=24")  # fmt: skip
  owed = []
  with tiny.training(config, tmp_path) as training:
    (sweeper,), learn, sweep = training.sweepers, training.learn, training.sweep
    training.replay.quota = lambda *_: config.agent.reanalyse.block  # one each learner step

    def slow(sweeper):
      sleep(0.01)
      sweep(sweeper)

    def checked(fed):
      owed.append(training.pacer.learner_steps - sweeper.calls)
      return learn(fed)

    training.learn, training.sweep = checked, slow
    assert loops.run(training)
  assert max(owed) <= 1 + 2 + 1  # a block, two steps, and one that is being searched


def test_without_refresh_priorities_age(tmp_path):
  config = tiny.config("reanalyse.schedule=off", "refresh.enabled=false", "run.log_interval=1")
  with tiny.training(config, tmp_path) as training:
    assert training.reanalyse is None and training.sweepers == []
    assert loops.run(training)
    assert (
      training.replay.stats(12)["priority_age_max"] == 12
    )  # some of the random play was never drawn
    assert training.replay.stats(12)["target_age_max"] == 12
  rows, _ = jsonl.read_rows(tmp_path / "metrics.jsonl")
  ages = [row["replay/priority_age_max"] for row in rows]
  assert ages == sorted(ages) and ages[-1] == 12


@pytest.mark.parametrize("schedule", ["sweep", "off"])
def test_a_drawn_batch_has_exact_weights_and_ages(started, schedule):
  training = started(
    f"reanalyse.schedule={schedule}", "priority.beta_start=0.4", "priority.beta_end=0.9"
  )
  replay, config = training.replay, training.config
  for sweeper in training.sweepers:
    sweeper.sweep(replay)  # some stamps and priorities differ
  slots = Slots(replay)
  priority = np.array([slots.rows[at]["priority"] for at in slots.index])
  for step in (0, 5, 12):
    fed = batch_pipeline.draw(config, replay, None, step)
    at = list(zip(fed.lane.tolist(), fed.time.tolist(), strict=True))
    probability = np.array([slots.rows[place]["priority"] for place in at]) / priority.sum()
    beta = 0.4 + 0.5 * step / 12
    np.testing.assert_allclose(fed.batch.weight, probability**-beta, rtol=1e-5)
    assert fed.batch.weight.dtype == np.float32 and len(set(fed.batch.weight.tolist())) > 1
    ages = [
      step - slots.rows[lane, t]["policy_step"]
      for lane, time in at
      for t in range(time, time + UNROLL + 1)
      if t <= slots.last(lane, time) and slots.rows[lane, t]["action"] >= 0
    ]
    assert (fed.age, fed.age_max) == (pytest.approx(np.mean(ages)), max(0, *ages))
    for i, (lane, time) in enumerate(at):
      np.testing.assert_array_equal(fed.batch.frames[i, :STACK], slots.stack(lane, time))
      end = min(time + UNROLL, slots.last(lane, time))
      np.testing.assert_array_equal(fed.batch.frames[i, -1], slots.rows[lane, end]["frame"])


def test_a_batch_drawn_is_reanalysed_first(started):
  """Its policy targets are of the reanalyser's weights, not of those that played."""
  training = started("reanalyse.schedule=batch", "refresh.enabled=false")
  fed = training.draw(7)
  assert (fed.age, fed.age_max) == (4, 4)  # version 3 at learner step 7


def test_units_that_draw_from_replays_of_their_own_weigh_as_one_would(started):
  """Each draws its share; a sample's probability in the whole is that in its shard, over the number of shards."""
  training = started("learner.batch_size=8", "reanalyse.schedule=off", "actor.lanes=4")
  config, units = training.config, 2
  shards = []
  for unit in range(units):
    own = unit_config(config, unit, units)
    replay = make_replay(own, game_of(config), training.learner.mesh, print, seed=unit)
    stats = EpisodeStats(own.actor.lanes)
    acting = Collecting(
      own, training.inference, replay, seed=unit, key=jax.random.key(unit), stats=stats
    )
    for _ in range(12 + 20 * unit):  # one unit has more to choose from
      replay.append_many(
        acting.actor.step(training.weights.latest(ACTOR), budget=999, progress=0.0, random=True)[0]
      )
    acting.close()
    lane, time, _ = replay.sample(64)
    replay.set_priorities(lane, time, np.random.default_rng(unit).random(64), 2)
    shards.append((own, replay))
  fed = [batch_pipeline.draw(own, replay, None, 6) for own, replay in shards]
  assert [len(part.lane) for part in fed] == [4, 4]
  whole = []
  for (_, replay), part in zip(shards, fed, strict=True):
    slots = Slots(replay)
    priority = {at: row["priority"] for at, row in slots.rows.items()}
    total = sum(priority.values())
    whole += [
      priority[at] / total / units
      for at in zip(part.lane.tolist(), part.time.tolist(), strict=True)
    ]
  beta = config.agent.priority.beta_start + 0.5 * (
    config.agent.priority.beta_end - config.agent.priority.beta_start
  )
  expected = np.array(whole) ** -beta
  weight = np.concatenate([part.batch.weight for part in fed])
  np.testing.assert_allclose(weight / weight.max(), expected / expected.max(), rtol=1e-5)
  assert len(set(weight.tolist())) > 3


def test_nothing_to_draw_is_an_error(tmp_path):
  with (
    tiny.training(dataclasses.replace(tiny.config()), tmp_path) as training,
    pytest.raises(ValueError, match="nothing to sample"),
  ):
    training.draw(0)
