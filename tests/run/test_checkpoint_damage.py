"""Damaged checkpoints, and saves that fail: noticed, named and survived."""

import errno
import json
import os
import re
import resource
import shutil
import types

import jax
import numpy as np
import pytest
from snapshots import (
  abstract,
  assert_restored,
  assert_same_tree,
  flip,
  read,
  segment_file,
  snapshot,
  write,
)

from speedyzero_jax.replay.frame_files import SlotFile, SlotFiles
from speedyzero_jax.run import checkpoint
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints

# A damaged checkpoint leaves Orbax with futures that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def listing(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A folder with checkpoints 4 and 8, and their snapshots."""
  folder = tmp_path_factory.mktemp("two")
  return folder, write(folder, 4, 8)


@pytest.fixture
def copied(two, tmp_path):
  shutil.copytree(two[0], tmp_path / "run")
  return tmp_path / "run", two[1]


def own_files(folder, step):
  """Files that only this checkpoint stands on."""
  own = [p for p in sorted((folder / "checkpoints" / str(step)).rglob("*")) if p.is_file()]
  return [*own, segment_file(folder, step)]


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def assert_falls_back(folder, snapshots):
  restored, segments, reported = read(folder)
  assert restored.step == 4
  assert_restored(restored, segments, snapshots[:1])
  assert (
    len(reported) == 1
    and str(folder / "checkpoints" / "8") in reported[0]
    and "\n" not in reported[0]
  )
  assert Checkpoints(folder).steps() == [4]


def parts(folder):
  """The files in which a damage must show, by what they hold."""
  newest = folder / "checkpoints" / "8"
  items = {
    name: [p for p in (newest / name).rglob("*") if p.parent.name == "d"]
    for name in ("network", "optimizer", "weights", "replay", "actor")
  }
  return items | {"meta": [newest / "meta" / "metadata"], "segment": own_files(folder, 8)[-1:]}


@pytest.mark.parametrize(
  "part", ["network", "optimizer", "weights", "replay", "actor", "meta", "segment"]
)
@pytest.mark.parametrize("damage", [flip, truncate, os.unlink])
def test_damage_is_named_and_the_checkpoint_before_is_used(copied, part, damage):
  folder, snapshots = copied
  paths = parts(folder)[part]
  assert paths
  for path in paths:
    damage(path)
  assert_falls_back(folder, snapshots)


def test_no_flipped_byte_of_any_file_is_believed(copied, tmp_path):
  """Files with no bearing on the content may be damaged unnoticed; what is read is right or refused."""
  folder, snapshots = copied
  refused = 0
  for number, path in enumerate(own_files(folder, 8)):
    run = tmp_path / str(number)
    shutil.copytree(folder, run)
    flip(run / path.relative_to(folder), at=number * 0.37 % 1)
    restored, segments, reported = read(run)
    assert (restored.step == 8) == (not reported), path
    refused += bool(reported)
    assert_restored(restored, segments, snapshots[: restored.step // 4])
  assert refused >= 6


@pytest.mark.parametrize("damage", [os.unlink, truncate, lambda path: path.write_bytes(b"")])
def test_every_file_missing_or_cut_short_is_damage_and_nothing_else(copied, tmp_path, damage):
  """The readers' exceptions are of many types; each must lead to the checkpoint before, none to the end of the run."""
  folder, snapshots = copied
  refused = 0
  for path in own_files(folder, 8):
    if not {"optimizer", "weights", "actor"} & set(path.parts):  # the same reader reads them
      shutil.copytree(folder, tmp_path / "damaged")
      damage(tmp_path / "damaged" / path.relative_to(folder))
      restored, segments, reported = read(tmp_path / "damaged")
      assert (restored.step == 8) == (not reported), path
      refused += bool(reported)
      assert_restored(restored, segments, snapshots[: restored.step // 4])
      shutil.rmtree(tmp_path / "damaged")
  assert refused >= 6


def test_every_byte_of_the_json_counts(copied):
  """A digit that became another one is still JSON."""
  folder, snapshots = copied
  path = folder / "checkpoints" / "8" / "meta" / "metadata"
  text = path.read_text()
  assert '"env_steps": 24' in text
  path.write_text(text.replace('"env_steps": 24', '"env_steps": 25'))
  assert_falls_back(folder, snapshots)


def test_every_byte_of_the_frames_counts(copied):
  """NumPy, reading an archive, stops before its checksum is compared; so this is our own."""
  folder, _ = copied
  path = own_files(folder, 8)[-1]
  meta = json.loads((folder / "checkpoints" / "8" / "meta" / "metadata").read_text())
  segment = SlotFile(*meta["segments"][-1])
  assert segment.name == path.name
  content = path.read_bytes()
  for at in range(len(content)):
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ValueError, match=path.name):
      SlotFiles(folder / "replay").check(segment)


def test_frames_of_an_older_segment_missing_damage_every_checkpoint_on_top(copied):
  folder, _ = copied
  own_files(folder, 4)[-1].unlink()
  reported = []
  with pytest.raises(
    CheckpointError, match=r"none of the 2 checkpoints in .*checkpoints can be read"
  ):
    Checkpoints(folder).restore(abstract(), reported.append)
  assert [
    str(folder / "checkpoints" / step) in line for step, line in zip("84", reported, strict=True)
  ] == [True] * 2
  assert Checkpoints(folder).steps() == [4, 8]  # nothing is moved while there is nothing better


def raising(error):
  def fail(*args, **kwargs):
    raise error

  return fail


OUT_OF_DEVICE_MEMORY = jax.errors.JaxRuntimeError(
  "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
)


@pytest.mark.parametrize(
  "error",
  [MemoryError("no memory"), OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "not allowed"),
   OUT_OF_DEVICE_MEMORY, ValueError("RESOURCE_EXHAUSTED: Error opening driver")],
  ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("part", ["orbax", "segment"])
def test_what_fails_for_want_of_something_is_no_damage(copied, monkeypatch, error, part):
  """The newest checkpoint may be whole: it is named, not set aside, and an older one is not taken for it."""
  folder, snapshots = copied
  before = listing(folder)
  with monkeypatch.context() as patch:
    if part == "orbax":
      patch.setattr(checkpoint.ocp.Checkpointer, "restore", raising(error))
    else:
      patch.setattr(SlotFiles, "check", raising(error))
    with pytest.raises(
      CheckpointError,
      match=rf"can't read checkpoint .*checkpoints/8, which may be whole: .*{re.escape(str(error))}",
    ):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert listing(folder) == before
  assert_restored(*read(folder)[:2], snapshots)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_files_that_cannot_be_opened_are_no_damage(copied):
  """As root may open all, these do it without permissions: TensorStore meets a loop of links, Python has no number left
  for another file."""
  folder, snapshots = copied
  (path,) = (folder / "checkpoints" / "8" / "network" / "d").iterdir()
  content = path.read_bytes()
  path.unlink()
  path.symlink_to(path.name)
  with pytest.raises(CheckpointError, match="which may be whole: ValueError: UNKNOWN: "):
    Checkpoints(folder).restore(abstract(), pytest.fail)
  path.unlink()
  path.write_bytes(content)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  lowest_free = min(set(range(soft)) - set(map(int, os.listdir("/proc/self/fd"))))
  resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
  try:
    with pytest.raises(CheckpointError, match="Too many open files"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert_restored(*read(folder)[:2], snapshots)


def test_without_a_checkpoint(tmp_path):
  for folder in (tmp_path, tmp_path / "missing"):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert not list(tmp_path.iterdir())


def test_a_reader_of_the_network_falls_back_too_and_moves_nothing(copied):
  folder, snapshots = copied
  for path in parts(folder)["network"]:
    flip(path)
  reported = []
  step, network = Checkpoints(folder).restore_network(abstract()["network"], reported.append)
  assert step == 4 and len(reported) == 1
  assert_same_tree(network, snapshots[0].network)
  assert Checkpoints(folder).steps() == [4, 8]


def test_a_run_goes_on_from_the_checkpoint_before(copied):
  """The damaged one is moved out of the way, and its step can be saved again."""
  folder, snapshots = copied
  flip(own_files(folder, 8)[-1])
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), lambda line: None)
  assert (folder / "damaged" / "8").is_dir() and not own_files(folder, 8)[-1].exists()
  checkpoints.save(snapshots[1])
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)


class Trap:
  """Makes a folder when it is unpickled."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_nothing_is_unpickled(tmp_path):
  slots = snapshot(8, since=4).slots
  trap = np.empty(len(slots["frame"]), object)
  trap[:] = Trap(tmp_path / "sprung")
  folder = tmp_path / "run"
  good = write(folder, 4)
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(snapshot(8, since=4, slots=slots | {"frame": trap}))
  checkpoints.close()
  assert_falls_back(folder, good)
  assert not (tmp_path / "sprung").exists()


# --- Failing to write


def fail_segment(monkeypatch):
  def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(SlotFiles, "write", refuse)
  return monkeypatch.undo


def fail_replace(monkeypatch):
  def refuse(source, target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checkpoint.os, "replace", refuse)
  return monkeypatch.undo


def fail_orbax(monkeypatch):
  def refuse(*args, **kwargs):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", refuse)
  return monkeypatch.undo


def limit_files(size):
  """Files may not grow past `size` bytes: what a full disk looks like to Orbax's own threads."""

  def fail(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  return fail


def nearly_full_disk(monkeypatch):
  monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
  return monkeypatch.undo


FAILURES = {
  "nearly full disk": nearly_full_disk,
  "segment": fail_segment,
  "rename": fail_replace,
  "orbax": fail_orbax,
  "no space at all": limit_files(0),
  "little space": limit_files(600),
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_save_that_fails_harms_nothing(copied, monkeypatch, fail):
  """The error comes with the next call, earlier checkpoints stay, and the next save has the frames of both."""
  folder, snapshots = copied
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  restore = fail(monkeypatch)
  try:
    checkpoints.save(snapshot(12, since=8))
    with pytest.raises(CheckpointError, match=r"saving to .*checkpoints failed: \w+"):
      checkpoints.wait()
  finally:
    restore()
  checkpoints.wait()  # said once
  np.testing.assert_array_equal(checkpoints.heads, [8, 8])
  # Nothing half-written is left to fill the disk further.
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert {segment_file(folder, 4), segment_file(folder, 8)} == set((folder / "replay").iterdir())
  shutil.copytree(folder, folder.with_name("killed"))  # as if the process had ended here
  assert_restored(*read(folder.with_name("killed"))[:2], snapshots)
  for step, since in ((12, 8), (16, 12)):  # the same step may be tried again
    snapshots = [*snapshots, snapshot(step, since=since)]
    checkpoints.save(snapshots[-1])
    checkpoints.wait()
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_replacement_that_fails_leaves_what_was_there(copied, monkeypatch, fail):
  folder, snapshots = copied
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  restore = fail(monkeypatch)
  newer = snapshot(8, since=8, head=11)
  try:
    checkpoints.save(newer)
    with pytest.raises(CheckpointError, match="failed"):
      checkpoints.wait()
  finally:
    restore()
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  shutil.copytree(folder, folder.with_name("killed"))
  assert_restored(*read(folder.with_name("killed"))[:2], snapshots)
  checkpoints.save(newer)
  checkpoints.close()
  assert_restored(*read(folder)[:2], [*snapshots, newer])


def test_a_failure_shows_at_the_next_save_and_nothing_of_that_is_written(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  undo = fail_segment(monkeypatch)
  checkpoints.save(snapshot(4))
  with pytest.raises(CheckpointError):
    checkpoints.save(snapshot(8))
  undo()
  checkpoints.wait()
  assert checkpoints.steps() == []
  checkpoints.close()


def test_leftovers_of_a_killed_writer_are_no_checkpoints(copied):
  folder, snapshots = copied
  directory = folder / "checkpoints"
  os.replace(directory / "8", directory / "8.orbax-checkpoint-tmp")
  (folder / "replay" / "slots-000000000012-000000000036.tmp").write_bytes(b"PK")
  assert Checkpoints(folder).steps() == [4]
  checkpoints = Checkpoints(folder)
  restored, segments = checkpoints.restore(abstract(), pytest.fail)
  assert_restored(restored, list(segments), snapshots[:1])
  checkpoints.save(snapshots[1])
  checkpoints.close()
  restored, segments, _ = read(folder)
  assert_restored(restored, segments, snapshots)
