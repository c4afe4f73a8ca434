"""Checkpoints on disk: what is written comes back bit for bit, also from a process that was killed meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from snapshots import (
  abstract,
  assert_restored,
  assert_same_tree,
  flip,
  read,
  replace,
  segment_file,
  snapshot,
  variables,
  write,
)

from speedyzero_jax.agents.efficientzero.networks import Variables
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints

# A damaged checkpoint leaves Orbax with futures that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

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


def test_round_trip(two):
  folder, snapshots = two
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)
  assert isinstance(restored.optimizer[1][0], optax.ScaleByAdamState)  # what optax made, not a dict


def test_who_goes_on_from_a_checkpoint_knows_what_is_saved_already(two):
  checkpoints = Checkpoints(two[0])
  assert checkpoints.heads is None
  checkpoints.restore(abstract(), print)
  np.testing.assert_array_equal(checkpoints.heads, [8, 8])


def test_the_network_alone_is_read_without_the_rest(copied):
  folder, snapshots = copied
  shutil.rmtree(folder / "replay")
  step, network = Checkpoints(folder).restore_network(abstract()["network"], pytest.fail)
  assert step == 8
  assert_same_tree(network, snapshots[-1].network)


def test_the_newest_few_are_kept_and_all_frames_with_them(tmp_path):
  snapshots = write(tmp_path, 2, 4, 6, 8, 10, keep=2)
  assert Checkpoints(tmp_path).steps() == [8, 10]
  restored, segments, _ = read(tmp_path)
  assert_restored(restored, segments, snapshots)


def test_snapshots_without_new_frames_or_weights(tmp_path):
  first = snapshot(4, weights={}, actor={})
  second = snapshot(5, since=5, weights={}, actor={})
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(first)
  checkpoints.save(second)
  checkpoints.close()
  restored, segments = Checkpoints(tmp_path).restore(abstract() | {"weights": {}}, pytest.fail)
  assert (
    len(list(segments)) == 1
    and restored.step == 5
    and restored.weights == {}
    and restored.actor == {}
  )
  assert_same_tree(restored.replay, second.replay)


def test_one_moment_is_saved_once(tmp_path):
  """A finished run that is resumed, or one that is stopped at once, has its checkpoint already."""
  write(tmp_path, 4)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  replace(tmp_path, snapshot(4, since=4))
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_segments_are_loaded_one_at_a_time(two):
  """All were checked before; at no moment are two in memory."""
  _, segments = Checkpoints(two[0]).restore(abstract(), pytest.fail)
  alive = []
  for segment in segments:
    assert not any(ref() is not None for ref in alive)
    alive.append(weakref.ref(segment["frame"]))
    del segment
  assert len(alive) == 2


def test_who_begins_anew_saves_the_same_moment_again(copied):
  folder, _ = copied
  aside = {path.name for name in ("checkpoints", "replay") for path in (folder / name).iterdir()}
  checkpoints, other = Checkpoints(folder), snapshot(8)._replace(network=variables(9))
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.begin_anew()
  assert (checkpoints.steps(), checkpoints.newest, checkpoints.heads) == ([], None, None)
  assert {path.name for path in (folder / "damaged").iterdir()} == aside
  checkpoints.save(other)
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, [other])


# --- Replacing: a newer state of the same learner step


def test_what_came_since_is_saved_at_the_same_learner_step(copied):
  folder, snapshots = copied
  newer = [snapshot(8, since=8, head=11), snapshot(8, since=11, head=15)]
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  for one in newer:
    checkpoints.save(one)
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.heads, one.heads)
  checkpoints.save(snapshot(12, since=15, head=20))
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported and checkpoints.steps() == [4, 8, 12]
  assert_restored(restored, segments, [*snapshots, *newer, snapshot(12, since=15, head=20)])
  shutil.rmtree(folder / "checkpoints" / "12")
  segment_file(folder, 12, 60).unlink()
  restored, segments, reported = read(folder)
  assert_restored(restored, segments, [*snapshots, *newer])


@pytest.fixture(scope="module")
def replaced(two, tmp_path_factory):
  """A folder as `two` in which 8 was replaced, and its snapshots."""
  folder = tmp_path_factory.mktemp("replaced") / "run"
  shutil.copytree(two[0], folder)
  newer = snapshot(8, since=8, head=11)
  replace(folder, newer)
  return folder, [*two[1], newer]


def killed_before_saving(folder, _):
  os.replace(folder / "checkpoints" / "8", folder / "checkpoints" / "8.replaced")


def killed_while_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8.orbax-checkpoint-tmp")
  shutil.rmtree(folder / "checkpoints" / "8.orbax-checkpoint-tmp" / "network")
  shutil.copy(segment_file(newer, 8, 33), folder / "replay")


def killed_after_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8")
  shutil.copy(segment_file(newer, 8, 33), folder / "replay")


def killed_while_removing(folder, newer):
  killed_after_saving(folder, newer)
  shutil.rmtree(folder / "checkpoints" / "8.replaced" / "network")


MOMENTS = {
  killed_before_saving: 2,
  killed_while_saving: 2,
  killed_after_saving: 3,
  killed_while_removing: 3,
}


@pytest.mark.parametrize(("moment", "expected"), MOMENTS.items())
def test_a_replacement_cut_short_leaves_the_older_or_the_newer_state(
  copied, replaced, moment, expected
):
  folder, _ = copied
  newer, snapshots = replaced
  moment(folder, newer)
  before = sorted(folder.rglob("*"))
  assert Checkpoints(folder).steps() == [4, 8]
  step, network = Checkpoints(folder).restore_network(abstract()["network"], pytest.fail)
  assert step == 8
  assert_same_tree(network, snapshots[expected - 1].network)
  assert sorted(folder.rglob("*")) == before  # it only looks
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots[:expected])
  if expected == 2:
    replace(folder, snapshots[2])
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert len(list((folder / "replay").iterdir())) == 3 and not (folder / "damaged").exists()


def test_a_damaged_replacement_falls_back_to_what_it_replaced(copied, replaced):
  folder, _ = copied
  newer, snapshots = replaced
  killed_after_saving(folder, newer)
  flip(segment_file(folder, 8, 33))
  restored, segments, reported = read(folder)
  assert len(reported) == 1 and "checkpoints/8 is damaged" in reported[0]
  assert_restored(restored, segments, snapshots[:2])
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert sorted(path.name for path in (folder / "damaged").iterdir()) == [
    "8",
    segment_file(folder, 8, 33).name,
  ]
  replace(folder, snapshots[2])
  assert_restored(*read(folder)[:2], snapshots)


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
from snapshots import abstract, snapshot
from speedyzero_jax.run import checkpoint
owner, name = {"save": (checkpoint.ocp.CheckpointManager, "save"), "rmtree": (checkpoint.shutil, "rmtree")}[sys.argv[4]]
checkpoints = checkpoint.Checkpoints(Path(sys.argv[3]))
checkpoints.restore(abstract(), print)
real = getattr(owner, name)
def die_after_the_rename(*args, **kwargs):
  if (Path(sys.argv[3]) / "checkpoints" / "8.replaced").exists():
    os.kill(os.getpid(), signal.SIGKILL)
  return real(*args, **kwargs)
setattr(owner, name, die_after_the_rename)
checkpoints.save(snapshot(8, since=8, head=11))
checkpoints.wait()
"""


@pytest.mark.parametrize(("moment", "expected"), [("save", 2), ("rmtree", 3)])
def test_a_process_killed_while_it_replaces(copied, replaced, moment, expected):
  folder, _ = copied
  done = subprocess.run(
    [sys.executable, "-c", KILLED, ROOT, ROOT / "tests/support", folder, moment],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert (folder / "checkpoints" / "8.replaced").is_dir()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, replaced[1][:expected])


# --- A ring: slots are evicted


def test_segments_wholly_evicted_are_deleted_once_no_checkpoint_lists_them(tmp_path):
  """A replay of 5 slots per lane; each checkpoint stands on the segments whose end its replay still holds."""
  checkpoints, snapshots = Checkpoints(tmp_path, keep=2), []
  for step in range(2, 14, 2):
    snapshots.append(snapshot(step, since=step - 2, tail=max(0, step - 5)))
    checkpoints.save(snapshots[-1])
    checkpoints.wait()
    kept = {s for at in (step - 2, step) for s in range(2, at + 1, 2) if s > max(0, at - 5)}
    assert {path.name for path in (tmp_path / "replay").iterdir()} == {
      segment_file(tmp_path, s).name for s in kept
    }
    if step == 8:  # another process goes on
      checkpoints.close()
      checkpoints = Checkpoints(tmp_path, keep=2)
      checkpoints.restore(abstract(), pytest.fail)
  checkpoints.close()
  shutil.copytree(tmp_path, tmp_path / "copy")
  assert_restored(*read(tmp_path)[:2], snapshots[-3:])
  flip(segment_file(tmp_path / "copy", 12))
  restored, segments, reported = read(tmp_path / "copy")  # the one before has all its segments
  assert len(reported) == 1
  assert_restored(restored, segments, snapshots[-4:-1])


def test_a_segment_stays_while_a_checkpoint_that_cannot_be_read_may_list_it(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  checkpoints.save(snapshot(2))
  checkpoints.wait()
  (tmp_path / "checkpoints" / "2" / "meta" / "metadata").write_bytes(b"{")
  checkpoints.save(snapshot(9, since=2, tail=4))
  checkpoints.wait()
  assert segment_file(tmp_path, 2).exists()
  checkpoints.save(snapshot(10, since=9, tail=5))
  checkpoints.close()
  assert not segment_file(tmp_path, 2).exists()


def test_another_network_is_refused_by_name(two):
  other = abstract()
  kernel = jax.ShapeDtypeStruct((5, 4), np.float32)
  other["network"] = Variables(
    {**other["network"].params, "h": {"kernel": kernel}}, other["network"].batch_stats
  )
  reported = []
  with pytest.raises(CheckpointError, match="none of the 2"):
    Checkpoints(two[0]).restore(other, reported.append)
  assert len(reported) == 2
