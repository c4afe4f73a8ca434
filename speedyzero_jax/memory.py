"""How much host memory a process can have, and whether an error says that memory ran out."""

from pathlib import Path
from typing import Literal

import jax

_CGROUPS = Path("/sys/fs/cgroup")


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
