"""Tests of recovery from checkpoint and journal together, also after kill -9."""

import threading

import numpy as np
import pytest

from forked import killing
from same import assert_same
from snapshots import LANES, abstract, flip, snapshot
from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.recovery import RecoveryManager
from speedyzero_jax.types import Slots

SCHEMA = make_schema((1, 1, 2), "uint8", 3)
CAPACITY = 12  # of the imagined replay, slots per lane


def play(lane, start, stop):
  """Slots of one endless episode, each a function of its lane and time."""
  time = np.arange(start, stop)
  arrays = {c.name: np.zeros((len(time), *c.shape), c.dtype) for c in SCHEMA.columns}
  arrays["frame"][:, 0, 0] = np.stack([np.full_like(time, lane), time % 256], -1)
  return Slots.of_lane(
    lane, start, arrays | {"first": time == 0, "reward": time.astype(np.float32)}
  )


def times(items):
  """Maps lanes to the times of their slots; asserts that the contents are right."""
  found = {lane: [] for lane in range(LANES)}
  for slots in items:
    lane, start, stop = int(slots.lane[0]), int(slots.time[0]), int(slots.time[-1]) + 1
    assert_same(vars(slots), vars(play(lane, start, stop)))
    found[lane] += range(start, stop)
  return found


class Unit:
  """The recovery manager and journal of one process in a run folder."""

  def __init__(self, folder, *, durable=False, keep=2, **options):
    folder.mkdir(exist_ok=True)
    self.reported = []
    self.journal = Journal(folder / "journal.sqlite", LANES, SCHEMA)
    self.manager = RecoveryManager(
      Checkpoints(folder, keep),
      self.journal,
      self.reported.append,
      durable=durable,
      exact=not durable,
      **options,
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.manager.close()

  def collect(self, head):
    heads = self.journal.heads.tolist()
    self.manager.append(
      Slots.concatenate([play(lane, start, head) for lane, start in enumerate(heads)])
    )

  def save(self, step, *, required=False):
    head = int(self.journal.heads[0])
    one = snapshot(step, head=head, tail=max(0, head - CAPACITY))
    self.manager.save(one, required=required)
    return one

  def restore(self):
    return self.manager.restore(abstract())


def stored(unit, snapshot):
  """The experience that a checkpoint refers to."""
  return unit.journal.read(snapshot.tails, snapshot.heads)


def everything(tail, head):
  return {lane: list(range(tail, head)) for lane in range(LANES)}


@pytest.mark.parametrize("durable", [False, True])
def test_a_run_comes_back_with_its_experience(tmp_path, durable):
  """Exactly as of the checkpoint, with later experience if it is durable; else it is dropped."""
  with Unit(tmp_path, durable=durable) as unit:
    assert unit.restore() is None
    for step in (1, 2, 3):
      unit.collect(5 * step)
      saved = unit.save(step)
    unit.manager.wait()
    unit.collect(17)
    if not durable:
      unit.journal.flush()
  with Unit(tmp_path, durable=durable) as unit:
    restored = unit.restore()
    assert_same(restored, saved)
    assert times(stored(unit, restored)) == everything(3, 15)
    later = times(unit.journal.read(restored.heads))
    assert later == everything(15, 17 if durable else 15)
    assert unit.journal.heads.tolist() == [17 if durable else 15] * LANES
    assert not unit.reported


@pytest.mark.parametrize("durable", [False, True])
def test_without_a_checkpoint_only_durable_experience_is_kept(tmp_path, durable):
  with Unit(tmp_path, durable=durable) as unit:
    unit.collect(5)
    unit.journal.flush()
  with Unit(tmp_path, durable=durable) as unit:
    assert unit.restore() is None
    assert times(unit.journal.read(np.zeros(LANES, int))) == everything(0, 5 * durable)


def test_the_journal_keeps_what_any_checkpoint_refers_to(tmp_path):
  """If the newest checkpoint or its rows in the journal are damaged, the preceding one is used."""
  with Unit(tmp_path) as unit:
    for step in (1, 2, 3, 4, 5):
      unit.collect(10 * step)
      unit.save(step, required=True)
    assert unit.manager.checkpoints.steps() == [4, 5]
    assert unit.journal.tails.tolist() == [40 - CAPACITY] * LANES
  flip(tmp_path / "checkpoints" / "5-150" / "meta" / "metadata")
  with Unit(tmp_path) as unit:
    restored = unit.restore()
    assert restored.step == 4 and "checkpoints/5-150" in unit.reported[0]
    assert times(stored(unit, restored)) == everything(40 - CAPACITY, 40)
    unit.collect(50)
    unit.save(5, required=True)
  content = (tmp_path / "journal.sqlite").read_bytes()
  frames = unit.journal._codec.encode(play(0, 40, 50))[0].frames
  assert content.count(frames) == 1
  (tmp_path / "journal.sqlite").write_bytes(content.replace(frames, frames[::-1]))
  with Unit(tmp_path) as unit:
    assert unit.restore().step == 4 and "lane 0, slot 40 is missing or damaged" in unit.reported[0]


@pytest.mark.parametrize("durable", [False, True])
def test_a_lost_journal_is_named_and_nothing_is_changed(tmp_path, durable):
  with Unit(tmp_path, durable=durable) as unit:
    unit.collect(5)
    unit.save(1, required=True)
  (tmp_path / "journal.sqlite").unlink()
  with Unit(tmp_path, durable=durable) as unit:
    with pytest.raises(CheckpointError, match="none of the 1"):
      unit.restore()
    assert "journal.sqlite: lane 0, slot 0 is missing" in unit.reported[0]
  assert Checkpoints(tmp_path).steps() == [1]


def test_a_journal_that_fails_fails_the_checkpoint(tmp_path, monkeypatch):
  """Training continues, the experience is kept, and the next checkpoint includes it."""

  def refuse(*_):
    raise JournalError("the disk is full")

  with Unit(tmp_path) as unit:
    unit.collect(5)
    with monkeypatch.context() as patch:
      patch.setattr(unit.journal, "flush", refuse)
      unit.save(1)
      unit.manager.wait()
      with pytest.raises(JournalError, match="the disk is full"):
        unit.save(1, required=True)
    assert len(unit.reported) == 1 and "the disk is full" in unit.reported[0]
    assert unit.manager.checkpoints.steps() == []
    unit.collect(8)
    saved = unit.save(2, required=True)
  with Unit(tmp_path) as unit:
    restored = unit.restore()
    assert_same(restored, saved)
    assert times(stored(unit, restored)) == everything(0, 8)


_WRITER = """
import os
from pathlib import Path
from test_recovery import Unit

def work(folder, kind):  # starts jax, which the process that forks must not
  with Unit(Path(folder), durable=kind == "durable") as unit:
    restored = unit.restore()
    step = restored.step if restored else 0
    while True:
      step += 1
      for _ in range(3):
        unit.collect(int(unit.journal.heads[0]) + 2)
        os.write(1, b"head %d\\n" % unit.journal.heads[0])
      unit.save(step, required=True)
      os.write(1, b"step %d\\n" % step)
"""


@pytest.mark.parametrize("durable", [False, True])
def test_killed_at_any_moment(tmp_path, durable):
  """No acknowledged checkpoint is lost, and no durable experience."""
  rng, newest = np.random.default_rng(durable), {"head": 0, "step": 0}
  with killing(_WRITER, tmp_path, "durable" if durable else "exact") as run:
    for _ in range(6):
      for line in run(int(rng.integers(2, 12)), rng.random() * 0.06):
        name, number = line.split()
        newest[name] = int(number)
      with Unit(tmp_path, durable=durable) as unit:
        restored, step = unit.restore(), newest["step"]
        if restored is None:
          assert step == 0
          newest["head"] = int(unit.journal.heads[0])
          continue
        assert restored.step in (step, step + 1) and not unit.reported
        head, last = int(restored.heads[0]), int(unit.journal.heads[0])
        assert times(stored(unit, restored)) == everything(max(0, head - CAPACITY), head)
        assert times(unit.journal.read(restored.heads)) == everything(head, last)
        assert last in (newest["head"], newest["head"] + 2) if durable else last == head
        newest["head"], newest["step"] = last, restored.step
  assert newest["step"] > 2


# --- Units ---


def meeting(units):
  """For each unit, a function that sends a number to all units and returns the numbers of all."""
  barrier, sent = threading.Barrier(units), [0] * units

  def of(unit):
    def agree(number):
      sent[unit] = number
      barrier.wait(20)
      answer = list(sent)
      barrier.wait(20)
      return answer

    return agree

  return [of(unit) for unit in range(units)]


class Listed:
  """Fake checkpoints that have only step numbers."""

  def __init__(self, steps):
    self._steps = list(steps)

  def steps(self):
    return self._steps

  def restore(self, abstract, report, *, newest, verify):
    step = max(step for step in self._steps if newest is None or step <= newest)
    return snapshot(4)._replace(step=step, heads=np.zeros(LANES, int))

  def set_aside(self):
    self._steps = []


@pytest.mark.parametrize(
  ("steps", "agreed"),
  [
    ([[20, 40], [20, 40]], 40), ([[20, 40], [20]], 20), ([[20], [20, 40], [20, 40, 60]], 20),
    ([[20, 60], [20, 40, 60], [20, 40]], 20), ([[0], [0, 20]], 0), ([[20], []], None),
    ([[], []], None), ([[], [0], [20, 40]], None), ([[7, 9]], 9), ([[]], None),
  ],
)  # fmt: skip
def test_units_continue_from_the_newest_checkpoint_that_all_have(tmp_path, steps, agreed):
  """Without a common checkpoint, all start from the beginning and set theirs aside."""
  checkpoints = [Listed(have) for have in steps]
  found, reported = [0] * len(steps), [[] for _ in steps]

  def restore(unit, agree):
    journal = Journal(tmp_path / str(unit), LANES, SCHEMA)
    manager = RecoveryManager(
      checkpoints[unit],
      journal,
      reported[unit].append,
      durable=True,
      exact=False,
      all_gather=agree,
      units=len(steps),
    )
    restored = manager.restore({})
    found[unit] = None if restored is None else restored.step
    journal.close()

  threads = [threading.Thread(target=restore, args=of) for of in enumerate(meeting(len(steps)))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert found == [agreed] * len(steps)
  for unit, had in enumerate(steps):
    lost = bool(had) and agreed is None
    assert checkpoints[unit].steps() == ([] if lost else had)
    assert len(reported[unit]) == lost


def test_a_unit_without_a_common_checkpoint_fails_and_changes_nothing(tmp_path):
  with Unit(tmp_path) as unit:
    for step in (4, 8):
      unit.collect(step)
      unit.save(step, required=True)
  with (
    Unit(tmp_path, all_gather=lambda step: [step, 2], units=2) as unit,
    pytest.raises(CheckpointError, match="there is no checkpoint at step 2 or earlier in"),
  ):
    unit.restore()
  assert Checkpoints(tmp_path).steps() == [4, 8]


@pytest.mark.parametrize("evicted", [False, True])
def test_a_unit_that_starts_from_the_beginning_keeps_its_experience(tmp_path, evicted):
  """A lane whose first slots are evicted loses the others, too; that is reported."""
  with Unit(tmp_path, durable=True) as unit:
    unit.collect(CAPACITY + 3 * evicted)
    unit.save(1, required=True)
  with Unit(tmp_path, durable=True, all_gather=lambda step: [step, -1], units=2) as unit:
    assert unit.restore() is None
    kept = everything(0, 0 if evicted else CAPACITY)
    assert times(unit.journal.read(np.zeros(LANES, int))) == kept
    lost = f"{LANES * (CAPACITY + 3)} later frames in {LANES} lanes are lost"
    assert any(lost in line for line in unit.reported) == evicted
  assert Checkpoints(tmp_path).steps() == []


@pytest.mark.parametrize("units", [1, 2])
def test_checkpoints_of_one_learner_step_are_limited(tmp_path, units):
  """A run may be stopped and resumed again and again while it only collects."""
  with Unit(tmp_path, durable=True, keep=2, all_gather=lambda x: [x] * units, units=units) as unit:
    for head in (10, 20, 30, 40):
      unit.collect(head)
      unit.save(4, required=head > 20)
  assert len([*(tmp_path / "checkpoints").glob("4-*")]) == 2


@pytest.mark.parametrize(
  ("units", "keep", "theirs", "kept"),
  [  # the newest that the other unit has at each save but the last; what is there in the end
    (1, 2, [], [8, 10]),
    (2, 1, [-1, 2, 4, 6], [6, 8, 10]),  # at the save before, both had 6
    (2, 1, [-1, 2, 4, 4], [4, 6, 8, 10]),  # it fails from 6 on
    (2, 1, [-1, 2, 2, 6], [6, 8, 10]),  # of 4
    (2, 1, [-1, -1, -1, -1], [2, 4, 6, 8, 10]),  # it may come back without any
  ],
)
def test_what_another_unit_may_have_to_go_back_to_stays(tmp_path, units, keep, theirs, kept):
  """The last save is by a unit that is stopping, which does not communicate with others."""
  others = iter(theirs)

  def agree(step):
    return [step] if units == 1 else [step, next(others)]

  with Unit(tmp_path, durable=True, keep=keep, all_gather=agree, units=units) as unit:
    for step in (2, 4, 6, 8, 10):
      unit.collect(10 * step)
      unit.save(step, required=step == 10)
    assert next(others, None) is None
    assert unit.manager.checkpoints.steps() == kept
    assert unit.journal.tails.tolist() == [10 * kept[0] - CAPACITY] * LANES
    oldest = Checkpoints(tmp_path).restore(abstract(), pytest.fail, newest=kept[0])
    assert times(stored(unit, oldest)) == everything(10 * kept[0] - CAPACITY, 10 * kept[0])
