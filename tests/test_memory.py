"""What is known of a machine's memory, and which errors say that it ran out."""

import jax
import pytest

from speedyzero_jax import memory

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
    (V2, {"user/memory.max": "2000000\n", "user/job/memory.max": "max\n"}, 2_000_000),  # a group around it
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


def test_what_runs_out_is_said_by_the_error(monkeypatch):
  device = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
  assert memory.ran_out(MemoryError()) == "host"
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert memory.ran_out(device) == "device"
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert memory.ran_out(device) == "host"
  assert memory.ran_out(jax.errors.JaxRuntimeError("INTERNAL: a bug")) is None
  assert memory.ran_out(ValueError("RESOURCE_EXHAUSTED")) is None
