"""Tests of the experience journal: content, durability and crash recovery."""

import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forked import ROOT, killing
from journals import (
  LANES,
  LARGE,
  NONE,
  SMALL,
  contents,
  expected,
  opened,
  play,
  play_all,
  read,
  rows,
)
from speedyzero_jax.replay import journal as journal_module
from speedyzero_jax.replay.journal import Journal, JournalDamage, JournalError
from speedyzero_jax.types import Slots

# --- Content ---

parts = st.tuples(st.integers(0, LANES - 1), st.integers(1, 5))  # lane and number of slots
bounds = st.lists(st.integers(0, 12), min_size=LANES, max_size=LANES).map(np.array)
operations = st.lists(
  st.one_of(
    st.tuples(st.just("append"), st.lists(parts, min_size=1, max_size=3)),
    st.tuples(st.sampled_from(["flush", "reopen"])),
    st.tuples(st.sampled_from(["evict", "drop", "keep"]), bounds),
  ),
  max_size=20,
)


@settings(max_examples=100)
@given(operations, bounds, bounds, st.sampled_from([1, 400, 1 << 20]))
def test_it_holds_what_a_list_would(todo, start, stop, buffer_bytes):
  """Any sequence of calls, with buffers of different sizes, against a plain model."""
  tails, heads, model = [0] * LANES, [0] * LANES, {}
  with tempfile.TemporaryDirectory() as folder:
    journal = Journal(Path(folder) / "j", LANES, SMALL, buffer_bytes=buffer_bytes)
    for salt, (name, *args) in enumerate(todo):
      if name == "append":
        played = []  # of a lane perhaps twice, with other lanes in between
        for lane, n in args[0]:
          played.append(play(lane, heads[lane], n, salt=salt))
          heads[lane] += n
        journal.append(Slots.concatenate(played))
        model |= contents(played)
      elif name == "evict":
        limit = np.minimum(args[0], heads)
        journal.evict(limit)
        tails = np.maximum(tails, limit).tolist()
      elif name in ("drop", "keep"):
        lost = journal.continue_from(args[0], drop=name == "drop")
        for lane, head in enumerate(args[0].tolist()):
          apart, count = not tails[lane] <= head <= heads[lane], max(heads[lane] - head, 0)
          assert lost[lane] == (count if apart or name == "drop" else 0)
          if apart:
            tails[lane] = heads[lane] = head
          elif name == "drop":
            heads[lane] = head
      else:
        journal.flush()
        if name == "reopen":
          journal.close()
          journal = Journal(Path(folder) / "j", LANES, SMALL, buffer_bytes=buffer_bytes)
      model = {(l, t): slot for (l, t), slot in model.items() if tails[l] <= t < heads[l]}
      assert journal.heads.tolist() == list(heads) and journal.tails.tolist() == list(tails)
      assert journal.heads.dtype == np.int64
    assert read(journal, tails) == model
    wanted = {(l, t): slot for (l, t), slot in model.items() if start[l] <= t < stop[l]}
    if all((l, t) in model for l in range(LANES) for t in range(start[l], stop[l])):
      journal.verify(start, stop)
      assert read(journal, start, stop) == wanted
    else:
      with pytest.raises(JournalDamage, match="is missing"):
        journal.verify(start, stop)
    journal.close()


@given(st.lists(st.permutations(range(LANES)).map(lambda p: p[: 1 + p[0]]), max_size=8))
def test_appends_flushed_one_by_one_keep_their_order_between_lanes(appends):
  """So a replay, which counts insertions by lane within an append, is rebuilt exactly."""
  heads, order = [0] * LANES, []
  with tempfile.TemporaryDirectory() as folder:
    with opened(Path(folder) / "j") as journal:
      for lanes in appends:
        journal.append(Slots.concatenate([play(lane, heads[lane]) for lane in lanes]))
        journal.flush()
        order += [(lane, heads[lane]) for lane in sorted(lanes)]
        for lane in lanes:
          heads[lane] += 1
    with opened(Path(folder) / "j") as journal:
      assert [(s.lane[0], s.time[0]) for s in journal.read(NONE)] == order


def test_appends_between_flushes_share_a_row(tmp_path):
  with opened(tmp_path / "j") as journal:
    for t in range(20):
      journal.append(play_all(t))
    journal.flush()
  assert rows(tmp_path / "j") == [(lane, 0, 20) for lane in range(LANES)]


def test_a_full_buffer_is_written_without_a_flush(tmp_path):
  """All but about as many bytes as the buffer may hold."""
  with opened(tmp_path / "j", LARGE, buffer_bytes=50_000) as journal:
    for t in range(20):
      journal.append(play_all(t, schema=LARGE))
  with opened(tmp_path / "j", LARGE) as journal:
    assert ((20 - journal.heads) * LANES * LARGE.slot_bytes <= 50_000).all()


@pytest.mark.parametrize("how", ["flushed one by one", "one flush", "one append"])
def test_an_episode_cut_by_a_lost_environment_ends_an_item(tmp_path, how):
  """A frame that begins an episode while the one before is open comes first among what is read."""

  def episode(start, n, **changes):
    slots, no = play(1, start, n), np.zeros(n, bool)
    flags = {"terminated": no, "truncated": no, "first": np.arange(n) == 0, **changes}
    return Slots(slots.lane, slots.time, {**slots.columns, **flags})

  appends = [
    episode(0, 3),
    episode(3, 2, truncated=np.array([False, True])),  # after a lost environment
    episode(5, 2, terminated=np.array([False, True])),
    episode(7, 2),
    episode(9, 1, first=np.array([False])),
    episode(10, 2),  # after a lost environment
  ]
  others = [play(lane, t) for t in range(6) for lane in (0, 2)]  # one episode each
  appends = [Slots.concatenate([s, *others[2 * i : 2 * i + 2]]) for i, s in enumerate(appends)]
  with opened(tmp_path / "j") as journal:
    for slots in [Slots.concatenate(appends)] if how == "one append" else appends:
      journal.append(slots)
      if how == "flushed one by one":
        journal.flush()
    starts = [(s.lane[0], s.time[0]) for s in journal.read(NONE)]
    assert {(1, 0), (1, 3), (1, 10)} <= set(starts)
    if how != "flushed one by one":
      assert sorted(starts) == [(0, 0), (1, 0), (1, 3), (1, 10), (2, 0)]


def test_callers_may_reuse_their_arrays(tmp_path):
  with opened(tmp_path / "j") as journal:
    slots = play_all(0, 2)
    wanted = contents([slots])
    journal.append(slots)
    for array in (slots.lane, slots.time, *slots.columns.values()):
      array[:] = 1
    assert read(journal) == wanted


def test_what_does_not_follow_is_refused_as_a_whole(tmp_path):
  good, other = play(0, 0, 2), play(1, 0)
  with opened(tmp_path / "j") as journal:
    for wrong, message in (
      ([other, play(0, 2)], "lane 0 must .* expected slot 0, got 2"),
      ([good, other, good], "lane 0 must .* expected slot 2, got 0"),
      ([good, other, play(0, 3)], "lane 0 must .* expected slot 2, got 3"),
      ([play(0, 1), other, play(0, 0)], "lane 0 must .* expected slot 0, got 1"),
      ([good, play(LANES, 0)], "lanes must be in 0..2, got 0..3"),
      ([good.select(slice(0))], "at least one slot"),
    ):
      with pytest.raises(ValueError, match=message):
        journal.append(Slots.concatenate(wrong))
      assert not journal.heads.any() and not read(journal)
    journal.append(Slots.concatenate([good, other, play(0, 2)]))
    assert read(journal) == expected([0, 0, 0], [3, 1, 0])


def test_evicted_space_is_used_again(tmp_path):
  with opened(tmp_path / "j", LARGE) as journal:
    for t in range(600):
      journal.append(play(0, t, schema=LARGE))
      journal.flush()
      if t % 50 == 0:
        journal.evict(np.array([max(0, t - 50), 0, 0]))
  assert (tmp_path / "j").stat().st_size < 200 * LARGE.slot_bytes


# --- Threads and processes ---


@pytest.mark.parametrize(
  "call",
  [
    lambda journal: journal.append(play(0, 2)),
    Journal.flush,
    lambda journal: journal.continue_from(NONE, drop=True),
    lambda journal: journal.evict(np.array([1, 0, 0])),
    lambda journal: journal.heads,
    lambda journal: journal.tails,
  ],
)
def test_a_call_waits_while_the_lock_is_held(tmp_path, call):
  with opened(tmp_path / "j") as journal:
    journal.append(play(0, 0, 2))
    journal.flush = lambda: None  # it would wait in place of those that call it
    begun, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (begun.set(), call(journal), done.set()))
    with journal._lock:
      thread.start()
      assert begun.wait(10) and not done.wait(0.05)
    thread.join(10)
    assert done.is_set()


_WRITER = """
import os
import numpy as np
from journals import LANES, LARGE, opened, play_all

def work(path):
  with opened(path, LARGE, buffer_bytes=30_000) as journal:
    while True:
      for _ in range(3):
        heads = journal.heads
        journal.append(play_all(heads, 1 + (np.arange(LANES) + heads) % 3, schema=LARGE))
      journal.flush()
      os.write(1, b"%d %d %d\\n" % tuple(journal.heads))
"""


def test_killed_in_the_middle_of_appends_and_flushes(tmp_path):
  """After kill -9 at any moment, all flushed slots are there, in order and without repetition."""
  path, rng = tmp_path / "journal", np.random.default_rng(0)
  heads, flushes = NONE, 0
  with killing(_WRITER, path) as run:
    for _ in range(8):
      # Killed anywhere in the appends after these flushes.
      lines = run(int(rng.integers(0, 20)), rng.random() * 0.01)
      acknowledged = np.array(lines[-1].split(), int) if lines else heads
      with opened(path, LARGE) as journal:
        heads = journal.heads
        assert read(journal) == expected(NONE, heads, schema=LARGE)
      assert (heads >= acknowledged).all() and (heads - acknowledged <= 9).all()
      flushes += len(lines)
  assert flushes > 40


def test_a_second_opener_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(journal_module, "_BUSY_SECONDS", 0.1)
  path = tmp_path / "journal"
  script = (
    "import sys; sys.path[:0] = sys.argv[2:]\n"
    "from journals import opened\n"
    "from speedyzero_jax.replay import journal\n"
    "from speedyzero_jax.replay.journal import JournalError\n"
    "journal._BUSY_SECONDS = 0.1\n"
    "try:\n  opened(sys.argv[1]).__enter__()\n"
    "except JournalError as error:\n  print(error)\n"
  )
  other = [sys.executable, "-c", script, str(path), str(ROOT), str(ROOT / "tests" / "support")]
  with opened(path) as journal:
    printed = subprocess.run(other, capture_output=True, text=True, check=True).stdout
    assert str(path) in printed and "in use" in printed
    with pytest.raises(JournalError, match="in use"), opened(path):
      pass
    journal.append(play(0, 0))
    journal.flush()
  with opened(path) as journal:
    assert journal.heads.tolist() == [1, 0, 0]


# --- Disks ---


def append_until_it_fails(journal, limit=10_000):
  """Message of the first JournalError, and the heads of the last flush before it."""
  for _ in range(limit):
    durable = journal.heads.tolist()
    try:
      journal.append(play_all(journal.heads, schema=LARGE))
      journal.flush()
    except JournalError as error:
      return str(error), durable
  raise AssertionError("never failed")


def test_failing_writes(tmp_path):
  """The file may not grow past a limit, as on a full disk; later the limit is removed.

  Flushed slots stay; others are kept until there is room.
  """
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  with opened(tmp_path / "journal", LARGE) as journal:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
      message, durable = append_until_it_fails(journal)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert min(durable) > 1 and str(tmp_path / "journal") in message
    heads = [head + 1 for head in durable]
    assert journal.heads.tolist() == heads  # in the buffer
    journal.flush()
  with opened(tmp_path / "journal", LARGE) as journal:
    assert read(journal) == expected(NONE, heads, schema=LARGE)
