"""The hub: what becomes of grants and experience when callers die, repeat themselves or come too late; and the end."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hub_calls import QUICK, append, grant, hello, join, play, player, unchanged, work
from small_unit import Blueprint, Direct, Seer, Unit, assert_same

from speedyzero_jax.cluster import messages, remote_actor
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run.topology import Role
from speedyzero_jax.workers.weights import ACTOR, REANALYSER, REFRESHER

NONE = np.zeros(0)


# --- actors


def test_a_new_incarnation_begins_behind_what_its_forerunner_handed_over():
  unit = Unit("actor.lanes=5", actors=2)
  assert [list(lanes) for lanes in unit.lanes] == [[0, 1], [2, 3, 4]]
  welcome = join(unit, 1)
  assert welcome.first == 2 and welcome.heads.tolist() == [0, 0, 0]
  segments, _ = play(unit, player(unit, 1), grant(unit, actor=1))
  acknowledged = append(unit, segments, actor=1)
  assert acknowledged.heads.tolist() == [1, 1, 1] and unit.replay.heads.tolist() == [0, 0, 1, 1, 1]
  unit.cuts.clear()
  assert (
    join(unit, 1).heads.tolist() == [1, 1, 1] and not unit.cuts
  )  # the same one: its answer was lost
  assert join(unit, 1, 4).heads.tolist() == [1, 1, 1] and unit.cuts == [[2, 3, 4]]
  segments, _ = play(unit, player(unit, 1), grant(unit, actor=1, incarnation=4))
  assert append(unit, segments, actor=1, incarnation=4).heads.tolist() == [2, 2, 2]
  assert all(segment.first[0] for segment in segments)


def test_an_older_incarnation_is_refused_whatever_it_asks():
  unit = Unit("actor.lanes=2", kinds=["refresh"])
  join(unit, 0, 0)
  segments, _ = play(unit, player(unit), grant(unit))
  join(unit, 0, 1)
  for call in (lambda: join(unit, 0, 0), lambda: grant(unit, 1), lambda: append(unit, segments)):
    unchanged(unit, call, "actor 0 has incarnation 1 now, this is 0")
  hello = lambda i: unit.hub.join_reanalyser(messages.ReanalyserJoin(0, i))  # noqa: E731
  hello(1)
  for call in (
    lambda: hello(0),
    lambda: unit.hub.work(messages.WorkRequest(0, 0), QUICK),
    lambda: unit.hub.frames(messages.FramesRequest(0, 0, 0), QUICK),
  ):
    unchanged(unit, call, "reanalyser 0 has incarnation 1 now, this is 0")


def test_numbers_that_nobody_has_are_refused_and_not_waited_for_in_the_end():
  unit = Unit(actors=2, reanalysers=2)
  for call in (
    lambda: join(unit, 2),
    lambda: grant(unit, actor=2),
    lambda: append(unit, [], actor=2),
    lambda: unit.hub.join_reanalyser(messages.ReanalyserJoin(2, 0)),
    lambda: unit.hub.work(messages.WorkRequest(2, 0), QUICK),
    lambda: unit.hub.result(messages.Result(2, 0, 1, 0, NONE, NONE, NONE)),
    lambda: unit.hub.frames(messages.FramesRequest(2, 0, 0), QUICK),
  ):
    unchanged(unit, call, "there are 2 .*, this is number 2")
  begin = time.monotonic()
  unit.hub.finish(10)
  assert time.monotonic() - begin < 5


def test_experience_that_is_not_an_actors_own_or_not_granted_is_refused_and_can_be_put_right():
  unit = Unit("actor.lanes=4", actors=2)
  join(unit, 0), join(unit, 1)
  unchanged(
    unit,
    lambda: append(unit, play(unit, player(unit), messages.Grant(2, False, 0, 0, False))[0]),
    "granted",
  )
  granted = grant(unit)
  good, _ = play(unit, player(unit), granted)
  theirs, _ = play(unit, player(unit, 1), granted)
  policy = good[0].policy * np.nan
  for segments, match in (
    ([good[0], theirs[0]], "lane 2 is not actor 0's"),
    ([good[0], good[1]._replace(start=5)], "start must be the lane's head 0, got 5"),
    ([good[0]._replace(policy=policy), good[1]], "policy must be finite"),
    ([good[0], good[1]._replace(first=~good[1].first)], "first must hold"),
    ([good[0], good[0]], "one segment per lane"),
  ):
    unchanged(unit, lambda segments=segments: append(unit, segments), match)
  unchanged(unit, lambda: append(unit, good, sequence=1), "was not granted")
  append(unit, good)
  assert unit.pacer.env_steps == 2


def test_steps_of_weights_that_there_are_none_of_are_refused():
  unit = Unit("actor.lanes=2")
  join(unit)
  segments, _ = play(unit, player(unit), grant(unit))
  later = [segment._replace(step=segment.step + 1) for segment in segments]
  unchanged(unit, lambda: append(unit, later), "weights that there are none of")
  append(unit, segments)


@pytest.mark.parametrize(
  "episodes",
  [
    [Episode(float("nan"), 3)],
    [Episode(float("inf"), 3)],
    [Episode(1.0, -1)],
    [Episode(1.0, 3)] * 3,
  ],
)
def test_games_that_can_not_have_ended_are_refused(episodes):
  unit = Unit("actor.lanes=4", actors=2)
  join(unit)
  segments, _ = play(unit, player(unit), grant(unit))
  unchanged(
    unit,
    lambda: append(unit, segments, episodes=episodes),
    "at most one game for each lane, finite and not",
  )
  assert not unit.episodes
  append(unit, segments, episodes=[Episode(-1.5, 3), Episode(1.0, 0)])  # as many as lanes
  assert len(unit.episodes) == 2


def test_more_steps_than_were_granted_are_refused():
  unit = Unit("actor.lanes=3")
  join(unit)
  granted = grant(unit, steps=2)
  assert granted.steps == 2
  segments, count = play(unit, player(unit), granted._replace(steps=3))
  assert count == 3
  unchanged(unit, lambda: append(unit, segments), "took 3 steps of 2 granted")


def test_an_append_that_is_sent_again_is_acknowledged_and_counts_once():
  unit = Unit("actor.lanes=2")
  join(unit)
  who, ended = player(unit), [Episode(1.0, 3)]
  segments, count = play(unit, who, grant(unit))
  first = append(unit, segments, episodes=ended)
  again = append(unit, segments, episodes=ended)
  assert first.heads.tolist() == again.heads.tolist() == [1, 1]
  more, more_count = play(unit, who, grant(unit, 1))
  append(unit, more, 1)
  assert append(unit, segments, episodes=ended).heads.tolist() == [2, 2]  # very late
  assert (
    unit.pacer.env_steps == unit.replay.num_transitions == count + more_count
    and len(unit.taken) == 2
  )
  assert unit.episodes == ended


def test_a_grant_asked_for_again_is_the_same_and_one_that_was_used_is_refused():
  unit = Unit("actor.lanes=2")
  join(unit)
  pool = unit.pacer.pool
  granted = grant(unit)
  assert grant(unit) == granted and unit.pacer.pool == pool - granted.steps
  segments, _ = play(unit, player(unit), granted)
  append(unit, segments)
  unchanged(unit, lambda: grant(unit), "grant 0 of actor 0 was used already")
  assert grant(unit, 1).steps == 2


def test_what_an_actor_did_not_use_goes_back():
  unit = Unit("actor.lanes=4", actors=2, reanalysers=0)
  join(unit, 0), join(unit, 1)
  pool = unit.pacer.pool
  assert grant(unit, 0).steps == 2 and unit.pacer.pool == pool - 2
  assert (
    grant(unit, 1, steps=1).steps == 1
  )  # a grant that was never used, when the next one is asked for
  assert unit.pacer.pool == pool - 1
  join(unit, 0, 1)  # it died
  assert unit.pacer.pool == pool
  who, sequence, resets = player(unit, 1), 0, 0
  while resets < 3:  # lanes that only reset
    granted = grant(unit, sequence, actor=1)
    segments, count = play(unit, who, granted)
    append(unit, segments, sequence, actor=1)
    resets += 2 - count
    sequence += 1
    assert unit.pacer.pool == pool - unit.pacer.env_steps
    unit.pacer.add_learner_step()


def test_grants_wait_for_the_learner_and_a_dead_actor_holds_nobody_up():
  unit = Unit("actor.lanes=4", "actor.random_steps=10", actors=2)
  unit.fill(3)
  assert unit.replay.num_eligible
  join(unit, 0), join(unit, 1)
  assert grant(unit).steps == 2  # and then it dies
  sequence, who = 0, player(unit, 1)
  join(unit, 1, 1)
  who = player(unit, 1)
  while granted := grant(unit, sequence, actor=1, incarnation=1):
    append(unit, play(unit, who, granted)[0], sequence, actor=1, incarnation=1)
    sequence += 1
  assert unit.pacer.may_learn() and unit.pacer.env_steps < 60
  waited = []
  thread = threading.Thread(
    target=lambda: waited.append(grant(unit, sequence, actor=1, incarnation=1, seconds=20))
  )
  thread.start()
  time.sleep(0.05)
  assert not waited
  for _ in range(3):
    unit.pacer.add_learner_step()
  thread.join(10)
  assert waited[0].steps == 2 and not waited[0].weights and not waited[0].closing


def test_who_acts_holds_the_learner_up_when_asked_until_his_steps_are_there_or_lost():
  unit = Unit(
    "actor.lanes=4",
    "actor.random_steps=10",
    "actor.weights_interval=2",
    "actor.max_lag=5",
    actors=2,
  )
  unit.fill(3)
  join(unit, 0), join(unit, 1)

  def learn():
    steps = 0
    while not unit.pacer.lagging:
      unit.pacer.add_learner_step()
      unit.publish(unit.pacer.learner_steps)
      steps += 1
    return steps

  unit.pacer.add_learner_step()
  first, second = grant(unit), grant(unit, actor=1)
  assert (first.weights, second.weights) == (0, 0) and learn() == 3
  assert append(unit, play(unit, player(unit), first)[0]) and unit.pacer.lagging
  join(unit, 1, 1)  # the other one has died
  assert not unit.pacer.lagging
  assert grant(unit, actor=1, incarnation=1, seconds=1).weights == 4 and learn() == 3


def test_a_grant_names_the_newest_weights_that_the_learner_waits_by(monkeypatch):
  """Those that came before it began to wait may be an interval older than it thinks."""
  unit = Unit("actor.weights_interval=2", "actor.max_lag=3")
  join(unit)
  begin = unit.pacer.begin_acting
  monkeypatch.setattr(unit.pacer, "begin_acting", lambda who: (begin(who), unit.publish(8)))
  assert grant(unit).weights == 8


def test_who_is_there_how_long_they_wait_and_how_often_they_come_back_is_told():
  unit = Unit("actor.random_steps=10", kinds=["refresh"])
  unit.fill(3)
  join(unit), hello(unit)
  assert unit.presence.summary() == {
    names.PRESENT_ACTORS: 1, names.PRESENT_REANALYSERS: 1, names.RESTARTS_ACTORS: 0, names.RESTARTS_REANALYSERS: 0,
  }  # fmt: skip
  who, sequence = player(unit), 0
  while granted := grant(unit, sequence):
    assert grant(unit, sequence) == granted  # it asks again, which is no other wait
    append(unit, play(unit, who, granted)[0], sequence)
    sequence += 1
  assert len(unit.told) == sequence > 2 and all(names.ACTOR_WAIT in told for told in unit.told)
  time.sleep(0.1)
  unit.pacer.add_learner_step()
  unit.pacer.add_learner_step()
  assert grant(unit, sequence, seconds=10)
  assert (
    unit.told[-1][names.ACTOR_WAIT] >= 0.1
    and max(told[names.ACTOR_WAIT] for told in unit.told[:-1]) < 0.1
  )
  assert work(unit) is not None
  assert unit.told[-1][names.REANALYSER_WAIT] < 0.1
  (
    join(unit, incarnation=1),
    join(unit, incarnation=1),
  )  # the second because the first answer was lost
  hello(unit, incarnation=3)
  summary = unit.presence.summary()
  assert (summary[names.RESTARTS_ACTORS], summary[names.RESTARTS_REANALYSERS]) == (1, 1)


def test_a_unit_that_fails_sends_its_actors_home():
  unit = Unit()
  join(unit)
  granted = grant(unit)
  segments, _ = play(unit, player(unit), granted)

  def take(*_, granted):
    raise JournalError("the disk is full")

  unit.take = take
  with pytest.raises(RunOver, match="the unit has failed: the disk is full"):
    append(unit, segments)


def test_the_last_steps_close_every_lane():
  unit = Unit("actor.lanes=3", "run.env_steps=7", "actor.random_steps=0")
  join(unit)
  who, sequence = player(unit, seed=3), 0
  while not unit.pacer.collected:
    granted = grant(unit, sequence)
    assert granted.steps == min(3, 7 - unit.pacer.env_steps)
    assert granted.closing == (unit.pacer.env_steps + granted.steps == 7)
    append(unit, play(unit, who, granted)[0], sequence)
    sequence += 1
  last = grant(unit, sequence)
  assert (last.steps, last.closing) == (0, True)
  assert unit.replay.num_transitions == 7
  state = unit.replay.state_dict()
  assert all(state["slot_action"][np.cumsum(unit.replay.heads) - 1] == -1)


def test_who_has_closed_is_granted_nothing_more_but_hears_when_all_is_collected():
  unit = Unit("actor.lanes=4", "run.env_steps=4", "actor.random_steps=0", actors=2)
  join(unit, 0), join(unit, 1)
  other = grant(unit, actor=1)
  mine = grant(unit)
  assert (mine.steps, mine.closing, other.closing) == (2, True, False)
  append(unit, play(unit, player(unit), mine)[0])
  join(unit, 1, 1)  # the other died, so that two steps are left
  assert unit.pacer.pool == 2 and grant(unit, 1) is None
  theirs = grant(unit, actor=1, incarnation=1)
  append(unit, play(unit, player(unit, 1), theirs)[0], actor=1, incarnation=1)
  assert (grant(unit, 1).steps, unit.pacer.env_steps, unit.pacer.pool) == (0, 4, 0)


def test_who_has_closed_and_begins_anew_may_take_what_is_left():
  unit = Unit("actor.lanes=4", "run.env_steps=4", "actor.random_steps=0", actors=2)
  join(unit, 0), join(unit, 1)
  grant(unit, actor=1)
  append(unit, play(unit, player(unit), grant(unit))[0])
  assert grant(unit, 1) is None
  join(unit, 0, 1), join(unit, 1, 1)
  granted = grant(unit, incarnation=1)
  assert (granted.steps, granted.closing) == (2, True)
  append(unit, play(unit, player(unit), granted)[0], incarnation=1)
  assert unit.pacer.collected and grant(unit, actor=1, incarnation=1).steps == 0


def test_who_comes_when_all_is_collected_is_sent_home_before_it_begins():
  """Whatever it would hand over takes the place of something."""
  unit = Unit("actor.lanes=3", "run.env_steps=3", "actor.random_steps=0", actors=1, reanalysers=0)
  join(unit)
  append(unit, play(unit, player(unit), grant(unit))[0])
  heads = unit.replay.heads
  unit.cuts.clear()
  with pytest.raises(RunOver, match="everything is collected"):
    join(unit, incarnation=1)
  assert unit.cuts == [[0, 1, 2]]  # its forerunner may have left games open
  begin = time.monotonic()
  unit.hub.finish(10)
  assert time.monotonic() - begin < 5
  np.testing.assert_array_equal(unit.replay.heads, heads)


def test_a_grant_of_less_than_a_step_closes_whatever_comes_back_meanwhile(monkeypatch):
  """Or the lanes beyond it would be cut, and then go on."""
  unit = Unit("actor.lanes=4", "run.env_steps=5", "actor.random_steps=0")
  join(unit)
  reserve = unit.pacer.reserve

  def with_a_race(steps, seconds, urgent):
    count = reserve(steps, seconds, urgent)
    if count == 1:
      unit.pacer._total_env += 2  # as if another actor gave two steps back
    return count

  monkeypatch.setattr(unit.pacer, "reserve", with_a_race)
  append(unit, play(unit, player(unit), grant(unit))[0])
  granted = grant(unit, 1)
  assert granted.steps == 1 and granted.closing


class Killed(Exception):
  """What happens to an actor's process."""


class Unlucky(Direct):
  """A client that dies now and then, before or after the hub hears it, and asks again for lost answers."""

  def __init__(self, hub, seed, danger):
    super().__init__(hub)
    self._rng, self._danger, self.dead, self.acknowledged = (
      np.random.default_rng(seed),
      danger,
      False,
      0,
    )

  def _fate(self):
    if self.dead or self._rng.random() < self._danger:
      self.dead = True
      raise Killed

  def __getattr__(self, name):
    ask = super().__getattr__(name)

    def unlucky(request):
      if name == "weights":
        if self.dead:
          raise Killed
        return ask(request)
      self._fate()
      answer = ask(request)
      if self._rng.random() < 0.2 and name in ("grant", "append", "join_actor"):
        answer = ask(request)
      self._fate()
      if name == "append":
        self.acknowledged += sum(int((s.action >= 0).sum()) for s in request.segments)
      time.sleep(self._rng.random() * 0.002)
      return answer

    return unlucky


@pytest.fixture
def fake_games(monkeypatch):
  monkeypatch.setattr(
    remote_actor, "make_env", lambda _, lanes, seed, training: tiny.FakeEnv(lanes, seed)
  )
  monkeypatch.setattr(remote_actor, "Inference", lambda *_, **__: Seer())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("danger", [0.0, 0.02, 0.1])
def test_exactly_what_was_asked_for_is_collected_whoever_dies_and_whenever(
  fake_games, seed, danger
):
  rng = np.random.default_rng(seed)
  lanes, actors, total = (
    int(rng.integers(3, 7)),
    int(rng.integers(1, 4)),
    int(rng.integers(40, 120)),
  )
  unit = Unit(
    f"actor.lanes={lanes}",
    f"run.env_steps={total}",
    "actor.random_steps=20",
    actors=actors,
    reanalysers=0,
  )
  clients, errors = [], []

  def live(number):
    incarnation, returned = 0, False
    while not returned:
      client = Unlucky(unit.hub, [seed, number, incarnation], danger)
      clients.append(client)
      try:
        remote_actor.act(unit.config, Blueprint, client, Role("actor", 0, number), incarnation)
        returned = True
      except Killed:
        incarnation += 1
      except Exception as error:
        errors.append(error)
        unit.pacer.stop()
        raise
      finally:
        client.dead = True

  threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(actors)]
  learner = unit.learn()
  for thread in threads:
    thread.start()
  unit.pacer.wait_for(lambda: unit.pacer.collected, 60)
  assert not errors and unit.pacer.collected
  learner.join(10)
  early = bool(seed % 2)  # while some still close their lanes
  for thread in threads if not early else ():
    thread.join(10)
  begin = time.monotonic()
  unit.hub.finish(10)
  assert time.monotonic() - begin < 5
  for thread in threads:
    thread.join(10)
    assert not thread.is_alive()
  assert not errors
  assert unit.pacer.env_steps == unit.replay.num_transitions == total
  assert unit.pacer.pool == 0 and unit.pacer.finished  # no promise is left
  assert (len(clients) > actors) == (danger > 0) or danger == 0.02
  assert sum(client.acknowledged for client in clients) <= total
  if not danger and not early:
    assert sum(client.acknowledged for client in clients) == total
  if not early:  # all lanes are closed
    assert all(unit.replay.state_dict()["slot_action"][np.cumsum(unit.replay.heads) - 1] == -1)
  again = unit.twin()
  unit.append_to(again)
  for lane in range(lanes):  # the only thing that a journal does not say
    again.truncate(lane), unit.replay.truncate(lane)
  assert_same(unit.replay, again)


# --- weights


def ask_weights(unit, subscriber=ACTOR, have=-1):
  return unit.hub.weights(messages.WeightsRequest(0, subscriber, have), QUICK)


def test_each_version_is_sent_once_and_the_latest_wins():
  unit = Unit()
  assert ask_weights(unit).step == 0 and ask_weights(unit, have=0) is None
  for step in (2, 4, 5):
    unit.publish(step)
  sent = ask_weights(unit, have=0)
  assert sent.step == 4 and ask_weights(unit, have=4) is None
  assert {name: (a.dtype.name, a.tolist()) for name, a in sent.arrays.items()} == {
    name: (leaf.dtype.name, leaf.tolist())
    for name, leaf in messages.named(Blueprint.init(number=4)).items()
  }
  assert (
    ask_weights(unit, REANALYSER, have=-1).step == 0
    and ask_weights(unit, REFRESHER, have=2).step == 4
  )
  with pytest.raises(ValueError, match="nobody subscribes as 'evaluator'"):
    ask_weights(unit, "evaluator")
  waited = []
  thread = threading.Thread(
    target=lambda: waited.append(unit.hub.weights(messages.WeightsRequest(0, ACTOR, 4), 20.0).step)
  )
  thread.start()
  unit.publish(6)
  thread.join(10)
  assert waited == [6]


def test_half_weights_are_rounded_floats_and_whole_counters():
  unit = Unit(half=True)
  unit.weights.publish(2, Blueprint.init(number=1 / 3))
  arrays = ask_weights(unit, have=0).arrays
  assert {a.dtype.name for name, a in arrays.items() if "w" in name} == {"bfloat16"}
  assert {a.dtype.name for name, a in arrays.items() if "w" not in name} == {"int32"}
  np.testing.assert_array_equal(
    arrays[next(n for n in arrays if "w" in n)], np.full((2, 3), jnp.bfloat16(1 / 3))
  )


# --- the end


def test_everybody_is_sent_home_and_waited_for():
  unit = Unit("actor.lanes=2", actors=2, reanalysers=1)
  unit.fill(4)
  join(unit, 0), join(unit, 1), hello(unit)
  granted = grant(unit)
  ended = threading.Thread(target=unit.hub.finish, args=(30,), daemon=True)
  ended.start()
  time.sleep(0.05)
  # What somebody may need to finish what it is doing is still to be had, and does not say that it has gone.
  fetch_all = messages.FramesRequest(0, 0, 0)
  assert len(unit.hub.frames(fetch_all, QUICK).lane) == 8
  assert ask_weights(unit).step == 0
  for call in (
    lambda: unit.hub.frames(fetch_all._replace(sequence=unit.replay.frames_written), QUICK),
    lambda: ask_weights(unit, have=0),
  ):
    with pytest.raises(RunOver):
      call()
  for call in (
    lambda: append(unit, play(unit, player(unit), granted)[0]),
    lambda: grant(unit, actor=1),
    lambda: work(unit),
  ):
    assert ended.is_alive()
    with pytest.raises(RunOver):
      call()
  ended.join(10)
  assert not ended.is_alive() and not unit.pacer.env_steps - 8 > 0
  for call in (lambda: join(unit, 0, 1), lambda: hello(unit, 0, 1)):
    with pytest.raises(RunOver):
      call()


def test_those_who_do_not_come_are_not_waited_for_forever():
  unit = Unit()
  join(unit)
  begin = time.monotonic()
  unit.hub.finish(0.1)
  assert 0.1 <= time.monotonic() - begin < 5


def test_a_waiting_reanalyser_hears_the_end_at_once():
  unit = Unit()
  hello(unit)
  heard = []

  def wait():
    try:
      work(unit, seconds=20)
    except RunOver:
      heard.append(time.monotonic())

  thread = threading.Thread(target=wait)
  thread.start()
  time.sleep(0.05)
  begin = time.monotonic()
  unit.hub.finish(10)
  thread.join(10)
  assert heard[0] - begin < 5
