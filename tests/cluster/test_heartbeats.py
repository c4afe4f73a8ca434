"""Presence, restarts and waiting times of a unit's processes, by a clock that the test moves."""

import pytest

from speedyzero_jax.cluster.heartbeats import TIMEOUT, Heartbeats


class Unit:
  """Two actors and a refresher."""

  def __init__(self, **counts):
    self.now, self.waits = 100.0, []
    self.beats = Heartbeats(
      counts or {"actor": 2, "refresher": 1}, self.waits.append, clock=lambda: self.now
    )

  def metrics(self, group):
    return [self.beats.summary()[f"{group}/{kind}s"] for kind in ("actor", "refresher")]


@pytest.fixture
def unit():
  return Unit()


def test_a_silent_process_is_not_present(unit):
  assert unit.metrics("present") == [0, 0] and not unit.beats.any_alive("actor")
  unit.beats.beat("actor", 0)
  unit.beats.beat("refresher", 0)
  assert unit.metrics("present") == [1, 1]
  unit.now += TIMEOUT / 2
  unit.beats.beat("actor", 1)
  assert unit.metrics("present") == [2, 1]
  unit.now += TIMEOUT / 2 + 0.1
  assert unit.metrics("present") == [1, 0]
  assert unit.beats.any_alive("actor") and not unit.beats.any_alive("refresher")


def test_every_start_but_the_first_is_a_restart(unit):
  for number in (0, 1, 1, 1):
    unit.beats.joined("actor", number)
  assert unit.metrics("restarts") == [2, 0]


def test_a_wait_lasts_from_the_first_request_to_the_answer(unit):
  for _ in range(3):
    unit.beats.waits("actor", 1)
    unit.now += 2
  unit.beats.waits("refresher", 0)
  unit.now += 1
  unit.beats.served("actor", 1)
  unit.beats.served("refresher", 0)
  unit.beats.served("actor", 1)  # had not waited
  assert unit.waits == [{"queue/actor_wait_seconds": 7}, {"queue/refresher_wait_seconds": 1}]


def test_a_new_process_does_not_inherit_a_wait(unit):
  unit.beats.waits("actor", 0)
  unit.now += 50
  unit.beats.joined("actor", 0)
  unit.beats.waits("actor", 0)
  unit.now += 1
  unit.beats.served("actor", 0)
  assert unit.waits == [{"queue/actor_wait_seconds": 1}]


def test_only_processes_of_the_unit_count():
  unit = Unit(actor=0, refresher=2)
  assert unit.beats.summary() == {"present/refreshers": 0, "restarts/refreshers": 0}
  with pytest.raises(ValueError, match="there are 0 actors"):
    unit.beats.beat("actor", 0)
  with pytest.raises(ValueError, match="there are 2 refreshers"):
    unit.beats.beat("refresher", 2)
