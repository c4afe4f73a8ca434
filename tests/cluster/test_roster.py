"""Tests of presence, incarnations and waiting times of a unit's processes, with a fake clock."""

import time

import pytest

from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import TIMEOUT, Roster

ACTOR, OTHER, REFRESHER = Helper("actor", 0), Helper("actor", 1), Helper("refresher", 0)


class Unit:
  """A unit of two actors and a refresher."""

  def __init__(self, **counts):
    self.now, self.waits = 100.0, []
    self.roster = Roster(
      counts or {"actor": 2, "refresher": 1}, self.waits.append, clock=lambda: self.now
    )

  def present(self):
    return [self.roster.summary()[f"present/{kind}s"] for kind in ("actor", "refresher")]


@pytest.fixture
def unit():
  return Unit()


def test_a_silent_process_is_not_present(unit):
  assert unit.present() == [0, 0]
  unit.roster.enter(ACTOR)
  unit.roster.enter(REFRESHER)
  assert unit.present() == [1, 1]
  unit.now += TIMEOUT / 2
  unit.roster.enter(OTHER)
  assert unit.present() == [2, 1]
  unit.now += TIMEOUT / 2 + 0.1
  assert unit.present() == [1, 0]


def test_every_start_ends_the_former(unit):
  for incarnation in (0, 1, 1, 4):
    unit.roster.enter(OTHER._replace(incarnation=incarnation))
  unit.roster.enter(ACTOR._replace(incarnation=3))
  with pytest.raises(ValueError, match="actor 1 has incarnation 4 now, this is 1"):
    unit.roster.enter(OTHER._replace(incarnation=1))


def test_the_end_of_a_former_process_does_not_dismiss_its_successor(unit):
  former = ACTOR._replace(incarnation=1)
  for helper in (former, ACTOR._replace(incarnation=2)):
    unit.roster.enter(helper)
  unit.roster.dismiss(former)
  begin = time.monotonic()
  unit.roster.wait_for_dismissal(0.05)
  assert time.monotonic() - begin >= 0.05


def test_a_wait_lasts_from_the_first_request_to_the_answer(unit):
  for _ in range(3):
    unit.roster.waits(OTHER)
    unit.now += 2
  unit.roster.waits(REFRESHER)
  unit.now += 1
  unit.roster.served(OTHER)
  unit.roster.served(REFRESHER)
  unit.roster.served(OTHER)  # had not waited
  assert unit.waits == [{"queue/actor_wait_seconds": 7}, {"queue/refresher_wait_seconds": 1}]


def test_a_new_process_does_not_inherit_a_wait(unit):
  unit.roster.waits(ACTOR)
  unit.now += 50
  unit.roster.enter(ACTOR)
  unit.roster.waits(ACTOR)
  unit.now += 1
  unit.roster.served(ACTOR)
  assert unit.waits == [{"queue/actor_wait_seconds": 1}]


def test_only_processes_of_the_unit_count():
  unit = Unit(actor=0, refresher=2)
  assert unit.roster.summary() == {"present/refreshers": 0}
  with pytest.raises(ValueError, match="there are 0 actors"):
    unit.roster.enter(ACTOR)
  with pytest.raises(ValueError, match="there are 2 refreshers"):
    unit.roster.enter(Helper("refresher", 2))
