"""Metrics: what is written survives kills and full disks, and what is counted is right."""

import contextlib
import errno
import json
import logging
import os
import pathlib
import struct
import subprocess
import sys
import threading
import time
import weakref
from typing import NamedTuple

import numpy as np
import pytest
from clock import Clock
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto import event_pb2

from speedyzero_jax.metrics import aggregation, jsonl, names
from speedyzero_jax.metrics.recorder import Recorder

ROOT = pathlib.Path(__file__).parents[2]


def lines(run_dir):
  return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def crc32c(data):
  """Bit by bit, from the polynomial."""
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


# --- names ---


def test_every_metric_says_what_it_is():
  for name, metric in names.METRICS.items():
    assert metric.name == name and metric.unit and metric.meaning.endswith(".")
  constants = [
    value for key, value in vars(names).items() if key.isupper() and isinstance(value, str)
  ]
  assert sorted(constants) == sorted([*names.METRICS, names.TIME_PREFIX])


# --- recorder ---


def test_a_line_holds_what_was_written_at_once(tmp_path):
  clock = Clock()
  with Recorder(tmp_path / "run", resume_step=None, clock=clock) as recorder:
    clock.now += 12.5
    values = {
      "losses/total": np.float32(0.5),
      "env_steps": np.int64(320),
      "charts/episodes": 7,
      "own/name": np.ones(()),
    }
    row = recorder.write(20, values)
    expected = {
      "step": 20,
      "env_steps": 320,
      "time": 12.5,
      "losses/total": 0.5,
      "charts/episodes": 7,
      "own/name": 1.0,
    }
    assert lines(tmp_path / "run") == [expected] == [row]  # while it is still open
    assert list(row)[:3] == ["step", "env_steps", "time"]
    recorder.write(40, {"losses/total": 0.25})
  assert [line["step"] for line in lines(tmp_path / "run")] == [20, 40]


def test_tensorboard_gets_the_same_numbers(tmp_path):
  with Recorder(tmp_path, resume_step=None) as recorder:
    recorder.write(20, {"losses/total": 0.5, "losses/value": float("nan"), "env_steps": 320})
    (path,) = (tmp_path / "tensorboard").iterdir()
    version, scalars = events(path)  # whole while it is still open
  assert "tfevents" in path.name
  assert version.file_version == "brain.Event:2"
  assert scalars.step == 20 and abs(scalars.wall_time - time.time()) < 60
  got = {value.tag: value.simple_value for value in scalars.summary.value}
  assert got.keys() == {"env_steps", "time", "losses/total"}
  assert got["losses/total"] == 0.5 and got["env_steps"] == 320


def test_not_finite_is_null_counted_and_warned_of_once_by_name(tmp_path, caplog):
  with Recorder(tmp_path, resume_step=None) as recorder:
    for step in range(3):
      recorder.write(
        step,
        {"losses/total": float("nan"), "losses/value": np.float32(-np.inf), "losses/policy": 1.0},
      )
    assert recorder.nonfinite == {"losses/total": 3, "losses/value": 3}
  assert all(
    line["losses/total"] is None and line["losses/value"] is None for line in lines(tmp_path)
  )
  assert [record.args[0] for record in caplog.records] == ["losses/total", "losses/value"]


@pytest.mark.parametrize(
  ("step", "values", "message"),
  [
    (1, {"losses/total": "1.0"}, "losses/total"),
    (1, {"losses/total": np.zeros(2)}, "losses/total"),
    (1, {"": 1.0}, "name"),
    (1, {"time": 1.0}, "time"),
    (1, {"step": 2}, "step"),
    (-1, {}, "step"),
  ],
)
def test_bad_values_are_refused_and_leave_nothing(tmp_path, step, values, message):
  with Recorder(tmp_path, resume_step=None) as recorder:
    with pytest.raises(ValueError, match=message):
      recorder.write(step, {"losses/value": float("nan")} | values)
    assert lines(tmp_path) == [] and recorder.nonfinite == {}


def test_a_closed_recorder_refuses(tmp_path):
  recorder = Recorder(tmp_path, resume_step=None)
  recorder.close()
  recorder.close()
  with pytest.raises(ValueError, match="closed"):
    recorder.write(1, {})


def test_a_new_run_does_not_write_into_another(tmp_path):
  with Recorder(tmp_path, resume_step=None) as recorder:
    recorder.write(1, {})
  with pytest.raises(ValueError, match=r"metrics\.jsonl"):
    Recorder(tmp_path, resume_step=None)
  with pytest.raises(ValueError, match="resume_step"):
    Recorder(tmp_path, resume_step=-1)
  assert len(lines(tmp_path)) == 1


def test_resuming_drops_later_lines_and_goes_on_in_time(tmp_path):
  clock = Clock()
  with Recorder(tmp_path, resume_step=None, clock=clock) as recorder:
    for step in (0, 10, 20, 30):
      clock.now += 5
      recorder.write(step, {"losses/total": float(step)})
    recorder.write(15, {"evaluation/mean": 3.0})  # an evaluation of an older checkpoint comes late
  clock.now += 1000  # while nothing runs
  with Recorder(tmp_path, resume_step=20, clock=clock) as recorder:
    assert [line["step"] for line in lines(tmp_path)] == [0, 10, 20, 15]
    clock.now += 1
    assert recorder.write(25, {})["time"] == 21.0  # the dropped line's time was spent all the same
  assert [line["step"] for line in lines(tmp_path)] == [0, 10, 20, 15, 25]
  old, new = sorted((tmp_path / "tensorboard").iterdir())
  assert [event.step for event in events(old)] == [0, 0, 10, 20, 30, 15]
  _, restart, scalars = events(new)
  assert restart.session_log.status == event_pb2.SessionLog.START and restart.step == 21
  assert scalars.step == 25


@given(cut=st.integers(0, 200), resume_step=st.integers(0, 6))
def test_a_torn_file_is_repaired_wherever_it_was_torn(tmp_path_factory, cut, resume_step):
  path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
  whole = [
    json.dumps({"step": step, "time": step / 2, "x": step}).encode() + b"\n" for step in range(5)
  ]
  path.write_bytes(b"".join(whole)[:cut])
  survivors = [line for i, line in enumerate(whole) if sum(map(len, whole[: i + 1])) <= cut]
  elapsed = jsonl.drop_after(path, resume_step)
  assert path.read_bytes() == b"".join(survivors[: resume_step + 1])
  assert elapsed == max([0.0] + [json.loads(line)["time"] for line in survivors])
  assert [entry.name for entry in path.parent.iterdir()] == ["metrics.jsonl"]


def test_resuming_without_metrics_starts_them(tmp_path):
  with Recorder(tmp_path, resume_step=100) as recorder:
    recorder.write(101, {})
  assert [line["step"] for line in lines(tmp_path)] == [101]


def test_damaged_lines_are_counted_and_an_unfinished_last_one_is_not(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step":1}\n\xff\xfe\n[1]\n{"step":"2"}\n{"no":1}\n\n{"step":3}\n{"step":4')
  assert jsonl.read_rows(path) == ([{"step": 1}, {"step": 3}], 5)


def test_a_failed_rewrite_leaves_the_file_as_it_was(tmp_path, monkeypatch):
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(b'{"step":1}\n{"step":2}\n')

  def full(_):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space"):
    jsonl.drop_after(path, 1)
  assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


class FullDisk:
  """Stands in for os.write: lets `room` bytes through, then says that the disk is full."""

  def __init__(self, write, room):
    self.write, self.room = write, room

  def __call__(self, fd, data):
    if self.room <= 0:
      raise OSError(errno.ENOSPC, "No space left on device")
    written = self.write(fd, bytes(data)[: self.room])
    self.room -= written
    return written


@pytest.mark.parametrize("room", [0, 1, 30, 62, 100])
def test_a_full_disk_costs_lines_but_neither_training_nor_the_file(
  tmp_path, monkeypatch, caplog, room
):
  real = os.write
  with Recorder(tmp_path, resume_step=None) as recorder:
    recorder.write(1, {"losses/total": 1.0})
    with monkeypatch.context() as patch:
      patch.setattr(os, "write", FullDisk(real, room))
      for step in range(2, 50):  # more than any queue between here and the disk would hold
        assert recorder.write(step, {"losses/total": 2.0, "losses/value": 3.0})["step"] == step
    recorder.write(50, {"losses/total": 5.0})  # there is room again
  written = [line["step"] for line in lines(tmp_path)]  # every line is whole
  assert written[0] == 1 and written[-1] == 50 and len(written) < 10
  warned = [record.getMessage() for record in caplog.records]
  assert len(warned) == 2 and all("No space left" in text for text in warned)
  assert "metrics.jsonl" in warned[0] + warned[1] and "tensorboard" in warned[0] + warned[1]
  (path,) = (tmp_path / "tensorboard").iterdir()
  steps = [event.step for event in events(path)]  # every record is whole
  assert steps[:2] == [0, 1] and steps[-1] == 50


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_really_full_device_is_survived(tmp_path, caplog):
  (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
  with Recorder(tmp_path, resume_step=None) as recorder:
    for step in range(30):
      recorder.write(step, {"losses/total": 1.0})
  assert [record.args[0] for record in caplog.records] == ["metrics.jsonl"]
  (path,) = (tmp_path / "tensorboard").iterdir()
  assert [event.step for event in events(path)] == [0, *range(30)]


def test_many_threads_write_whole_lines(tmp_path):
  with Recorder(tmp_path, resume_step=None) as recorder:
    threads = [
      threading.Thread(target=lambda k=k: [recorder.write(k, {"x": i}) for i in range(25)])
      for k in range(4)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  for k in range(4):
    assert [line["x"] for line in lines(tmp_path) if line["step"] == k] == list(range(25))


def test_a_killed_process_loses_no_written_line(tmp_path):
  script = (
    "import os, sys; from speedyzero_jax.metrics.recorder import Recorder\n"
    "r = Recorder(sys.argv[1], resume_step=None); r.write(1, {'x': 1.0}); os.kill(os.getpid(), 9)"
  )
  subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, check=False, timeout=60)
  assert [line["x"] for line in lines(tmp_path)] == [1.0]


# --- rates ---


@given(
  st.lists(st.tuples(st.floats(0, 40), st.integers(1, 5)), max_size=30),
  st.sampled_from([6.0, 60.0]),
)
def test_rate_counts_the_events_of_the_window(steps, window):
  clock = Clock()
  meter = aggregation.RateMeter(window, clock)
  happened, start, width = [], clock.now, window / 60
  for wait, events_ in steps:
    clock.now += wait
    meter.add(events_)
    happened.append((clock.now - start, events_))
  elapsed = clock.now - start
  if elapsed > 0:
    oldest = max(0, int(elapsed / width) - 59)
    recent = sum(n for at, n in happened if int(at / width) >= oldest)
    assert meter.rate() == pytest.approx(recent / (elapsed - oldest * width))


def test_rate_of_a_steady_stream_of_a_pause_and_of_nothing():
  clock = Clock()
  meter = aggregation.RateMeter(10.0, clock)
  assert meter.rate() == 0.0
  for _ in range(400):
    clock.now += 0.25
    meter.add(3)
  assert meter.rate() == pytest.approx(12.0, rel=0.03)
  clock.now += 5.0
  assert 4.0 < meter.rate() < 8.0
  clock.now += 5.2
  assert meter.rate() == 0.0
  with pytest.raises(ValueError, match="window"):
    aggregation.RateMeter(0.0)


class Step(NamedTuple):
  reward: np.ndarray
  first: np.ndarray
  terminated: np.ndarray
  truncated: np.ndarray
  game_over: np.ndarray


def step_of(rewards, flags):
  """flags: per lane any of f(irst), t(erminated), c(ap), o(ver)."""

  def has(letter):
    return np.array([letter in flag for flag in flags])

  return Step(np.array(rewards, np.float32), has("f"), has("t"), has("c"), has("o"))


def test_episodes_reach_across_lost_lives_and_end_at_game_over_or_cap():
  stats = aggregation.EpisodeStats(2, window=2)
  assert stats.summary() == {names.EPISODES: 0}
  assert stats.update(step_of([0, 0], ["f", "f"])) == []
  assert stats.update(step_of([4, 1], ["", ""])) == []
  assert stats.update(step_of([0, 1], ["t", ""])) == []  # a life is lost
  assert stats.update(step_of([0, 1], ["f", ""])) == []  # not a step
  assert stats.update(step_of([-1, 1], ["to", "c"])) == [
    aggregation.Episode(3.0, 3),
    aggregation.Episode(4.0, 4),
  ]
  assert stats.update(step_of([0, 0], ["f", "f"])) == []
  assert stats.update(step_of([2, 5], ["to", ""])) == [aggregation.Episode(2.0, 1)]
  assert stats.summary() == {
    names.EPISODES: 3,
    names.EPISODE_RETURN: 3.0,  # of the last two: 4 and 2
    names.EPISODE_RETURN_LAST: 2.0,
    names.EPISODE_RETURN_BEST: 4.0,
    names.EPISODE_LENGTH: 2.5,
  }
  stats.record(aggregation.Episode(10.0, 7))
  assert stats.summary()[names.EPISODE_RETURN] == 6.0 and stats.summary()[names.EPISODES] == 4
  with pytest.raises(ValueError, match="2 lanes"):
    stats.update(step_of([1], ["o"]))
  with pytest.raises(ValueError, match="lanes"):
    aggregation.EpisodeStats(0)


@given(
  st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(["", "", "t", "to", "c"])), max_size=60)
)
def test_episode_returns_add_up(stream):
  stats, expected, game, new = aggregation.EpisodeStats(1), [], [], True
  for reward, flags in stream:
    if new:
      assert stats.update(step_of([0], ["f"])) == []
    finished = stats.update(step_of([reward], [flags]))
    game.append(reward)
    new = flags != ""
    if "o" in flags or "c" in flags:
      expected.append(aggregation.Episode(float(sum(game)), len(game)))
      assert finished == expected[-1:]
      game = []
    else:
      assert finished == []
  assert stats.summary()[names.EPISODES] == len(expected)


def test_means_between_log_lines():
  class Device:
    asked = False

    def copy_to_host_async(self):
      self.asked = True

    def __float__(self):
      assert self.asked, "waited for on the way"
      return 4.0

  means = aggregation.RunningMeans()
  means.add(
    {
      "losses/total": 1.0,
      names.TRUST_RATIO_MIN: 0.2,
      names.TARGET_AGE_MAX: 5,
      "own/x": float("nan"),
    }
  )
  means.add(
    {"losses/total": Device(), names.TRUST_RATIO_MIN: 0.1, names.TARGET_AGE_MAX: 9, "own/x": 1.0}
  )
  means.add({"losses/total": np.float32(4.0)})
  taken = means.take()
  assert np.isnan(taken.pop("own/x"))
  assert taken == {"losses/total": 3.0, names.TRUST_RATIO_MIN: 0.1, names.TARGET_AGE_MAX: 9.0}
  assert means.take() == {}


def test_values_that_nobody_takes_do_not_pile_up():
  alive = weakref.WeakSet()

  class Device:
    def __init__(self, value):
      self._value = value
      alive.add(self)

    def __float__(self):
      return float(self._value)

  means, n = aggregation.RunningMeans(), 7001
  for value in range(n):
    means.add(
      {
        "losses/total": Device(value),
        names.TRUST_RATIO_MIN: Device(-value),
        names.TARGET_AGE_MAX: value,
      }
    )
  assert len(alive) <= 4000
  taken = means.take()
  assert taken == {
    "losses/total": pytest.approx((n - 1) / 2),
    names.TRUST_RATIO_MIN: 1 - n,
    names.TARGET_AGE_MAX: n - 1,
  }


def test_nan_in_a_window_is_not_averaged_away():
  means = aggregation.RunningMeans()
  for value in (1.0, float("nan"), *[2.0] * 5000):
    means.add({"losses/total": value, names.TARGET_AGE_MAX: value})
  assert all(np.isnan(value) for value in means.take().values())


def test_parts_are_timed_per_learner_step():
  clock, marked = Clock(), []

  @contextlib.contextmanager
  def mark(name):
    marked.append(name)
    yield

  times = aggregation.PartTimes(mark, clock)

  def spend(name, seconds):
    with times.part(name):
      clock.now += seconds

  spend("act", 5.0)
  times.take(10)  # what came before belongs to no step
  spend("act", 2.0)
  spend("train", 1.0)
  spend("act", 1.0)
  assert times.take(14) == {"time/act": 0.75, "time/train": 0.25}
  assert times.take(14) == {}
  spend("train", 3.0)
  assert times.take(16) == {"time/act": 0.0, "time/train": 1.5}
  with pytest.raises(KeyError), times.part("save"):
    clock.now += 7.0
    raise KeyError
  assert times.totals() == {"act": 8.0, "train": 4.0, "save": 7.0}
  assert marked == ["act", "act", "train", "act", "train", "save"]


def test_parts_of_many_threads_add_up():
  times = aggregation.PartTimes()

  def work():
    for _ in range(200):
      with times.part("search"):
        pass
      with times.part("search"):
        time.sleep(0)

  threads = [threading.Thread(target=work) for _ in range(4)]
  begin = time.monotonic()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert 0 < times.totals()["search"] <= 4 * (time.monotonic() - begin)


def test_metrics_need_no_jax():
  code = "import sys; from speedyzero_jax.metrics import display, rates, recorder; sys.exit('jax' in sys.modules)"
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_warnings_are_logged_under_the_package(tmp_path, caplog):
  with (
    caplog.at_level(logging.WARNING, logger="speedyzero_jax"),
    Recorder(tmp_path, resume_step=None) as recorder,
  ):
    recorder.write(1, {"losses/total": float("inf")})
  assert caplog.records[0].name.startswith("speedyzero_jax")
