"""Tests of checkpoints: exact restoration of saved state."""

import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from same import assert_same
from snapshots import (
  LANES,
  Variables,
  abstract,
  read,
  snapshot,
  variables,
  write,
)
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def test_round_trip(two):
  folder, snapshots = two
  restored, reported = read(folder)
  assert not reported
  assert_same(restored, snapshots[-1])
  assert isinstance(restored.items["optimizer"][1][0], optax.ScaleByAdamState)


def test_the_network_alone_is_read_without_the_rest(copied):
  folder, snapshots = copied
  shutil.rmtree(folder / "checkpoints" / "8-24" / "replay")
  step, network = Checkpoints(folder).restore_network(abstract()["network"], pytest.fail)
  assert step == 8
  assert_same(network, snapshots[-1].items["network"])


def test_orbax_alone_restores_the_network(two):
  folder, snapshots = two
  with ocp.StandardCheckpointer() as checkpointer:
    found = checkpointer.restore(folder / "checkpoints" / "8-24" / "network")
  wanted = snapshots[-1].items["network"]
  assert_same(found, {"params": wanted.params, "batch_stats": wanted.batch_stats})


def test_items_without_arrays(tmp_path):
  items = {
    "weights": {},
    "actor": {},
    "replay": {"empty": np.zeros((0, 2), np.int8)},
  }
  one = snapshot(5, **items)
  write(tmp_path, one)
  restored = Checkpoints(tmp_path).restore(abstract() | {"weights": {}, "actor": {}}, pytest.fail)
  assert_same(restored, one)


def test_the_newest_few_are_kept_and_those_that_are_needed(tmp_path):
  write(tmp_path, 2, 4, 6, 8, 10, keep=2)
  checkpoints = Checkpoints(tmp_path, 2)
  assert checkpoints.steps() == [8, 10]
  checkpoints.save(snapshot(12), needed=8)
  assert checkpoints.steps() == [8, 10, 12]


def test_a_checkpoint_is_on_disk_before_older_ones_are_deleted(tmp_path, monkeypatch):
  synced, fsync, rmtree = set(), os.fsync, shutil.rmtree

  def recorded(file):
    synced.add(os.readlink(f"/proc/self/fd/{file}"))
    fsync(file)

  def remove(path, **options):
    if re.fullmatch(r"\d+-\d+", Path(path).name):
      (newest,) = (folder for folder in tmp_path.glob("checkpoints/6-*"))
      assert {str(file) for file in (newest, newest.parent, *newest.rglob("*"))} <= synced
    rmtree(path, **options)

  monkeypatch.setattr(os, "fsync", recorded)
  monkeypatch.setattr(shutil, "rmtree", remove)
  write(tmp_path, 2, 4, 6, keep=2)
  assert Checkpoints(tmp_path, 2).steps() == [4, 6]


def test_one_moment_is_saved_once(tmp_path):
  """A checkpoint exists already if a finished run is resumed or a resumed run stops at once."""
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
  assert checkpoints.steps() == []
  assert names(folder / "checkpoints" / "damaged") == ["4-12", "8-24"]
  checkpoints.save(other)
  restored, reported = read(folder)
  assert not reported
  assert_same(restored, other)


def test_another_network_is_refused_by_name(two):
  other, reported = abstract(), []
  params = {**other["network"].params, "h": {"kernel": jax.ShapeDtypeStruct((5, 4), np.float32)}}
  other["network"] = Variables(params, other["network"].batch_stats)
  with pytest.raises(CheckpointError, match="none of the 2"):
    Checkpoints(two[0]).restore(other, reported.append)
  assert len(reported) == 2 and "'network'" in reported[0]


def test_the_oldest_slots_that_any_checkpoint_refers_to(tmp_path):
  write(tmp_path, *(snapshot(step, tail=step // 2) for step in (4, 6, 8)), keep=2)
  checkpoints = Checkpoints(tmp_path)
  np.testing.assert_array_equal(checkpoints.tails(), [3] * LANES)
  (tmp_path / "checkpoints" / "6-18" / "meta" / "metadata").write_bytes(b"{")
  assert checkpoints.tails() is None


@pytest.mark.parametrize("kind", ["dangling link", "file"])
def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, kind):
  path = tmp_path / "checkpoints"
  if kind == "file":
    path.write_text("")
  else:
    path.symlink_to("unmounted")
  with pytest.raises(CheckpointError, match=f"can't read {path}"):
    Checkpoints(tmp_path).steps()


def test_a_journal_that_cannot_be_read_is_no_reason_for_an_older_checkpoint(copied):
  def verify(tails, heads):
    raise JournalError("disk I/O error")

  with pytest.raises(CheckpointError, match=r"checkpoints/8-24 \(it may be intact\): .*I/O"):
    Checkpoints(copied[0]).restore(abstract(), pytest.fail, verify=verify)
  assert Checkpoints(copied[0]).steps() == [4, 8]
