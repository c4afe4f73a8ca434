"""Tests of the journal's file: other and damaged files are refused, and rows keep their bytes."""

import contextlib
import sqlite3
import zlib

import numpy as np
import pytest

from journals import (
  ACTIONS,
  EXTRA,
  NONE,
  edit,
  expected,
  opened,
  play,
  play_all,
  read,
  rows,
)
from speedyzero_jax.replay.journal import JournalDamage, JournalError
from speedyzero_jax.replay.schema import make_schema


def test_a_journal_of_other_columns_is_refused_and_left_alone(tmp_path):
  with opened(tmp_path / "j") as journal:
    journal.append(play(0, 0))
    journal.flush()
  before = (tmp_path / "j").read_bytes()
  other = (
    make_schema((1, 1, 3), "float32", ACTIONS, EXTRA),
    make_schema((1, 1, 3), "uint8", ACTIONS),
  )
  for change in ({"lanes": 2}, *({"schema": schema} for schema in other)):
    with pytest.raises(JournalError, match="start a new run"), opened(tmp_path / "j", **change):
      pass
    assert (tmp_path / "j").read_bytes() == before


def test_flushed_steps_survive_a_power_failure(tmp_path):
  """As SQLite guarantees with these settings; a killed process would not lose unsynced data."""
  with opened(tmp_path / "j") as journal:
    found = [journal._db.execute(f"PRAGMA {x}").fetchone() for x in ("journal_mode", "synchronous")]
  assert found == [("wal",), (2,)]  # 2: FULL


def test_other_files_are_refused_and_left_alone(tmp_path):
  text, other, older = tmp_path / "text", tmp_path / "other", tmp_path / "older"
  text.write_bytes(b"not a database" * 100)
  with contextlib.closing(sqlite3.connect(other)) as database:
    database.execute("CREATE TABLE mine (x)")
  with opened(older):
    pass
  edit(older, "UPDATE form SET json = replace(json, '3', '2')")
  for path, message in (
    (text, "not a database"),
    (other, "no such table"),
    (older, "another version"),
  ):
    before = path.read_bytes()
    with pytest.raises(JournalError, match=message) as caught, opened(path):
      pass
    assert str(path) in str(caught.value) and path.read_bytes() == before


@pytest.fixture
def three_rows(tmp_path):
  """Path of a journal with rows of 2 slots in lane-major order within each flush."""
  with opened(tmp_path / "j") as journal:
    for t in range(0, 6, 2):
      journal.append(play_all(t, 2))
      journal.flush()
  return tmp_path / "j"


@pytest.mark.parametrize("column", ["slots", "frames", "crc", "start", "size", "lane"])
def test_a_damaged_row_is_named(three_rows, column):
  ((number, value),) = rows(three_rows, f"id, {column}", "lane = 1 AND start = 2")
  wrong = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1]) + value[1:]
  edit(three_rows, f"UPDATE segment SET {column} = ? WHERE id = ?", wrong, number)
  with opened(three_rows) as journal:
    named = rf"journal {three_rows}: lane 1, slot 2 is"
    for call in (read, lambda j: j.verify(NONE, NONE + 6)):
      with pytest.raises(JournalDamage, match=named):
        call(journal)
    if column in ("slots", "frames", "crc"):  # slots of other rows can still be used
      assert read(journal, np.array([0, 4, 0])) == expected([0, 4, 0], [6, 6, 6])
      journal.verify(np.array([0, 4, 0]), np.array([6, 6, 6]))
      journal.continue_from(np.array([0, 2, 0]), drop=True)
      assert read(journal) == expected([0, 0, 0], [0, 2, 0])


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
  """With a flipped bit anywhere, either the slots read are right or a JournalError is raised."""
  path, rng, noticed = tmp_path / "j", np.random.default_rng(0), 0
  with opened(path) as journal:
    for t in range(20):
      journal.append(play_all(2 * t, 2))
      journal.flush()
  right, good = expected(NONE, NONE + 40), path.read_bytes()
  for at in rng.integers(0, len(good), 300):
    bad = bytearray(good)
    bad[at] ^= 1 << rng.integers(8)
    path.write_bytes(bad)
    try:
      with opened(path) as journal:
        journal.verify(NONE, NONE + 40)  # as a run does before it uses a checkpoint
        found = read(journal)
    except JournalError:
      noticed += 1
    else:
      assert found == right, at
  assert noticed > 30


def test_rows_keep_their_bytes(tmp_path):
  """Fixed blobs of version 3, so that later code can read files written now."""
  slots = play(1, 0, 3)
  with opened(tmp_path / "j") as journal:
    journal.append(slots)
    journal.flush()
  ((*place, crc, stored, frames),) = rows(tmp_path / "j", "lane, start, size, crc, slots, frames")
  names = ("first", "terminated", "truncated", "action", "reward", "step", "policy", "visits")
  assert place == [1, 0, 3]
  assert stored == b"".join(slots[name].tobytes() for name in names)
  f = slots["frame"]
  assert zlib.decompress(frames) == np.stack([f[0], f[0] ^ f[1], f[1] ^ f[2]]).tobytes()
  assert crc == zlib.crc32(np.array([1, 0, 3], "<i8").tobytes() + stored + frames)
