"""Tests of grants and experience with actors that die, repeat calls, are late, or send bad data."""

import threading
import time

import numpy as np
import pytest

from small_unit import last_actions
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.actor_service import ActorService
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run.experiment import Membership
from speedyzero_jax.types import Slots


def test_a_new_incarnation_continues_after_what_was_acknowledged(make_unit):
  unit = make_unit("actor.lanes=5", actors=2)
  assert [list(lanes) for lanes in unit.lanes] == [[0, 1], [2, 3, 4]]
  welcome = unit.join(1)
  assert welcome.first == 2 and welcome.heads.tolist() == [0, 0, 0]
  slots, _ = unit.play(unit.player(1), unit.step(actor=1))
  unit.step(slots, 1, actor=1)
  assert unit.replay.heads.tolist() == unit.journal.heads.tolist() == [0, 0, 1, 1, 1]
  last = unit.replay.store.flat(np.arange(2, 5), np.zeros(3, int))
  unit.join(1)  # again: its answer was lost
  assert not unit.replay.store.truncated.reshape(-1)[last].any()
  assert unit.join(1, 4).heads.tolist() == [1, 1, 1]
  assert unit.replay.store.truncated.reshape(-1)[last].all()  # the games of the first are cut
  slots, _ = unit.play(unit.player(1), unit.step(actor=1, incarnation=4))
  assert slots["first"].all()
  unit.step(slots, 1, actor=1, incarnation=4)
  assert unit.replay.heads.tolist() == [0, 0, 2, 2, 2]


def test_no_two_actors_play_the_same_games(make_unit):
  unit, seeds = make_unit("actor.lanes=4", actors=2, refreshers=0), set()
  for number in range(2):
    unit.experiment.membership = Membership(number, 2)
    service = ActorService(unit.experiment, unit.roster)
    seeds |= {service.join(Helper("actor", a), messages.Join()).seed for a in range(2)}
  assert len(seeds) == 4


def test_experience_of_other_lanes_or_without_a_grant_is_refused(make_unit):
  unit = make_unit("actor.lanes=4", actors=2)
  unit.refuses(lambda: unit.step(), "has no session")
  unit.join(0), unit.join(1)
  without = unit.play(unit.player(), messages.Grant(2, False, 0, 0.0, False))[0]
  unit.refuses(lambda: unit.step(without), "no grant")
  granted = unit.step()
  good, _ = unit.play(unit.player(), granted)
  theirs, _ = unit.play(unit.player(1), granted)

  def changed(**columns):
    return Slots(good.lane, good.time, {**good.columns, **columns})

  second, columns = np.array([False, True]), good.columns
  few = {name: column for name, column in columns.items() if name != "policy"}
  for slots, match in (
    (Slots.concatenate([good.select([0]), theirs.select([0])]), r"actor 0 has lanes .*, got .*2\]"),
    (Slots(good.lane, good.time + 5 * second, columns), "continue from the lane's head"),
    (good.select([0, 0]), "continue from the lane's head"),
    (Slots(good.lane.astype(np.int32), good.time, columns), "lane must be int64"),
    (Slots(good.lane, good.time[:1], columns), r"time must be int64\[2\], got int64\[1\]"),
    (Slots(good.lane, good.time, few), "missing or unknown columns"),
    (Slots(good.lane, good.time, None), "malformed slots"),
    (changed(reward=[0.0, 0.0]), "malformed slots"),
    (changed(policy=good["policy"] * np.float32(np.nan)), "policy must be finite"),
    (changed(first=good["first"] ^ second), "first"),
    (changed(reward=good["reward"].astype(np.float64)), "reward must be float32"),
    (changed(frame=good["frame"][:, :1]), "frame must be uint8"),
    (changed(action=good["action"] + 3), "action must be in"),
    (changed(step=good["step"] + 1), "weights newer than the learner's"),
  ):
    unit.refuses(lambda slots=slots: unit.step(slots, 1), match)
  unit.refuses(lambda: unit.step(good, 2), "sent step 2 after step 0")
  unit.step(good, 1)
  assert unit.limiter.env_steps == 2


def test_impossible_episodes_are_refused(make_unit):
  unit = make_unit("actor.lanes=4", actors=2)
  unit.join()
  slots, _ = unit.play(unit.player(), unit.step())
  for score in (np.nan, np.inf):
    unit.refuses(lambda x=score: unit.step(slots, 1, episodes=[(x, 3)]), "episodes must be")
  unit.step(slots, 1, episodes=[Episode(-1.5, 3), Episode(1.0, 0)])  # as many as lanes
  assert unit.episodes == [Episode(-1.5, 3), Episode(1.0, 0)]


def test_more_steps_than_granted_are_refused(make_unit):
  unit = make_unit("actor.lanes=3", "run.env_steps=2", "actor.random_steps=0")
  unit.join()
  granted = unit.step()
  assert granted.steps == 2
  slots, count = unit.play(unit.player(), granted._replace(steps=3, closing=False))
  assert count == 3
  unit.refuses(lambda: unit.step(slots, 1), "took 3 steps of 2 granted")


def test_a_repeated_step_gets_the_same_grant_and_counts_once(make_unit):
  unit = make_unit("actor.lanes=2")
  unit.join()
  player, ended, pool = unit.player(), [Episode(1.0, 3)], unit.limiter.pool
  granted = unit.step()
  assert unit.step() == granted and unit.limiter.pool == pool - granted.steps
  slots, count = unit.play(player, granted)
  granted = unit.step(slots, 1, episodes=ended)
  assert unit.step(slots, 1, episodes=ended) == granted
  more, more_count = unit.play(player, granted)
  both = Slots.concatenate([slots, more])
  unit.refuses(lambda: unit.step(both, 2, episodes=ended), "steps of 2 granted")
  unit.step(more, 2)
  unit.refuses(lambda: unit.step(slots, 1, episodes=ended), "sent step 1 after step 2")
  assert unit.limiter.env_steps == unit.replay.num_transitions == count + more_count
  assert unit.journal.heads.tolist() == [2, 2] and unit.episodes == ended


def test_unused_steps_return_to_the_pool(make_unit):
  unit = make_unit("actor.lanes=4", actors=2, refreshers=0)
  unit.join(0), unit.join(1)
  pool = unit.limiter.pool
  for sequence in range(2):  # the first grant was never used
    assert unit.step(None, sequence).steps == 2 and unit.limiter.pool == pool - 2
  unit.join(0, 1)  # it died
  assert unit.limiter.pool == pool
  player, sequence, resets = unit.player(1), 0, 0
  granted = unit.step(actor=1)
  while resets < 3:  # lanes that only reset take no step
    slots, count = unit.play(player, granted)
    sequence += 1
    granted = unit.step(slots, sequence, actor=1)
    resets += 2 - count
    assert unit.limiter.pool == pool - unit.limiter.env_steps - granted.steps
    unit.learn()


def play_to_the_limit(unit, player, actor=0):
  """Plays while steps are granted; returns the last slots and their sequence number."""
  slots, sequence = None, 0
  while granted := unit.step(slots, sequence, actor):
    slots, _ = unit.play(player, granted)
    sequence += 1
  return slots, sequence


def test_grants_wait_for_the_learner_but_not_for_a_dead_actor(make_unit):
  unit = make_unit("actor.lanes=4", "actor.random_steps=10", actors=2)
  unit.fill(3)
  unit.join(0), unit.join(1)
  assert unit.step().steps == 2  # and then actor 0 dies
  last = play_to_the_limit(unit, unit.player(1), actor=1)
  assert unit.limiter.may_learn() and unit.limiter.env_steps < 60
  found, collected = [], unit.limiter.env_steps
  waiting = threading.Thread(
    target=lambda: found.append(unit.step(*last, actor=1, seconds=20)), daemon=True
  )
  waiting.start()
  waiting.join(0.05)
  assert not found
  unit.learn(3)
  waiting.join(10)
  assert found[0].steps == 2 and not found[0].weights and not found[0].closing
  assert unit.limiter.env_steps == collected  # what it had sent before counts once


def test_a_step_that_is_repeated_while_it_waits_is_granted_once(make_unit):
  unit = make_unit("actor.random_steps=10", refreshers=0)
  unit.fill(3)
  unit.join()
  last, found = play_to_the_limit(unit, unit.player()), []
  threads = [
    threading.Thread(target=lambda: found.append(unit.step(*last, seconds=20)), daemon=True)
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
    thread.join(0.05)
  pool = unit.limiter.pool
  unit.learn(3)
  for thread in threads:
    thread.join(10)
  assert len(found) == 2 and found[0] == found[1]
  assert unit.limiter.pool == pool - found[0].steps


def test_an_acting_actor_bounds_the_learner_until_its_steps_arrive_or_are_lost(make_unit):
  unit = make_unit(
    "actor.lanes=4", "actor.random_steps=10", "actor.weights_interval=2", "actor.max_lag=5",
    actors=2,
  )  # fmt: skip
  unit.fill(3)
  unit.join(0), unit.join(1)

  def learn():
    steps = 0
    while not unit.limiter.lag_exceeded:
      unit.learn()
      unit.publish(unit.limiter.learner_steps)
      steps += 1
    return steps

  unit.learn()
  first, second = unit.step(), unit.step(actor=1)
  assert (first.weights, second.weights) == (0, 0) and learn() == 3
  slots, _ = unit.play(unit.player(), first)
  assert unit.step(slots, 1).weights == 4 and unit.limiter.lag_exceeded
  unit.join(1, 1)  # the other has died
  assert not unit.limiter.lag_exceeded
  assert unit.step(actor=1, incarnation=1, seconds=1).weights == 4 and learn() == 3


def test_an_actor_that_hangs_does_not_block_a_learner_with_a_bound_on_lag(make_unit):
  lag = "actor.weights_interval=2", "actor.max_lag=5"
  unit = make_unit("actor.lanes=4", "actor.random_steps=10", *lag, actors=2)
  unit.fill(3)
  unit.join(0), unit.join(1)
  granted, _ = unit.step(), unit.step(actor=1)
  while not unit.limiter.lag_exceeded:
    unit.learn()
  slots, _ = unit.play(unit.player(), granted)
  unit.now = 601
  unit.step(slots, 1)
  assert not unit.limiter.lag_exceeded


def test_an_actor_that_hangs_loses_its_grant_and_must_join_again(make_unit):
  unit = make_unit("actor.lanes=4", "actor.random_steps=24", "run.env_steps=24", actors=2)
  unit.fill(6)
  unit.join(0), unit.join(1)
  player = unit.player()
  granted = unit.step(), unit.step(actor=1)
  assert [grant.steps for grant in granted] == [2, 2] and unit.limiter.pool == 0
  slots, _ = unit.play(player, granted[0])
  for now in (300, 599):
    unit.now = now
    assert unit.step(slots, 1) is None and unit.limiter.pool == 0
  unit.now = 601
  assert unit.step(slots, 1).steps == 2
  late, _ = unit.play(unit.player(1), granted[1])
  unit.refuses(lambda: unit.step(late, 1, actor=1), "has no session")
  assert unit.join(1, 1).heads.tolist() == [6, 6]


def test_the_steps_of_an_actor_that_hangs_before_the_last_grant_go_to_another(make_unit):
  unit = make_unit("actor.lanes=4", "actor.random_steps=24", "run.env_steps=24", actors=2)
  unit.fill(6)
  unit.join(0), unit.join(1)
  assert unit.step(actor=1).steps == 2  # and hangs
  unit.now = 601
  granted = unit.step()
  assert granted.steps == 2 and not granted.closing
  slots, _ = unit.play(unit.player(), granted)
  last = unit.step(slots, 1)
  assert last.steps == 2 and last.closing


@pytest.mark.parametrize("third", ["waits", "is silent"])
def test_an_actor_that_has_closed_its_episodes_takes_steps_only_if_no_other_can(make_unit, third):
  unit = make_unit("actor.lanes=6", "actor.random_steps=36", "run.env_steps=36", actors=3)
  unit.fill(6)
  for actor in range(3):
    unit.join(actor)
  assert unit.step(actor=1).steps == 2  # and hangs
  granted = unit.step(actor=2), unit.step()
  assert granted[1].closing and not granted[0].closing
  players = unit.player(2), unit.player(0)
  (waiting, _), (closed, _) = map(unit.play, players, granted)
  assert unit.step(closed, 1) is None and unit.step(waiting, 1, actor=2) is None
  if third == "waits":
    unit.now = 300
    assert unit.step(waiting, 1, actor=2) is None
  unit.now = 601
  if third == "waits":
    assert unit.step(closed, 1) is None and unit.limiter.pool == 2
    last = unit.step(waiting, 1, actor=2)
  else:
    with pytest.raises(ValueError, match="actor 0 must join again"):
      unit.step(closed, 1)
    unit.refuses(lambda: unit.step(closed, 1), "has no session")
    unit.join(0, 1)
    last = unit.step(incarnation=1)
  assert last.steps == 2 and last.closing


def test_a_grant_names_weights_published_until_the_lag_is_bounded(make_unit, monkeypatch):
  """Weights looked up before `begin_acting` could be an interval older than the bound assumes."""
  unit = make_unit("actor.weights_interval=2", "actor.max_lag=3")
  unit.join()
  begin = unit.limiter.begin_acting
  monkeypatch.setattr(unit.limiter, "begin_acting", lambda who: (begin(who), unit.publish(8)))
  assert unit.step().weights == 8


def test_waits_and_presence_are_reported(make_unit):
  unit = make_unit("actor.random_steps=10", refreshers=0)
  unit.fill(3)
  unit.join()
  assert unit.roster.summary() == {"present/actors": 1}
  last = play_to_the_limit(unit, unit.player())
  assert len(unit.waits) == last[1] > 2
  unit.step(*last), unit.step(*last)  # no answer yet: both are one wait
  unit.now += 7
  unit.learn(2)
  assert unit.step(*last, seconds=10)
  assert unit.waits[-1] == {names.wait("actor"): 7}


def test_actors_leave_a_unit_that_can_store_nothing(make_unit, monkeypatch):
  unit = make_unit()
  unit.join()
  slots, _ = unit.play(unit.player(), unit.step())

  def full(*_):
    raise JournalError("the disk is full")

  monkeypatch.setattr(unit.journal, "append", full)
  with pytest.raises(RunFinished, match="the disk is full"):
    unit.step(slots, 1)
  assert unit.limiter.stopping and isinstance(unit.limiter.failure, JournalError)


def test_the_last_steps_close_every_lane(make_unit):
  unit = make_unit("actor.lanes=3", "run.env_steps=7", "actor.random_steps=0")
  unit.join()
  player, sequence, granted = unit.player(seed=3), 0, unit.step()
  while not unit.limiter.collected:
    assert granted.steps == min(3, 7 - unit.limiter.env_steps)
    assert granted.closing == (unit.limiter.env_steps + granted.steps == 7)
    sequence += 1
    granted = unit.step(unit.play(player, granted)[0], sequence)
  assert (granted.steps, granted.closing) == (0, True) and unit.replay.num_transitions == 7
  assert (last_actions(unit) == -1).all()


@pytest.mark.parametrize("restarts", [False, True])
def test_an_actor_that_has_closed_takes_no_step_unless_it_restarts(make_unit, restarts):
  unit = make_unit("actor.lanes=4", "run.env_steps=4", "actor.random_steps=0", actors=2)
  unit.join(0), unit.join(1)
  other, mine = unit.step(actor=1), unit.step()
  assert (mine.steps, mine.closing, other.closing) == (2, True, False)
  last = unit.play(unit.player(), mine)[0]
  assert unit.step(last, 1) is None
  unit.join(1, 1)  # the other died, so that two steps are left
  assert unit.limiter.pool == 2 and unit.step(last, 1) is None
  actor = 0 if restarts else 1
  unit.join(actor, 1)
  granted = unit.step(actor=actor, incarnation=1)
  assert (granted.steps, granted.closing) == (2, True)
  slots, _ = unit.play(unit.player(actor), granted)
  assert unit.step(slots, 1, actor, incarnation=1).steps == 0
  assert unit.limiter.collected and unit.limiter.pool == 0
  waiting = (None, 0, 1, 1) if restarts else (last, 1)
  assert unit.step(*waiting).steps == 0


def test_an_actor_that_joins_when_all_is_collected_is_dismissed(make_unit):
  """Anything it appended would evict experience from the replay."""
  unit = make_unit("actor.lanes=3", "run.env_steps=3", "actor.random_steps=0", refreshers=0)
  unit.join()
  unit.step(unit.play(unit.player(), unit.step())[0], 1)
  heads = unit.replay.heads
  with pytest.raises(RunFinished, match="all agent steps are collected"):
    unit.join(incarnation=1)
  begin = time.monotonic()
  unit.service.finish(10)
  assert time.monotonic() - begin < 5
  np.testing.assert_array_equal(unit.replay.heads, heads)


def test_a_grant_smaller_than_wanted_closes_whatever_is_released_meanwhile(make_unit, monkeypatch):
  """Otherwise the lanes beyond it would be truncated and then continue."""
  unit = make_unit("actor.lanes=4", "run.env_steps=5", "actor.random_steps=0")
  unit.join()
  reserve = unit.limiter.reserve

  def with_a_race(steps, seconds, urgent):
    count = reserve(steps, seconds, urgent)
    if count == 1:
      unit.limiter.add_env_steps(0, reserved=2)  # as if another actor gave two steps back
    return count

  monkeypatch.setattr(unit.limiter, "reserve", with_a_race)
  granted = unit.step(unit.play(unit.player(), unit.step())[0], 1)
  assert granted.steps == 1 and granted.closing
