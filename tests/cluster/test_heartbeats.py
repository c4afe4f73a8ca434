"""Who is there, who has gone or come back, and how long somebody waited: by a clock that is handed in."""

import pytest

from speedyzero_jax.cluster.heartbeats import SILENCE, Presence
from speedyzero_jax.metrics import names


class Unit:
  """The presence of two actors and a reanalyser, time, and the waits that were told."""

  def __init__(self, **counts):
    self.now, self.told = 100.0, []
    counts = counts or {"actor": 2, "reanalyser": 1}
    self.presence = Presence(counts, self.told.append, clock=lambda: self.now)

  def there(self):
    summary = self.presence.summary()
    return summary[names.PRESENT_ACTORS], summary[names.PRESENT_REANALYSERS]

  def restarts(self):
    summary = self.presence.summary()
    return summary[names.RESTARTS_ACTORS], summary[names.RESTARTS_REANALYSERS]


def test_who_says_nothing_for_a_while_is_not_there():
  unit = Unit()
  assert unit.there() == (0, 0)
  unit.presence.heard("actor", 0)
  unit.presence.heard("reanalyser", 0)
  assert unit.there() == (1, 1)
  unit.now += SILENCE / 2
  unit.presence.heard("actor", 1)
  assert unit.there() == (2, 1)
  unit.now += SILENCE / 2 + 0.1
  assert unit.there() == (1, 0)
  unit.presence.heard("reanalyser", 0)
  assert unit.there() == (1, 1)


def test_who_comes_back_is_counted_and_who_comes_first_is_not():
  unit = Unit()
  for number in (0, 1):
    unit.presence.joined("actor", number)
  assert unit.restarts() == (0, 0)
  for _ in range(3):
    unit.presence.joined("actor", 1)
  unit.presence.joined("reanalyser", 0)
  unit.presence.joined("reanalyser", 0)
  assert unit.restarts() == (3, 1)


def test_a_wait_lasts_from_the_first_request_until_it_is_served():
  unit = Unit()
  for _ in range(3):
    unit.presence.asks("actor", 1)
    unit.now += 2
  unit.presence.asks("reanalyser", 0)
  unit.now += 1
  unit.presence.served("actor", 1)
  unit.presence.served("reanalyser", 0)
  unit.presence.served("actor", 1)  # nothing was asked for
  assert unit.told == [{names.ACTOR_WAIT: 7}, {names.REANALYSER_WAIT: 1}]


def test_a_new_process_has_not_waited_for_its_forerunner():
  unit = Unit()
  unit.presence.asks("actor", 0)
  unit.now += 50
  unit.presence.joined("actor", 0)
  unit.presence.asks("actor", 0)
  unit.now += 1
  unit.presence.served("actor", 0)
  assert unit.told == [{names.ACTOR_WAIT: 1}]


def test_a_unit_tells_only_of_what_it_has():
  unit = Unit(actor=0, reanalyser=2)
  assert unit.presence.summary() == {names.PRESENT_REANALYSERS: 0, names.RESTARTS_REANALYSERS: 0}
  with pytest.raises(ValueError, match="there are 0 actors, this is number 0"):
    unit.presence.heard("actor", 0)
  with pytest.raises(ValueError, match="there are 2 reanalysers, this is number 2"):
    unit.presence.heard("reanalyser", 2)
