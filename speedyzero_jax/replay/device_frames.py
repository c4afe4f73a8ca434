"""A copy of the replay's frames on the learner's devices, from which batches are gathered there.

Frames are uploaded once, as they arrive; afterwards a batch costs only its indices. Lanes are
divided over the mesh: each device holds its share of the frames, and one reduction assembles
windows.
"""

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.system.dispatch_lock import in_order

_UPLOAD = 256  # frames restored in one call


def place_frames(
  where: Literal["auto", "device", "host"],
  mesh: Mesh,
  *,
  lanes: int,
  capacity: int,
  rows: int,
  frame_shape: tuple[int, ...],
  frame_dtype: np.dtype | type,
  report: Callable[[str], None],
) -> "DeviceFrames | None":
  """Frames on the mesh's devices, or None if they are to stay on the host (`replay.frames`).

  Args:
    where: as configured; auto takes accelerators with three times the memory that `rows` cells per
      lane need, since growing takes two and a half times as much and training needs some too.
    mesh: of the learner.
    lanes, capacity, rows, frame_shape, frame_dtype: see `DeviceFrames`.
    report: receives a line on where the frames are, and why.
  """
  stay = "frames stay in host memory:"
  if where == "host" or (where == "auto" and jax.default_backend() == "cpu"):
    report(f"{stay} {'as configured' if where == 'host' else 'the devices are CPUs'}")
    return None
  size = DeviceFrames.size(lanes, rows, frame_shape, frame_dtype, mesh.size)
  if where == "auto":
    stats = [device.memory_stats() for device in mesh.devices.flat]
    if not all(stats):
      report(f"{stay} they take {size / 1e9:.1f} GB, and these devices don't report free memory")
      return None
    free = min(
      known.get("bytes_limit", 0) - known.get("bytes_in_use", 0) for known in stats if known
    )
    if 3 * size > free:
      report(f"{stay} {size / 1e9:.1f} GB of them, and {free / 1e9:.1f} GB free on a device")
      return None
  report(f"frames on {mesh.size} device(s), {size / 1e9:.1f} GB each")
  return DeviceFrames(
    mesh,
    lanes=lanes,
    capacity=capacity,
    rows=rows,
    frame_shape=frame_shape,
    frame_dtype=frame_dtype,
  )


def host_bytes(windows: np.ndarray | jax.Array) -> int:
  """Bytes sent from the host to devices for windows [B, T, ...].

  For windows gathered on devices, those are one int32 index per frame.
  """
  if isinstance(windows, np.ndarray):
    return windows.nbytes
  return 4 * windows.shape[0] * windows.shape[1]


class DeviceFrames:
  """Frames of cells (lane, cell) on a mesh of one axis. Thread-safe.

  The array starts with `rows` cells per lane and grows on demand, up to the replay's capacity.

  Args:
    mesh: of the learner; all its devices must belong to this process.
    lanes: of the replay.
    capacity: cells per lane of the replay, C.
    rows: initial cells per lane, at most C.
    frame_shape: [H, W, channels].
    frame_dtype: of the frames.
  """

  def __init__(
    self,
    mesh: Mesh,
    *,
    lanes: int,
    capacity: int,
    rows: int,
    frame_shape: tuple[int, ...],
    frame_dtype: np.dtype | type,
  ):
    self._mesh, (self._axis,) = mesh, mesh.axis_names
    self._lanes = -(-lanes // mesh.size) * mesh.size  # padded to a multiple of the devices
    self._capacity, self._rows = capacity, min(rows, capacity)
    self._chunk = lanes  # frames of a typical append
    self._shape, self._dtype = tuple(frame_shape), np.dtype(frame_dtype)
    self._lock = threading.Lock()
    self.bytes_written = 0  # to all devices, so far
    by_lane, everywhere = PartitionSpec(self._axis), PartitionSpec()
    self._by_lane = by_lane
    self._map = partial(jax.shard_map, mesh=mesh, check_vma=False)
    write = self._map(
      self._local_write, in_specs=(by_lane, everywhere, everywhere), out_specs=by_lane
    )
    self._write = jax.jit(write, donate_argnums=0)
    self._gather = {
      spread: jax.jit(
        self._map(
          partial(self._local_gather, spread=spread),
          in_specs=(by_lane, everywhere),
          out_specs=by_lane if spread else everywhere,
        )
      )
      for spread in (False, True)
    }
    self._frames = self._zeros(self._rows)

  @staticmethod
  def size(
    lanes: int, rows: int, frame_shape: tuple[int, ...], frame_dtype: np.dtype | type, devices: int
  ) -> int:
    """Bytes on each device with `rows` cells per lane."""
    return -(-lanes // devices) * rows * int(np.prod(frame_shape)) * np.dtype(frame_dtype).itemsize

  @property
  def devices(self) -> int:
    """Number of devices that hold frames."""
    return self._mesh.size

  @property
  def bytes_per_device(self) -> int:
    """Bytes held on each device."""
    return self.size(self._lanes, self._rows, self._shape, self._dtype, self._mesh.size)

  def write(self, lane: np.ndarray, cell: np.ndarray, frames: np.ndarray) -> None:
    """Writes frames [n, H, W, C] to distinct cells (lane [n], cell [n]), asynchronously."""
    width = self._chunk if len(lane) <= 2 * self._chunk else _UPLOAD
    flat = np.ascontiguousarray(frames).reshape(len(frames), -1)
    with self._lock:
      self._make_room(int(cell.max(initial=0)) + 1)
      for begin in range(0, len(lane), width):
        part = slice(begin, begin + width)
        missing = width - len(flat[part])
        # Rows of -1 are written nowhere.
        row = np.pad(self._row(lane[part], cell[part]), (0, missing), constant_values=-1)
        self._frames = self._write(self._frames, row, np.pad(flat[part], ((0, missing), (0, 0))))
        self.bytes_written += self._mesh.size * width * flat[:1].nbytes

  def gather(self, lane: np.ndarray, cell: np.ndarray, *, spread: bool) -> jax.Array:
    """Frames [B, T, H, W, C] of written cells (lane [B, T], cell [B, T]), asynchronously.

    Args:
      lane: of each frame.
      cell: of each frame.
      spread: divide B over the mesh (B is a multiple of its size), as the learner needs it.
        Otherwise the result is on the mesh's first device.
    """
    with self._lock:
      row = self._row(lane, cell)
      with in_order(self._mesh):
        found = self._gather[spread](self._frames, row)
    return found if spread else found.addressable_data(0)

  def _row(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return (np.asarray(lane, np.int64) * self._rows + cell).astype(np.int32)

  def _zeros(self, rows: int) -> jax.Array:
    # Flattened, so that no layout pads a small last axis.
    shape = (self._lanes * rows, int(np.prod(self._shape)))
    if shape[0] > np.iinfo(np.int32).max:
      raise ValueError(
        f"{shape[0]} frames exceed the range of int32; keep them on the host (replay.frames=host)"
      )
    sharding = NamedSharding(self._mesh, self._by_lane)
    return jax.jit(lambda: jnp.zeros(shape, self._dtype), out_shardings=sharding)()

  def _make_room(self, rows: int) -> None:
    if rows <= self._rows:
      return
    more = min(max(rows, self._rows + self._rows // 2), self._capacity)
    grow = partial(self._local_grow, lanes=self._lanes // self._mesh.size, old=self._rows, new=more)
    self._frames = jax.jit(self._map(grow, in_specs=self._by_lane, out_specs=self._by_lane))(
      self._frames
    )
    self._rows = more

  def _place(self, held: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Local positions of rows, and whether they are on this device."""
    local = row - jax.lax.axis_index(self._axis) * held.shape[0]
    return local, (local >= 0) & (local < held.shape[0])

  def _local_write(self, held: jax.Array, row: jax.Array, frames: jax.Array) -> jax.Array:
    local, here = self._place(held, row)
    return held.at[jnp.where(here, local, held.shape[0])].set(frames, mode="drop")

  def _local_gather(self, held: jax.Array, row: jax.Array, *, spread: bool) -> jax.Array:
    local, here = self._place(held, row)
    # The default mode fills missing rows, at a cost.
    found = jnp.take(held, jnp.where(here, local, 0), axis=0, mode="clip")
    if self._mesh.size > 1:
      found = jnp.where(here[..., None], found, jnp.zeros((), held.dtype))
      meet = (
        partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True) if spread else jax.lax.psum
      )
      found = meet(found, self._axis)
    return found.reshape(*found.shape[:-1], *self._shape)

  @staticmethod
  def _local_grow(held: jax.Array, *, lanes: int, old: int, new: int) -> jax.Array:
    by_lane = held.reshape(lanes, old, -1)
    return jnp.pad(by_lane, ((0, 0), (0, new - old), (0, 0))).reshape(lanes * new, -1)
