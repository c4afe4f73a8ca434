"""Tests of metrics.jsonl and TensorBoard files: content, and state after kills and full disks."""

import errno
import json
import os
import pathlib
import struct
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from clock import Clock
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.metrics.recorder import Recorder

ROOT = pathlib.Path(__file__).parents[2]


def lines(run_dir):
  return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def crc32c(data):
  """CRC-32C, computed bit by bit from the polynomial."""
  crc = 0xFFFFFFFF
  for byte in data:
    crc ^= byte
    for _ in range(8):
      crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
  return crc ^ 0xFFFFFFFF


def events(path):
  """Reads a TFRecord file, checking every checksum."""
  data, found = path.read_bytes(), []
  while data:
    header, body_and_crc = data[:12], data[12:]
    (length,) = struct.unpack("<Q", header[:8])
    body = body_and_crc[:length]
    for part, masked in ((header[:8], header[8:]), (body, body_and_crc[length : length + 4])):
      (masked_crc,) = struct.unpack("<I", masked)
      crc = crc32c(part)
      assert masked_crc == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    found.append(event_pb2.Event.FromString(body))
    data = body_and_crc[length + 4 :]
  return found


def test_both_files_hold_a_line_as_soon_as_it_is_written(tmp_path):
  clock = Clock()
  recorder = Recorder(tmp_path / "run", None, clock)
  clock.now += 12.5
  values = {"losses/any": np.float32(0.5), "env_steps": np.int64(320), "own/name": np.ones(())}
  row = recorder.write(20, values)
  expected = {"step": 20, "env_steps": 320, "time": 12.5, "losses/any": 0.5, "own/name": 1.0}
  assert lines(tmp_path / "run") == [expected] == [row]
  assert list(row)[:2] == ["step", "time"]
  (path,) = (tmp_path / "run/tensorboard").iterdir()
  version, scalars = events(path)
  assert "tfevents" in path.name and version.file_version == "brain.Event:2"
  assert scalars.step == 20 and abs(scalars.wall_time - time.time()) < 60
  written = {value.tag: value.simple_value for value in scalars.summary.value}
  assert written == {name: x for name, x in expected.items() if name != "step"}
  recorder.close()


def test_values_that_are_not_finite_are_null_with_one_warning(tmp_path, caplog):
  recorder = Recorder(tmp_path, None)
  for step in range(3):
    recorder.write(step, {"a": float("nan"), "b": np.float32(-np.inf), "c": 1.0})
  assert all(row["a"] is None and row["b"] is None and row["c"] == 1 for row in lines(tmp_path))
  assert [record.args[0] for record in caplog.records] == ["a", "b"]
  assert caplog.records[0].name.startswith("speedyzero_jax")
  (path,) = (tmp_path / "tensorboard").iterdir()
  assert {value.tag for value in events(path)[-1].summary.value} == {"c", "time"}
  for bad in (np.zeros(2), "high"):
    with pytest.raises((ValueError, TypeError)):
      recorder.write(4, {"c": 1.0, "a": bad})
  assert len(lines(tmp_path)) == 3


def test_resuming_drops_later_lines_and_continues_the_time(tmp_path):
  clock = Clock()
  recorder = Recorder(tmp_path, None, clock)
  for step in (0, 10, 20, 30, 15):  # an evaluation of an older checkpoint may come late
    clock.now += 5
    recorder.write(step, {"x": float(step)})
  recorder.close()
  clock.now += 1000  # while nothing runs
  resumed = Recorder(tmp_path, 20, clock, begun=clock.now - 3)
  assert [row["step"] for row in lines(tmp_path)] == [0, 10, 20, 15]
  clock.now += 1
  assert resumed.write(25, {})["time"] == 29.0  # the dropped line's time was spent all the same
  assert [row["step"] for row in lines(tmp_path)] == [0, 10, 20, 15, 25]
  old, new = sorted((tmp_path / "tensorboard").iterdir())
  assert [event.step for event in events(old)] == [0, 0, 10, 20, 30, 15]
  _, restart, scalars = events(new)
  assert restart.session_log.status == event_pb2.SessionLog.START and restart.step == 21
  assert scalars.step == 25


@given(cut=st.integers(0, 200), resume_step=st.integers(0, 6))
def test_a_torn_file_is_repaired_wherever_it_is_torn(tmp_path_factory, cut, resume_step):
  path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
  whole = [jsonl.line({"step": i, "time": i / 2, "x": i}) for i in range(5)]
  path.write_bytes(b"".join(whole)[:cut])
  survivors = [line for i, line in enumerate(whole) if sum(map(len, whole[: i + 1])) <= cut]
  elapsed = jsonl.drop_after(path, resume_step)
  assert elapsed == max([0.0] + [json.loads(line)["time"] for line in survivors])
  kept = survivors[: resume_step + 1]
  if len(kept) < len(survivors):
    kept[-1] = jsonl.line(json.loads(kept[-1]) | {"time": elapsed})
  assert path.read_bytes() == b"".join(kept)
  assert jsonl.drop_after(path, resume_step) == elapsed  # a second restart before any line
  assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_damaged_lines_are_counted_and_an_unfinished_last_one_is_not(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step":1}\n\xff\xfe\n[1]\n{"step":"2"}\n{"no":1}\n\n{"step":3}\n{"step":4')
  assert jsonl.read_rows(path) == ([{"step": 1}, {"step": 3}], 5)


def test_a_stale_file_handle_costs_lines_only(tmp_path, monkeypatch):
  recorder = Recorder(tmp_path, None)
  with monkeypatch.context() as patch:
    patch.setattr(os, "fstat", mock.Mock(side_effect=OSError(errno.ESTALE, "stale")))
    recorder.write(1, {"x": 1.0})
  recorder.write(2, {"x": 2.0})
  assert [row["step"] for row in lines(tmp_path)] == [2]


def python(script, *args):
  command = [sys.executable, "-c", script, *map(str, args)]
  return subprocess.run(command, cwd=ROOT, timeout=60, capture_output=True, text=True, check=False)


def test_a_full_disk_costs_lines_but_no_whole_record(tmp_path):
  # A limit on the size of files fails as a full disk does: part of a record is written first.
  script = """
import os, resource, sys
from speedyzero_jax.metrics.recorder import Recorder
for room in (0, 1, 30, 62, 100):
  run = f"{sys.argv[1]}/{room}"
  recorder = Recorder(run, None)
  recorder.write(1, {"x": 1.0})
  folders = [run, run + "/tensorboard"]
  sizes = [entry.stat().st_size for at in folders for entry in os.scandir(at) if entry.is_file()]
  _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) + room, hard))
  for step in range(2, 50):
    recorder.write(step, {"x": 2.0, "y": 3.0})
  resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
  recorder.write(50, {"x": 5.0})
"""
  done = python(script, tmp_path)
  assert done.returncode == 0, done.stderr
  runs = list(tmp_path.iterdir())
  assert len(runs) == 5
  for run in runs:
    steps = [row["step"] for row in lines(run)]
    assert steps[0] == 1 and steps[-1] == 50 and len(steps) < 10
    (path,) = (run / "tensorboard").iterdir()
    steps = [event.step for event in events(path)]
    assert steps[:2] == [0, 1] and steps[-1] == 50 and len(steps) < 10
  assert done.stderr.count("cannot write metrics.jsonl") == 5
  assert done.stderr.count("cannot write tensorboard") == 5


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device_is_survived(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  recorder = Recorder(tmp_path, None)
  for step in range(30):
    recorder.write(step, {"x": 1.0})
  recorder.close()
  assert [record.args[0] for record in caplog.records] == ["metrics.jsonl"]
  (path,) = (tmp_path / "tensorboard").iterdir()
  assert [event.step for event in events(path)] == [0, *range(30)]


def test_a_killed_process_loses_no_written_line_and_needs_no_jax(tmp_path):
  script = """
import os, sys
sys.modules["jax"] = None
from speedyzero_jax.metrics.recorder import Recorder
Recorder(sys.argv[1], None).write(1, {"x": 1.0})
os.kill(os.getpid(), 9)
"""
  assert python(script, tmp_path).returncode == -9
  assert [row["x"] for row in lines(tmp_path)] == [1.0]
