"""Journal of experience: steps as they are collected, in one SQLite file.

Appends are buffered in memory; `flush` makes them durable. A write is one transaction in WAL mode,
so a killed process leaves all of it or none, a full disk changes nothing, and with
`synchronous=FULL` a commit has reached the disk when it returns. What SQLite does not check, the
content of its pages, has a CRC-32 per row, and rows of a lane must follow one another.
"""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from speedyzero_jax.replay.journal_rows import Row, RowCodec, runs
from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.types import Segment

_APPLICATION = int.from_bytes(b"SZjl")  # application_id in the file's header
_VERSION = 2  # changes with the tables and with the layout of their blobs
_BUSY_SECONDS = 3.0  # a killed process may hold the file a moment longer
_BUFFER_BYTES = 64 << 20
_SEGMENT_BYTES = 2048  # of the array objects of one segment in memory

_COLUMNS = "lane, start, size, crc, slots, frames"  # of a `Row`
_TABLES = (
  "CREATE TABLE form (json TEXT NOT NULL)",
  "CREATE TABLE lane (lane INTEGER PRIMARY KEY, tail INTEGER NOT NULL, head INTEGER NOT NULL)",
  """CREATE TABLE segment (
    id INTEGER PRIMARY KEY, lane INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    crc INTEGER NOT NULL, slots BLOB NOT NULL, frames BLOB NOT NULL
  )""",
  "CREATE INDEX extent ON segment (lane, start, size)",
)


class JournalError(Exception):
  """The journal cannot be opened, written or read; the message names its file."""


class JournalDamage(JournalError):
  """Slots are damaged or missing; the message names lane and slot."""


class Journal:
  """The slots tails[lane] <= t < heads[lane] of every lane. Thread-safe.

  Args:
    path: the file; created if it does not exist. It is locked until `close`. This process must not
      open it by other means: when it closed it, POSIX would drop the lock.
    lanes: L.
    schema: columns of a slot.
    buffer_bytes: appends are written, though not yet durable, when the buffer exceeds this size.

  Raises:
    JournalError: not a journal, one with other columns, damaged, or in use.
  """

  def __init__(self, path: Path, lanes: int, schema: Schema, *, buffer_bytes: int = _BUFFER_BYTES):
    self.path = path
    self._schema, self._codec, self._buffer_bytes = schema, RowCodec(schema), buffer_bytes
    self._lock = threading.RLock()
    self._buffer: list[Segment] = []
    self._buffered = 0  # bytes
    self._synced = True  # all rows are durable
    columns = [[column.name, column.dtype, list(column.shape)] for column in schema.columns]
    with self._errors("can't be opened"):
      self._db = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
      )
      try:
        self._open({"lanes": lanes, "columns": columns})
        self._tails, self._heads = self._load(lanes)
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

  # --- Writing ---

  def append(self, segments: Sequence[Segment]) -> None:
    """Adds segments, all or none; `flush` makes them durable.

    Raises:
      ValueError: a segment does not start at its lane's head or has other columns; then none is
        added.
      JournalError: the buffer is full and cannot be written; it keeps the segments.
    """
    with self._lock:
      heads = self._heads.copy()
      for segment in segments:
        lane, size = segment.lane, len(segment.frame)
        if not 0 <= lane < len(heads):
          raise ValueError(f"segment.lane must be in 0..{len(heads) - 1}, got {lane}")
        if segment.start != heads[lane] or not size:
          raise ValueError(
            f"segment of lane {lane}: must hold slots from the lane's head {heads[lane]} on, "
            f"got {size} slots from {segment.start} on"
          )
        self._schema.check(segment)
        heads[lane] += size
      # Copied, because actors may reuse their arrays.
      self._buffer += [segment.map(np.array, int(segment.start)) for segment in segments]
      self._heads = heads
      for segment in segments:
        self._buffered += len(segment.frame) * self._schema.slot_bytes + _SEGMENT_BYTES
      if self._buffered > self._buffer_bytes:
        self._write(sync=False)

  def flush(self) -> None:
    """Makes everything appended so far durable.

    Raises:
      JournalError: the disk is full or failed. Nothing is lost; `flush` may be called again.
    """
    with self._lock:
      self._write(sync=True)
      if not self._synced:  # rows of a full buffer, and none after them
        with self._errors("can't be written"):
          self._db.execute("PRAGMA wal_checkpoint(FULL)")
        self._synced = True

  def _write(self, *, sync: bool) -> None:
    if self._buffer:
      rows = [self._codec.encode(run) for run in runs(self._buffer)]
      with self._transaction(sync=sync):
        self._db.executemany(f"INSERT INTO segment ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        for row in rows:
          self._set("head", row.lane, row.start + row.size)
      self._buffer, self._buffered = [], 0

  def continue_from(self, heads: np.ndarray, *, drop: bool) -> np.ndarray:
    """Lets every lane continue from heads [L], those of a checkpoint, or 0.

    Lanes without the slots just before there are emptied: their file was lost, or evicted further
    than an old checkpoint. Of the others, later slots are kept, for `read`, or dropped.

    Args:
      heads: [L].
      drop: drop later slots of all lanes.

    Returns:
      [L] int64, slots from `heads` on that were dropped.

    Raises:
      ValueError: not [L] slots; nothing has changed.
      JournalError: the disk is full or failed, or a row that must be cut is damaged; nothing has
        changed.
    """
    with self._lock:
      heads = self._times("heads", heads)
      self._write(sync=False)
      apart = (heads > self._heads) | (heads < self._tails)
      moved = apart | drop
      with self._transaction():
        for lane in np.flatnonzero(moved).tolist():
          if apart[lane]:
            self._db.execute("DELETE FROM segment WHERE lane = ?", (lane,))
            self._set("tail", lane, int(heads[lane]))
          else:
            self._drop_from(lane, int(heads[lane]))
          self._set("head", lane, int(heads[lane]))
      lost = np.where(moved, np.maximum(self._heads - heads, 0), 0)
      self._heads = np.where(moved, heads, self._heads)
      self._tails = np.where(apart, heads, self._tails)
    return lost

  def _drop_from(self, lane: int, head: int) -> None:
    """Deletes a lane's slots from `head` on; one row may have to be cut."""
    self._db.execute(
      "DELETE FROM segment WHERE lane = ? AND max(start, ?) >= ?",
      (lane, int(self._tails[lane]), head),
    )
    found = self._db.execute(
      f"SELECT id, {_COLUMNS} FROM segment WHERE lane = ? AND start + size > ?", (lane, head)
    ).fetchone()
    if found is not None:
      row = self._intact(Row(*found[1:]))
      short = self._codec.encode([self._codec.decode(row, row.start, head)])
      self._db.execute(
        "UPDATE segment SET size = ?, crc = ?, slots = ?, frames = ? WHERE id = ?",
        (*short[2:], found[0]),
      )

  def evict(self, tails: np.ndarray) -> None:
    """Drops the slots before tails [L]. Rows wholly before them give their space to new rows.

    Raises:
      ValueError: not [L] slots, or beyond the heads; nothing has changed.
      JournalError: the disk is full or failed; nothing has changed.
    """
    with self._lock:
      tails = np.maximum(self._times("tails", tails), self._tails)
      if (tails > self._heads).any():
        raise ValueError(f"tails must be at most the heads {self._heads.tolist()}, got {tails}")
      self._write(sync=False)
      with self._transaction():
        for lane in np.flatnonzero(tails > self._tails).tolist():
          self._set("tail", lane, int(tails[lane]))
        self._db.execute(
          "DELETE FROM segment WHERE id IN "
          "(SELECT id FROM segment JOIN lane USING (lane) WHERE start + size <= tail)"
        )
      self._tails = tails

  def _set(self, column: str, lane: int, slot: int) -> None:
    self._db.execute(f"UPDATE lane SET {column} = ? WHERE lane = ?", (slot, lane))

  # --- Reading ---

  def read(self, start: np.ndarray, stop: np.ndarray | None = None) -> Iterator[list[Segment]]:
    """Slots start[lane] <= t < stop[lane], in the order of each lane.

    Each list has at most one segment of a lane, as a replay appends them. If every append was
    flushed by itself, the order between lanes is that of the appends too. A segment that begins an
    episode while its lane's previous one is open follows a lost environment. Later appends are not
    included.

    Args:
      start: [L]; slots before the tails are skipped.
      stop: [L]; None: the heads.

    Raises:
      ValueError: an argument is not [L] slots.
      JournalDamage: slots are damaged or missing.
      JournalError: the disk failed.
    """
    position, stop = self._range(start, stop)

    def lists() -> Iterator[list[Segment]]:
      segments: dict[int, Segment] = {}
      slots = 0
      for row, begin, end in self._rows(position, stop):
        if row.lane in segments or slots * self._schema.slot_bytes > _BUFFER_BYTES:
          yield list(segments.values())
          segments, slots = {}, 0
        segments[row.lane] = self._codec.decode(row, begin, end)
        slots += end - begin
      if segments:
        yield list(segments.values())

    return lists()

  def verify(self, start: np.ndarray, stop: np.ndarray) -> None:
    """Raises JournalDamage unless slots start[lane] <= t < stop[lane] are all stored and intact."""
    position, end = self._range(start, stop)
    for lane in np.flatnonzero((position > start) | (end < stop)).tolist():
      if start[lane] < stop[lane]:
        slot = int(start[lane] if position[lane] > start[lane] else end[lane])
        raise self._damage(lane, slot, "is missing")
    for _ in self._rows(position, end):
      pass

  def _range(self, start: np.ndarray, stop: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    start = self._times("start", start)
    with self._lock:
      self._write(sync=False)
      stop = self._heads if stop is None else np.minimum(self._times("stop", stop), self._heads)
      return np.maximum(start, self._tails), stop

  def _rows(self, position: np.ndarray, stop: np.ndarray) -> Iterator[tuple[Row, int, int]]:
    """Intact rows and the slots wanted of each; position [L] is where each lane continues."""
    number = 0
    query = f"SELECT id, {_COLUMNS} FROM segment WHERE id > ? AND start + size > ? ORDER BY id"
    while (missing := position < stop).any():
      with self._lock, self._errors("can't be read"):
        oldest = int(position[missing].min())
        found = self._db.execute(f"{query} LIMIT 1", (number, oldest)).fetchone()
      if found is None or found[0] <= number:  # the latter in a damaged tree
        lane = int(missing.argmax())
        raise self._damage(lane, int(position[lane]), "is missing")
      number, row = found[0], Row(*found[1:])
      lane, start, size = row[:3]
      if any(type(x) is not int for x in row[:3]) or not 0 <= lane < len(stop):
        raise self._damage(lane, start, "is damaged")
      begin, end = max(int(position[lane]), start), min(int(stop[lane]), start + size)
      if begin < end:
        if begin > position[lane]:
          raise self._damage(lane, int(position[lane]), "is missing")
        position[lane] = end
        yield self._intact(row), begin, end

  def _intact(self, row: Row) -> Row:
    if not row.intact():
      raise self._damage(row.lane, row.start, "is damaged")
    return row

  def _times(self, name: str, times: np.ndarray) -> np.ndarray:
    times, lanes = np.asarray(times), len(self._heads)
    if times.shape != (lanes,) or times.dtype.kind not in "iu" or (times < 0).any():
      raise ValueError(f"{name} must be [{lanes}] slots, got {times}")
    return times.astype(np.int64)

  def _damage(self, lane: Any, slot: Any, what: str) -> JournalDamage:
    return JournalDamage(f"journal {self.path}: lane {lane}, slot {slot} {what}")

  # --- The file ---

  def close(self) -> None:
    """Unlocks the file; what was not flushed is lost. May be called twice."""
    with self._lock:
      self._db.close()

  def _open(self, form: dict[str, Any]) -> None:
    """Locks the file and checks that it is a journal of this form."""
    self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
    (application,) = self._db.execute("PRAGMA application_id").fetchone()
    (version,) = self._db.execute("PRAGMA user_version").fetchone()
    new = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if not new and application != _APPLICATION:
      raise JournalError(f"{self.path} is not a journal")
    if not new and version != _VERSION:
      raise JournalError(
        f"journal {self.path} has format {version}, this version of the program uses {_VERSION}"
      )
    (mode,) = self._db.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
      raise JournalError(f"journal {self.path}: SQLite stays in mode {mode} instead of WAL")
    with self._transaction():  # also takes the lock
      if new:
        for table in _TABLES:
          self._db.execute(table)
        self._db.execute("INSERT INTO form VALUES (?)", (json.dumps(form),))
        lanes = [(lane,) for lane in range(form["lanes"])]
        self._db.executemany("INSERT INTO lane VALUES (?, 0, 0)", lanes)
        self._db.execute(f"PRAGMA application_id={_APPLICATION}")
        self._db.execute(f"PRAGMA user_version={_VERSION}")
    (stored,) = self._db.execute("SELECT json FROM form").fetchone() or (None,)
    if stored != json.dumps(form):
      raise JournalError(f"journal {self.path} holds {stored}, expected {json.dumps(form)}")

  def _load(self, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Tails and heads."""
    stored = self._db.execute("SELECT lane, tail, head FROM lane ORDER BY lane").fetchall()
    stops = self._db.execute(
      "SELECT lane, min(start + size), max(start + size) FROM segment GROUP BY lane"
    ).fetchall()
    lane_rows = {lane: (tail, head) for lane, tail, head in stored}
    if (
      not all(type(x) is int for row in (*stored, *stops) for x in row)
      or list(lane_rows) != list(range(lanes))
      # `evict` deletes rows before the tail; missing rows are found when they are read.
      or not all(
        lane in lane_rows and lane_rows[lane][0] < first <= last <= lane_rows[lane][1]
        for lane, first, last in stops
      )
    ):
      raise JournalDamage(f"journal {self.path} is damaged: its lanes are not consistent")
    return np.array([tail for _, tail, _ in stored]), np.array([head for *_, head in stored])

  @contextlib.contextmanager
  def _transaction(self, *, sync: bool = True) -> Iterator[None]:
    """With `sync`, this transaction and all before it are durable at the end."""
    with self._errors("can't be written"):
      self._db.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
      self._db.execute("BEGIN EXCLUSIVE")
      try:
        yield
        self._db.execute("COMMIT")
      except BaseException:
        if self._db.in_transaction:  # SQLite rolls back by itself after some errors
          self._db.execute("ROLLBACK")
        raise
      self._synced = sync

  @contextlib.contextmanager
  def _errors(self, what: str) -> Iterator[None]:
    try:
      yield
    # UnicodeDecodeError: from messages that quote damaged names.
    except (sqlite3.Error, UnicodeDecodeError) as error:
      code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
      if code == sqlite3.SQLITE_BUSY:
        reason = f"journal {self.path} {what}: it is in use, probably by another process"
        raise JournalError(reason) from error
      damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
      kind = JournalDamage if damaged else JournalError
      raise kind(f"journal {self.path} {what}: {error}") from error
