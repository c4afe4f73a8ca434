"""Journal of experience: the collected steps, in one SQLite file.

Appends are buffered in memory; `flush` makes them durable. Each write is one transaction in WAL
mode: if the process is killed, all of it or nothing is stored, and a full disk changes nothing.
With `synchronous=FULL` a commit has reached the disk when it returns. SQLite does not check the
content of its pages, so each row has a CRC-32, and the rows of a lane must be contiguous.
"""

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from speedyzero_jax.replay.journal_rows import Row, RowCodec
from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.types import Slots

_VERSION = 3  # increased when the tables or the layout of their blobs change
_BUSY_SECONDS = 3.0  # a killed process may keep the file locked for a moment
_BUFFER_BYTES = 64 << 20
_APPEND_BYTES = 2048  # overhead of one append's array objects in memory

_COLUMNS = "lane, start, size, crc, slots, frames"  # fields of `Row`
_TABLES = (
  "CREATE TABLE form (json TEXT NOT NULL)",
  "CREATE TABLE lane (lane INTEGER PRIMARY KEY, tail INTEGER NOT NULL, head INTEGER NOT NULL)",
  # A `Row` per segment.
  """CREATE TABLE segment (
    id INTEGER PRIMARY KEY, lane INTEGER NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL,
    crc INTEGER NOT NULL, slots BLOB NOT NULL, frames BLOB NOT NULL
  )""",
  "CREATE INDEX extent ON segment (start, lane, size)",
)


class JournalError(Exception):
  """The journal cannot be opened, written or read; the message names its file."""


class JournalDamage(JournalError):
  """Slots are damaged or missing; the message names lane and slot."""


class Journal:
  """Stores the slots tails[lane] <= t < heads[lane] of every lane. Thread-safe, except for reading.

  The file is created if it does not exist, and locked until `close`. This process must not open it
  by other means: closing it would release the POSIX lock. Appends are written when the buffer
  exceeds `buffer_bytes`.

  Methods raise JournalError if the disk is full or fails; the stored content is then unchanged.
  The constructor raises JournalError if the file is in use or is no journal of these columns.
  """

  def __init__(self, path: Path, lanes: int, schema: Schema, *, buffer_bytes: int = _BUFFER_BYTES):
    self.path = path
    self._codec, self._slot_bytes = RowCodec(schema), schema.slot_bytes
    self._buffer_bytes = buffer_bytes
    self._lock = threading.RLock()
    self._buffer: list[Slots] = []
    self._buffered = 0  # bytes
    columns = [[column.name, column.dtype, list(column.shape)] for column in schema.columns]
    with self._errors("cannot be opened"):
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
    """[L] int64, each lane's next slot."""
    with self._lock:
      return self._heads.copy()

  @property
  def tails(self) -> np.ndarray:
    """[L] int64, each lane's oldest slot; its head if the lane is empty."""
    with self._lock:
      return self._tails.copy()

  # --- Writing ---

  def append(self, slots: Slots) -> None:
    """Appends all of the slots or none; `flush` makes them durable.

    Raises:
      ValueError: there are none, or they do not follow their lane's head; none is appended.
      JournalError: the full buffer cannot be written; the slots remain in it.
    """
    with self._lock:
      slots = Slots.concatenate([slots.by_lane()])  # a copy, as actors may reuse their arrays
      slots.check_follows(self._heads)
      self._buffer.append(slots)
      self._heads[slots.lane] = slots.time + 1  # repeated lanes: the last time is used
      self._buffered += len(slots) * self._slot_bytes + _APPEND_BYTES
      if self._buffered > self._buffer_bytes:
        self.flush()

  def flush(self) -> None:
    """Makes everything appended so far durable. Can be retried after an error."""
    with self._lock:
      if not self._buffer:
        return
      slots = self._buffer[0] if len(self._buffer) == 1 else Slots.concatenate(self._buffer)
      rows = self._codec.encode(slots)
      heads = [(row.start + row.size, row.lane) for row in rows]  # repeated lanes: the last is used
      with self._transaction():
        self._db.executemany(f"INSERT INTO segment ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._db.executemany("UPDATE lane SET head = ? WHERE lane = ?", heads)
      self._buffer, self._buffered = [], 0

  def continue_from(self, heads: np.ndarray, *, drop: bool) -> np.ndarray:
    """Prepares every lane to continue from heads [L] of a verified checkpoint, or from 0.

    A lane that does not hold the slots just before its head is emptied. This happens if the file
    was lost, or if an old checkpoint precedes the evicted slots. In other lanes, slots from the
    head on are deleted if `drop`, else kept for `read`.

    Returns the number of slots from `heads` on that were deleted, [L] int64.
    """
    with self._lock:
      self.flush()
      disjoint = (heads > self._heads) | (heads < self._tails)
      moved = disjoint | drop
      with self._transaction():
        for lane in np.flatnonzero(moved).tolist():
          if disjoint[lane]:
            self._set("tail", lane, int(heads[lane]))
          self._set("head", lane, int(heads[lane]))
        self._drop_beyond_heads()
      lost = np.where(moved, np.maximum(self._heads - heads, 0), 0)
      self._heads = np.where(moved, heads, self._heads)
      self._tails = np.where(disjoint, heads, self._tails)
    return lost

  def _drop_beyond_heads(self) -> None:
    """Deletes all slots from their lane's head on; shortens the rows that contain a head."""
    joined = "FROM segment JOIN lane USING (lane) WHERE"
    self._db.execute(
      f"DELETE FROM segment WHERE id IN (SELECT id {joined} max(start, tail) >= head)"
    )
    longer = self._db.execute(f"SELECT id, head, {_COLUMNS} {joined} start + size > head")
    for number, head, *fields in longer.fetchall():
      row = Row(*fields)
      (short,) = self._codec.encode(self._codec.decode(row, row.start, head))
      self._db.execute(
        "UPDATE segment SET size = ?, crc = ?, slots = ?, frames = ? WHERE id = ?",
        (*short[2:], number),
      )

  def evict(self, tails: np.ndarray) -> None:
    """Evicts the slots before tails [L], which must not exceed the heads.

    The file reuses the space of rows that are evicted completely.
    """
    with self._lock:
      self.flush()
      tails = np.maximum(tails, self._tails)
      if np.array_equal(tails, self._tails):  # finding rows takes a scan of all
        return
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

  def read(self, start: np.ndarray, stop: np.ndarray | None = None) -> Iterator[Slots]:
    """Yields slots start[lane] <= t < stop[lane] (None: the heads), in order within each lane.

    Each item has consecutive slots of one lane. If every append was flushed separately, items are
    in the order of the appends, and by lane within an append. If an item begins an episode although
    the lane's previous episode is open, the environment was lost in between.

    Raises JournalDamage if slots are damaged or missing.
    """
    for row, begin, end in self._rows(start, stop):
      yield self._codec.decode(row, begin, end)

  def verify(self, start: np.ndarray, stop: np.ndarray) -> None:
    """Raises JournalDamage unless all slots start[lane] <= t < stop[lane] are stored and intact."""
    for _ in self._rows(start, stop):
      pass

  def _rows(self, start: np.ndarray, stop: np.ndarray | None) -> Iterator[tuple[Row, int, int]]:
    """Yields intact rows and the requested range of slots in each."""
    self.flush()
    tails, stop = self.tails, self.heads if stop is None else stop
    position = np.array(start)  # next slot of each lane
    query = f"SELECT {_COLUMNS} FROM segment WHERE start + size > ? ORDER BY id"
    with self._errors("cannot be read"):
      for result in self._db.execute(query, (int(position.min()),)):
        if (position >= stop).all():
          return
        row = Row(*result)
        if row.intact():  # slots of damaged rows are reported as missing below
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
    """Closes and unlocks the file, without flushing. Idempotent."""
    with self._lock:
      self._db.close()

  def _open(self, form: dict[str, Any]) -> None:
    """Locks the file and checks that its version, lanes and columns are those of `form`."""
    self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
    new = not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    stored = None if new else self._db.execute("SELECT json FROM form").fetchone()
    if not new and stored != (json.dumps(form),):
      raise JournalError(
        f"{self.path} was written by another version or for other lanes or columns; start a new run"
      )
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
    """Returns tails and heads. Raises JournalDamage if the rows do not match them."""
    result = self._db.execute(
      "SELECT lane, tail, head, ifnull(min(start + size), head), ifnull(max(start + size), head) "
      "FROM lane LEFT JOIN segment USING (lane) GROUP BY lane ORDER BY lane"
    ).fetchall()
    table = np.array(result)
    if table.shape == (lanes, 5) and table.dtype == np.int64:  # may be false in a damaged file
      number, tails, heads, first, last = table.T
      ordered = (tails <= first) & (first <= last) & (last <= heads)
      if ordered.all() and (number == np.arange(lanes)).all():
        return tails, heads
    raise JournalDamage(f"journal {self.path} is damaged: its lanes and rows are inconsistent")

  @contextlib.contextmanager
  def _transaction(self) -> Iterator[None]:
    """A transaction: at the end everything written is durable, or nothing is written."""
    with self._errors("cannot be written"):
      self._db.execute("BEGIN EXCLUSIVE")
      try:
        yield
        self._db.execute("COMMIT")
      except BaseException:
        if self._db.in_transaction:  # SQLite rolls back by itself after some errors
          self._db.execute("ROLLBACK")
        raise

  @contextlib.contextmanager
  def _errors(self, problem: str) -> Iterator[None]:
    """Turns errors of SQLite into JournalError, or JournalDamage if the file is corrupt."""
    try:
      yield
    # UnicodeDecodeError: raised for messages that quote damaged names.
    except (sqlite3.Error, UnicodeDecodeError) as error:
      code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
      if code == sqlite3.SQLITE_BUSY:
        reason = f"journal {self.path} {problem}: it is in use, probably by another process"
        raise JournalError(reason) from error
      damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
      kind = JournalDamage if damaged else JournalError
      raise kind(f"journal {self.path} {problem}: {error}") from error
