"""What is known of a machine's memory, and which errors say that it ran out."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.system import memory

ROOT = Path(__file__).resolve().parents[2]
MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\n"


def machine(tmp_path, *, meminfo=MEMINFO, cgroup="", limits=()):
  """Folders that look like /proc and /sys/fs/cgroup; `limits`: path -> content."""
  (tmp_path / "proc" / "self").mkdir(parents=True)
  (tmp_path / "proc" / "meminfo").write_text(meminfo)
  (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
  for name, content in dict(limits).items():
    path = tmp_path / "cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
  return memory.available(tmp_path / "proc", tmp_path / "cgroup")


V2, V1 = "0::/user/job\n", "9:cpu,cpuacct:/x\n4:memory:/user/job\n0::/\n"


@pytest.mark.parametrize(
  ("cgroup", "limits", "expected"),
  [
    ("", {}, 2_048_000_000),
    (V2, {"user/job/memory.max": "max\n"}, 2_048_000_000),
    (V2, {"user/job/memory.max": "1000000\n"}, 1_000_000),
    (
      V2,
      {"user/memory.max": "2000000\n", "user/job/memory.max": "max\n"},
      2_000_000,
    ),  # a group around it
    (V2, {"memory.max": "3000000\n"}, 3_000_000),  # inside a container
    (V2, {"user/job/memory.max": "9000000000000\n"}, 2_048_000_000),
    (V1, {"memory/user/job/memory.limit_in_bytes": "4000000\n"}, 4_000_000),
    (V1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, 2_048_000_000),  # unlimited
    (V1, {"cpu/user/job/memory.limit_in_bytes": "5\n"}, 2_048_000_000),
  ],
)
def test_the_tightest_limit_counts(tmp_path, cgroup, limits, expected):
  assert machine(tmp_path, cgroup=cgroup, limits=limits) == expected


def test_where_nothing_is_known(tmp_path):
  assert memory.available(tmp_path / "proc", tmp_path / "cgroup") is None


def test_here_some_is_known():
  assert memory.available() > 2**20
  now, peak = memory.resident(), memory.resident(peak=True)
  assert 2**20 < now <= peak


def test_what_a_process_has_and_has_had(tmp_path):
  assert memory.resident(tmp_path) is None
  (tmp_path / "self").mkdir()
  (tmp_path / "self" / "status").write_text(
    "Name:\tx\nVmPeak:\t9 kB\nVmHWM:\t     30 kB\nVmRSS:\t     20 kB\n"
  )
  assert (
    memory.resident(tmp_path) == 20 * 1024 and memory.resident(tmp_path, peak=True) == 30 * 1024
  )


def test_of_devices_the_fullest_and_the_smallest_count():
  class Device:
    def __init__(self, stats):
      self.memory_stats = lambda: stats

  known = [Device({"peak_bytes_in_use": n, "bytes_limit": 10 * n}) for n in (7, 9, 5)]
  assert memory.of_devices(known, "peak_bytes_in_use") == 9
  assert memory.of_devices(known, "bytes_limit") == 50
  assert memory.of_devices([*known, Device({})], "peak_bytes_in_use") is None
  assert memory.of_devices([Device(None)], "peak_bytes_in_use") is None  # a CPU
  assert memory.of_devices([], "peak_bytes_in_use") is None


def test_what_runs_out_is_said_by_the_error(monkeypatch):
  device = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
  assert memory.ran_out(MemoryError()) == "host"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert memory.ran_out(device) == "device"
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert memory.ran_out(device) == "host"
  assert memory.ran_out(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None
  assert memory.ran_out(ValueError("RESOURCE_EXHAUSTED")) is None


def strict():
  with open("/proc/sys/vm/overcommit_memory") as file:
    return file.read().strip() == "2"


@pytest.mark.skipif(strict(), reason="this machine hands out no more addresses than it has memory")
def test_frames_may_be_reserved_beyond_what_the_machine_has():
  frame = 1 << 20  # bytes
  machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  before = memory.resident()
  store = LaneStore(2, 2 * machine // frame, (1024, 1024, 1), np.uint8, 3)
  assert store.memory()["reserved_bytes"] > 3 * machine
  store.frame[1, -1] = 7
  assert store.frame[1, -1].all() and not store.frame[0, 0].any()
  assert memory.resident() - before < machine / 100


def test_zeros_are_those_of_numpy():
  for shape, dtype in (
    ((2, 3, 4), np.float32),
    ((), np.uint8),
    ((0, 5), np.int64),
    ((1 << 20,), np.uint8),
  ):
    ours, theirs = memory.zeros(shape, dtype), np.zeros(shape, dtype)
    assert (ours.shape, ours.dtype, ours.flags.writeable) == (theirs.shape, theirs.dtype, True)
    np.testing.assert_array_equal(ours, theirs)
  with pytest.raises(MemoryError, match="Unable to allocate"):
    memory.zeros((2**55,), np.uint8)


@pytest.mark.parametrize(("environment", "kept"), [({}, True), ({"MALLOC_ARENA_MAX": "8"}, False)])
def test_what_is_freed_is_kept_unless_somebody_wants_otherwise(environment, kept):
  script = (
    "from speedyzero_jax.system import memory\nimport numpy as np\nmemory.keep_freed()\n"
    "before = memory.resident()\nnp.ones(25_000_000)\nprint(memory.resident() - before)"
  )
  clean = {
    name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
  }
  command = [sys.executable, "-c", script]
  said = subprocess.run(
    command, env=clean | environment, cwd=ROOT, capture_output=True, text=True, check=True
  ).stdout
  assert (int(said) > 150_000_000) == kept
