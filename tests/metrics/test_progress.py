"""Tests of the display: its layout, and its behavior on terminals, pipes and broken streams."""

import errno
import io
import types

import pytest

from clock import Clock
from speedyzero_jax.config import schema
from speedyzero_jax.metrics import names, progress
from speedyzero_jax.metrics.progress import Display, format_number

CONFIG = schema.Config(
  agent=types.SimpleNamespace(name="dqn"),
  env=schema.EnvConfig(game="MsPacman"),
  learner=schema.LearnerConfig(steps=15_000),
  topology=schema.TopologyConfig(actors=4, refreshers=16),
  run=schema.RunConfig(seed=3, env_steps=300_000),
)
FOLDER = "runs/atari300k-MsPacman-s3"
VALUES = {
  names.STEP: 6180, names.ENV_STEPS: 123_456, names.EPISODE_RETURN: 312.44,
  names.EPISODE_RETURN_BEST: 864.0, names.EPISODE_RETURN_LAST: 401.0, names.EPISODES: 88,
  names.EVALUATION_MEAN: 398.2, "evaluation/std": 101.7, names.AGENT_STEPS_PER_SECOND: 143.2,
  names.LEARNER_STEPS_PER_SECOND: 8.82, names.SAMPLES_PER_SECOND: 14_649.0,
  "agent/states_per_second": 6212.2, names.LOSS_TOTAL: 4.2123, "losses/policy": None,
  "losses/own": -0.9613, "replay/transitions": 123_000, names.REPLAY_BYTES: 3.412e9,
  names.CHECKPOINT_STEP: 6000, "replay/target_age_mean": 27.3, "replay/priority_age_max": 38,
  names.POLICY_LAG: 6.2, names.POLICY_LAG_MAX: 17, names.wait("learner"): 0.0213,
  names.wait("refresher"): 12.5, names.present("actor"): 3, names.present("refresher"): 15,
}  # fmt: skip


@pytest.fixture(autouse=True)
def environment(monkeypatch):
  monkeypatch.delenv(progress.TERMINAL, raising=False)


@pytest.mark.parametrize(
  ("values", "shown"),
  [
    ({}, "-"),
    (dict.fromkeys(VALUES, 1e300), "1.00e+300"),
    (dict.fromkeys(VALUES, -1e-300), "-1e-300"),
    (dict.fromkeys(VALUES), "nan"),
  ],
  ids=["nothing", "large", "small", "not finite"],
)
def test_nothing_and_extremes_are_shown(values, shown):
  stream = io.StringIO()
  with Display(CONFIG, FOLDER, [stream]) as display:
    display.update(values | {names.ENV_STEPS: 1})  # lines come with progress only
  assert f"return {shown}  " in stream.getvalue()


@pytest.mark.parametrize(
  ("number", "text"),
  [(None, "-"), (0.0, "0"), (12.0, "12"), (0.01234, "0.0123"), (0.000123, "0.00012"),
   (312.44, "312.4"), (14_649.2, "14,649"), (3.4e9, "3.40e+09"), (float("nan"), "nan")],
)  # fmt: skip
def test_numbers_are_short(number, text):
  assert format_number(number) == text


def test_lines_come_at_intervals_and_with_events():
  stream, clock = io.StringIO(), Clock()
  with Display(CONFIG, FOLDER, [stream], clock) as shown:
    for _ in range(25):
      shown.update(VALUES | {names.TIME: clock.now - 1000, names.STEP: clock.now})
      clock.now += 1
    shown.message("checkpoint [6,000]")
  out = stream.getvalue().splitlines()
  assert "dqn  MsPacman  seed 3" in out[0] and FOLDER in out[0]
  assert [line.split()[0] for line in out[1:4]] == ["0:00:00", "0:00:10", "0:00:20"]
  assert out[4] == "checkpoint [6,000]"
  assert out[5].startswith("0:00:24") and len(out) == 6  # the last values are shown at the end
  assert "123,456/300,000 41%" in out[1] and "return 312.4  best 864" in out[1]


def test_the_last_step_is_shown_at_once_and_nothing_after_it():
  stream, clock = io.StringIO(), Clock()
  with Display(CONFIG, FOLDER, [stream], clock) as shown:
    shown.update(VALUES)
    clock.now += 1
    shown.update(VALUES | {names.STEP: 15_000})  # collection goes on
    assert "15,000/15,000" not in stream.getvalue()
    shown.update({names.ENV_STEPS: 300_000})
    clock.now += progress.INTERVAL
    shown.update({names.EVALUATION_MEAN: 1.0, names.LEARNER_STEPS_PER_SECOND: 0.0})
  assert ["15,000/15,000" in line for line in stream.getvalue().splitlines()] == [0, 0, 1]


def test_between_lines_only_progress_prints_one():
  stream, clock = io.StringIO(), Clock()
  with Display(CONFIG, FOLDER, [stream], clock) as shown:
    shown.update(VALUES)
    for change, printed in (
      ({names.AGENT_STEPS_PER_SECOND: 0.0, names.LOSS_TOTAL: 9.0}, 0),
      ({names.present("actor"): 2}, 1),
      ({names.present("actor"): 2}, 0),
      ({names.ENV_STEPS: 123_457}, 1),
    ):
      clock.now += progress.INTERVAL
      before = len(stream.getvalue().splitlines())
      shown.update(change)
      assert len(stream.getvalue().splitlines()) == before + printed, change
  last = stream.getvalue().splitlines()[-1]
  assert "actors 2/4  refreshers 15/16" in last and "loss 9" in last


@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError])
def test_a_broken_stream_silences_it(error):
  class Broken(io.StringIO):
    writes = 0

    def write(self, text):
      self.writes += 1
      raise error("gone")

  stream, closed = Broken(), io.StringIO()
  closed.close()
  with Display(CONFIG, FOLDER, [stream, closed]) as shown:
    for _ in range(3):
      shown.update(VALUES)
      shown.message("event")
  assert stream.writes == 1


def test_where_stdout_is_a_log_the_inherited_terminal_shows_it_too(tmp_path, monkeypatch, capsys):
  with (tmp_path / "terminal").open("w") as terminal:
    monkeypatch.setenv(progress.TERMINAL, str(terminal.fileno()))
    with Display(CONFIG, FOLDER) as shown:
      shown.update(VALUES)
      shown.message("event")
    print("still open", file=terminal)
  log = capsys.readouterr().out
  assert "event" in log and "8.82" in log
  assert (tmp_path / "terminal").read_text() == log + "still open\n"


def test_a_full_disk_does_not_silence_it():
  class Full(io.StringIO):
    full = True

    def flush(self):
      if self.full:
        raise OSError(errno.ENOSPC, "No space left on device")

  with Display(CONFIG, FOLDER, [stream := Full()]) as shown:
    shown.message("lost or late")
    stream.full = False
    shown.message("event")
  assert "event" in stream.getvalue()


def test_an_ascii_stream_gets_ascii():
  raw = io.BytesIO()
  with Display(
    CONFIG, FOLDER, [io.TextIOWrapper(raw, encoding="ascii", write_through=True)]
  ) as shown:
    shown.update(VALUES)
    shown.message("3.0 ± 1")
    assert "3.0 ? 1" in raw.getvalue().decode("ascii")
