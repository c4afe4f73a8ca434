"""Ring storage of slots, in which each frame is stored once.

Consecutive slots of a lane are adjacent in memory. A slot is identified by lane and absolute time.
"""

from collections.abc import Mapping

import numpy as np

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.system import memory
from speedyzero_jax.types import Slots

OPEN = -1  # episode_end of an episode that has not ended yet
NEVER = np.iinfo(np.int32).max  # stamp of an empty cell, greater than any learner step
_DERIVED = ("inserted", "episode_start", "episode_end")


def take(field: np.ndarray, flat: np.ndarray) -> np.ndarray:
  """Returns values of a field [L, C, ...] in flat cells [...] (see `LaneStore.flat`).

  Twice as fast as indexing with two arrays.
  """
  return field.reshape(-1, *field.shape[2:]).take(flat, axis=0)


def put(field: np.ndarray, flat: np.ndarray, values: np.ndarray | int) -> None:
  """Writes values into flat cells; for repeated cells the last value is stored."""
  field.reshape(-1, *field.shape[2:])[flat] = values


def slots_between(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Lists slots begin[lane] <= t < end[lane] by lane, oldest first: (lane [N], time [N]) int64."""
  count = np.maximum(end - begin, 0)
  lane = np.repeat(np.arange(len(count)), count)
  offset = np.arange(len(lane)) - np.repeat(np.cumsum(count) - count, count)
  return lane, begin[lane] + offset


class LaneStore:
  """Rings of slots, arrays [L, C, ...] with C = `capacity`; slot t is in cell t % C of its lane.

  The live slots of a lane are tail[lane] <= t < head[lane]. Memory of frames is committed only
  when it is written. `store[name]` is the array of a column or copy of the schema, of a stamp
  (int32, `NEVER` in empty cells), or one of these derived columns, [L, C] int64:

    inserted: number of transitions collected in all lanes before the slot.
    episode_start: absolute time of the first frame of the slot's episode.
    episode_end: absolute time of its last frame; `OPEN` while the episode is unfinished.
  """

  def __init__(self, schema: Schema, lanes: int, capacity: int):
    cells = (lanes, capacity)
    self.schema, self.lanes, self.capacity = schema, lanes, capacity
    self.num_actions = schema.num_actions
    frame, *others = schema.columns
    self.frame = memory.zeros((*cells, *frame.shape), np.dtype(frame.dtype))
    columns = {c.name: np.zeros((*cells, *c.shape), c.dtype) for c in others}
    copies = {name: np.zeros_like(columns[source]) for name, source in schema.copies.items()}
    stamps = {name: np.full(cells, NEVER, np.int32) for name in schema.stamps}
    derived = {name: np.zeros(cells, np.int64) for name in _DERIVED}
    self._columns = {"frame": self.frame} | columns
    self._sources = {**schema.copies, **dict.fromkeys(stamps, "step")}  # of copies and stamps
    self.fields = columns | copies | stamps | derived  # all arrays except the frames
    self.head = np.zeros(lanes, np.int64)
    self.tail = np.zeros(lanes, np.int64)
    self.num_transitions = 0  # collected so far, including evicted ones
    self.stored_transitions = 0
    self.first, self.action, self.reward = (self[name] for name in ("first", "action", "reward"))
    self.terminated, self.truncated = self["terminated"], self["truncated"]
    self.inserted, self.episode_start, self.episode_end = (self[name] for name in _DERIVED)

  def __getitem__(self, name: str) -> np.ndarray:
    return self.fields[name]

  def append(self, slots: Slots) -> Slots:
    """Appends slots, evicting the oldest ones of full lanes; returns them sorted by lane.

    A frame may be both terminated and truncated; it then counts as terminated. Raises ValueError if
    slots are invalid (see `check`); nothing is changed.
    """
    slots = self.check(slots)
    lane, time, first = slots.lane, slots.time, slots["first"]
    cell = self.cell(time)
    # A slot's episode starts at the latest `first` among its lane's new slots, or where the lane's
    # open episode started.
    open_start = self.episode_start[lane, self.cell(self.head[lane] - 1)]
    latest = np.maximum.accumulate(np.where(first | _leads(lane), np.arange(len(lane)), 0))
    self.episode_start[lane, cell] = np.where(first, time, open_start)[latest]
    self.episode_end[lane, cell] = OPEN
    acted = slots["action"] >= 0
    evicted = (time - self.capacity >= self.tail[lane]) & (self.action[lane, cell] >= 0)
    self.stored_transitions += int(acted.sum()) - int(evicted.sum())
    for name, column in self._columns.items():
      column[lane, cell] = slots[name]
    for name, source in self._sources.items():
      self[name][lane, cell] = slots[source]
    self.inserted[lane, cell] = self.num_transitions + np.cumsum(acted) - acted
    self.num_transitions += int(acted.sum())
    self.head[lane] = time + 1  # repeated lanes: the last time is used
    np.maximum(self.tail, self.head - self.capacity, out=self.tail)
    for end in np.flatnonzero(~acted):
      self._close(int(lane[end]), int(time[end]))
    return slots

  def check(self, slots: Slots) -> Slots:
    """Returns the slots sorted by lane.

    Raises ValueError if there are none, if columns are missing, of another shape or type, or
    inconsistent, if a lane has more slots than its capacity, or if they do not follow its head.
    """
    self.schema.check(slots)
    slots = slots.by_lane()
    slots.check_follows(self.head)
    count = np.bincount(slots.lane)
    if count.max() > self.capacity:
      lane = int(count.argmax())
      raise ValueError(
        f"an append must have at most {self.capacity} slots per lane, got {count[lane]} of lane "
        f"{lane}"
      )
    self._check_content(slots)
    return slots

  def _check_content(self, slots: Slots) -> None:
    """Checks the values of columns and their consistency."""
    lane, action, step = slots.lane, slots["action"], slots["step"]
    ended = slots["terminated"] | slots["truncated"]
    first = np.where(_leads(lane), ~self._is_open(lane), np.roll(ended, 1))
    for wrong, message in (
      ((action == -1) != ended, "action must be -1 exactly where an episode ends"),
      (
        (action < -1) | (action >= self.num_actions),
        f"action must be in -1..{self.num_actions - 1}",
      ),
      ((step < 0) | (step == NEVER), f"step must be a learner step, 0..{NEVER - 1}"),
      (
        slots["first"] != first,
        "first must be true exactly at the lane's start and after an episode's end",
      ),
      *(
        (~np.isfinite(x.reshape(len(x), -1)).all(axis=1), f"{name} must be finite")
        for name, x in slots.columns.items()
        if x.dtype.kind == "f"
      ),
    ):
      if wrong.any():
        raise ValueError(f"slots of lane {lane[wrong][0]}: {message}")

  def _is_open(self, lane: np.ndarray) -> np.ndarray:
    """Whether each lane's newest slot belongs to an unfinished episode."""
    head = self.head[lane]
    return (head > 0) & (self.episode_end[lane, self.cell(head - 1)] == OPEN)

  def _close(self, lane: int, end: int) -> None:
    """Records that the lane's open episode ends with slot `end`."""
    start = max(int(self.episode_start[lane, end % self.capacity]), int(self.tail[lane]))
    self.episode_end[lane, np.arange(start, end + 1) % self.capacity] = end

  def truncate(self, lane: int) -> None:
    """Truncates the lane's open episode, if any, at its newest slot.

    Called after the lane's environment was lost: the next slot starts an episode. The transition
    from the newest slot is discarded.
    """
    if not self._is_open(np.array([lane]))[0]:
      return
    end = int(self.head[lane]) - 1
    cell = end % self.capacity
    self.truncated[lane, cell], self.action[lane, cell], self.reward[lane, cell] = True, -1, 0.0
    self.stored_transitions -= 1
    self._close(lane, end)

  def put_frames(self, slots: Slots) -> None:
    """Restores the frames of slots, sorted by lane and consecutive within each.

    After a gap, the slots before the gap are evicted. The other fields are restored by
    `load_state_dict`.
    """
    begins = _leads(slots.lane) & (slots.time > self.head[slots.lane])
    self.tail[slots.lane[begins]] = slots.time[begins]
    self.frame[slots.lane, self.cell(slots.time)] = slots["frame"]  # of a full ring, the last ones
    self.head[slots.lane] = slots.time + 1  # repeated lanes: the last time is used
    np.maximum(self.tail, self.head - self.capacity, out=self.tail)

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the contents except the frames: live slots by lane, oldest first."""
    flat = self.flat(*slots_between(self.tail, self.head))
    state = {f"slot_{name}": take(array, flat) for name, array in self.fields.items()}
    counts = {"head": self.head.copy(), "tail": self.tail.copy()}
    return state | counts | {"num_transitions": np.array(self.num_transitions, np.int64)}

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict`.

    Raises ValueError, and changes nothing, unless these are the slots whose frames are stored.
    """
    if not (np.array_equal(state["head"], self.head) and np.array_equal(state["tail"], self.tail)):
      raise ValueError("the state does not match the slots whose frames were imported")
    flat = self.flat(*slots_between(self.tail, self.head))
    for name, array in self.fields.items():
      saved = state[f"slot_{name}"]
      if saved.shape != (len(flat), *array.shape[2:]) or saved.dtype != array.dtype:
        raise ValueError(
          f"slot_{name} must be {array.dtype}{[len(flat), *array.shape[2:]]}, got "
          f"{saved.dtype}{list(saved.shape)}"
        )
    for name, array in self.fields.items():
      put(array, flat, state[f"slot_{name}"])
    self.num_transitions = int(state["num_transitions"])
    self.stored_transitions = int((state["slot_action"] >= 0).sum())

  def cell(self, time: np.ndarray) -> np.ndarray:
    """Returns cells of slots in their lane's ring."""
    return time % self.capacity

  def flat(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Returns flat cells, lane * C + cell, of slots; int64."""
    return np.asarray(lane, np.int64) * self.capacity + self.cell(time)

  def time_of(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Returns absolute times of the slots in used cells, int64."""
    newest = self.head[lane] - 1
    return newest - (newest - cell) % self.capacity

  def last(self, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Returns the absolute time of the last stored frame of each live slot's episode, int64."""
    end = take(self.episode_end, self.flat(lane, time))
    return np.where(end == OPEN, self.head[lane] - 1, end)

  def window_cells(self, lane: np.ndarray, time: np.ndarray, before: int, after: int) -> np.ndarray:
    """Returns cells of frames time-before .. time+after of live slots, [B, before+1+after].

    Beyond the ends of an episode, its first or last stored frame is repeated.
    """
    lo = np.maximum(take(self.episode_start, self.flat(lane, time)), self.tail[lane])
    hi = self.last(lane, time)
    window = time[:, None] + np.arange(-before, after + 1)
    return self.cell(np.clip(window, lo[:, None], hi[:, None]))

  def gather(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Returns frames [..., H, W, C] of cells (lane [...], cell [...])."""
    return take(self.frame, np.asarray(lane, np.int64) * self.capacity + cell)

  @property
  def slot_bytes(self) -> int:
    """Bytes of a slot in all arrays."""
    arrays = (self.frame, *self.fields.values())
    return sum(array.nbytes for array in arrays) // (self.lanes * self.capacity)


def _leads(lane: np.ndarray) -> np.ndarray:
  """Whether slots, sorted by lane, are the first ones of their lanes, bool [n]."""
  return np.diff(lane, prepend=-1) != 0
