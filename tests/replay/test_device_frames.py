"""Frames on devices: what was written last is gathered, and where frames are placed."""

import jax
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from test_storage import SEEDS
from tiny_replay import LANES, UNROLL, make_replay, play, stored

from speedyzero_jax.replay.device_frames import DeviceFrames, place_frames
from speedyzero_jax.workers.learner import make_mesh

SHAPE = (2, 1, 3)


def make(devices, lanes=3, capacity=9, rows=2, dtype=np.uint8, shape=SHAPE):
  mesh = make_mesh(jax.local_devices()[:devices])
  form = {"frame_shape": shape, "frame_dtype": dtype}
  return DeviceFrames(mesh, lanes=lanes, capacity=capacity, rows=rows, **form)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_what_was_written_last_is_gathered_from_any_number_of_devices(devices, dtype):
  """Also after growing from 2 rows to 9, in writes of one frame and of many."""
  rng, ours = np.random.default_rng(devices), make(devices, dtype=dtype)
  truth = np.zeros((3, 9, *SHAPE), dtype)
  for n, rows in ((1, 2), (3, 3), (5, 5), (25, 9), (2, 9)):
    chosen = np.union1d(rng.permutation(3 * rows)[:n], [rows - 1])  # the last: all rows are in use
    lane, cell = chosen // rows, chosen % rows
    frames = rng.integers(0, 256, (len(chosen), *SHAPE)).astype(dtype)
    ours.write(lane, cell, frames)
    truth[lane, cell] = frames
    ask = rng.integers(0, 3, (8, 4)), rng.integers(0, rows, (8, 4))
    spread, whole = (ours.gather(*ask, spread=spread) for spread in (True, False))
    for found in (spread, whole):
      np.testing.assert_array_equal(found, truth[ask])
      assert found.dtype == dtype
    assert len(spread.sharding.device_set) == devices
    assert spread.addressable_shards[0].data.shape[0] == 8 // devices
    assert whole.sharding.device_set == {jax.local_devices()[0]}
  assert ours.bytes_per_device == DeviceFrames.size(3, 9, SHAPE, dtype, devices)


def test_a_write_copies_nothing_else():
  """The frames held, gigabytes of them, are written in place."""
  ours = make(1, rows=9)
  row, frames = np.zeros(3, np.int32), np.zeros((3, 6), np.uint8)
  memory = ours._write.lower(ours._frames, row, frames).compile().memory_analysis()
  assert memory.alias_size_in_bytes == ours.bytes_per_device


@settings(max_examples=3)
@given(capacity=st.integers(7, 30), seed=SEEDS)
def test_a_replay_shows_the_same_windows_from_devices_and_from_the_host(capacity, seed):
  """While lanes grow and evict, and after a restore."""

  def on_devices():
    frames = make(2, LANES, capacity, rows=4, shape=reference.FRAME_SHAPE)
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
    for spread in (False, True):
      windows = ours.windows(drawn.lane, drawn.time, after=UNROLL, spread=spread)
      assert isinstance(windows, jax.Array)
      np.testing.assert_array_equal(windows, wanted)
  other.import_frames(stored(ours))
  other.load_state_dict(ours.state_dict())
  lane, time = host.next_block("refresh", 16)
  np.testing.assert_array_equal(other.windows(lane, time), host.windows(lane, time))


class FakeMesh:
  """Of two devices, the second with so many bytes free."""

  size = 2

  def __init__(self, free):
    self.devices = np.array([self._device(10**9), self._device(free)])

  @staticmethod
  def _device(free):
    stats = {"bytes_limit": free + 100, "bytes_in_use": 100}
    return type("Device", (), {"memory_stats": lambda self: stats})()


def place(where, mesh):
  sizes = {"lanes": 4, "capacity": 10, "rows": 10, "frame_shape": SHAPE, "frame_dtype": np.uint8}
  return place_frames(where, mesh, **sizes, report=lambda line: None)


def test_frames_are_placed_as_configured_and_where_there_is_room(monkeypatch):
  mesh = make_mesh(jax.local_devices()[:2])
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  assert isinstance(place("device", mesh), DeviceFrames) and place("host", mesh) is None
  assert (
    place("auto", FakeMesh(3 * 2 * 10 * 6 - 1)) is None
  )  # two lanes of ten frames, 6 bytes each
  monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
  assert place("auto", mesh) is None
