"""Checkpoints: back bit for bit; damage and failing saves are noticed, named and survived."""

import errno
import os
import re
import resource
import shutil
import zipfile

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
from speedyzero_jax.run import checkpoint
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints


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
  assert restored.items["replay"]["priority"].flags.writeable
  with np.load(folder / "checkpoints/8-24.npz") as arrays:  # NumPy alone
    kernel = snapshots[-1].items["network"].params["h"]["kernel"]
    np.testing.assert_array_equal(arrays["network/params/h/kernel"], kernel)


def test_items_without_arrays(tmp_path):
  one = snapshot(5, weights={}, actor={}, replay={"empty": np.zeros((0, 2), np.int8)})
  write(tmp_path, one)
  restored = Checkpoints(tmp_path).restore(abstract() | {"weights": {}, "actor": {}}, pytest.fail)
  assert_same_tree(restored, one)


def test_the_newest_few_are_kept_and_those_that_are_needed(tmp_path):
  write(tmp_path, *(snapshot(step, tail=step // 2) for step in (2, 4, 6, 8, 10)), keep=2)
  checkpoints = Checkpoints(tmp_path, 2)
  assert checkpoints.steps() == [8, 10]
  checkpoints.save(snapshot(12), needed=8)
  assert checkpoints.steps() == [8, 10, 12]
  np.testing.assert_array_equal(checkpoints.tails(), [4] * LANES)  # the oldest one's
  (tmp_path / "checkpoints/8-24.npz").write_bytes(b"PK")
  assert checkpoints.tails() is None


def test_one_moment_is_saved_once(tmp_path):
  """A finished run that is resumed, or one that is stopped at once, has its checkpoint already."""
  write(tmp_path, 4)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  write(tmp_path, 4)
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_after_setting_all_aside_the_same_moment_is_saved_again(copied):
  folder, _ = copied
  checkpoints, other = Checkpoints(folder), snapshot(8, network=variables(9))
  checkpoints.set_aside()
  assert checkpoints.steps() == []
  assert names(folder / "damaged") == ["4-12.npz", "8-24.npz"]
  checkpoints.save(other)
  restored, reported = read(folder)
  assert not reported
  assert_same_tree(restored, other)


@pytest.mark.parametrize("change", ["shape", "name"])
def test_another_network_is_refused_by_name(two, change):
  other, reported = abstract(), []
  params = dict(other["network"].params)
  if change == "shape":
    params["h"] = params["h"] | {"kernel": jax.ShapeDtypeStruct((5, 4), np.float32)}
  else:
    del params["scale"]
  other["network"] = Variables(params, other["network"].batch_stats)
  with pytest.raises(CheckpointError, match="none of the 2"):
    Checkpoints(two[0]).restore(other, reported.append)
  assert len(reported) == 2 and "'network" in reported[0]


def test_checkpoints_of_an_earlier_version_are_named_and_left_alone(tmp_path):
  (tmp_path / "checkpoints/8-24").mkdir(parents=True)
  for use in (lambda c: c.restore(abstract(), pytest.fail), Checkpoints.steps):
    with pytest.raises(CheckpointError, match="checkpoints/8-24 was written by an earlier version"):
      use(Checkpoints(tmp_path))


def test_a_checkpoint_whose_slots_are_not_in_the_journal_is_skipped(copied):
  folder, snapshots = copied

  def verify(tails, heads):
    assert (tails == 0).all()
    if heads[0] > 4:
      raise JournalDamage("lane 0, slot 4 is missing")

  reported = []
  restored = Checkpoints(folder).restore(abstract(), reported.append, verify=verify)
  assert len(reported) == 1 and "checkpoints/8-24" in reported[0] and "slot 4" in reported[0]
  assert_same_tree(restored, snapshots[0])
  assert names(folder / "damaged") == ["8-24.npz"]


def test_without_a_checkpoint(tmp_path):
  for folder in (tmp_path, tmp_path / "missing"):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert not list(tmp_path.iterdir())


# --- Damage ---


def test_every_damaged_byte_and_every_truncation_is_named_or_harmless(copied):
  """Readers raise many types of exceptions: each must lead to the checkpoint before."""
  folder, snapshots = copied
  path = folder / "checkpoints/8-24.npz"
  content, refused = path.read_bytes(), 0
  with zipfile.ZipFile(path) as file:
    ends = [info.header_offset for info in file.infolist()[1:]] + [file.start_dir]
  flips = [(at, content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
           for at in [*range(0, len(content), 101), *(end - 1 for end in ends)]]  # fmt: skip
  cuts = [(0, content[:at]) for at in range(0, len(content), 1999)]
  for at, damaged in flips + cuts:
    path.write_bytes(damaged)
    reported = []
    restored = Checkpoints(folder).restore(abstract(), reported.append)
    assert_same_tree(restored, snapshots[restored.step == 8])
    if restored.step == 4:
      (line,) = reported
      assert str(path) in line and "\n" not in line
      (folder / "damaged/8-24.npz").unlink()
      refused += 1
    else:
      assert at + 1 not in ends  # the last byte of an array
  assert refused > len(cuts) + len(flips) / 2


def test_nothing_is_moved_while_there_is_nothing_better(copied):
  folder, reported = copied[0], []
  for path in (folder / "checkpoints").iterdir():
    path.write_bytes(path.read_bytes()[:-99])
  with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .*checkpoints can be"):
    Checkpoints(folder).restore(abstract(), reported.append)
  assert len(reported) == 2 and Checkpoints(folder).steps() == [4, 8]


@pytest.mark.parametrize(
  "error",
  [MemoryError("no memory"), OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "no"),
   JournalError("disk I/O error")],
  ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_a_failing_machine_is_no_damage(two, monkeypatch, error):
  """The newest checkpoint may be whole: it is named, not set aside, and no older one is used."""

  def fail(*args, **kwargs):
    raise error

  monkeypatch.setattr(checkpoint, "_read", fail)
  expected = rf"checkpoints/8-24.npz, which may be whole: .*{re.escape(str(error))}"
  with pytest.raises(CheckpointError, match=expected):
    Checkpoints(two[0]).restore(abstract(), pytest.fail)
  assert Checkpoints(two[0]).steps() == [4, 8]


def test_a_file_that_cannot_be_opened_is_no_damage(copied):
  """A loop of links works as root."""
  path = copied[0] / "checkpoints/8-24.npz"
  path.unlink()
  path.symlink_to(path.name)
  with pytest.raises(CheckpointError, match="which may be whole: OSError"):
    Checkpoints(copied[0]).restore(abstract(), pytest.fail)


def test_one_item_alone_is_read_without_the_rest_and_nothing_is_moved(copied):
  folder, snapshots = copied
  for damaged, step in (("replay/inserted", 8), ("network/params/scale", 4)):
    path = folder / "checkpoints/8-24.npz"
    with zipfile.ZipFile(path) as file:
      place = file.getinfo(f"{damaged}.npy").header_offset + 150  # in the array's own header
    flip(path, at=place / path.stat().st_size)
    reported = []
    found = Checkpoints(folder).restore_item("network", abstract()["network"], reported.append)
    assert found[0] == step and len(reported) == (step == 4)
    assert_same_tree(found[1], snapshots[step == 8].items["network"])
  assert Checkpoints(folder).steps() == [4, 8]


class Trap:
  """Makes a folder when it is unpickled."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_nothing_is_unpickled(tmp_path):
  trap = np.empty(1, object)
  trap[0] = Trap(tmp_path / "sprung")
  write(tmp_path / "run", snapshot(8, actor={"trap": trap}))
  with pytest.raises(CheckpointError):
    read(tmp_path / "run")
  assert not (tmp_path / "sprung").exists()


# --- Failing to write ---


@pytest.mark.parametrize("size", [0, 600])
def test_a_save_that_fails_harms_nothing(copied, size):
  """Earlier checkpoints stay; the same can be saved again, and nothing half-written is left."""
  folder, snapshots = copied
  newer, checkpoints = snapshot(8, head=11), Checkpoints(folder)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # as a full disk
  try:
    with pytest.raises(CheckpointError, match=r"saving to .*checkpoints failed: OSError"):
      checkpoints.save(newer)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert names(folder / "checkpoints") == ["4-12.npz", "8-24.npz"]
  assert_same_tree(read(folder)[0], snapshots[1])
  checkpoints.save(newer)
  assert names(folder / "checkpoints") == ["4-12.npz", "8-24.npz", "8-33.npz"]
  assert_same_tree(read(folder)[0], newer)
