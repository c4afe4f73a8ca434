"""Copy of the replay's frames on the learner's devices, from which batches are gathered.

Each frame is uploaded once, when it arrives; afterwards a batch transfers only indices. Lanes are
sharded over the mesh: each device holds its shard of the frames, and a collective assembles the
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
from speedyzero_jax.system.dispatch_lock import dispatch_lock

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
  """Frames of a replay's cells (lane, cell) on a mesh with one axis. Thread-safe.

  All devices of the mesh must belong to this process.
  """

  def __init__(self, mesh: Mesh, frame: Column, *, lanes: int, capacity: int):
    self._mesh, (self._axis,) = mesh, mesh.axis_names
    self._capacity = capacity
    self._chunk = lanes  # frames in a typical append
    self._frame = frame
    self._lock = threading.Lock()
    by_lane, copied = PartitionSpec(self._axis), PartitionSpec()
    local = partial(jax.shard_map, mesh=mesh, check_vma=False)
    write = local(self._local_write, in_specs=(by_lane, copied, copied), out_specs=by_lane)
    self._write = jax.jit(write, donate_argnums=0)
    self._gather = {
      spread: jax.jit(
        local(
          partial(self._local_gather, spread=spread),
          in_specs=(by_lane, copied),
          out_specs=by_lane if spread else copied,
        )
      )
      for spread in (False, True)
    }
    padded = -(-lanes // mesh.size) * mesh.size
    # Frames are flattened, so that no device layout pads a small last axis.
    shape = (padded * capacity, math.prod(frame.shape))
    if shape[0] > np.iinfo(np.int32).max:
      raise ValueError(
        f"{shape[0]} frames on devices exceed the range of int32; set replay.frames=host"
      )
    sharding = NamedSharding(mesh, by_lane)
    self._frames = jax.jit(lambda: jnp.zeros(shape, frame.dtype), out_shardings=sharding)()
    self.bytes_per_device = self.size(frame, lanes, capacity, mesh.size)

  @staticmethod
  def size(frame: Column, lanes: int, capacity: int, devices: int) -> int:
    """Bytes on each device."""
    return -(-lanes // devices) * capacity * frame.nbytes

  def write(self, lane: np.ndarray, cell: np.ndarray, frames: np.ndarray) -> None:
    """Writes frames [n, H, W, C] to distinct cells (lane [n], cell [n]), asynchronously."""
    width = self._chunk if len(lane) <= 2 * self._chunk else _UPLOAD
    flat = np.ascontiguousarray(frames).reshape(len(frames), -1)
    with self._lock:
      for begin in range(0, len(lane), width):
        part = slice(begin, begin + width)
        missing = width - len(flat[part])
        # Padding has row -1, which is dropped.
        row = np.pad(self._row(lane[part], cell[part]), (0, missing), constant_values=-1)
        self._frames = self._write(self._frames, row, np.pad(flat[part], ((0, missing), (0, 0))))

  def gather(self, lane: np.ndarray, cell: np.ndarray) -> jax.Array:
    """Frames [B, T, H, W, C] of written cells (lane [B], cell [B, T]), asynchronously.

    They are sharded over the mesh if B is a multiple of its size, else on its first device.
    """
    spread = len(lane) % self._mesh.size == 0
    with self._lock:
      row = self._row(lane[:, None], cell)
      with dispatch_lock(self._mesh):
        frames = self._gather[spread](self._frames, row)
    return frames if spread else frames.addressable_data(0)

  def _row(self, lane: np.ndarray, cell: np.ndarray) -> np.ndarray:
    return (np.asarray(lane, np.int64) * self._capacity + cell).astype(np.int32)

  def _place(self, shard: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the local indices of rows, and whether rows are on this device."""
    index = row - jax.lax.axis_index(self._axis) * shard.shape[0]
    return index, (index >= 0) & (index < shard.shape[0])

  def _local_write(self, shard: jax.Array, row: jax.Array, frames: jax.Array) -> jax.Array:
    index, is_local = self._place(shard, row)
    return shard.at[jnp.where(is_local, index, shard.shape[0])].set(frames, mode="drop")

  def _local_gather(self, shard: jax.Array, row: jax.Array, *, spread: bool) -> jax.Array:
    index, is_local = self._place(shard, row)
    # The default mode, which fills rows out of range, is slower.
    frames = jnp.take(shard, jnp.where(is_local, index, 0), axis=0, mode="clip")
    if self._mesh.size > 1:
      frames = jnp.where(is_local[..., None], frames, jnp.zeros((), shard.dtype))
      reduce = (
        partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True) if spread else jax.lax.psum
      )
      frames = reduce(frames, self._axis)
    return frames.reshape(*frames.shape[:-1], *self._frame.shape)
