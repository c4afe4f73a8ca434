"""Units that stop at different moments go on from one checkpoint, and none deletes what another may need."""

import threading

import numpy as np
import pytest
from snapshots import LANES, abstract, snapshot, write

from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.recovery import Keeper


def meeting(units):
  """For each unit a function that tells all a number, waits, and returns all of theirs."""
  barrier, said = threading.Barrier(units), [0] * units

  def of(unit):
    def agree(number):
      said[unit] = number
      barrier.wait(5)
      answer = list(said)
      barrier.wait(5)
      return answer

    return agree

  return [of(unit) for unit in range(units)]


class Listed:
  """Checkpoints of which nothing is known but their steps."""

  keep = 3

  def __init__(self, steps):
    self._steps = list(steps)

  def steps(self):
    return self._steps

  def restore(self, abstract, report, *, newest):
    return snapshot(4)._replace(
      step=max(step for step in self._steps if newest is None or step <= newest)
    ), iter(())

  def begin_anew(self):
    self._steps = []


@pytest.mark.parametrize(
  ("steps", "agreed"),
  [
    ([[20, 40], [20, 40]], 40), ([[20, 40], [20]], 20), ([[20], [20, 40], [20, 40, 60]], 20),
    ([[20, 60], [20, 40, 60], [20, 40]], 20), ([[0], [0, 20]], 0), ([[20], []], None), ([[], []], None),
    ([[], [0], [20, 40]], None), ([[7, 9]], 9), ([[]], None),
  ],
)  # fmt: skip
def test_units_go_on_from_the_newest_checkpoint_that_all_have(steps, agreed):
  """Or all begin anew, without those that some have."""
  checkpoints = [Listed(have) for have in steps]
  found, said = [0] * len(steps), [[] for _ in steps]

  def restore(unit, agree):
    keeper = Keeper(checkpoints[unit], None, agree, said[unit].append, units=len(steps))
    restored, _ = keeper.restore({})
    found[unit] = None if restored is None else restored.step

  threads = [threading.Thread(target=restore, args=of) for of in enumerate(meeting(len(steps)))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(10)
  assert found == [agreed] * len(steps)
  for unit, had in enumerate(steps):
    lost = bool(had) and agreed is None
    assert checkpoints[unit].steps() == ([] if lost else had)
    assert [line for line in said[unit] if "all begin anew" in line] == said[unit] and len(
      said[unit]
    ) == lost


def test_a_unit_that_has_nothing_as_old_says_so(tmp_path):
  write(tmp_path, 4, 8)
  keeper = Keeper(Checkpoints(tmp_path), None, lambda step: [step, 2], print, units=2)
  with pytest.raises(CheckpointError, match="there is no checkpoint of step 2 or before in"):
    keeper.restore(abstract())
  assert Checkpoints(tmp_path).steps() == [4, 8]  # nothing was changed


class Forgetful:
  """A journal of which is known only where it begins."""

  tail = 0

  def evict(self, tails):
    assert len(set(tails.tolist())) == 1 and len(tails) == LANES
    self.tail = int(tails[0])


@pytest.mark.parametrize(
  ("units", "keep", "theirs", "kept", "tail"),
  [  # the newest that the other unit has at each save but the last; what is there in the end
    (1, 2, [], [8, 10], 4),
    (2, 1, [-1, 2, 4, 6], [6, 8, 10], 6),  # at the save before, both had 6
    (2, 1, [-1, 2, 4, 4], [4, 6, 8, 10], 4),  # it fails from 6 on
    (2, 1, [-1, 2, 2, 6], [6, 8, 10], 6),  # of 4
    (2, 1, [-1, -1, -1, -1], [2, 4, 6, 8, 10], 0),  # it may come back without any
  ],
)  # fmt: skip
def test_what_another_unit_may_have_to_go_back_to_stays(tmp_path, units, keep, theirs, kept, tail):
  """The last save is of a unit that is stopped, and asks nobody."""
  others, journal = iter(theirs), Forgetful()

  def agree(step):
    return [step] if units == 1 else [step, next(others)]

  keeper = Keeper(Checkpoints(tmp_path, keep), journal, agree, pytest.fail, units=units)
  for step in (2, 4, 6, 8, 10):
    keeper.settle()
    keeper.save(snapshot(step, since=step - 2), required=step == 10)
  keeper.close()
  assert Checkpoints(tmp_path).steps() == kept and journal.tail == tail
  assert next(others, None) is None
  restored, _ = Checkpoints(tmp_path).restore(abstract(), pytest.fail, newest=kept[0])
  np.testing.assert_array_equal(
    restored.heads >= tail, True
  )  # it is followed by what the journal holds
