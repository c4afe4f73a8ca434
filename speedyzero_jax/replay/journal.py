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

_VERSION = 3  # changes with the tables and with the layout of their blobs
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
  """The slots tails[lane] <= t < heads[lane] of every lane. Thread-safe, but for reading.

  Args:
    path: the file; created if it does not exist. It is locked until `close`. This process must not
      open it by other means: when it closed it, POSIX would drop the lock.
    lanes: L.
    schema: columns of a slot.
    buffer_bytes: appends are written when the buffer exceeds this size.

  Methods raise JournalError if the disk is full or failed; what they would write has not changed
  then. So does the constructor for what is not a journal of these columns, or is in use.
  """

  def __init__(self, path: Path, lanes: int, schema: Schema, *, buffer_bytes: int = _BUFFER_BYTES):
    self.path = path
    self._codec, self._slot_bytes = RowCodec(schema), schema.slot_bytes
    self._buffer_bytes = buffer_bytes
    self._lock = threading.RLock()
    self._buffer: list[Segment] = []
    self._buffered = 0  # bytes
    columns = [[column.name, column.dtype, list(column.shape)] for column in schema.columns]
    with self._errors("can't be opened"):
      self._db = sqlite3.connect(
        path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
      )
      try:
        self._open({"version": _VERSION, "lanes": lanes, "columns": columns})
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
    """Adds segments with the columns of the schema, all or none; `flush` makes them durable.

    Raises ValueError if a segment does not start at its lane's head; then none is added. A
    JournalError means that the buffer is full and cannot be written; it keeps the segments.
    """
    with self._lock:
      heads = self._heads.copy()
      for segment in segments:
        if segment.start != heads[segment.lane]:
          raise ValueError(
            f"segment of lane {segment.lane}: must start at slot {heads[segment.lane]}, the lane's "
            f"head, got {segment.start}"
          )
        heads[segment.lane] += len(segment.frame)
      # Copied, because actors may reuse their arrays.
      self._buffer += [segment.map(np.array, int(segment.start)) for segment in segments]
      self._heads = heads
      for segment in segments:
        self._buffered += len(segment.frame) * self._slot_bytes + _SEGMENT_BYTES
      if self._buffered > self._buffer_bytes:
        self.flush()

  def flush(self) -> None:
    """Makes everything appended so far durable. After an error it may be called again."""
    with self._lock:
      if not self._buffer:
        return
      rows = [self._codec.encode(run) for run in runs(self._buffer)]
      with self._transaction():
        self._db.executemany(f"INSERT INTO segment ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        for row in rows:
          self._set("head", row.lane, row.start + row.size)
      self._buffer, self._buffered = [], 0

  def continue_from(self, heads: np.ndarray, *, drop: bool) -> np.ndarray:
    """Lets every lane continue from heads [L], those of a verified checkpoint, or 0.

    Lanes without the slots just before there are emptied: their file was lost, or evicted further
    than an old checkpoint. Of the others, later slots are kept, for `read`, or dropped. Returns the
    number of slots from `heads` on that were dropped, [L] int64.
    """
    with self._lock:
      self.flush()
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
      row = Row(*found[1:])
      short = self._codec.encode([self._codec.decode(row, row.start, head)])
      self._db.execute(
        "UPDATE segment SET size = ?, crc = ?, slots = ?, frames = ? WHERE id = ?",
        (*short[2:], found[0]),
      )

  def evict(self, tails: np.ndarray) -> None:
    """Drops the slots before tails [L], at most the heads; whole rows give way to new ones."""
    with self._lock:
      self.flush()
      tails = np.maximum(tails, self._tails)
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

  def read(self, start: np.ndarray, stop: np.ndarray | None = None) -> Iterator[Segment]:
    """Slots start[lane] <= t < stop[lane] (None: the heads), in the order of each lane.

    If every append was flushed by itself, the order between lanes is that of the appends too. A
    segment that begins an episode while its lane's previous one is open follows a lost environment.
    Raises JournalDamage if slots are damaged or missing.
    """
    for row, begin, end in self._rows(start, stop):
      yield self._codec.decode(row, begin, end)

  def verify(self, start: np.ndarray, stop: np.ndarray) -> None:
    """Raises JournalDamage unless slots start[lane] <= t < stop[lane] are all stored and intact."""
    for _ in self._rows(start, stop):
      pass

  def _rows(self, start: np.ndarray, stop: np.ndarray | None) -> Iterator[tuple[Row, int, int]]:
    """Intact rows and the slots wanted of each."""
    self.flush()
    tails, stop = self.tails, self.heads if stop is None else stop
    position = np.array(start)  # where each lane continues
    query = f"SELECT {_COLUMNS} FROM segment WHERE start + size > ? ORDER BY id"
    with self._errors("can't be read"):
      for found in self._db.execute(query, (int(position.min()),)):
        if (position >= stop).all():
          return
        row = Row(*found)
        if row.intact():  # if not, its slots are missed below
          begin, end = max(row.start, tails[row.lane]), min(row.start + row.size, stop[row.lane])
          if begin <= position[row.lane] < end:
            yield row, int(position[row.lane]), int(end)
            position[row.lane] = end
    for lane in np.flatnonzero(position < stop):
      raise JournalDamage(
        f"journal {self.path}: lane {lane}, slot {position[lane]} is missing or damaged"
      )

  # --- The file ---

  def close(self) -> None:
    """Unlocks the file; what was not flushed is lost. May be called twice."""
    with self._lock:
      self._db.close()

  def _open(self, form: dict[str, Any]) -> None:
    """Locks the file and checks that it is a journal of this form."""
    self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
    new = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    stored = None if new else self._db.execute("SELECT json FROM form").fetchone()
    if not new and stored != (json.dumps(form),):
      raise JournalError(f"journal {self.path} holds {stored}, expected {json.dumps(form)}")
    self._db.execute("PRAGMA journal_mode=WAL")
    self._db.execute("PRAGMA synchronous=FULL")
    with self._transaction():  # also takes the lock
      if new:
        for table in _TABLES:
          self._db.execute(table)
        self._db.execute("INSERT INTO form VALUES (?)", (json.dumps(form),))
        lanes = [(lane,) for lane in range(form["lanes"])]
        self._db.executemany("INSERT INTO lane VALUES (?, 0, 0)", lanes)

  def _load(self, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Tails and heads, which must agree with the extent of the rows."""
    found = self._db.execute(
      "SELECT lane, tail, head, ifnull(min(start + size), head), ifnull(max(start + size), head) "
      "FROM lane LEFT JOIN segment USING (lane) GROUP BY lane ORDER BY lane"
    ).fetchall()
    table = np.array(found)
    if table.shape == (lanes, 5) and table.dtype == np.int64:  # not so in a damaged file
      number, tails, heads, first, last = table.T
      ordered = (tails <= first) & (first <= last) & (last <= heads)
      if ordered.all() and (number == np.arange(lanes)).all():
        return tails, heads
    raise JournalDamage(f"journal {self.path} is damaged: its lanes are not consistent")

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    """Everything written is durable at the end, or nothing is written."""
    with self._errors("can't be written"):
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
    # UnicodeDecodeError: from messages that quote damaged names.
    except (sqlite3.Error, UnicodeDecodeError) as error:
      code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
      if code == sqlite3.SQLITE_BUSY:
        reason = f"journal {self.path} {what}: it is in use, probably by another process"
        raise JournalError(reason) from error
      damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
      kind = JournalDamage if damaged else JournalError
      raise kind(f"journal {self.path} {what}: {error}") from error
