"""The replay: thread-safe storage of steps, selection of training data, and sweeps.

One lock makes reads and writes of columns atomic. Frames are copied without the lock (see
`intact`). Agents hold `lock` while they compute targets from `store`.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.schema import Column, Schema
from speedyzero_jax.replay.selector import Selection, Selector
from speedyzero_jax.replay.storage import NEVER, LaneStore, put, slots_between, take
from speedyzero_jax.replay.sweep import Sweep
from speedyzero_jax.types import Slots

Array = np.ndarray | jax.Array


class Replay:
  """Lanes of slots (see `types.py`), a selector, and sweeps.

  Slots are addressed by (lane [B] integer, time [B] integer). Slots may be evicted between two
  calls; writes to them are then ignored. Windows are gathered from `device_frames`, or in host
  memory if it is None.
  """

  def __init__(
    self,
    schema: Schema,
    make_selector: Callable[[LaneStore], Selector],
    *,
    lanes: int,
    capacity: int,  # slots per lane
    frame_stack: int,
    rng_seed: int,
    sweeps: Mapping[str, int] = MappingProxyType({}),  # phases by name, see `Sweep`
    device_frames: DeviceFrames | None = None,
  ):
    self.schema, self._stack = schema, frame_stack
    self.store = LaneStore(schema, lanes, capacity)
    self.selector = make_selector(self.store)
    self.rng = np.random.Generator(np.random.PCG64(rng_seed))
    self.lock = threading.RLock()
    self._device_frames = device_frames
    self._sweeps = {name: Sweep(lanes, capacity, phases=phases) for name, phases in sweeps.items()}
    self._least = dict.fromkeys(schema.stamps, NEVER)  # lower bounds of the stamps

  # --- collecting

  @property
  def num_transitions(self) -> int:
    """Number of transitions appended so far, including evicted ones."""
    return self.store.num_transitions

  @property
  def heads(self) -> np.ndarray:
    """[L] int64, the absolute time of each lane's next slot."""
    with self.lock:
      return self.store.head.copy()

  @property
  def tails(self) -> np.ndarray:
    """[L] int64, the oldest stored slot of each lane."""
    with self.lock:
      return self.store.tail.copy()

  def append(self, slots: Slots) -> None:
    """Appends slots. Raises ValueError if they are invalid; nothing is changed."""
    with self.lock:
      old_head = self.store.head.copy()
      slots = self.store.append(slots)
      self._copy_frames(slots.lane, slots.time)
      used = np.minimum(self.store.head, self.store.capacity)
      for sweep in self._sweeps.values():
        sweep.grow(used)
      grown = np.flatnonzero(self.store.head > old_head)
      self.selector.appended(grown, old_head[grown])
      oldest = int(slots["step"].min(initial=NEVER))
      self._least = {stamp: min(least, oldest) for stamp, least in self._least.items()}

  def _copy_frames(self, lane: np.ndarray, time: np.ndarray) -> None:
    """Copies the frames of newly written slots [n] to the devices."""
    if self._device_frames is None:
      return
    # The caller holds the lock, so visible slots have their frames. Chunks bound temporary memory.
    for begin in range(0, len(lane), 4096):
      part = slice(begin, begin + 4096)
      cell = self.store.cell(time[part])
      self._device_frames.write(lane[part], cell, self.store.gather(lane[part], cell))

  def check(self, slots: Slots) -> None:
    """Raises the ValueError that `append` of these slots would raise."""
    with self.lock:
      self.store.check(slots)

  def truncate(self, lane: int) -> None:
    """Ends a lane's open episode after its environment was lost (see `LaneStore.truncate`)."""
    with self.lock:
      self.store.truncate(lane)
      if self.store.head[lane]:
        self.selector.appended(np.array([lane]), self.store.head[[lane]])

  # --- selection

  def ready(self, n: int) -> bool:
    """Whether a batch of n samples can be selected."""
    with self.lock:
      return self.selector.ready(n)

  def select(self, n: int) -> Selection:
    """Selects the next n samples. Raises ValueError if there are not enough."""
    with self.lock:
      return self.selector.select(n, self.rng)

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """Passes the errors [B] computed in learner step `step` to the selector."""
    with self.lock:
      keep, _ = self.clamp(selection.lane, selection.time)
      kept = Selection(*(x[keep] for x in selection))
      self.selector.update(kept, priority[keep], step)

  # --- frames

  def windows(self, lane: np.ndarray, time: np.ndarray, after: int = 0) -> Array:
    """Returns the frames of the stacked states time .. time+after, [B, S+after, H, W, C].

    State time+i consists of frames i .. i+S-1. Beyond the ends of the episode, its first or last
    stored frame is repeated. With frames on devices, the result is a JAX array (see
    `DeviceFrames.gather`).
    """
    return self._gather(lane, self.window_cells(lane, time, after)[0])

  def trajectories(
    self, lane: np.ndarray, time: np.ndarray, after: int
  ) -> tuple[Array, np.ndarray]:
    """Returns frames of consecutive slots, which may span episodes, and indices of their stacks.

    The frames are those of slots time-S+1 .. time+after, [B, S+after, H, W, C]. The indices
    [B, after+1, S] int32 into their second axis are the stacks of slots time .. time+after, oldest
    frame first.
    """
    with self.lock:
      store = self.store
      tail = store.tail[lane][:, None]
      slots = np.maximum(time[:, None] + np.arange(1 - self._stack, after + 1), tail)
      states = time[:, None] + np.arange(after + 1)
      start = take(store.episode_start, store.flat(lane[:, None], np.maximum(states, tail)))
      stack = np.maximum(states[..., None] + np.arange(1 - self._stack, 1), start[..., None])
      index = stack - (time[:, None, None] - self._stack + 1)
      cells = store.cell(slots)
    return self._gather(lane, cells), index.astype(np.int32)

  def _gather(self, lane: np.ndarray, cells: np.ndarray) -> Array:
    # Frames are large, so they are copied without the lock. If any is replaced meanwhile, `intact`
    # detects it, and writes of results computed from it are ignored.
    if self._device_frames is not None:
      return self._device_frames.gather(lane, cells)
    return self.store.gather(lane[:, None], cells)

  def values(
    self, columns: Sequence[Column], lane: np.ndarray, time: np.ndarray, after: int = 0
  ) -> dict[str, np.ndarray]:
    """Returns columns of the states time .. time+after, [B, after+1, ...] each, like `windows`."""
    with self.lock:
      _, time = self.clamp(lane, time)
      last = self.store.last(lane, time)[:, None]
      flat = self.store.flat(lane[:, None], np.minimum(time[:, None] + np.arange(after + 1), last))
      return {column.name: take(self.store[column.name], flat) for column in columns}

  def blanks(self, count: int, after: int = 0) -> Array:
    """Returns placeholder windows with the shape and placement of real ones, for compilation."""
    cells = np.zeros((count, self._stack + after), np.int64)
    return self._gather(cells[:, 0], cells)

  def intact(self, lane: np.ndarray, time: np.ndarray, since: np.ndarray) -> np.ndarray:
    """Whether windows gathered after `tails` were `since` [L] contain no replaced frame, bool [B].

    May be false for an intact window if the start of its stack has just been evicted.
    """
    with self.lock:
      tail = self.store.tail[lane]
      return (time >= tail) & ((tail == since[lane]) | (time - (self._stack - 1) >= tail))

  def window_cells(
    self, lane: np.ndarray, time: np.ndarray, after: int = 0
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns cells [B, S+after] of the frames of `windows` in each lane's ring, and the heads."""
    with self.lock:
      _, safe = self.clamp(lane, time)
      return self.store.window_cells(lane, safe, self._stack - 1, after), self.heads

  def frames_since(
    self, heads: np.ndarray, n: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns up to n frames of stored slots from heads [L] on.

    Returns the heads to continue from, lane [m], cell [m] and frames [m, H, W, C].
    """
    with self.lock:
      new_heads = np.maximum(heads, self.store.tail)
      count = np.maximum(self.store.head - new_heads, 0)
      room = np.maximum(n - (np.cumsum(count) - count), 0)
      lane, time = slots_between(new_heads, new_heads + np.minimum(count, room))
    new_heads[lane] = time + 1  # repeated lanes: the last time is used
    cell = self.store.cell(time)
    # Copied without the lock, as in `windows`. If a slot is evicted meanwhile, a later call returns
    # the slot that replaced it.
    return new_heads, lane, cell, self.store.gather(lane, cell)

  @property
  def bytes_on_devices(self) -> int:
    """Bytes of frames on each device; 0 if batches are gathered on the host."""
    return self._device_frames.bytes_per_device if self._device_frames is not None else 0

  # --- rewriting stored values

  def clamp(self, lane: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether slots are stored, and times clamped to stored slots.

    Evicted slots become the oldest slot of their lane. Raises ValueError if a slot was never
    appended.
    """
    if np.any(time >= self.store.head[lane]):
      raise ValueError("some of the slots were never appended")
    tail = self.store.tail[lane]
    return time >= tail, np.maximum(time, tail)

  def rewrite(
    self,
    stamp: str,
    lane: np.ndarray,
    time: np.ndarray,
    step: int,
    columns: Mapping[str, np.ndarray],
  ) -> None:
    """Replaces values by results from weights of learner step `step`, unless newer ones are stored.

    `columns` [B, ...] belong to the named stamp. For repeated slots the last value is stored.
    """
    with self.lock:
      live, safe = self.clamp(lane, time)
      flat = self.store.flat(lane, safe)
      keep = live & (take(self.store[stamp], flat) <= step)
      flat = flat[keep]
      for name, values in columns.items():
        put(self.store[name], flat, values[keep])
      put(self.store[stamp], flat, step)

  def next_block(self, sweep: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next n states of a sweep: lane [n] int32, time [n] int64."""
    with self.lock:
      lane, cell = self._sweeps[sweep].next_block(n)
      return lane.astype(np.int32), self.store.time_of(lane, cell)

  def quota(self, sweep: str, n: int, max_age: int, delay: int) -> int:
    """Number of states that a sweep must recompute per learner step (see `Sweep.quota`)."""
    with self.lock:
      return self._sweeps[sweep].quota(n, max_age, delay)

  def oldest_step(self, stamp: str) -> int:
    """The oldest learner step of a stamp; `NEVER` while the replay is empty."""
    with self.lock:
      return int(self.store[stamp].min())

  def is_older(self, stamp: str, step: int) -> bool:
    """Whether the oldest learner step of a stamp is before `step`; rarely looks at all slots."""
    if self._least[stamp] >= step:  # stamps never decrease, except in new slots
      return False
    with self.lock:
      self._least[stamp] = self.oldest_step(stamp)
      return self._least[stamp] < step

  # --- state

  def stats(self, learner_step: int) -> dict[str, float]:
    """Returns sizes in transitions and bytes, and the selector's metrics."""
    with self.lock:
      transitions, slots = self.store.stored_transitions, (self.store.head - self.store.tail).sum()
      used = float(self.store.slot_bytes * slots)
      return {
        "transitions": float(transitions),
        "bytes": used,
        "bytes_per_transition": used / max(transitions, 1),
        **self.selector.stats(learner_step),
      }

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the contents except the frames, as numpy arrays."""
    with self.lock:
      return {
        **self.store.state_dict(),
        **self.selector.state_dict(),
        "rng": np.frombuffer(json.dumps(self.rng.bit_generator.state).encode(), np.uint8),
        **{f"sweep_{name}": sweep.state() for name, sweep in self._sweeps.items()},
      }

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Restores `state_dict` after `import_frames`; the replay then continues bit for bit.

    Raises ValueError if the state does not match the imported slots.
    """
    with self.lock:
      store = self.store
      store.load_state_dict(state)
      self._copy_frames(*slots_between(store.tail, store.head))
      self._least = dict.fromkeys(self._least, 0)
      self.selector.load_state_dict(state)
      self.rng.bit_generator.state = json.loads(state["rng"].tobytes())
      for name, sweep in self._sweeps.items():
        sweep.load(state[f"sweep_{name}"], np.minimum(store.head, store.capacity))

  def import_frames(self, slots: Slots) -> None:
    """Restores frames into a new replay before `load_state_dict`, each lane's oldest first."""
    with self.lock:
      self.store.put_frames(slots)
