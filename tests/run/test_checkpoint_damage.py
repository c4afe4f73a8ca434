"""Tests of damaged checkpoints and failed saves: detection, messages and recovery."""

import errno
import gc
import importlib
import os
import re
import resource
import shutil
import stat
import types

import jax
import numpy as np
import pytest

from launched import listing
from same import assert_same
from snapshots import abstract, flip, read, snapshot, write
from speedyzero_jax.run import checkpoint
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints

# A damaged checkpoint leaves Orbax with futures that nothing waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def files_of(folder, step):
  return [
    p for p in sorted((folder / "checkpoints" / f"{step}-{3 * step}").rglob("*")) if p.is_file()
  ]


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path):
  path.write_bytes(b"")


def content_of(folder, item):
  """The file of checkpoint 8 in which damage to this item must be detected."""
  place = folder / "checkpoints" / "8-24" / item
  if item == "network":
    return next(path for path in place.rglob("d/*") if path.is_file())
  return place / "metadata" if item == "meta" else place / "checkpoint" / "0"


@pytest.mark.parametrize("damage", [flip, os.unlink, truncate, empty])
def test_damage_of_any_file_is_named_or_harmless(copied, tmp_path, damage):
  """Readers raise many types of exceptions: each must lead to the preceding checkpoint."""
  folder, snapshots = copied
  refused = set()
  for number, path in enumerate(files_of(folder, 8)):
    run = tmp_path / str(number)
    shutil.copytree(folder, run)
    damage(run / path.relative_to(folder))
    restored, reported = read(run)
    assert_same(restored, snapshots[restored.step == 8])
    if restored.step == 4:
      (line,) = reported
      assert str(run / "checkpoints" / "8-24") in line and "\n" not in line
      assert Checkpoints(run).steps() == [4] and (run / "checkpoints" / "damaged" / "8-24").is_dir()
      refused.add(path)
  assert refused >= {content_of(folder, item) for item in snapshots[1].items} | {
    content_of(folder, "meta")
  }


def test_every_byte_of_the_json_counts(copied):
  """A changed digit is still valid JSON."""
  folder, snapshots = copied
  path = folder / "checkpoints" / "8-24" / "meta" / "metadata"
  text = path.read_text()
  assert '"env_steps": 24' in text
  path.write_text(text.replace('"env_steps": 24', '"env_steps": 25'))
  restored, reported = read(folder)
  assert_same(restored, snapshots[0])
  assert len(reported) == 1


@pytest.mark.parametrize("item", ["network", "weights"])
def test_an_intact_item_of_another_checkpoint_is_damage(copied, item):
  folder, snapshots = copied
  older, newer = (folder / "checkpoints" / name / item for name in ("4-12", "8-24"))
  shutil.rmtree(newer)
  shutil.copytree(older, newer)
  restored, (line,) = read(folder)
  assert_same(restored, snapshots[0])
  assert f"checksum of '{item}' differs" in line


def test_nothing_is_moved_while_there_is_nothing_better(copied):
  folder, reported = copied[0], []
  for step in (4, 8):
    for path in files_of(folder, step):
      flip(path)
  with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .*checkpoints can be"):
    Checkpoints(folder).restore(abstract(), reported.append)
  assert len(reported) == 2 and Checkpoints(folder).steps() == [4, 8]


@pytest.mark.parametrize(
  "error",
  [
    MemoryError("no memory"),
    OSError(errno.EIO, "I/O error"),
    PermissionError(errno.EACCES, "not allowed"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ValueError("RESOURCE_EXHAUSTED: Error opening driver"),
  ],
  ids=lambda error: type(error).__name__,
)
def test_a_failing_machine_is_no_damage(copied, monkeypatch, error):
  """The newest checkpoint may be intact: it is named, not set aside, and no older one is used."""

  def fail(*args, **kwargs):
    raise error

  folder, snapshots = copied
  before = listing(folder)
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.ocp.Checkpointer, "restore", fail)
    expected = rf"checkpoints/8-24 \(it may be intact\): .*{re.escape(str(error))}"
    with pytest.raises(CheckpointError, match=expected):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert listing(folder) == before
  assert_same(read(folder)[0], snapshots[1])


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_files_that_cannot_be_opened_are_no_damage(copied):
  """Two ways that work as root: a loop of links, and no free file descriptors."""
  folder, snapshots = copied
  path = content_of(folder, "network")
  content = path.read_bytes()
  path.unlink()
  path.symlink_to(path.name)
  with pytest.raises(CheckpointError, match=r"it may be intact\): ValueError: UNKNOWN: "):
    Checkpoints(folder).restore(abstract(), pytest.fail)
  path.unlink()
  path.write_bytes(content)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  importlib.import_module("tracemalloc")  # pytest imports it to report an unraisable exception
  stdin = os.dup(0)
  os.close(0)  # the only descriptor that can be opened, whatever other threads close
  resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
  try:
    with pytest.raises(
      CheckpointError, match=r"it may be intact\): .*(RESOURCE_EXHAUSTED|Too many open files)"
    ):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    gc.collect()  # else a file of the failed call may close descriptor 0 later
    os.dup2(stdin, 0)
    os.close(stdin)
  assert_same(read(folder)[0], snapshots[1])


def test_without_a_checkpoint(tmp_path):
  for folder in (tmp_path, tmp_path / "missing"):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert not list(tmp_path.iterdir())


def test_a_reader_of_the_network_falls_back_too_and_moves_nothing(copied):
  folder, snapshots = copied
  flip(content_of(folder, "network"))
  reported = []
  step, network = Checkpoints(folder).restore_network(abstract()["network"], reported.append)
  assert step == 4 and len(reported) == 1
  assert_same(network, snapshots[0].items["network"])
  assert Checkpoints(folder).steps() == [4, 8]


def test_the_step_of_a_damaged_checkpoint_can_be_saved_again(copied):
  folder, snapshots = copied
  flip(content_of(folder, "replay"))
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), lambda line: None)
  checkpoints.save(snapshots[1])
  restored, reported = read(folder)
  assert not reported
  assert_same(restored, snapshots[1])


class Trap:
  """Creates a folder when it is unpickled."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_nothing_is_pickled_or_unpickled(tmp_path):
  trap = np.empty(1, object)
  trap[0] = Trap(tmp_path / "sprung")
  with pytest.raises(CheckpointError):
    write(tmp_path / "run", snapshot(8, actor={"trap": trap}))
  assert Checkpoints(tmp_path / "run").steps() == [] and not (tmp_path / "sprung").exists()


# --- Failing to write ---


def failing(owner, name, error):
  """Makes a function of a module fail."""

  def fail(monkeypatch):
    def refuse(*args, **kwargs):
      raise OSError(error, os.strerror(error))

    monkeypatch.setattr(owner, name, refuse)
    return monkeypatch.undo

  return fail


def unwritable_files(monkeypatch):
  fsync = os.fsync

  def refuse(file):
    if stat.S_ISREG(os.fstat(file).st_mode):
      raise OSError(errno.EIO, "can't write back")
    fsync(file)

  monkeypatch.setattr(os, "fsync", refuse)
  return monkeypatch.undo


def limit_files(size):
  """Limits the size of files: Orbax's own threads fail as on a full disk."""

  def fail(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  return fail


def nearly_full_disk(monkeypatch):
  usage = types.SimpleNamespace(free=2**20 + 100)  # the margin, and too little for the arrays
  monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
  return monkeypatch.undo


FAILURES = {
  "nearly full disk": nearly_full_disk,
  "writing back": unwritable_files,
  "orbax": failing(checkpoint.ocp.Checkpointer, "save", errno.EIO),
  "no space at all": limit_files(0),
  "little space": limit_files(600),
}


def test_what_a_killed_save_left_is_removed_before_a_full_disk_refuses_the_next(
  copied, monkeypatch
):
  folder, _ = copied
  leftover = folder / "checkpoints" / "8-33.orbax-checkpoint-tmp"
  leftover.mkdir()
  free = types.SimpleNamespace(free=2**30)
  monkeypatch.setattr(
    checkpoint.shutil,
    "disk_usage",
    lambda _: types.SimpleNamespace(free=0) if leftover.exists() else free,
  )
  Checkpoints(folder).save(snapshot(12, head=11))
  assert Checkpoints(folder).steps() == [4, 8, 12]


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_save_that_fails_harms_nothing(copied, monkeypatch, fail):
  """Earlier checkpoints stay; the same can be saved again, and no partial files are left."""
  folder, snapshots = copied
  newer = snapshot(8, head=11)
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  restore = fail(monkeypatch)
  try:
    with pytest.raises(CheckpointError, match=r"saving to .*checkpoints failed: \w+"):
      checkpoints.save(newer)
  finally:
    restore()
  assert checkpoints.steps() == [4, 8]
  shutil.copytree(folder, folder.with_name("killed"))  # as if the process had ended here
  assert_same(read(folder.with_name("killed"))[0], snapshots[1])
  checkpoints.save(newer)
  names = sorted(path.name for path in (folder / "checkpoints").iterdir())
  assert names == ["4-12", "8-24", "8-33"]
  restored, reported = read(folder)
  assert not reported
  assert_same(restored, newer)
