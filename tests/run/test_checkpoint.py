"""Checkpoints come back bit for bit, also from a process that was killed while it wrote one."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from snapshots import (
  LANES,
  Variables,
  abstract,
  assert_same_tree,
  flip,
  read,
  snapshot,
  variables,
  write,
)

from speedyzero_jax.replay.journal import JournalDamage, JournalError
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A folder with checkpoints 4 and 8, and their snapshots."""
  folder = tmp_path_factory.mktemp("two")
  return folder, write(folder, 4, 8)


@pytest.fixture
def copied(two, tmp_path):
  shutil.copytree(two[0], tmp_path / "run")
  return tmp_path / "run", two[1]


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_round_trip(two):
  folder, snapshots = two
  restored, reported = read(folder)
  assert not reported
  assert_same_tree(restored, snapshots[-1])
  assert isinstance(restored.items["optimizer"][1][0], optax.ScaleByAdamState)


def test_one_item_alone_is_read_without_the_rest(copied):
  folder, snapshots = copied
  shutil.rmtree(folder / "checkpoints" / "8" / "replay")
  step, network = Checkpoints(folder).restore_item("network", abstract()["network"], pytest.fail)
  assert step == 8
  assert_same_tree(network, snapshots[-1].items["network"])


def test_items_without_arrays(tmp_path):
  items = {
    "weights": {},
    "actor": {},
    "replay": {"sampler": {}, "empty": np.zeros((0, 2), np.int8)},
  }
  one = snapshot(5, **items)
  write(tmp_path, one)
  restored = Checkpoints(tmp_path).restore(abstract() | {"weights": {}, "actor": {}}, pytest.fail)
  assert_same_tree(restored, one)


def test_the_newest_few_are_kept_and_those_that_are_needed(tmp_path):
  write(tmp_path, 2, 4, 6, 8, 10, keep=2)
  checkpoints = Checkpoints(tmp_path, 2)
  assert checkpoints.steps() == [8, 10]
  checkpoints.save(snapshot(12), needed=8)
  assert checkpoints.steps() == [8, 10, 12]


def test_one_moment_is_saved_once(tmp_path):
  """A finished run that is resumed, or one that is stopped at once, has its checkpoint already."""
  write(tmp_path, 4)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  checkpoints = Checkpoints(tmp_path)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(snapshot(4))
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_after_setting_all_aside_the_same_moment_is_saved_again(copied):
  folder, _ = copied
  checkpoints, other = Checkpoints(folder), snapshot(8, network=variables(9))
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.set_aside()
  assert (checkpoints.steps(), checkpoints.newest) == ([], None)
  assert names(folder / "damaged") == ["4", "8"]
  checkpoints.save(other)
  restored, reported = read(folder)
  assert not reported
  assert_same_tree(restored, other)


def test_another_network_is_refused_by_name(two):
  other, reported = abstract(), []
  params = {**other["network"].params, "h": {"kernel": jax.ShapeDtypeStruct((5, 4), np.float32)}}
  other["network"] = Variables(params, other["network"].batch_stats)
  with pytest.raises(CheckpointError, match="none of the 2"):
    Checkpoints(two[0]).restore(other, reported.append)
  assert len(reported) == 2


def test_the_oldest_slots_that_any_checkpoint_refers_to(tmp_path):
  write(tmp_path, *(snapshot(step, tail=step // 2) for step in (4, 6, 8)), keep=2)
  checkpoints = Checkpoints(tmp_path)
  np.testing.assert_array_equal(checkpoints.tails(), [3] * LANES)
  (tmp_path / "checkpoints" / "8" / "meta" / "metadata").write_bytes(b"{")
  assert checkpoints.tails() is None


def test_a_checkpoint_whose_slots_are_not_in_the_journal_is_skipped(copied):
  folder, snapshots = copied

  def verify(tails, heads):
    assert (tails == 0).all()
    if heads[0] > 4:
      raise JournalDamage("lane 0, slot 4 is missing")

  reported = []
  restored = Checkpoints(folder).restore(abstract(), reported.append, verify=verify)
  assert len(reported) == 1 and "checkpoints/8" in reported[0] and "slot 4" in reported[0]
  assert_same_tree(restored, snapshots[0])
  assert names(folder / "damaged") == ["8"]


def test_a_journal_that_cannot_be_read_is_no_reason_for_an_older_checkpoint(copied):
  def verify(tails, heads):
    raise JournalError("disk I/O error")

  with pytest.raises(CheckpointError, match=r"checkpoints/8, which may be whole: .*I/O"):
    Checkpoints(copied[0]).restore(abstract(), pytest.fail, verify=verify)
  assert Checkpoints(copied[0]).steps() == [4, 8]


# --- Replacing: a newer state of the same learner step ---


def replace(folder, newer):
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(newer)


@pytest.fixture(scope="module")
def replaced(two, tmp_path_factory):
  """A folder as `two` in which 8 was replaced, and the newer snapshot."""
  folder, newer = tmp_path_factory.mktemp("replaced") / "run", snapshot(8, head=11)
  shutil.copytree(two[0], folder)
  replace(folder, newer)
  assert names(folder / "checkpoints") == ["4", "8"]
  return folder, newer


def killed_before_saving(folder, _):
  os.replace(folder / "checkpoints" / "8", folder / "checkpoints" / "8.replaced")


def killed_while_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8.orbax-checkpoint-tmp")
  shutil.rmtree(folder / "checkpoints" / "8.orbax-checkpoint-tmp" / "network")


def killed_after_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8")


def killed_while_removing(folder, newer):
  killed_after_saving(folder, newer)
  shutil.rmtree(folder / "checkpoints" / "8.replaced" / "network")


@pytest.mark.parametrize(
  ("moment", "is_newer"),
  [
    (killed_before_saving, False),
    (killed_while_saving, False),
    (killed_after_saving, True),
    (killed_while_removing, True),
  ],
)
def test_a_replacement_cut_short_leaves_the_older_or_the_newer_state(
  copied, replaced, moment, is_newer
):
  folder, snapshots = copied
  moment(folder, replaced[0])
  wanted, before = replaced[1] if is_newer else snapshots[1], sorted(folder.rglob("*"))
  assert Checkpoints(folder).steps() == [4, 8]
  step, network = Checkpoints(folder).restore_item("network", abstract()["network"], pytest.fail)
  assert step == 8 and sorted(folder.rglob("*")) == before  # nothing is changed
  assert_same_tree(network, wanted.items["network"])
  restored, reported = read(folder)
  assert not reported
  assert_same_tree(restored, wanted)
  replace(folder, replaced[1])
  assert_same_tree(read(folder)[0], replaced[1])
  assert names(folder / "checkpoints") == ["4", "8"] and not (folder / "damaged").exists()


def test_a_damaged_replacement_falls_back_to_what_it_replaced(copied, replaced):
  folder, snapshots = copied
  killed_after_saving(folder, replaced[0])
  flip(folder / "checkpoints" / "8" / "meta" / "metadata")
  restored, reported = read(folder)
  assert len(reported) == 1 and "checkpoints/8 cannot be used" in reported[0]
  assert_same_tree(restored, snapshots[1])
  assert names(folder / "checkpoints") == ["4", "8"] and names(folder / "damaged") == ["8"]


_WRITER = """
import os, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from snapshots import abstract, snapshot
from speedyzero_jax.run.checkpoint import Checkpoints
os.write(1, b"ready\\n")
for _ in sys.stdin:
  child = os.fork()
  if not child:  # which starts jax, its parent must not
    checkpoints, done = Checkpoints(Path(sys.argv[3]), keep=2), 0
    if checkpoints.steps():
      done = checkpoints.restore(abstract(), print).env_steps // 3
    snapshots = [snapshot(1 + i // 2, head=1 + i) for i in range(done, done + 9)]
    for one in snapshots:
      checkpoints.save(one)
      os.write(1, b"%d\\n" % (one.env_steps // 3))
    os.kill(os.getpid(), 9)
  os.write(1, b"pid %d\\n" % child)
  os.waitpid(child, 0)
  os.write(1, b"dead\\n")
"""


def test_killed_in_the_middle_of_saves(tmp_path):
  """kill -9 at any moment: the newest acknowledged state, or the one after, comes back whole."""
  command = [sys.executable, "-W", "ignore", "-c", _WRITER, ROOT, ROOT / "tests/support", tmp_path]
  rng, acknowledged = np.random.default_rng(0), 0
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as parent:
    assert parent.stdout.readline() == "ready\n"
    for _ in range(6):
      parent.stdin.write("next\n")
      parent.stdin.flush()
      child, lines, wanted = 0, 0, int(rng.integers(1, 4))
      while lines < wanted:
        line = parent.stdout.readline()
        if line.startswith("pid"):
          child = int(line.split()[1])
        else:
          acknowledged, lines = int(line), lines + 1
      child = child or int(parent.stdout.readline().split()[1])
      time.sleep(rng.random() * 0.06)  # anywhere in the next save
      os.kill(child, signal.SIGKILL)
      for line in iter(parent.stdout.readline, "dead\n"):
        acknowledged = int(line)
      restored, reported = read(tmp_path)
      count = restored.env_steps // 3
      assert not reported and count in (acknowledged, acknowledged + 1)
      assert_same_tree(restored, snapshot(1 + (count - 1) // 2, head=count))
    parent.stdin.close()
    assert parent.wait() == 0
  assert acknowledged >= 6 and not (tmp_path / "damaged").exists()
