"""Journals of a few lanes with known contents."""

import contextlib
import sqlite3

import numpy as np

from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.types import Slots

LANES, ACTIONS = 3, 4
EXTRA = (Column("policy", "float32", (ACTIONS,)), Column("visits", "int16"))
SMALL = make_schema((1, 1, 3), "uint8", ACTIONS, EXTRA)
LARGE = make_schema((32, 32, 3), "uint8", ACTIONS, EXTRA)
NONE = np.zeros(LANES, int)


def opened(path, schema=SMALL, lanes=LANES, **options):
  """Opens a journal as a context manager, which closes it."""
  return contextlib.closing(Journal(path, lanes, schema, **options))


def play(lane, start, n=1, schema=SMALL, salt=0):
  """Incompressible slots; each is a function of its lane, time and salt."""
  rngs = [np.random.default_rng([lane, t, salt]) for t in range(start, start + n)]
  arrays = {}
  for column in schema.columns:
    dtype = np.dtype(column.dtype)
    arrays[column.name] = np.stack(
      [
        rng.normal(size=column.shape).astype(dtype)
        if dtype.kind == "f"
        else rng.integers(0, 2 if dtype.kind == "b" else ACTIONS, column.shape).astype(dtype)
        for rng in rngs
      ]
    )
  arrays["frame"] = np.stack([r.integers(0, 256, schema.frame.shape) for r in rngs]).astype("uint8")
  arrays["first"] = np.arange(start, start + n) == 0
  return Slots.of_lane(lane, start, arrays)


def play_all(start, n=1, **options):
  """Slots start <= t < start + n of every lane; both may be numbers or arrays [LANES]."""
  places = np.stack(np.broadcast_arrays(np.arange(LANES), start, n), axis=1)
  return Slots.concatenate([play(*place, **options) for place in places.tolist()])


def contents(items):
  """Maps (lane, time) to all bytes of a slot; asserts that no slot repeats."""
  result = {}
  for slots in items:
    for i, place in enumerate(zip(slots.lane.tolist(), slots.time.tolist(), strict=True)):
      assert place not in result
      result[place] = {name: (a.dtype, a[i].tobytes()) for name, a in slots.columns.items()}
  return result


def read(journal, start=NONE, stop=None):
  """The journal's slots by lane and time."""
  return contents(journal.read(start, stop))


def expected(tails, heads, **options):
  return contents(
    play(lane, tail, head - tail, **options)
    for lane, (tail, head) in enumerate(zip(tails, heads, strict=True))
    if head > tail
  )


def rows(path, what="lane, start, size", where="1"):
  with contextlib.closing(sqlite3.connect(path)) as database:
    return database.execute(f"SELECT {what} FROM segment WHERE {where} ORDER BY id").fetchall()


def edit(path, command, *values):
  with contextlib.closing(sqlite3.connect(path)) as database:
    database.execute(command, values)
    database.commit()
