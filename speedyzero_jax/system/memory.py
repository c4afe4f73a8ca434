"""How much memory a process can have and has had, how it is got, and whether an error says that it ran out."""

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax
import numpy as np

_CGROUPS = Path("/sys/fs/cgroup")
_NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
_ARENA_MAX, _MMAP_MAX, _TRIM_THRESHOLD = -8, -4, -1  # malloc.h


def keep_freed() -> None:
  """Asks the C library to keep what is freed for the next who asks. Call it before jax has threads.

  XLA allocates every large result anew on a CPU; without this each of its pages is a page fault, which takes longer
  than some convolutions. Does nothing where there is no glibc, or somebody has set what they want in the environment.
  """
  if any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ):
    return
  with contextlib.suppress(OSError, AttributeError):
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
      mallopt(option, value)


def available(proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
  """Bytes that this process can have: what the machine has left, or the limit of a control group around the process.

  Linux only (cgroup versions 1 and 2); None where nothing is known.
  """
  known = []
  for line in _lines(proc / "meminfo"):
    if line.startswith("MemAvailable:"):
      known.append(int(line.split()[1]) * 1024)
  for line in _lines(proc / "self" / "cgroup"):
    _, controllers, group = line.split(":", 2)
    if not controllers:
      root, name = cgroups, "memory.max"
    elif "memory" in controllers.split(","):
      root, name = cgroups / "memory", "memory.limit_in_bytes"
    else:
      continue
    inner = root / group.lstrip("/")
    for folder in (inner, *inner.parents):  # a container may show its own group as the root of all
      known += [int(text) for text in _lines(folder / name) if text.isdigit()]  # else "max"
      if folder == root:
        break
  return min(known, default=None)


def resident(proc: Path = Path("/proc"), *, peak: bool = False) -> int | None:
  """Bytes of host memory that this process has now, or the most it ever had. Linux only; None where it is not known."""
  name = "VmHWM:" if peak else "VmRSS:"
  found = [line.split()[1] for line in _lines(proc / "self" / "status") if line.startswith(name)]
  return int(found[0]) * 1024 if found else None


def of_devices(
  devices: Sequence[jax.Device], what: Literal["bytes_limit", "peak_bytes_in_use"]
) -> int | None:
  """A figure of `Device.memory_stats`: the smallest limit, or the largest use, of all devices; None if one has none."""
  known = [(device.memory_stats() or {}).get(what) for device in devices]
  figures = [x for x in known if x is not None]
  if not known or len(figures) < len(known):
    return None
  return min(figures) if what == "bytes_limit" else max(figures)


def zeros(shape: Sequence[int], dtype: np.dtype | type) -> np.ndarray:
  """As np.zeros, but it may be more than the machine has: what is written to is taken from it, nothing else.

  Linux, as it is set up usually, refuses np.zeros more than all its memory. Raises MemoryError where there are not
  even as many addresses.
  """
  count = math.prod(shape)
  try:
    buffer = mmap.mmap(
      -1,
      max(count * np.dtype(dtype).itemsize, 1),
      mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE,
    )
  except (OSError, OverflowError) as error:
    raise MemoryError(f"Unable to allocate an array of {list(shape)} {np.dtype(dtype)}") from error
  with contextlib.suppress(OSError):  # of kernels without them
    buffer.madvise(mmap.MADV_HUGEPAGE)  # as numpy does
  return np.frombuffer(buffer, dtype, count).reshape(shape)


def size(bytes_: float) -> str:
  """A number of bytes in words."""
  return f"{bytes_ / 1e9:.1f} GB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"


def _lines(path: Path) -> list[str]:
  try:
    return path.read_text().splitlines()
  except OSError:
    return []


def ran_out(error: BaseException) -> Literal["host", "device"] | None:
  """Which memory an error says is exhausted; None if it says something else."""
  if isinstance(error, MemoryError):
    return "host"
  if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
    return "host" if jax.default_backend() == "cpu" else "device"
  return None


def out_of(where: str, error: BaseException) -> str:
  """What to say of an error that `ran_out` knows."""
  said = str(error).strip().splitlines() or [type(error).__name__]
  return f"out of {where} memory: {said[0][:200]}"
