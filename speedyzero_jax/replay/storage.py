"""Ring storage of slots, each frame stored once.

Slots that are neighbours in time are neighbours in memory. A slot is named (lane, absolute time).
"""

import math
from collections.abc import Sequence

import numpy as np

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.replay.staleness import NEVER, Stamps
from speedyzero_jax.system import memory
from speedyzero_jax.types import Segment

OPEN = -1  # episode_end of an episode that has not ended yet


def take(field: np.ndarray, flat: np.ndarray) -> np.ndarray:
  """Values of a field [L, C, ...] in flat cells [...] (see `LaneStore.flat`).

  Twice as fast as indexing with two arrays.
  """
  return field.reshape(-1, *field.shape[2:]).take(flat, axis=0)


def put(field: np.ndarray, flat: np.ndarray, values: np.ndarray) -> None:
  """Writes values into flat cells; for repeated cells the last value counts."""
  field.reshape(-1, *field.shape[2:])[flat] = values


class LaneStore:
  """Rings of slots, arrays [L, capacity, ...]; slot t of a lane lives in cell t % capacity.

  Memory is committed only as it is written. `store[name]` is the array of a column of the schema,
  of a copy, or of a stamp (int32; write it through `stamps[name]`). Besides those, `inserted` [L,
  C] int64 counts the transitions collected in all lanes before the slot, and `episode_start` and
  `episode_end` [L, C] int64 are absolute times (`OPEN` while unfinished). The live slots of a lane
  are tail[lane] <= t < head[lane].
  """

  def __init__(
    self, schema: Schema, lanes: int, capacity: int, frame_memory: np.ndarray | None = None
  ):
    """Allocates the rings.

    Args:
      schema: of a slot.
      lanes: L.
      capacity: C, slots per lane.
      frame_memory: [L, C, H, W, C] array for the frames, if shared with other processes.

    Raises:
      ValueError: a size below 1, or frame memory of another shape or dtype.
    """
    sizes = ("lanes", lanes), ("capacity", capacity), ("num_actions", schema.num_actions)
    for name, size in sizes:
      if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    cells = (lanes, capacity)
    self.schema, self.lanes, self.capacity = schema, lanes, capacity
    self.num_actions = schema.num_actions
    frame, *others = schema.columns
    shape = (*cells, *frame.shape)
    self.frame = (
      memory.zeros(shape, np.dtype(frame.dtype)) if frame_memory is None else frame_memory
    )
    if self.frame.shape != shape or self.frame.dtype != frame.dtype:
      expected, got = f"{frame.dtype}{list(shape)}", f"{self.frame.dtype}{list(self.frame.shape)}"
      raise ValueError(f"frame_memory is {got}, not {expected}")
    self._columns = {c.name: np.zeros((*cells, *c.shape), c.dtype) for c in others}
    copies = {name: np.zeros_like(self._columns[source]) for name, source in schema.copies.items()}
    self.stamps = {name: Stamps(cells) for name in schema.stamps}
    stamps = {name: stamps.step for name, stamps in self.stamps.items()}
    self.inserted = np.zeros(cells, np.int64)
    self.episode_start = np.zeros(cells, np.int64)
    self.episode_end = np.zeros(cells, np.int64)
    derived = ("inserted", "episode_start", "episode_end")
    self.fields = self._columns | copies | stamps | {name: getattr(self, name) for name in derived}
    self.head = np.zeros(lanes, np.int64)
    self.tail = np.zeros(lanes, np.int64)
    self.num_transitions = 0  # collected so far, evicted ones included
    self.stored_transitions = 0
    self.first, self.action, self.reward = (self[name] for name in ("first", "action", "reward"))
    self.terminated, self.truncated = self["terminated"], self["truncated"]

  def __getitem__(self, name: str) -> np.ndarray:
    return self.fields[name]

  def append(self, segments: Sequence[Segment]) -> None:
    """Appends segments of different lanes, evicting the oldest slots of full lanes.

    A frame may be both terminated and truncated; it then counts as terminated.

    Raises:
      ValueError: invalid segments; nothing has changed then.
    """
    lane, size, offset, slots = self._checked(segments)
    self._write(lane, size, offset, slots, [segment.frame for segment in segments])

  def check(self, segments: Sequence[Segment]) -> None:
    """Raises the ValueError that `append` would raise."""
    self._checked(segments)

  def _checked(
    self, segments: Sequence[Segment]
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Lanes of all slots, sizes and offsets of the segments, and one array per column."""
    lanes = [int(segment.lane) for segment in segments]
    if len(set(lanes)) != len(lanes):
      raise ValueError(f"one append takes one segment per lane, got lanes {lanes}")
    for segment in segments:
      self._check_place(segment)
      self.schema.check(segment)
    # One array per column from here on: most segments are one slot long.
    size = np.array([len(segment.frame) for segment in segments])
    arrays = [segment.arrays() for segment in segments]
    slots = {name: np.concatenate([array[name] for array in arrays]) for name in self._columns}
    lane = np.repeat(lanes, size)
    offset = np.cumsum(size) - size  # of each segment's first slot
    self._check_content(lane, offset, slots, [segment.frame for segment in segments])
    return lane, size, offset, slots

  def _check_place(self, segment: Segment) -> None:
    lane, n = segment.lane, len(segment.frame)
    if not 0 <= lane < self.lanes:
      raise ValueError(f"segment.lane must be in 0..{self.lanes - 1}, got {lane}")
    if segment.start != self.head[lane]:
      raise ValueError(
        f"segment of lane {lane}: start must be the lane's head {self.head[lane]}, "
        f"got {segment.start}"
      )
    if not 1 <= n <= self.capacity:
      raise ValueError(f"segment of lane {lane}: must hold 1..{self.capacity} slots, got {n}")

  def _check_content(
    self,
    lane: np.ndarray,
    offset: np.ndarray,
    slots: dict[str, np.ndarray],
    frames: list[np.ndarray],
  ) -> None:
    """Checks values and their consistency."""
    ended = slots["terminated"] | slots["truncated"]
    expected_first = np.concatenate([[False], ended[:-1]])
    expected_first[offset] = ~self._is_open(lane[offset])
    action, step = slots["action"], slots["step"]
    floats = [c.name for c in self.schema.columns[1:] if np.dtype(c.dtype).kind == "f"]
    for wrong, message in (
      ((action == -1) != ended, "action must be -1 exactly where an episode ends"),
      (
        (action < -1) | (action >= self.num_actions),
        f"action must be in -1..{self.num_actions - 1}",
      ),
      ((step < 0) | (step == NEVER), f"step must be a learner step, 0..{NEVER - 1}"),
      (
        slots["first"] != expected_first,
        "first must hold exactly at the lane's start and after an episode's end",
      ),
      *((~_finite(slots[name]), f"{name} must be finite") for name in floats),
    ):
      if wrong.any():
        raise ValueError(f"segment of lane {lane[wrong][0]}: {message}")
    if self.frame.dtype.kind == "f" and not all(np.isfinite(frame).all() for frame in frames):
      raise ValueError(f"segments of lanes {lane[offset].tolist()}: frame must be finite")

  def _write(
    self,
    lane: np.ndarray,
    size: np.ndarray,
    offset: np.ndarray,
    slots: dict[str, np.ndarray],
    frames: list[np.ndarray],
  ) -> None:
    position = np.arange(len(lane))
    start = self.head[lane[offset]]
    time = position + np.repeat(start - offset, size)
    cell, flat = self.cell(time), self.flat(lane, time)
    # A slot's episode starts at the latest `first` in its segment, or where the open episode does.
    open_start = self.episode_start[lane, self.cell(self.head[lane] - 1)]
    first_time = np.where(slots["first"], time, open_start)
    boundary = slots["first"].copy()
    boundary[offset] = True
    begin = np.maximum.accumulate(np.where(boundary, position, 0))
    self.episode_start[lane, cell] = first_time[begin]
    self.episode_end[lane, cell] = OPEN
    acted = slots["action"] >= 0
    evicted = (time - self.capacity >= self.tail[lane]) & (self.action[lane, cell] >= 0)
    self.stored_transitions += int(acted.sum()) - int(evicted.sum())
    for name, column in self._columns.items():
      column[lane, cell] = slots[name]
    for name, source in self.schema.copies.items():
      self[name][lane, cell] = slots[source]
    for stamps in self.stamps.values():
      stamps.set(flat, slots["step"])
    self.inserted[lane, cell] = self.num_transitions + np.cumsum(acted) - acted
    self.num_transitions += int(acted.sum())
    for at, n, frame in zip(offset, size, frames, strict=True):
      place, new = (cell[at], frame[0]) if n == 1 else (cell[at : at + n], frame)
      self.frame[lane[at], place] = new
    grown = lane[offset]
    self.head[grown] = start + size
    self.tail[grown] = np.maximum(self.tail[grown], self.head[grown] - self.capacity)
    for end in np.flatnonzero(~acted):
      self._close(int(lane[end]), int(time[end]))

  def _is_open(self, lane: np.ndarray) -> np.ndarray:
    """Whether each lane's newest slot belongs to an unfinished episode."""
    head = self.head[lane]
    return (head > 0) & (self.episode_end[lane, self.cell(head - 1)] == OPEN)

  def _close(self, lane: int, end: int) -> None:
    start = max(int(self.episode_start[lane, end % self.capacity]), int(self.tail[lane]))
    self.episode_end[lane, np.arange(start, end + 1) % self.capacity] = end

  def truncate(self, lane: int) -> None:
    """Truncates the lane's open episode, if any, at its newest slot.

    For a lane whose environment was lost: its next slot starts an episode. The transition out of
    the newest slot is dropped.
    """
    if not self._is_open(np.array([lane]))[0]:
      return
    end = int(self.head[lane]) - 1
    cell = end % self.capacity
    self.truncated[lane, cell], self.action[lane, cell], self.reward[lane, cell] = True, -1, 0.0
    self.stored_transitions -= 1
    self._close(lane, end)

  def put_frames(self, lane: int, start: int, frame: np.ndarray) -> None:
    """Restores frames [n, H, W, C] of slots start.. of a lane; a gap evicts the slots before it.

    The caller restores the other fields. Raises ValueError if `start` is before the lane's head.
    """
    if not 0 <= lane < self.lanes or start < self.head[lane]:
      raise ValueError(f"frames of lane {lane} from slot {start} on do not follow its head")
    if frame.shape[1:] != self.frame.shape[2:] or frame.dtype != self.frame.dtype:
      raise ValueError(
        f"frames of lane {lane} must be {self.frame.dtype}{list(self.frame.shape[2:])} each, "
        f"got {frame.dtype}{list(frame.shape[1:])}"
      )
    if start > self.head[lane]:
      self.tail[lane] = start
    stop = start + len(frame)
    kept = frame[-self.capacity :]
    self.frame[lane, np.arange(stop - len(kept), stop) % self.capacity] = kept
    self.head[lane] = stop
    self.tail[lane] = max(self.tail[lane], stop - self.capacity)

  def cell(self, time: np.ndarray) -> np.ndarray:
    """Cells of slots in their lane's ring."""
    return time % self.capacity

  def flat(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Cells of slots among those of all lanes, int64."""
    return np.asarray(lane, np.int64) * self.capacity + self.cell(time)

  def time_of(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Absolute times of the slots in used cells, int64."""
    newest = self.head[lane] - 1
    return newest - (newest - cell) % self.capacity

  def live(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Whether the slots are stored, bool."""
    return (self.tail[lane] <= time) & (time < self.head[lane])

  def last(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Absolute time of the last stored frame of each live slot's episode, int64."""
    end = take(self.episode_end, self.flat(lane, time))
    return np.where(end == OPEN, self.head[lane] - 1, end)

  def num_slots(self) -> int:
    """Live slots in all lanes."""
    return int((self.head - self.tail).sum())

  def window_cells(self, lane: np.ndarray, time: np.ndarray, before: int, after: int) -> np.ndarray:
    """Cells of frames time-before .. time+after, [B, before+1+after], for `gather`.

    Beyond an episode's first or last stored frame that frame is repeated. Raises ValueError for
    slots not stored.
    """
    if not self.live(lane, time).all():
      raise ValueError("windows: some of the slots are not stored")
    lo = np.maximum(take(self.episode_start, self.flat(lane, time)), self.tail[lane])
    hi = self.last(lane, time)
    window = time[:, None] + np.arange(-before, after + 1)
    return self.cell(np.clip(window, lo[:, None], hi[:, None]))

  def newest(self, field: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Copies a field [L, C, ...] of slots start[lane] .. head[lane]-1, all live, lane by lane."""
    parts = []
    begins, sizes = (start % self.capacity).tolist(), (self.head - start).tolist()
    for ring, begin, size in zip(field, begins, sizes, strict=True):
      wrapped = max(begin + size - self.capacity, 0)
      parts += [ring[begin : begin + size], ring[:wrapped]]
    return np.concatenate(parts)

  def gather(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Frames [..., H, W, C] of cells (lane [...], cell [...])."""
    return take(self.frame, np.asarray(lane, np.int64) * self.capacity + cell)

  def memory(self) -> dict[str, float]:
    """Bytes in use (of slots, and of frames alone), reserved, and per stored transition."""
    arrays = list(self.fields.values())
    cells = self.lanes * self.capacity
    slots = self.num_slots()
    frames = self.frame.nbytes / cells * slots
    used = frames + sum(a.nbytes for a in arrays) / cells * slots
    return {
      "bytes": used,
      "frame_bytes": frames,
      "reserved_bytes": float(self.frame.nbytes + sum(a.nbytes for a in arrays)),
      "bytes_per_transition": used / max(self.stored_transitions, 1),
    }


def _finite(values: np.ndarray) -> np.ndarray:
  """Whether all values of a slot are finite, bool [n]."""
  return np.isfinite(values).reshape(len(values), math.prod(values.shape[1:])).all(-1)
