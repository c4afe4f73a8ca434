"""Memory of the machine, the process and its devices; allocation; out-of-memory errors."""

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from speedyzero_jax.system.gpus import local_gpus

_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # malloc.h


def retain_freed() -> None:
  """Makes glibc keep freed memory for later allocations. Call it before jax starts threads.

  On CPUs, XLA repeatedly allocates large results, whose page faults can take longer than a
  convolution. Does nothing without glibc, if the environment configures malloc, or if jax may use a
  GPU: the threads that compile for it may compete for malloc's single arena.
  """
  if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
    return
  if local_gpus():
    return
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
      mallopt(option, value)


def usable(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
  """Bytes that this process uses or can still use, as far as the machine and its cgroups allow.

  Supports Linux with cgroup versions 1 and 2; None if neither figure is known.
  """
  free, used = _field(proc / "meminfo", "MemAvailable"), _field(proc / "self/status", "VmRSS")
  known = [] if free is None else [free + (used or 0)]
  for line in _lines(proc / "self" / "cgroup"):
    _, controllers, group = line.split(":", 2)
    if controllers and "memory" not in controllers.split(","):
      continue
    root = cgroups / "memory" if controllers else cgroups
    name = "memory.limit_in_bytes" if controllers else "memory.max"
    inner = root / group.lstrip("/")
    for folder in (inner, *inner.parents):  # in a container, its group may be the root
      known += [int(text) for text in _lines(folder / name) if text.isdigit()]  # else "max"
      if folder == root:
        break
  return min(known, default=None)


def resident(*, peak: bool = False) -> int | None:
  """Resident host memory of this process in bytes, current or peak; None except on Linux."""
  return _field(Path("/proc/self/status"), "VmHWM" if peak else "VmRSS")


def _field(path: Path, name: str) -> int | None:
  values = [line.split()[1] for line in _lines(path) if line.startswith(f"{name}:")]
  return int(values[0]) * 1024 if values else None


def _lines(path: Path) -> list[str]:
  try:
    return path.read_text().splitlines()
  except OSError:
    return []


def device_limit() -> int | None:
  """The smallest memory limit of the local devices in bytes; None if a device reports none."""
  limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
  known = [x for x in limits if x is not None]
  return min(known) if len(known) == len(limits) else None


def zeros(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
  """Like np.zeros, but may exceed the machine's memory, as pages are committed when written.

  Raises MemoryError if the address space is too small.
  """
  count = math.prod(shape)
  flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
  try:
    buffer = mmap.mmap(-1, max(count * np.dtype(dtype).itemsize, 1), flags)
  except (OSError, OverflowError) as error:
    raise MemoryError(f"Unable to allocate an array of {list(shape)} {np.dtype(dtype)}") from error
  with contextlib.suppress(OSError):  # kernels without huge pages
    buffer.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
  return np.frombuffer(buffer, dtype, count).reshape(shape)


def bytes_of(tree: Any) -> int:
  """Bytes of all arrays of a pytree, abstract or not."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def format_bytes(count: float) -> str:
  """Formats a number of bytes in MB or GB."""
  return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def exhausted(error: BaseException) -> Literal["host", "device"] | None:
  """Which memory an error reports as exhausted; None for other errors."""
  if isinstance(error, MemoryError):
    return "host"
  if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
    return "host" if jax.default_backend() == "cpu" else "device"
  return None


def exhausted_message(where: str, error: BaseException) -> str:
  """Formats a message for an error that `exhausted` recognizes."""
  lines = str(error).strip().splitlines() or [type(error).__name__]
  return f"out of {where} memory: {lines[0][:200]}"
