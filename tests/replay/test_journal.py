"""Everything acknowledged is there, once and in order, whatever became of the process, the disk or some bytes."""

import contextlib
import itertools
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_replay import assert_same, make_replay

from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.types import Segment

LANES = 3
PIXELS = (32, 32, 3)


def opened(
  path,
  lanes=LANES,
  frame_shape=reference.FRAME_SHAPE,
  frame_dtype=np.uint8,
  actions=reference.NUM_ACTIONS,
):
  """A journal that is closed at the end of a `with`."""
  return contextlib.closing(Journal(path, lanes, frame_shape, frame_dtype, actions))


def noisy(lane: int, start: int, n: int = 1) -> Segment:
  """Slots that nothing compresses; each is a function of its lane and time alone."""
  rng = [np.random.default_rng([lane, t]) for t in range(start, start + n)]
  return Segment(
    lane=lane,
    start=start,
    frame=np.stack([r.integers(0, 256, PIXELS, np.uint8) for r in rng]),
    first=np.arange(start, start + n) == 0,
    terminated=np.zeros(n, bool),
    truncated=np.zeros(n, bool),
    action=np.array([r.integers(reference.NUM_ACTIONS) for r in rng], np.int32),
    reward=np.array([r.normal() for r in rng], np.float32),
    policy=np.array([r.random(reference.NUM_ACTIONS) for r in rng], np.float32),
    search_value=np.array([r.normal() for r in rng], np.float32),
    value=np.array([r.normal() for r in rng], np.float32),
    step=np.arange(start, start + n, dtype=np.int32),
  )


def by_slot(segments):
  """{(lane, time): the bytes of all of a slot}; no slot may come twice."""
  slots = {}
  for segment in segments:
    for i in range(len(segment.frame)):
      name = segment.lane, segment.start + i
      assert name not in slots
      slots[name] = tuple(array[i].tobytes() for array in segment[2:])
  return slots


def flat(batches):
  return itertools.chain.from_iterable(batches)


def everything(journal):
  return by_slot(flat(journal.read(np.zeros(len(journal.heads), int))))


def extents(batches):
  return [[(s.lane, s.start, len(s.frame)) for s in segments] for segments in batches]


cuts = st.lists(
  st.lists(
    st.tuples(st.integers(0, LANES - 1), st.integers(1, 5)),
    min_size=1,
    max_size=5,
    unique_by=lambda c: c[0],
  ),
  max_size=8,
)


@given(cuts, st.integers(0, 2**32), st.data())
def test_round_trip(appends, seed, data):
  stream = reference.Stream(LANES, seed)
  written = [[stream.segment(lane, n, step) for lane, n in cut] for step, cut in enumerate(appends)]
  slot = st.lists(st.integers(0, 30), min_size=LANES, max_size=LANES).map(np.array)
  start, stop = data.draw(slot), data.draw(st.none() | slot)
  reopen = data.draw(st.integers(0, len(written)))
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "journal"
    with opened(path) as journal:
      for segments in written[:reopen]:
        journal.append(segments)
    with opened(path) as journal:
      for segments in written[reopen:]:
        journal.append(segments)
      assert journal.heads.tolist() == stream.heads and journal.heads.dtype == np.int64
      read = list(journal.read(start, stop))
  end = np.array(stream.heads) if stop is None else stop
  wanted = {
    name: slot
    for name, slot in by_slot(flat(written)).items()
    if start[name[0]] <= name[1] < end[name[0]]
  }
  assert by_slot(flat(read)) == wanted
  for segments in read:
    for segment in segments:
      for name, array in zip(Segment._fields[2:], segment[2:], strict=True):
        assert array.dtype == getattr(written[0][0], name).dtype
  # The order, and what was appended together.
  expected = [
    [(s.lane, max(s.start, start[s.lane]), min(s.start + len(s.frame), end[s.lane])) for s in w]
    for w in written
  ]
  expected = [
    [(lane, begin, stop - begin) for lane, begin, stop in row if begin < stop] for row in expected
  ]
  assert extents(read) == [row for row in expected if row]


def test_floats_survive_bit_for_bit(tmp_path):
  rng = np.random.default_rng(0)
  n = 4
  odd = np.array([np.nan, -0.0, np.inf, np.float32(1e-42)], np.float32)
  segment = noisy(0, 0, n)._replace(
    frame=rng.normal(size=(n, 1, 1, 5)).astype(np.float32), value=odd
  )
  with opened(tmp_path / "j", frame_shape=(1, 1, 5), frame_dtype=np.float32) as journal:
    journal.append([segment])
    (((read,),)) = journal.read(np.zeros(LANES, int))
  assert read.frame.dtype == np.float32 and by_slot([read]) == by_slot([segment])


def test_a_replay_fed_from_it_is_the_one_that_was_journalled(tmp_path):
  stream, rng = reference.Stream(2, 5), np.random.default_rng(0)
  original, restored = make_replay(40), make_replay(40)
  with opened(tmp_path / "j", lanes=2) as journal:
    for step in range(60):
      segments = [
        stream.segment(int(l), int(rng.integers(1, 4)), step)
        for l in rng.permutation(2)[: step % 2 + 1]
      ]
      journal.append(segments)
      original.append_many(segments)
    for segments in journal.read(np.zeros(2, int)):
      restored.append_many(segments)
  assert_same(original.state_dict(), restored.state_dict())
  assert_same(original.export_slots(np.zeros(2)), restored.export_slots(np.zeros(2)))


def test_a_lane_that_comes_twice_in_an_append_comes_in_two_lists(tmp_path):
  with opened(tmp_path / "j") as journal:
    stream = reference.Stream(LANES, 0)
    journal.append([stream.segment(lane, 1) for lane in (0, 1, 0, 2, 0)])
    journal.append([stream.segment(1, 1)])
    read = extents(journal.read(np.zeros(LANES, int)))
  assert read == [[(0, 0, 1), (1, 0, 1)], [(0, 1, 1), (2, 0, 1)], [(0, 2, 1)], [(1, 1, 1)]]


def test_reading_goes_on_while_more_is_appended_and_does_not_show_it(tmp_path):
  stream = reference.Stream(1, 0)
  with opened(tmp_path / "j", lanes=1) as journal:
    journal.append([stream.segment(0, 2)])
    journal.append([stream.segment(0, 2)])
    reading = journal.read(np.zeros(1, int))
    first = next(reading)
    journal.append([stream.segment(0, 2)])
    assert extents([first, *reading]) == [[(0, 0, 2)], [(0, 2, 2)]]


def test_what_does_not_follow_is_refused_as_a_whole(tmp_path):
  stream = reference.Stream(LANES, 0)
  good, later = stream.segment(0, 2), stream.segment(0, 1)
  other = stream.segment(1, 1)
  with opened(tmp_path / "j") as journal:
    for wrong, message in (
      ([other, later], "lane 0: start must be the lane's head 0, got 2"),
      ([good, good], "start must be the lane's head 2, got 0"),
      ([other, good._replace(lane=LANES)], r"lane must be in 0\.\.2, got 3"),
      (
        [other, good._replace(reward=good.reward.astype(np.float64))],
        r"reward must be float32\[2\], got float64\[2\]",
      ),
      (
        [other, good._replace(policy=good.policy[:, :2])],
        r"policy must be float32\[2, 3\], got float32\[2, 2\]",
      ),
      ([other, good._replace(frame=good.frame[:, 0])], r"frame must be uint8\[2, 1, 1, 3\]"),
      ([other, Segment(0, 0, *(array[:0] for array in good[2:]))], "at least one slot"),
    ):
      with pytest.raises(ValueError, match=message):
        journal.append(wrong)
      assert not journal.heads.any() and not everything(journal)
    journal.append([])
    journal.append([good, later, other])
    with pytest.raises(ValueError, match="start must be"):
      journal.append([good])
    for start in ([0, 0], [0.0, 0.0, 0.0], [0, -1, 0]):
      with pytest.raises(ValueError, match=r"start must be \[3\] slots"):
        journal.read(np.array(start))
    assert journal.heads.tolist() == stream.heads


@given(cuts, st.integers(0, 2**32), st.data())
def test_truncate_and_evict(appends, seed, data):
  stream = reference.Stream(LANES, seed)
  written = [stream.segment(lane, n) for cut in appends for lane, n in cut]
  slots = by_slot(written)
  tails = np.array([data.draw(st.integers(0, head)) for head in stream.heads])
  heads = np.array(
    [data.draw(st.integers(tail, head)) for tail, head in zip(tails, stream.heads, strict=True)]
  )
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "journal"
    with opened(path) as journal:
      journal.append(written)
      journal.evict(tails)
      journal.evict(np.zeros(LANES, int))  # brings nothing back
      journal.truncate(heads)
    rows = sqlite3.connect(path)
    assert all(
      start + size > tails[lane]
      for lane, start, size in rows.execute("SELECT lane, start, size FROM segment")
    )
    rows.close()
    with opened(path) as journal:
      assert journal.heads.tolist() == heads.tolist() and journal.tails.tolist() == tails.tolist()
      assert everything(journal) == {
        (l, t): s for (l, t), s in slots.items() if tails[l] <= t < heads[l]
      }
      again = reference.Stream(LANES, seed + 1).segment(1, 1)._replace(start=int(heads[1]))
      journal.append([again])
      assert everything(journal)[1, heads[1]] == by_slot([again])[1, heads[1]]


@settings(max_examples=15)
@given(cuts, st.integers(0, 2**32), st.lists(st.integers(0, 30), min_size=LANES, max_size=LANES))
def test_begin_at(appends, seed, begin):
  """Lanes that are elsewhere further on go on from there; the others keep what they have. Also after reopening."""
  stream, begin = reference.Stream(LANES, seed), np.array(begin)
  written = [[stream.segment(lane, n, step) for lane, n in cut] for step, cut in enumerate(appends)]
  old = np.array(stream.heads)
  kept = {
    name: slot for name, slot in by_slot(flat(written)).items() if begin[name[0]] <= old[name[0]]
  }
  with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "journal"
    with opened(path) as journal:
      for segments in written:
        journal.append(segments)
      journal.begin_at(begin)
      assert journal.heads.tolist() == np.maximum(old, begin).tolist()
      assert journal.tails.tolist() == np.where(begin > old, begin, 0).tolist()
      assert everything(journal) == kept
      journal.begin_at(begin)
    with opened(path) as journal:
      assert (
        journal.heads.tolist() == np.maximum(old, begin).tolist() and everything(journal) == kept
      )
      more = [
        stream.segment(lane, 2)._replace(start=int(head)) for lane, head in enumerate(journal.heads)
      ]
      journal.append(more)
    with opened(path) as journal:
      assert everything(journal) == kept | by_slot(more)


def test_bounds_that_make_no_sense_change_nothing(tmp_path):
  stream = reference.Stream(2, 0)
  with opened(tmp_path / "j", lanes=2) as journal:
    journal.append([stream.segment(0, 5), stream.segment(1, 5)])
    before = everything(journal)
    journal.evict(np.array([2, 0]))
    for call, wrong in (
      (journal.evict, [0, 6]),
      (journal.truncate, [1, 5]),
      (journal.truncate, [5, 6]),
    ):
      with pytest.raises(ValueError, match="got"):
        call(np.array(wrong))
    assert everything(journal) == {
      name: slot for name, slot in before.items() if name not in ((0, 0), (0, 1))
    }


def test_evicted_space_is_used_again(tmp_path):
  path = tmp_path / "j"
  with opened(path, frame_shape=PIXELS) as journal:
    for t in range(1200):
      journal.append([noisy(0, t)])
      if t % 50 == 0:
        journal.evict(np.array([max(0, t - 50), 0, 0]))
  assert path.stat().st_size < 200 * noisy(0, 0).frame.nbytes


# --- processes

_WRITER = """
import os, sys
sys.path[:0] = [sys.argv[2], os.path.join(sys.argv[2], "tests", "support")]
import numpy as np
from test_journal import LANES, PIXELS, noisy, opened

def collect():
  with opened(sys.argv[1], frame_shape=PIXELS) as journal:
    while True:
      heads = journal.heads
      journal.append([noisy(lane, int(head), 1 + (lane + int(head)) % 3) for lane, head in enumerate(heads)])
      os.write(1, b"%d %d %d\\n" % tuple(journal.heads))

for _ in sys.stdin:
  child = os.fork()
  if not child:
    collect()
  os.write(1, b"pid %d\\n" % child)
  os.waitpid(child, 0)
  os.write(1, b"dead\\n")
"""


def test_killed_in_the_middle_of_appends(tmp_path):
  """kill -9 at any moment: all that was acknowledged is there, whole appends, in order, nothing twice."""
  path, kills, rng = tmp_path / "journal", 14, np.random.default_rng(0)
  root = str(Path(__file__).parents[2])
  # One process that imports, and forks those that are killed: an interpreter for each would take a second to start.
  command = [sys.executable, "-W", "ignore", "-c", _WRITER, str(path), root]
  written, heads, appends = {}, np.zeros(LANES, int), 0
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  ) as parent:
    for _ in range(kills):
      parent.stdin.write("next\n")
      parent.stdin.flush()
      child = int(parent.stdout.readline().removeprefix("pid"))
      acknowledged, before = heads, heads
      wanted = int(rng.integers(0, 50))
      for _ in range(wanted):
        acknowledged = np.array(parent.stdout.readline().split(), int)
      time.sleep(rng.random() * 0.004)  # anywhere in the next append
      os.kill(child, signal.SIGKILL)
      for line in iter(parent.stdout.readline, "dead\n"):
        acknowledged = np.array(line.split(), int)
      with opened(path, frame_shape=PIXELS) as journal:
        heads = journal.heads
        read = list(journal.read(np.zeros(LANES, int)))
      assert (heads >= acknowledged).all() and (acknowledged >= before).all()
      assert (heads - acknowledged <= 3).all()  # at most the one append that was not acknowledged
      assert all(
        [segment.lane for segment in segments] == list(range(LANES)) for segments in read
      )  # in one piece
      for lane in np.flatnonzero(heads > before):
        written |= by_slot([noisy(int(lane), int(before[lane]), int(heads[lane] - before[lane]))])
      assert by_slot(flat(read)) == written
      appends += wanted
    parent.stdin.close()
    assert parent.wait() == 0
  assert appends > 10 * kills


def test_a_second_opener_is_told(tmp_path):
  path = tmp_path / "journal"
  script = (
    "import sys; sys.path.insert(0, sys.argv[2])\n"
    "from speedyzero_jax.replay.journal import Journal, JournalError\n"
    "try:\n  Journal(sys.argv[1], 3, (1, 1, 3), 'uint8', 3)\n"
    "except JournalError as error:\n  print(error)\n"
  )
  other = [sys.executable, "-c", script, str(path), str(Path(__file__).parents[2])]
  with opened(path) as journal:
    said = subprocess.run(other, capture_output=True, text=True, check=True).stdout
    assert said == f"journal {path} can't be opened: it is in use, probably by another process\n"
    with pytest.raises(JournalError, match="in use"):
      Journal(path, LANES, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS)
    journal.append([reference.Stream(LANES, 0).segment(0, 1)])  # and is no worse for it
  assert subprocess.run(other, capture_output=True, text=True, check=True).stdout == ""


# --- disks


@contextlib.contextmanager
def small_disk(folder):
  """2 MB of memory mounted at a folder, where the system lets us."""
  mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
  if (
    shutil.which("mount") is None
    or subprocess.run(mount, capture_output=True, check=False).returncode
  ):
    pytest.skip("may not mount a file system")
  try:
    yield
  finally:
    subprocess.run(["umount", str(folder)], check=True)


def append_until_it_fails(journal, limit=10_000):
  """Appends acknowledged before a JournalError, which is returned with them."""
  for done in range(limit):
    try:
      journal.append([noisy(lane, int(head)) for lane, head in enumerate(journal.heads)])
    except JournalError as error:
      return done, str(error)
  raise AssertionError("never failed")


def check_all_noisy(journal):
  assert everything(journal) == by_slot(
    noisy(lane, 0, int(head)) for lane, head in enumerate(journal.heads) if head
  )


def test_full_disk(tmp_path):
  with small_disk(tmp_path):
    path, filler = tmp_path / "journal", tmp_path / "filler"
    filler.write_bytes(bytes(500_000))
    with opened(path, frame_shape=PIXELS) as journal:
      done, message = append_until_it_fails(journal)
      assert done > 10 and message == f"journal {path} can't be written: database or disk is full"
      assert journal.heads.tolist() == [done] * LANES
      check_all_noisy(journal)
      assert append_until_it_fails(journal, 3)[0] == 0  # still full
      filler.unlink()
      more, _ = append_until_it_fails(journal)
      assert more > 10
      check_all_noisy(journal)
    with opened(path, frame_shape=PIXELS) as journal:  # with what was left of space
      assert journal.heads.tolist() == [done + more] * LANES
      check_all_noisy(journal)


def test_failing_writes(tmp_path):
  """The system refuses to let the file grow, as it would for a quota; then it lets it again."""
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with opened(tmp_path / "journal", frame_shape=PIXELS) as journal:
    journal.append([noisy(lane, 0) for lane in range(LANES)])
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
      done, message = append_until_it_fails(journal)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done > 1 and str(tmp_path / "journal") in message and "disk I/O error" in message
    assert journal.heads.tolist() == [1 + done] * LANES
    check_all_noisy(journal)
    journal.append([noisy(lane, 1 + done) for lane in range(LANES)])
  with opened(tmp_path / "journal", frame_shape=PIXELS) as journal:
    assert journal.heads.tolist() == [2 + done] * LANES
    check_all_noisy(journal)


def test_no_folder_and_a_closed_journal(tmp_path):
  with pytest.raises(JournalError, match="nowhere/j can't be opened"):
    Journal(
      tmp_path / "nowhere" / "j", LANES, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS
    )
  with opened(tmp_path / "j") as journal:
    journal.close()
    with pytest.raises(JournalError, match="can't be written"):
      journal.append([reference.Stream(LANES, 0).segment(0, 1)])


# --- what is in the file


@pytest.mark.parametrize(
  "change", [{"lanes": 2}, {"frame_shape": (1, 3, 1)}, {"frame_dtype": np.float32}, {"actions": 4}]
)
def test_another_form_is_refused_and_both_are_named(tmp_path, change):
  with opened(tmp_path / "j") as journal:
    journal.append([reference.Stream(LANES, 0).segment(0, 1)])
  before = (tmp_path / "j").read_bytes()
  with pytest.raises(JournalError) as caught, opened(tmp_path / "j", **change):
    pass
  name, value = next(iter(change.items()))
  said = {
    "actions": '"num_actions": 4',
    "frame_dtype": '"<f4"',
    "lanes": '"lanes": 2',
    "frame_shape": "[1, 3, 1]",
  }[name]
  assert str(tmp_path / "j") in str(caught.value) and said in str(caught.value), value
  assert '{"lanes": 3, "frame_shape": [1, 1, 3], "frame_dtype": "|u1", "num_actions": 3}' in str(
    caught.value
  )
  assert (tmp_path / "j").read_bytes() == before


def test_other_files_are_refused_and_left_alone(tmp_path):
  text, other, newer = tmp_path / "text", tmp_path / "other", tmp_path / "newer"
  text.write_bytes(b"not a database" * 100)
  with contextlib.closing(sqlite3.connect(other)) as database:
    database.execute("CREATE TABLE mine (x)")
  with opened(newer):
    pass
  with contextlib.closing(sqlite3.connect(newer)) as database:
    database.execute("PRAGMA user_version=99")
  for path, message in (
    (text, "not a database"),
    (other, "is not a journal"),
    (newer, "schema 99, .* knows schema 1"),
  ):
    before = path.read_bytes()
    with pytest.raises(JournalError, match=message) as caught, opened(path):
      pass
    assert str(path) in str(caught.value) and path.read_bytes() == before


@pytest.mark.parametrize("column", ["slots", "frames", "crc", "start", "size", "lane"])
def test_a_damaged_row_is_named(tmp_path, column):
  path, stream = tmp_path / "j", reference.Stream(LANES, 0)
  with opened(path) as journal:
    for _ in range(3):
      journal.append([stream.segment(lane, 2) for lane in range(LANES)])
  with contextlib.closing(sqlite3.connect(path)) as database:
    number, value = database.execute(
      f"SELECT id, {column} FROM segment WHERE lane = 1 AND start = 2"
    ).fetchone()
    wrong = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1]) + value[1:]
    database.execute(f"UPDATE segment SET {column} = ? WHERE id = ?", (wrong, number))
    database.commit()
  with opened(path) as journal:
    reading = journal.read(np.zeros(LANES, int))
    assert extents([next(reading)]) == [[(0, 0, 2), (1, 0, 2), (2, 0, 2)]]
    with pytest.raises(JournalError) as caught:
      list(reading)
    said = "lane 2, slot 2 is damaged" if column == "lane" else "lane 1, slot 2 is"
    assert f"journal {path}: {said}" in str(caught.value)
    if column in ("slots", "frames", "crc"):  # who doesn't need the row is not troubled by it
      assert len(list(journal.read(np.array([0, 4, 0])))) == 3
      with pytest.raises(JournalError, match="lane 1, slot 2 is damaged"):
        journal.truncate(np.array([0, 3, 0]))
      assert journal.heads.tolist() == stream.heads
      journal.truncate(np.array([0, 2, 0]))
      assert everything(journal).keys() == {(1, 0), (1, 1)}


def test_a_missing_row_is_named(tmp_path):
  path, stream = tmp_path / "j", reference.Stream(LANES, 0)
  with opened(path) as journal:
    for _ in range(3):
      journal.append([stream.segment(lane, 2) for lane in range(LANES)])
  with contextlib.closing(sqlite3.connect(path)) as database:
    database.execute("DELETE FROM segment WHERE lane = 1 AND start = 2")
    database.commit()
  with opened(path) as journal, pytest.raises(JournalError, match="lane 1, slot 2 is missing"):
    list(journal.read(np.zeros(LANES, int)))


def test_any_flipped_bit_is_noticed_or_harmless(tmp_path):
  """Anywhere in the file: what is read is right, or there is a JournalError."""
  path, stream, rng = tmp_path / "j", reference.Stream(LANES, 0), np.random.default_rng(0)
  written = [[stream.segment(lane, 2) for lane in range(LANES)] for _ in range(20)]
  with opened(path) as journal:
    for segments in written:
      journal.append(segments)
  right, good, noticed = by_slot(flat(written)), path.read_bytes(), 0
  for at in rng.integers(0, len(good), 400):
    bad = bytearray(good)
    bad[at] ^= 1 << rng.integers(8)
    path.write_bytes(bad)
    try:
      with opened(path) as journal:
        read = everything(journal)
    except JournalError:
      noticed += 1
    else:
      assert read == right, at
  assert noticed > 50


def test_rows_keep_their_bytes(tmp_path):
  """A file written today must be readable tomorrow: the blobs of schema 1, spelled out."""
  segment = reference.Stream(1, 3).segment(0, 3)
  with opened(tmp_path / "j", lanes=1) as journal:
    journal.append([segment])
  with contextlib.closing(sqlite3.connect(tmp_path / "j")) as database:
    (row,) = database.execute(
      "SELECT batch, lane, start, size, crc, slots, frames FROM segment"
    ).fetchall()
  order = (
    "first",
    "terminated",
    "truncated",
    "action",
    "reward",
    "policy",
    "search_value",
    "value",
    "step",
  )
  slots = b"".join(getattr(segment, name).tobytes() for name in order)
  f = segment.frame
  assert row[:4] == (1, 0, 0, 3) and row[5] == slots
  assert zlib.decompress(row[6]) == np.stack([f[0], f[0] ^ f[1], f[1] ^ f[2]]).tobytes()
  assert row[4] == zlib.crc32(np.array([0, 0, 3], "<i8").tobytes() + slots + row[6])
