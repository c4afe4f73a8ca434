"""What was collected, as others see it: appended, its frames shown and handed on, saved and restored.

One lock makes every method atomic. Must not know what is learned from it.
"""

import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from speedyzero_jax.replay import snapshot
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.replay.write_log import WriteLog
from speedyzero_jax.types import Segment

Array = np.ndarray | jax.Array


class Experience:
  """Lanes of slots (see `types.py` for slots and letters).

  Index arrays are (lane [B] integer, time [B] integer). Slots evicted between two calls are no error.
  """

  def __init__(
    self,
    *,
    lanes: int,
    capacity: int,
    frame_shape: tuple[int, ...],
    frame_dtype: np.dtype | type,
    num_actions: int,
    frame_stack: int,
    device_frames: DeviceFrames | None,
    frame_memory: np.ndarray | None,
  ):
    """Makes room for `capacity` slots per lane, see `Replay`. Raises ValueError for a size below 1."""
    if frame_stack < 1:
      raise ValueError(f"frame_stack must be at least 1, got {frame_stack}")
    self._stack = frame_stack
    self._store = LaneStore(lanes, capacity, frame_shape, frame_dtype, num_actions, frame_memory)
    self._log = WriteLog(lanes * capacity)
    self._device_frames = device_frames
    self._lock = threading.RLock()

  # --- collecting

  @property
  def num_transitions(self) -> int:
    """Transitions ever added, evicted ones included."""
    return self._store.num_transitions

  @property
  def heads(self) -> np.ndarray:
    """[L] int64, the absolute time of each lane's next slot."""
    with self._lock:
      return self._store.head.copy()

  @property
  def bytes_on_devices(self) -> int:
    """Of frames, on each device; 0 if batches are gathered on the host."""
    return self._device_frames.bytes_per_device if self._device_frames is not None else 0

  @property
  def bytes_to_devices(self) -> int:
    """Handed to the devices for that so far."""
    return self._device_frames.bytes_written if self._device_frames is not None else 0

  def append(self, segment: Segment) -> None:
    """`append_many` of one segment."""
    self.append_many([segment])

  def append_many(self, segments: Sequence[Segment]) -> None:
    """Appends segments of different lanes.

    Raises:
      ValueError: anything is wrong with any of them (see `LaneStore.append`); then nothing has changed.
    """
    if not segments:
      return
    with self._lock:
      self._store.append(segments)
      lane = np.repeat(
        [segment.lane for segment in segments], [len(segment.frame) for segment in segments]
      )
      time = np.concatenate([segment.start + np.arange(len(segment.frame)) for segment in segments])
      self._log.append(self._store.flat(lane, time))
      if (
        self._device_frames is not None
      ):  # while the lock is held: whoever sees the slots finds their frames there
        frames = np.concatenate([segment.frame for segment in segments])
        self._device_frames.write(lane, self._store.cell(time), frames)

  def check(self, segments: Sequence[Segment]) -> None:
    """Raises the ValueError that `append_many` of these segments would raise."""
    with self._lock:
      self._store.check(segments)

  def truncate(self, lane: int) -> None:
    """Ends a lane's open episode where it is, because its environment was lost (see `LaneStore.truncate`).

    Raises ValueError for an unknown lane.
    """
    with self._lock:
      if not 0 <= lane < self._store.lanes:
        raise ValueError(f"lane must be in 0..{self._store.lanes - 1}, got {lane}")
      self._store.truncate(lane)

  # --- frames

  def windows(
    self, lane: np.ndarray, time: np.ndarray, after: int = 0, *, spread: bool = False
  ) -> Array:
    """Frames of the states time .. time+after with their stacks, [B, S+after, H, W, C].

    State time+i is frames i .. i+S-1 of it. An episode's first and last stored frames are repeated at its edges.
    With frames on devices the result is a jax array there: on the first device, or with `spread` each device its
    share of B; otherwise it is a numpy array.
    """
    cells, _ = self.window_cells(lane, time, after)
    # Copied outside the lock, being large. A frame evicted meanwhile is shown as the one that took its place: `held`
    # tells, and what is found in an evicted state is dropped when it is written.
    lanes = np.broadcast_to(lane[:, None], cells.shape)
    if self._device_frames is not None:
      return self._device_frames.gather(lanes, cells, spread=spread)
    return self._store.gather(lanes, cells)

  def blanks(self, count: int, after: int = 0, *, spread: bool = False) -> Array:
    """Like `windows` of so many states, and where those are, but showing nothing in particular: to compile with."""
    cells = np.zeros((count, self._stack + after), np.int64)
    if self._device_frames is not None:
      return self._device_frames.gather(cells, cells, spread=spread)
    return np.zeros((*cells.shape, *self._store.frame.shape[2:]), self._store.frame.dtype)

  @property
  def tails(self) -> np.ndarray:
    """The oldest stored slot of each lane, [L]."""
    with self._lock:
      return self._store.tail.copy()

  def held(self, lane: np.ndarray, time: np.ndarray, since: np.ndarray) -> np.ndarray:
    """Whether `windows` of these states, made after `tails` were `since` [L], show frames of theirs only, [B] bool.

    Of lanes that were appended to meanwhile, it may say no of states that have just lost the beginning of their stack.
    """
    with self._lock:
      tail = self._store.tail[lane]
      return (time >= tail) & ((tail == since[lane]) | (time - (self._stack - 1) >= tail))

  def window_cells(
    self, lane: np.ndarray, time: np.ndarray, after: int = 0
  ) -> tuple[np.ndarray, int]:
    """Where the frames of `windows` are: their cells [B, S+after] in each lane's ring, and `frames_written`."""
    with self._lock:
      _, safe = self._present(lane, time)
      return self._store.window_cells(lane, safe, self._stack - 1, after), self._log.count

  @property
  def frames_written(self) -> int:
    """Frames ever written to cells, by which a copy elsewhere knows how much it has."""
    return self._log.count

  def frames_since(self, number: int, n: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Up to n of the frames written, from `number` on (see `WriteLog.since`).

    Returns the number to go on from, and lane [m], cell [m] and frames [m, H, W, C].
    """
    with self._lock:
      following, flat = self._log.since(number, n)
    lane, cell = np.divmod(flat, self._store.capacity)
    # Copied outside the lock, as in `windows`. A cell written meanwhile is told of again.
    return following, lane, cell, self._store.gather(lane, cell)

  def _present(self, lane: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether slots are stored, and their times with the evicted ones replaced by some stored slot's."""
    present = self._store.live(lane, time)
    if np.any(time >= self._store.head[lane]):
      raise ValueError("some of the slots were never appended")
    return present, np.where(present, time, self._store.tail[lane])

  # --- saving and restoring

  def export_slots(self, start: np.ndarray) -> dict[str, np.ndarray]:
    """The frames of slots from start [L] on, which never change once appended (see `snapshot.export_frames`).

    Saving `export_slots(heads at the last save)` and `state_dict()` each time saves every frame once.
    """
    with self._lock:
      return snapshot.export_frames(self._store, np.asarray(start, np.int64))

  def import_slots(self, exported: Mapping[str, np.ndarray]) -> None:
    """Restores exported frames into a new replay, oldest export first; `load_state_dict` is to follow.

    Raises:
      ValueError: they do not fit, do not follow, or this replay has been appended to; then nothing has changed.
    """
    with self._lock:
      if self._log.count:
        raise ValueError("slots can only be imported into a new replay")
      snapshot.import_frames(self._store, exported)

  def state_dict(self) -> dict[str, np.ndarray]:
    """Everything but the frames, as numpy arrays."""
    with self._lock:
      return snapshot.export_store(self._store)

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores what `state_dict` gave, after the frames.

    Raises:
      ValueError: the state is not of the slots imported; then nothing has changed.
    """
    with self._lock:
      store = self._store
      snapshot.check_store(store, state)
      snapshot.import_store(store, state)
      lane, time = snapshot.live_index(store)
      self._log.append(store.flat(lane, time))
      if self._device_frames is not None:
        for begin in range(0, len(lane), 4096):  # not all in memory twice
          some = slice(begin, begin + 4096)
          cell = store.cell(time[some])
          self._device_frames.write(lane[some], cell, store.gather(lane[some], cell))
