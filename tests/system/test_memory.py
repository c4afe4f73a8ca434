"""Tests of memory limits and use, overcommitted allocation, and out-of-memory errors."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from speedyzero_jax.system import memory

ROOT = Path(__file__).resolve().parents[2]
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\n"
V2, V1 = "0::/user/job\n", "9:cpu,cpuacct:/x\n4:memory:/user/job\n0::/\n"


@pytest.mark.parametrize(
  ("cgroup", "limits", "expected"),
  [
    ("", {}, 2_048_000_000),
    (V2, {"user/job/memory.max": "max\n"}, 2_048_000_000),
    (V2, {"user/job/memory.max": "1000000\n"}, 1_000_000),
    (V2, {"user/memory.max": "2000000\n", "user/job/memory.max": "max\n"}, 2_000_000),
    (V2, {"memory.max": "3000000\n"}, 3_000_000),  # inside a container
    (V2, {"user/job/memory.max": "9000000000000\n"}, 2_048_000_000),
    (V1, {"memory/user/job/memory.limit_in_bytes": "4000000\n"}, 4_000_000),
    (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 2_048_000_000),  # unlimited
    (V1, {"cpu/user/job/memory.limit_in_bytes": "5\n"}, 2_048_000_000),
  ],
)
@pytest.mark.parametrize("used", [0, 1000])  # kB; a limit includes it, what is available does not
def test_the_tightest_limit_counts(tmp_path, cgroup, limits, expected, used):
  expected += 1024 * used * (expected == 2_048_000_000)
  status = f"VmRSS:\t{used} kB\n"
  files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/status": status}
  for name, content in (files | {f"cgroup/{name}": x for name, x in limits.items()}).items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(content)
  assert memory.usable(tmp_path / "proc", tmp_path / "cgroup") == expected


def test_nothing_is_known_without_proc(tmp_path):
  assert memory.usable(tmp_path / "proc", tmp_path / "cgroup") is None


def test_use_follows_what_is_written():
  assert memory.usable() > 2**20
  before = memory.resident()
  written = memory.zeros((2**25,), np.float64)  # never of the freed memory of earlier tests
  written[:] = 1
  assert memory.resident() - before > 0.75 * written.nbytes  # the kernel may reclaim some
  assert memory.resident(peak=True) >= before + 0.75 * written.nbytes


class Device:
  def __init__(self, stats):
    self.memory_stats = lambda: stats


def test_of_several_devices_the_smallest_counts(monkeypatch):
  devices = [Device({"bytes_limit": n}) for n in (7, 9, 5)]
  monkeypatch.setattr(jax, "local_devices", lambda: devices)
  assert memory.device_limit() == 5
  devices.append(Device({}))
  assert memory.device_limit() is None
  devices[:] = [Device(None)]  # a CPU
  assert memory.device_limit() is None


@pytest.mark.parametrize(("backend", "where"), [("gpu", "device"), ("cpu", "host")])
def test_errors_name_the_memory_that_ran_out(monkeypatch, backend, where):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
  assert memory.exhausted(full) == where and memory.exhausted(MemoryError()) == "host"
  assert memory.exhausted(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None
  assert memory.exhausted(ValueError("RESOURCE_EXHAUSTED")) is None
  assert "9 bytes" in memory.exhausted_message(
    where, full
  ) and "more" not in memory.exhausted_message(where, full)


def strict():
  return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"


@pytest.mark.skipif(strict(), reason="this machine reserves no more addresses than it has memory")
def test_more_can_be_reserved_than_the_machine_has():
  machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  before = memory.resident()
  reserved = memory.zeros((3, machine), np.uint8)
  reserved[2, -1] = 7
  assert reserved[2, -1] == 7 and not reserved[0, :100].any()
  assert memory.resident() - before < machine / 100


def test_zeros_are_those_of_numpy():
  for shape, dtype in (((2, 3, 4), np.float32), ((), np.uint8), ((0, 5), np.int64)):
    ours, theirs = memory.zeros(shape, dtype), np.zeros(shape, dtype)
    assert (ours.shape, ours.dtype, ours.flags.writeable) == (theirs.shape, theirs.dtype, True)
    np.testing.assert_array_equal(ours, theirs)
  with pytest.raises(MemoryError, match="Unable to allocate"):
    memory.zeros((2**55,), np.uint8)


@pytest.mark.parametrize(
  ("environment", "kept"),
  [
    ({"CUDA_VISIBLE_DEVICES": ""}, True),
    ({"CUDA_VISIBLE_DEVICES": "", "MALLOC_ARENA_MAX": "8"}, False),
    ({"CUDA_VISIBLE_DEVICES": "0"}, False),
    ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, True),
  ],
)
def test_freed_memory_is_kept_on_cpus_unless_the_environment_configures_malloc(environment, kept):
  script = (
    "from speedyzero_jax.system import memory\nimport numpy as np\n"
    "memory.retain_freed()\n"
    "before = memory.resident()\nnp.ones(25_000_000)\nprint(memory.resident() - before)"
  )
  configured = ("MALLOC_", "GLIBC_", "JAX_PLATFORMS", "CUDA_")
  clean = {k: v for k, v in os.environ.items() if not k.startswith(configured)}
  command = [sys.executable, "-c", script]
  found = subprocess.run(
    command, env=clean | environment, cwd=ROOT, capture_output=True, text=True, check=True
  )
  assert (int(found.stdout) > 150_000_000) == kept
