import jax
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_replay import LANES, UNROLL, make_replay, play

from speedyzero_jax.replay.device_frames import DeviceFrames, place_frames
from speedyzero_jax.workers.learner import make_mesh

SHAPE = (2, 1, 3)


def make(devices, lanes=3, capacity=9, rows=2, dtype=np.uint8):
  mesh = make_mesh(jax.local_devices()[:devices])
  return DeviceFrames(
    mesh, lanes=lanes, capacity=capacity, rows=rows, frame_shape=SHAPE, frame_dtype=dtype
  )


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_what_was_written_last_is_gathered_from_any_number_of_devices(devices, dtype):
  """Also after growing from 2 rows to 9, in writes of one frame and of many."""
  rng, ours = np.random.default_rng(devices), make(devices, dtype=dtype)
  truth = np.zeros((3, 9, *SHAPE), dtype)
  for n, rows in ((1, 2), (3, 3), (5, 5), (25, 9), (2, 9)):
    chosen = np.union1d(
      rng.permutation(3 * rows)[:n], [rows - 1]
    )  # the last cell, so that there is room for all
    lane, cell = chosen // rows, chosen % rows
    frames = rng.integers(0, 256, (len(chosen), *SHAPE)).astype(dtype)
    ours.write(lane, cell, frames)
    truth[lane, cell] = frames
    ask = rng.integers(0, 3, (8, 4)), rng.integers(0, rows, (8, 4))
    spread, whole = ours.gather(*ask, spread=True), ours.gather(*ask, spread=False)
    np.testing.assert_array_equal(spread, truth[ask])
    np.testing.assert_array_equal(whole, truth[ask])
    assert spread.dtype == whole.dtype == dtype
    assert (
      len(spread.sharding.device_set) == devices
      and spread.addressable_shards[0].data.shape[0] == 8 // devices
    )
    assert whole.sharding.device_set == {jax.local_devices()[0]}
  assert ours.bytes_per_device == DeviceFrames.size(3, 9, SHAPE, dtype, devices)


def test_a_write_copies_nothing_else():
  """The frames held, gigabytes of them, are written in place."""
  ours = make(1, rows=9)
  row, frames = np.zeros(3, np.int32), np.zeros((3, 6), np.uint8)
  memory = ours._write.lower(ours._frames, row, frames).compile().memory_analysis()
  assert memory.alias_size_in_bytes == ours.bytes_per_device


@settings(max_examples=3)
@given(capacity=st.integers(7, 30), seed=st.integers(0, 2**32 - 1))
def test_a_replay_shows_the_same_windows_from_devices_and_from_the_host(capacity, seed):
  """While lanes grow and evict, and after a restore."""
  rng, stream = np.random.default_rng(seed), reference.Stream(LANES, seed)
  host = make_replay(capacity)
  ours, other = (make_replay(capacity, device_frames=frames_of(capacity)) for _ in range(2))
  for step in range(12):
    play(Both(host, ours), stream, rng, step)
    if not host.num_eligible:
      continue
    lane, time, _ = host.sample(8)
    for spread in (False, True):
      windows = ours.windows(lane, time, after=UNROLL, spread=spread)
      assert isinstance(windows, jax.Array)
      np.testing.assert_array_equal(windows, host.windows(lane, time, after=UNROLL))
  other.import_slots(ours.export_slots(np.zeros(LANES, int)))
  other.load_state_dict(ours.state_dict())
  lane, time = host.next_block("refresh", 16)
  np.testing.assert_array_equal(other.windows(lane, time), host.windows(lane, time))


class Both:
  """Appends to two replays."""

  def __init__(self, *replays):
    self._replays = replays

  def append_many(self, segments):
    for replay in self._replays:
      replay.append_many(segments)


def frames_of(capacity):
  mesh = make_mesh(jax.local_devices()[:2])
  return DeviceFrames(
    mesh,
    lanes=LANES,
    capacity=capacity,
    rows=4,
    frame_shape=reference.FRAME_SHAPE,
    frame_dtype=np.uint8,
  )


class FakeDevice:
  def __init__(self, free):
    self._free = free

  def memory_stats(self):
    return {"bytes_limit": self._free + 100, "bytes_in_use": 100}


def place(where, monkeypatch, backend="gpu", free=None):
  mesh, said = make_mesh(jax.local_devices()[:2]), []
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  if free is not None:

    class Mesh:
      size, devices = 2, np.array([FakeDevice(10**9), FakeDevice(free)])

    mesh = Mesh()
  frames = place_frames(
    where,
    mesh,
    lanes=4,
    capacity=10,
    rows=10,
    frame_shape=SHAPE,
    frame_dtype=np.uint8,
    report=said.append,
  )
  return frames, said


def test_frames_go_where_they_are_told_to(monkeypatch):
  assert place("auto", monkeypatch, backend="cpu") == (
    None,
    ["frames stay in host memory: the devices are CPUs"],
  )
  assert place("host", monkeypatch) == (None, ["frames stay in host memory: as configured"])
  frames, (line,) = place("device", monkeypatch)
  assert isinstance(frames, DeviceFrames) and "2 device(s)" in line


def test_frames_that_would_fill_a_device_stay_on_the_host(monkeypatch):
  frames, (line,) = place(
    "auto", monkeypatch, free=3 * 2 * 10 * 6 - 1
  )  # of two lanes, ten frames of six bytes each
  assert frames is None and "host memory" in line
