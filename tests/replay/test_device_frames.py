"""Tests of frames on devices: gathering of the newest writes, and placement."""

import re
import threading
from unittest import mock

import jax
import numpy as np
import pytest

import reference
from speedyzero_jax.replay.device_frames import DeviceFrames, reason_for_host_frames
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.workers.learner import make_mesh
from tiny_replay import LANES, UNROLL, copy_frames, make_replay, play

SHAPE = (2, 1, 3)


def make(devices, lanes=3, capacity=9, dtype="uint8", shape=SHAPE):
  mesh = make_mesh(jax.local_devices()[:devices])
  frame = Column("frame", dtype, shape)
  return DeviceFrames(mesh, frame, lanes=lanes, capacity=capacity)


@pytest.mark.parametrize(("devices", "dtype"), [(1, "uint8"), (2, "float32"), (4, "uint8")])
def test_what_was_written_last_is_gathered_from_any_number_of_devices(devices, dtype):
  """With writes of one frame and of many."""
  rng, ours = np.random.default_rng(devices), make(devices, dtype=dtype)
  truth = np.zeros((3, 9, *SHAPE), dtype)
  for n, rows in ((1, 2), (3, 3), (5, 5), (25, 9), (2, 9)):
    chosen = rng.permutation(3 * rows)[:n]
    lane, cell = chosen // rows, chosen % rows
    frames = rng.integers(0, 256, (n, *SHAPE)).astype(dtype)
    ours.write(lane, cell, frames)
    truth[lane, cell] = frames
    lanes, cells = rng.integers(0, 3, 8), rng.integers(0, rows, (8, 4))
    spread, whole = ours.gather(lanes, cells), ours.gather(lanes[:7], cells[:7])
    for found in (spread, whole):
      np.testing.assert_array_equal(found, truth[lanes[:, None], cells][: len(found)])
      assert found.dtype == dtype
    assert len(spread.sharding.device_set) == devices
    assert spread.addressable_shards[0].data.shape[0] == 8 // devices
    assert whole.sharding.device_set == {jax.local_devices()[0]}
  assert ours.bytes_per_device == 3 * 9 * 6 * np.dtype(dtype).itemsize


def test_no_device_waits_for_another():
  ours, row = make(4), np.zeros((8, 2), np.int32)
  frames = np.zeros((3, 6), np.uint8)
  for program, *given in ((ours._gather, row), (ours._write, row[:3, 0], frames)):
    text = program.lower(ours._frames, *given).compile().as_text()
    assert not re.search("all-|reduce-scatter|collective|permute", text)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_write_copies_nothing_else(devices):
  """The stored frames, which may be gigabytes, are updated in place."""
  ours = make(devices)
  row, frames = np.zeros(3, np.int32), np.zeros((3, 6), np.uint8)
  memory = ours._write.lower(ours._frames, row, frames).compile().memory_analysis()
  assert memory.alias_size_in_bytes == ours.bytes_per_device


def test_a_replay_shows_the_same_windows_from_devices_and_from_the_host():
  """While lanes grow and evict, and after a restore."""
  capacity, seed = 9, 0

  def on_devices():
    frames = make(2, LANES, capacity, shape=reference.FRAME_SHAPE)
    return make_replay(capacity, device_frames=frames)

  host, ours, other = make_replay(capacity), on_devices(), on_devices()
  streams = [reference.Stream(LANES, seed) for _ in range(2)]
  for step in range(12):
    for replay, stream in zip((host, ours), streams, strict=True):
      play(replay, stream, np.random.default_rng([seed, step]), step)
    if not host.ready(8):
      continue
    drawn = host.select(8)
    wanted = host.windows(drawn.lane, drawn.time, after=UNROLL)
    windows = ours.windows(drawn.lane, drawn.time, after=UNROLL)
    assert isinstance(windows, jax.Array)
    np.testing.assert_array_equal(windows, wanted)
  copy_frames(ours, other)
  other.load_state_dict(ours.state_dict())
  lane, time = host.next_block("refresh", 16)
  np.testing.assert_array_equal(other.windows(lane, time), host.windows(lane, time))


def test_a_restore_copies_all_of_a_large_replay():
  capacity = 5000
  host, ours = (
    make_replay(capacity, lanes=1, device_frames=frames)
    for frames in (None, make(1, 1, capacity, shape=reference.FRAME_SHAPE))
  )
  host.append(reference.Stream(1, 0).play(0, capacity))
  copy_frames(host, ours)
  ours.load_state_dict(host.state_dict())
  lane, time = np.zeros(capacity, int), np.arange(capacity)
  np.testing.assert_array_equal(ours.windows(lane, time), host.windows(lane, time))


def test_frames_are_placed_as_configured_and_where_there_is_room(monkeypatch):
  def mesh(*free):
    """A mesh of devices with these numbers of free bytes; None: unknown."""
    stats = [None if x is None else {"bytes_limit": x + 100, "bytes_in_use": 100} for x in free]
    devices = [mock.Mock(memory_stats=lambda known=known: known) for known in stats]
    return mock.Mock(devices=np.array(devices))

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert reason_for_host_frames("device", mesh(0), 10) is None
  assert reason_for_host_frames("host", mesh(1000), 10) == "as configured"
  assert reason_for_host_frames("auto", mesh(1000, 20), 10) is None
  assert "free per device" in reason_for_host_frames("auto", mesh(1000, 19), 10)
  assert "do not report" in reason_for_host_frames("auto", mesh(1000, None), 10)
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert "CPUs" in reason_for_host_frames("auto", mesh(1000), 10)


@pytest.mark.parametrize("method", ["write", "gather"])
def test_calls_of_several_threads_take_turns(method):
  """A write donates the buffer that a gather would read."""
  frames, at, done = make(1), np.zeros(1, int), threading.Event()
  arguments = (at, at, np.zeros((1, *SHAPE), np.uint8)) if method == "write" else (at, at[:, None])
  call = getattr(frames, method)
  call(*arguments)  # compiles it
  thread = threading.Thread(target=lambda: (call(*arguments), done.set()), daemon=True)
  with frames._lock:
    thread.start()
    assert not done.wait(0.1)
  assert done.wait(10)
