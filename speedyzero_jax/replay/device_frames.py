"""Copies of the replay's frames on the learner's devices, from which batches are gathered.

Each frame is uploaded once to each device, when it arrives; afterwards a batch transfers only
indices. As every device has all frames, it gathers its part of a batch without the others.
"""

import math
import threading
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from speedyzero_jax.replay.schema import Column
from speedyzero_jax.system import memory

_UPLOAD = 256  # frames per call of a large upload, as in restoring


def reason_for_host_frames(
  where: Literal["auto", "device", "host"], mesh: Mesh, size: int
) -> str | None:
  """Returns why frames must stay in host memory; None if they go to the mesh's devices.

  They take `size` bytes on each device. `where` is `replay.frames`; auto selects accelerators with
  twice the required memory free, as training needs memory, too.
  """
  if where != "auto":
    return "as configured" if where == "host" else None
  if jax.default_backend() == "cpu":
    return "the devices are CPUs"
  devices = [device.memory_stats() or {} for device in mesh.devices.flat]
  if not all(devices):
    return f"they take {memory.format_bytes(size)}, and these devices do not report free memory"
  free = min(stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0) for stats in devices)
  if 2 * size > free:
    return f"they take {memory.format_bytes(size)} with {memory.format_bytes(free)} free per device"
  return None


class DeviceFrames:
  """Frames of a replay's cells (lane, cell) on each device of a mesh with one axis. Thread-safe.

  All devices of the mesh must belong to this process.
  """

  def __init__(self, mesh: Mesh, frame: Column, *, lanes: int, capacity: int):
    self._mesh, (axis,) = mesh, mesh.axis_names
    self._frame, self._capacity, self._rows = frame, capacity, lanes * capacity
    self._chunk = lanes  # frames in a typical append
    self._lock = threading.Lock()
    copied, parts = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(axis))
    self._parts = parts
    self._write = jax.jit(self._written, donate_argnums=0, out_shardings=copied)
    self._gather = jax.jit(self._taken, in_shardings=(copied, parts), out_shardings=parts)
    self._gather_on_one = jax.jit(self._taken)
    # Frames are flattened, so that no device layout pads a small last axis.
    shape = self._rows, math.prod(frame.shape)
    self._frames = jax.jit(lambda: jnp.zeros(shape, frame.dtype), out_shardings=copied)()
    self.bytes_per_device = self.size(frame, lanes, capacity)

  @staticmethod
  def size(frame: Column, lanes: int, capacity: int) -> int:
    """Bytes on each device."""
    return lanes * capacity * frame.nbytes

  def write(self, lane: np.ndarray, cell: np.ndarray, frames: np.ndarray) -> None:
    """Writes frames [n, H, W, C] to distinct cells (lane [n], cell [n]), asynchronously."""
    width = self._chunk if len(lane) <= 2 * self._chunk else _UPLOAD
    flat = np.ascontiguousarray(frames).reshape(len(frames), -1)
    with self._lock:
      for begin in range(0, len(lane), width):
        part = slice(begin, begin + width)
        missing = width - len(flat[part])
        # Padding is written behind the last row, and so dropped.
        row = np.pad(self._row(lane[part], cell[part]), (0, missing), constant_values=self._rows)
        self._frames = self._write(self._frames, row, np.pad(flat[part], ((0, missing), (0, 0))))

  def gather(self, lane: np.ndarray, cell: np.ndarray) -> jax.Array:
    """Frames [B, T, H, W, C] of written cells (lane [B], cell [B, T]), asynchronously.

    They are sharded over the mesh if B is a multiple of its size, else on its first device.
    """
    row = self._row(lane[:, None], cell)
    with self._lock:
      if len(lane) % self._mesh.size == 0:
        # Among several processes, jit does not shard numpy arrays itself.
        return self._gather(self._frames, jax.device_put(row, self._parts))
      return self._gather_on_one(self._frames.addressable_data(0), row)

  def _row(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return (np.asarray(lane, np.int64) * self._capacity + cell).astype(np.int32)

  def _written(self, frames: jax.Array, row: jax.Array, new: jax.Array) -> jax.Array:
    return frames.at[row].set(new, mode="drop")

  def _taken(self, frames: jax.Array, row: jax.Array) -> jax.Array:
    # The default mode, which fills rows out of range, is slower.
    found = jnp.take(frames, row, axis=0, mode="clip")
    return found.reshape(*row.shape, *self._frame.shape)
