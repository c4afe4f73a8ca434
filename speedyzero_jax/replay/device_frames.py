"""A copy of the replay's frames on the learner's devices, from which batches are gathered there.

Frames are uploaded once, as they arrive; afterwards a batch costs only its indices. Lanes are
divided over the mesh: each device holds its share of the frames, and one reduction assembles
windows.
"""

import math
import threading
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.replay.schema import Column
from speedyzero_jax.system import memory
from speedyzero_jax.system.dispatch_lock import in_order

_UPLOAD = 256  # frames restored in one call


def reason_to_stay(where: Literal["auto", "device", "host"], mesh: Mesh, size: int) -> str | None:
  """Why frames are to stay in host memory; None if they are to be on the mesh's devices.

  Args:
    where: as configured; auto takes accelerators with twice the memory needed, since training
      needs some too.
    mesh: of the learner.
    size: bytes of the frames on each device.
  """
  if where != "auto":
    return "as configured" if where == "host" else None
  if jax.default_backend() == "cpu":
    return "the devices are CPUs"
  found = [device.memory_stats() or {} for device in mesh.devices.flat]
  if not all(found):
    return f"they take {memory.size(size)}, and these devices don't report free memory"
  free = min(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) for stats in found)
  if 2 * size > free:
    return f"{memory.size(size)} of them, and {memory.size(free)} free on a device"
  return None


class DeviceFrames:
  """Frames of cells (lane, cell) on a mesh of one axis. Thread-safe.

  Args:
    mesh: of the learner; all its devices must belong to this process.
    frame: the frames' column.
    lanes: of the replay.
    capacity: cells per lane of the replay, C.
  """

  def __init__(self, mesh: Mesh, frame: Column, *, lanes: int, capacity: int):
    self._mesh, (self._axis,) = mesh, mesh.axis_names
    self._lanes = -(-lanes // mesh.size) * mesh.size  # padded to a multiple of the devices
    self._capacity = capacity
    self._chunk = lanes  # frames of a typical append
    self._frame = frame
    self._lock = threading.Lock()
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
    self._frames = self._zeros()

  @staticmethod
  def size(frame: Column, lanes: int, capacity: int, devices: int) -> int:
    """Bytes on each device."""
    return -(-lanes // devices) * capacity * frame.nbytes

  @property
  def bytes_per_device(self) -> int:
    """Bytes held on each device."""
    return self.size(self._frame, self._lanes, self._capacity, self._mesh.size)

  def write(self, lane: np.ndarray, cell: np.ndarray, frames: np.ndarray) -> None:
    """Writes frames [n, H, W, C] to distinct cells (lane [n], cell [n]), asynchronously."""
    width = self._chunk if len(lane) <= 2 * self._chunk else _UPLOAD
    flat = np.ascontiguousarray(frames).reshape(len(frames), -1)
    with self._lock:
      for begin in range(0, len(lane), width):
        part = slice(begin, begin + width)
        missing = width - len(flat[part])
        # Rows of -1 are written nowhere.
        row = np.pad(self._row(lane[part], cell[part]), (0, missing), constant_values=-1)
        self._frames = self._write(self._frames, row, np.pad(flat[part], ((0, missing), (0, 0))))

  def gather(self, lane: np.ndarray, cell: np.ndarray) -> jax.Array:
    """Frames [B, T, H, W, C] of written cells (lane [B], cell [B, T]), asynchronously.

    They are divided over the mesh if B is a multiple of its size, else on its first device.
    """
    spread = len(lane) % self._mesh.size == 0
    with self._lock:
      row = self._row(lane[:, None], cell)
      with in_order(self._mesh):
        found = self._gather[spread](self._frames, row)
    return found if spread else found.addressable_data(0)

  def _row(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return (np.asarray(lane, np.int64) * self._capacity + cell).astype(np.int32)

  def _zeros(self) -> jax.Array:
    # Flattened, so that no layout pads a small last axis.
    shape = (self._lanes * self._capacity, math.prod(self._frame.shape))
    if shape[0] > np.iinfo(np.int32).max:
      raise ValueError(
        f"{shape[0]} frames exceed the range of int32; keep them on the host (replay.frames=host)"
      )
    sharding = NamedSharding(self._mesh, self._by_lane)
    return jax.jit(lambda: jnp.zeros(shape, self._frame.dtype), out_shardings=sharding)()

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
    return found.reshape(*found.shape[:-1], *self._frame.shape)
