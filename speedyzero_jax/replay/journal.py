"""The journal: segments on disk in the order they were collected. What it acknowledged outlives every process.

One SQLite file in WAL mode. Why not files of our own: an append is a transaction, so a process killed in the middle of
it leaves all of it or nothing, and the next one to open the file recovers by itself; with `synchronous=FULL` a commit
has reached the disk when it returns (one fsync), so it survives a power loss as well; a full disk is an error that
leaves everything as it was; deleted rows give their space to new ones; the format is documented, older than this
project, and read by tools everywhere; and it is in Python's standard library.

A row is one segment. Its frames are compressed together (zlib at its fastest, each frame XORed with the one before: on
Breakout a fourth of compressing them one by one); its other arrays are raw. What SQLite does not check, the content of
its pages, is covered by a CRC-32 per row and by each lane's slots having to follow one another without a gap.

Must not know of the replay, of who collects, or of what the values mean.
"""

import contextlib
import json
import sqlite3
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from speedyzero_jax.types import Segment

_APPLICATION = int.from_bytes(b"SZjl")  # in the file's header, for whoever wonders what it is
_PATIENCE = 3.0  # seconds for which a killed process may still hold the file
_SCHEMA = 1  # changes with the tables and with what is in their blobs
_SLOTS = {  # arrays of a row's blob `slots`, one after the other
  "first": "?", "terminated": "?", "truncated": "?", "action": "<i4", "reward": "<f4", "policy": "<f4",
  "search_value": "<f4", "value": "<f4", "step": "<i4",
}  # fmt: skip

# A batch is what was appended to the replay in one go. The index holds all that is to be known without reading blobs.
_TABLES = (
  "CREATE TABLE form (json TEXT NOT NULL)",
  "CREATE TABLE lane (lane INTEGER PRIMARY KEY, tail INTEGER NOT NULL)",
  """CREATE TABLE segment (
    id INTEGER PRIMARY KEY, batch INTEGER NOT NULL, lane INTEGER NOT NULL, start INTEGER NOT NULL,
    size INTEGER NOT NULL, crc INTEGER NOT NULL, slots BLOB NOT NULL, frames BLOB NOT NULL
  )""",
  "CREATE INDEX extent ON segment (batch, lane, start, size)",
)


class JournalError(Exception):
  """The journal can't be opened, written or read; the message names its file."""


class _Row(NamedTuple):
  """A segment as it is stored."""

  lane: int
  start: int
  size: int
  crc: int  # of all the rest
  slots: bytes
  frames: bytes


class Journal:
  """A durable record of the slots tail[lane] <= t < head[lane] of every lane. Safe to use from several threads.

  Args:
    path: the file; made if it does not exist (its folder must). While it is open, nobody else can open it, and
      `path`-wal beside it holds the newest appends. Its own process must not open it by other means: on closing it,
      POSIX would drop this lock.
    lanes: L.
    frame_shape: (H, W, C) of one frame.
    frame_dtype: of the frames.
    num_actions: A.

  Raises:
    JournalError: it's not a journal, or one of another form, damaged, or in use by somebody else.
  """

  def __init__(
    self,
    path: Path,
    lanes: int,
    frame_shape: tuple[int, ...],
    frame_dtype: np.dtype | type,
    num_actions: int,
  ):
    self.path = path
    self._codec = _Codec(frame_shape, np.dtype(frame_dtype), num_actions)
    # Held while the database is in use. The arrays of heads and tails are replaced, never written to.
    self._lock = threading.Lock()
    form = {
      "lanes": lanes,
      "frame_shape": list(frame_shape),
      "frame_dtype": self._codec.frame_dtype.str,
      "num_actions": num_actions,
    }
    with self._errors("can't be opened"):
      self._db = sqlite3.connect(
        path, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
      )
      try:
        self._open(form)
        self._tails, self._heads, self._batch = self._load(lanes)
      except BaseException:
        self._db.close()
        raise

  @property
  def heads(self) -> np.ndarray:
    """[L] int64, the slot that each lane's next segment must start at."""
    with self._lock:
      return self._heads.copy()

  @property
  def tails(self) -> np.ndarray:
    """[L] int64, each lane's oldest slot; its head if there is none."""
    with self._lock:
      return self._tails.copy()

  def append(self, segments: Sequence[Segment]) -> None:
    """Adds segments, all or none; when it returns they are on disk.

    Args:
      segments: of any lanes, each starting at its lane's head. `read` gives them back together, or, where a lane comes
        more than once, cut before each repetition.

    Raises:
      ValueError: one doesn't start at its lane's head, or is of another form than the journal.
      JournalError: the disk is full or failed. The journal is as it was; the same call may be tried again later.
    """
    rows = [self._codec.encode(segment) for segment in segments]
    with self._lock:
      heads, batch, together = self._heads.copy(), self._batch + 1, set[int]()
      numbered: list[tuple[Any, ...]] = []
      for row in rows:
        if not 0 <= row.lane < len(heads):
          raise ValueError(f"segment.lane must be in 0..{len(heads) - 1}, got {row.lane}")
        if row.start != heads[row.lane]:
          raise ValueError(
            f"segment of lane {row.lane}: start must be the lane's head {heads[row.lane]}, got {row.start}"
          )
        heads[row.lane] += row.size
        if row.lane in together:
          batch += 1
          together.clear()
        together.add(row.lane)
        numbered.append((batch, *row))
      with self._errors("can't be written"), self._transaction():
        self._db.executemany(
          "INSERT INTO segment (batch, lane, start, size, crc, slots, frames) VALUES (?, ?, ?, ?, ?, ?, ?)",
          numbered,
        )
      self._heads, self._batch = heads, batch

  def read(self, start: np.ndarray, stop: np.ndarray | None = None) -> Iterator[list[Segment]]:
    """The slots start[lane] <= t < stop[lane] that are stored, in the order they were appended.

    Each list holds what was appended together, at most one segment of a lane, so that a replay that appends list after
    list counts insertions as they were. Only one list is in memory at a time. What is appended meanwhile does not
    show; `truncate` and `evict` have to wait.

    Args:
      start: [L]; what is stored of a lane may begin later (`tails`).
      stop: [L]; None: the heads of now. What is stored may end before.

    Raises:
      ValueError: an argument is not [L] slots.
      JournalError: a row is damaged or missing (the message names lane and slot), or the disk failed.
    """
    start = self._times("start", start)
    with self._lock:
      stop = self._heads if stop is None else np.minimum(self._times("stop", stop), self._heads)
      return self._read(np.maximum(start, self._tails), stop)

  def truncate(self, heads: np.ndarray) -> None:
    """Drops the slots from heads [L] on; they are to be collected anew.

    Raises:
      ValueError: not within the tails and the heads; then nothing has changed.
      JournalError: the disk is full or failed (the journal is as it was), or a row that must be cut is damaged.
    """
    heads = self._times("heads", heads)
    with self._lock:
      if (heads < self._tails).any() or (heads > self._heads).any():
        raise ValueError(
          f"heads must be within {self._tails.tolist()} and {self._heads.tolist()}, got {heads}"
        )
      with self._errors("can't be written"), self._transaction():
        extents = self._db.execute(
          "SELECT id, lane, start, size FROM segment WHERE start + size > ?",
          (int(heads.min(initial=0)),),
        )
        beyond = [extent for extent in extents if extent[2] + extent[3] > heads[extent[1]]]
        for number, lane, start, _ in beyond:
          if max(start, self._tails[lane]) >= heads[lane]:  # nothing is left of it
            self._db.execute("DELETE FROM segment WHERE id = ?", (number,))
          else:
            self._cut(number, int(heads[lane]))
      self._heads = heads

  def evict(self, tails: np.ndarray) -> None:
    """Forgets the slots before tails [L]. New appends reuse the space of segments wholly before them.

    Raises:
      ValueError: beyond the heads; then nothing has changed.
      JournalError: the disk is full or failed; the journal is as it was.
    """
    tails = self._times("tails", tails)
    with self._lock:
      if (tails > self._heads).any():
        raise ValueError(f"tails must be at most the heads {self._heads.tolist()}, got {tails}")
      tails = np.maximum(tails, self._tails)
      with self._errors("can't be written"), self._transaction():
        self._db.executemany(
          "UPDATE lane SET tail = ? WHERE lane = ?", [(t, i) for i, t in enumerate(tails.tolist())]
        )
        self._db.execute(
          "DELETE FROM segment WHERE id IN (SELECT id FROM segment JOIN lane USING (lane) WHERE start + size <= tail)"
        )
      self._tails = tails

  def begin_at(self, heads: np.ndarray) -> np.ndarray:
    """Makes sure that what is stored goes on from heads [L]: lanes of which something is missing begin anew there.

    For a journal that was begun, or lost, when the lanes were there already, or that has forgotten what a checkpoint
    older than expected would need. Raises as `evict` does.

    Returns:
      [L] int64, the slots from there on that were stored and are lost.
    """
    heads = self._times("heads", heads)
    with self._lock:
      apart = (heads > self._heads) | (heads < self._tails)
      lost = np.where(apart, np.maximum(self._heads - heads, 0), 0)
      lanes = np.flatnonzero(apart).tolist()
      with self._errors("can't be written"), self._transaction():
        self._db.executemany("DELETE FROM segment WHERE lane = ?", [(lane,) for lane in lanes])
        self._db.executemany(
          "UPDATE lane SET tail = ? WHERE lane = ?", [(int(heads[lane]), lane) for lane in lanes]
        )
      self._heads, self._tails = (np.where(apart, heads, old) for old in (self._heads, self._tails))
    return lost

  def close(self) -> None:
    """Lets others open the file. May be called twice; nothing else may be called afterwards."""
    with self._lock:
      self._db.close()

  def _open(self, form: dict[str, Any]) -> None:
    """Takes the file for this process and makes sure that it is a journal of this form."""
    self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # until closed; dies with the process
    (application,) = self._db.execute("PRAGMA application_id").fetchone()
    (schema,) = self._db.execute("PRAGMA user_version").fetchone()
    new = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not new and application != _APPLICATION:
      raise JournalError(f"{self.path} is not a journal")
    if not new and schema != _SCHEMA:
      raise JournalError(
        f"journal {self.path} is of schema {schema}, this program knows schema {_SCHEMA}"
      )
    mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    if mode != "wal":
      raise JournalError(f"journal {self.path}: SQLite stays in its mode {mode} instead of WAL")
    self._db.execute("PRAGMA synchronous=FULL")
    with self._transaction():  # takes the lock, also where there is nothing to make
      if new:
        for table in _TABLES:
          self._db.execute(table)
        self._db.execute("INSERT INTO form VALUES (?)", (json.dumps(form),))
        self._db.executemany(
          "INSERT INTO lane VALUES (?, 0)", [(lane,) for lane in range(form["lanes"])]
        )
        self._db.execute(f"PRAGMA application_id={_APPLICATION}")
        self._db.execute(f"PRAGMA user_version={_SCHEMA}")
    (stored,) = self._db.execute("SELECT json FROM form").fetchone() or (None,)
    if stored != json.dumps(form):
      raise JournalError(
        f"journal {self.path} is of the form {stored}, wanted is {json.dumps(form)}"
      )

  def _load(self, lanes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Tails, heads and the last batch's number."""
    lane_tails = self._db.execute("SELECT lane, tail FROM lane").fetchall()
    stops = self._db.execute(
      "SELECT lane, min(start + size), max(start + size) FROM segment GROUP BY lane"
    ).fetchall()
    (batch,) = self._db.execute("SELECT coalesce(max(batch), 0) FROM segment").fetchone()
    tails = dict(lane_tails)
    heads = tails | {lane: last for lane, _, last in stops}
    if (
      not all(type(x) is int for row in (*lane_tails, *stops, (batch,)) for x in row)
      or not sorted(tails) == sorted(heads) == list(range(lanes))
      or any(first <= tails[lane] for lane, first, _ in stops)  # `evict` deletes such segments
    ):
      raise JournalError(f"journal {self.path} is damaged: what it says of its lanes can't be")
    return (
      np.array([tails[lane] for lane in range(lanes)]),
      np.array([heads[lane] for lane in range(lanes)]),
      batch,
    )

  def _read(self, position: np.ndarray, stop: np.ndarray) -> Iterator[list[Segment]]:
    """`read`, after its checks; position [L] is where each lane goes on."""
    batch = -1
    while (missing := position < stop).any():
      with self._lock, self._errors("can't be read"):
        found = self._db.execute(
          "SELECT batch FROM segment WHERE batch > ? AND start + size > ? ORDER BY batch LIMIT 1",
          (batch, int(position[missing].min())),
        ).fetchone()
        if found is None:
          lane = int(missing.argmax())
          raise self._damage(lane, int(position[lane]), "is missing")
        (batch,) = found
        rows = self._db.execute(
          "SELECT lane, start, size, crc, slots, frames FROM segment WHERE batch = ? ORDER BY id",
          (batch,),
        ).fetchall()
      segments = [
        cut for row in rows if (cut := self._cut_out(_Row(*row), position, stop)) is not None
      ]
      for segment in segments:
        position[segment.lane] += len(segment.frame)
      if segments:
        yield segments

  def _cut_out(self, row: _Row, position: np.ndarray, stop: np.ndarray) -> Segment | None:
    """The part of a row from position[lane] to stop[lane]; None if there is none."""
    lane, start, size = row[:3]
    if any(type(x) is not int for x in row[:3]) or not 0 <= lane < len(stop):
      raise self._damage(lane, start, "is damaged")
    begin, end = max(int(position[lane]), start), min(int(stop[lane]), start + size)
    if begin >= end:
      return None
    if begin > position[lane]:
      raise self._damage(lane, int(position[lane]), "is missing")
    return _slice(self._decode(row), begin, end)

  def _decode(self, row: _Row) -> Segment:
    try:
      return self._codec.decode(row)
    except (ValueError, TypeError, zlib.error, struct.error) as error:
      raise self._damage(row.lane, row.start, "is damaged") from error

  def _cut(self, number: int, stop: int) -> None:
    """Ends the segment of this id before slot `stop`."""
    row = _Row(
      *self._db.execute(
        "SELECT lane, start, size, crc, slots, frames FROM segment WHERE id = ?", (number,)
      ).fetchone()
    )
    short = self._codec.encode(_slice(self._decode(row), row.start, stop))
    self._db.execute(
      "UPDATE segment SET size = ?, crc = ?, slots = ?, frames = ? WHERE id = ?",
      (*short[2:], number),
    )

  def _times(self, name: str, times: np.ndarray) -> np.ndarray:
    times = np.asarray(times)
    if times.shape != self._heads.shape or times.dtype.kind not in "iu" or (times < 0).any():
      raise ValueError(f"{name} must be [{len(self._heads)}] slots, got {times}")
    return times.astype(np.int64)

  def _damage(self, lane: Any, slot: Any, what: str) -> JournalError:
    return JournalError(f"journal {self.path}: lane {lane}, slot {slot} {what}")

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    self._db.execute("BEGIN EXCLUSIVE")
    try:
      yield
      self._db.execute("COMMIT")
    except BaseException:
      if self._db.in_transaction:  # SQLite rolls back by itself after some errors
        self._db.execute("ROLLBACK")
      raise

  @contextlib.contextmanager
  def _errors(self, what: str) -> Iterator[None]:
    try:
      yield
    except (
      sqlite3.Error,
      UnicodeDecodeError,
    ) as error:  # the latter from messages that quote damaged names
      if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:  # the rest says why
        raise JournalError(
          f"journal {self.path} {what}: it is in use, probably by another process"
        ) from error
      raise JournalError(f"journal {self.path} {what}: {error}") from error


class _Codec:
  """Segments of one form to rows and back."""

  def __init__(self, frame_shape: tuple[int, ...], frame_dtype: np.dtype, num_actions: int):
    self.frame_dtype = frame_dtype.newbyteorder("<")
    self._frame_shape = frame_shape
    self._slots = {
      name: (np.dtype(dtype), (num_actions,) * (name == "policy")) for name, dtype in _SLOTS.items()
    }

  def encode(self, segment: Segment) -> _Row:
    """Raises ValueError if the segment is of another form."""
    lane, start, size = int(segment.lane), int(segment.start), len(segment.frame)
    if not size:
      raise ValueError(f"segment of lane {lane}: must hold at least one slot")
    for name, (dtype, shape) in {
      **self._slots,
      "frame": (self.frame_dtype, self._frame_shape),
    }.items():
      array = getattr(segment, name)
      if array.shape != (size, *shape) or array.dtype != dtype:
        raise ValueError(
          f"segment of lane {lane}: {name} must be {dtype}{[size, *shape]}, got {array.dtype}{list(array.shape)}"
        )
    slots = b"".join(getattr(segment, name).tobytes() for name in self._slots)
    pixels = np.ascontiguousarray(segment.frame).reshape(size, -1).view(np.uint8)
    changes = pixels.copy()
    changes[1:] ^= pixels[:-1]
    frames = zlib.compress(changes.data, 1)
    return _Row(lane, start, size, _crc(lane, start, size, slots, frames), slots, frames)

  def decode(self, row: _Row) -> Segment:
    """Raises ValueError, TypeError, zlib.error or struct.error if anything in the row is not as it was written."""
    lane, start, size, crc, slots, frames = row
    if _crc(lane, start, size, slots, frames) != crc:
      raise ValueError("checksum")
    arrays, offset = {}, 0
    for name, (dtype, shape) in self._slots.items():
      length = size * int(np.prod(shape, dtype=int))
      arrays[name] = np.frombuffer(slots, dtype, length, offset).reshape(size, *shape)
      offset += length * dtype.itemsize
    changes = np.frombuffer(zlib.decompress(frames), np.uint8).reshape(size, -1)
    pixels = np.bitwise_xor.accumulate(changes, axis=0)
    return Segment(
      lane, start, pixels.view(self.frame_dtype).reshape(size, *self._frame_shape), **arrays
    )


def _crc(lane: int, start: int, size: int, slots: bytes, frames: bytes) -> int:
  return zlib.crc32(frames, zlib.crc32(slots, zlib.crc32(struct.pack("<3q", lane, start, size))))


def _slice(segment: Segment, begin: int, end: int) -> Segment:
  """Slots begin <= t < end of a segment that holds them."""
  part = slice(begin - segment.start, end - segment.start)
  return Segment(segment.lane, begin, *(array[part] for array in segment[2:]))
