"""The display: legible, never in the way of training, and gone without a trace."""

import io
import os
import pathlib
import pty
import subprocess
import sys
import threading
import time

import pytest
from clock import Clock
from rich.console import Console

from speedyzero_jax.metrics import board, names, progress

ROOT = pathlib.Path(__file__).parents[2]
HEADER = board.Header("MsPacman", "atari300k", "runs/atari300k-MsPacman-s3", 3)
VALUES = {
  names.STEP: 6180,
  names.ENV_STEPS: 123_456,
  names.EPISODE_RETURN: 312.44,
  names.EPISODE_RETURN_BEST: 864.0,
  names.EPISODE_RETURN_LAST: 401.0,
  names.EVALUATION_MEAN: 398.2,
  names.EVALUATION_STD: 101.7,
  names.AGENT_STEPS_PER_SECOND: 143.2,
  names.LEARNER_STEPS_PER_SECOND: 8.82,
  names.SAMPLES_PER_SECOND: 14_649.0,
  names.REANALYSED_PER_SECOND: 6212.2,
  names.REFRESHED_PER_SECOND: 41_211.0,
  names.LOSS_TOTAL: 4.2123,
  names.LOSS_POLICY: None,
  names.LOSS_CONSISTENCY: -0.9613,
  names.GRADIENT_NORM: 1.2312,
  names.TRUST_RATIO_MEAN: 0.01234,
  names.TRUST_RATIO_MIN: 0.000123,
  names.TRUST_RATIO_MAX: 1.0,
  names.REPLAY_TRANSITIONS: 123_000,
  names.REPLAY_MEMORY: 3.412,
  names.CHECKPOINT_STEP: 6000,
  names.TARGET_AGE_MEAN: 27.3,
  names.TARGET_AGE_MAX: 99,
  names.PRIORITY_AGE_MEAN: 14.2,
  names.PRIORITY_AGE_MAX: 38,
  names.POLICY_LAG: 6.2,
  names.POLICY_LAG_MAX: 17,
  names.LEARNER_WAIT: 0.0213,
  names.ACTOR_WAIT: 3.25,
  names.REANALYSER_WAIT: 12.5,
  names.PRESENT_ACTORS: 3,
  names.PRESENT_REANALYSERS: 15,
  names.RESTARTS_LEARNERS: 19,
  names.RESTARTS_ACTORS: 28,
  names.RESTARTS_REANALYSERS: 37,
}


def make(stream, force="auto", clock=time.monotonic):
  return progress.make_display(
    HEADER, env_steps_total=300_000, learner_steps_total=15_000, actors_total=4, reanalysers_total=16, stream=stream,
    force=force, clock=clock,
  )  # fmt: skip


def screen(values, width=80):
  totals = {
    names.ENV_STEPS: 300_000,
    names.STEP: 15_000,
    names.PRESENT_ACTORS: 4,
    names.PRESENT_REANALYSERS: 16,
  }
  shown = board.Board(HEADER, totals, Clock())
  shown.update(values)
  console = Console(file=io.StringIO(), width=width, record=True)
  console.print(shown.screen())
  return console.export_text()


def test_the_screen_fits_80_by_24_and_says_everything():
  text = screen(VALUES)
  rows = text.splitlines()
  assert len(rows) <= 23 and max(map(len, rows)) <= 80
  assert "…" not in text
  for expected in (
    *(
      "MsPacman",
      "atari300k",
      "seed 3",
      "runs/atari300k-MsPacman-s3",
      "123,456/300,000 41%",
      "6,180/15,000 41%",
    ),
    *(
      "312.4",
      "864",
      "401",
      "398.2 ± 101.7",
      "143.2",
      "8.82",
      "14,649",
      "6,212",
      "41,211",
      "4.21",
      "-0.961",
      "nan",
    ),
    *(
      "1.23",
      "0.0123",
      "0.00012 / 1",
      "27.3 / 99",
      "14.2 / 38",
      "6.2 / 17",
      "123,000",
      "3.41 GB",
      "6,000",
    ),
    *("3/4", "15/16", "0.0213", "3.25", "12.5", "19", "28", "37"),
  ):
    assert expected in text, expected
  assert "eta 0:20:32" in text  # (300,000 - 123,456) / 143.2 s
  assert "eta 0:16:40" in text  # (15,000 - 6,180) / 8.82 s


def test_the_screen_stands_nothing_huge_odd_and_narrow():
  assert "0/300,000 0%" in screen({}) and "eta -" in screen({})
  odd = {name: value for name in names.METRICS for value in ["text"]}
  assert screen(odd) and screen(dict.fromkeys(names.METRICS, 1e300))
  assert screen(dict.fromkeys(names.METRICS, float("nan"))) and screen(
    dict.fromkeys(names.METRICS, -1e-300)
  )
  assert max(map(len, screen(VALUES, width=30).splitlines())) <= 30


def test_plain_lines_come_at_intervals_and_with_events():
  stream, clock = io.StringIO(), Clock()
  with make(stream, clock=clock) as shown:  # a StringIO is no terminal
    for _ in range(25):
      shown.update(VALUES | {names.TIME: clock.now - 1000})
      clock.now += 1
    shown.message("checkpoint [6,000]")
  out = stream.getvalue().splitlines()
  assert out[0].split() == [
    "SpeedyZero",
    "MsPacman",
    "atari300k",
    "seed",
    "3",
    "runs/atari300k-MsPacman-s3",
  ]
  assert [line.split()[0] for line in out[1:4]] == ["0:00:00", "0:00:10", "0:00:20"]
  assert out[4] == "checkpoint [6,000]"
  assert out[5].startswith("0:00:25") and len(out) == 6  # what had not been shown at the end
  assert (
    "123,456/300,000 41%" in out[1]
    and "return 312.4 (best 864)" in out[1]
    and "\x1b" not in stream.getvalue()
  )


def test_between_lines_only_what_moves_is_worth_one():
  stream, clock = io.StringIO(), Clock()
  with make(stream, "plain", clock) as shown:
    shown.update(VALUES)
    for change, said in (
      ({names.AGENT_STEPS_PER_SECOND: 0.0, names.LOSS_TOTAL: 9.0}, 0),
      ({names.PRESENT_ACTORS: 2}, 1),
      ({names.PRESENT_ACTORS: 2}, 0),
      ({names.RESTARTS_REANALYSERS: 38}, 1),
      ({names.ENV_STEPS: 123_457}, 1),
    ):
      clock.now += progress.PLAIN_INTERVAL
      before = len(stream.getvalue().splitlines())
      shown.refresh(change)
      assert len(stream.getvalue().splitlines()) == before + said, change
  last = stream.getvalue().splitlines()[-1]
  assert "actors 2/4 (restarts 28)  reanalysers 15/16 (restarts 38)" in last and "loss 9" in last


def test_live_redraws_in_place_seldom_and_leaves_the_cursor_visible(monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  stream = io.StringIO()
  with make(stream, "live") as shown:
    started = time.monotonic()
    while time.monotonic() < started + 1:
      shown.update(VALUES)
      time.sleep(0.001)
    shown.message("checkpoint [6,000]")
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind(
      "\x1b[?25l"
    )  # even now, if it were killed
    elapsed = time.monotonic() - started
  out = stream.getvalue()
  assert "checkpoint [6,000]" in out and "312.4" in out and "\x1b[1A" in out
  assert 3 <= out.count("SpeedyZero") <= 3 + 4 * elapsed  # and once each for start, message and end
  assert out.rfind("\x1b[?25h") > out.rfind("\x1b[?25l")


def test_live_cleans_up_after_an_exception():
  stream, before = (
    io.StringIO(),
    set(threading.enumerate()),
  )  # some of other tests may end meanwhile
  with pytest.raises(KeyboardInterrupt), make(stream, "live"):
    raise KeyboardInterrupt
  length = len(stream.getvalue())
  time.sleep(0.6)  # longer than between two refreshes
  assert len(stream.getvalue()) == length and set(threading.enumerate()) <= before


@pytest.mark.parametrize("force", ["live", "plain", "off"])
@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError])
def test_a_broken_stream_makes_it_quiet(force, error):
  class Broken(io.StringIO):
    writes = 0

    def write(self, text):
      self.writes += 1
      raise error("gone")

  stream = Broken()
  with make(stream, force) as shown:
    for _ in range(3):
      shown.update(VALUES)
      shown.message("event")
  assert stream.writes <= 1


def test_a_closed_stream_is_survived():
  stream = io.StringIO()
  stream.close()
  for force in ("auto", "live", "plain"):
    with make(stream, force) as shown:
      shown.update(VALUES)
      shown.message("event")


def test_where_output_is_a_log_the_terminal_shows_it_too(tmp_path, monkeypatch, capsys):
  with (tmp_path / "terminal").open("w") as terminal:
    monkeypatch.setenv(progress.TERMINAL, str(terminal.fileno()))
    with make(None) as shown:
      shown.update(VALUES)
      shown.refresh(VALUES)
      shown.message("event")
    print("still open", file=terminal)
  log = capsys.readouterr().out
  assert "event" in log and "8.82" in log
  assert (tmp_path / "terminal").read_text() == log + "still open\n"


def test_a_closed_pipe_does_not_change_the_exit_status():
  script = (
    "import time; from speedyzero_jax.metrics import board, display\n"
    "with display.make_display(board.Header('g', 'p', 'd', 0), env_steps_total=1, learner_steps_total=1) as shown:\n"
    "  [(shown.message('x' * 1000), time.sleep(0.002)) for _ in range(200)]\n"
  )
  environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
  process = subprocess.Popen(
    [sys.executable, "-c", script],
    cwd=ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
  )
  process.stdout.readline()
  process.stdout.close()
  errors = process.stderr.read()
  process.stderr.close()
  assert process.wait(timeout=60) == 0 and errors == b""


def test_an_ascii_terminal_gets_ascii():
  raw = io.BytesIO()
  for force in ("live", "plain"):
    with make(io.TextIOWrapper(raw, encoding="ascii", write_through=True), force) as shown:
      shown.update(VALUES)
      shown.message("3.0 ± 1")
      assert "3.0 ? 1" in raw.getvalue().decode("ascii")
      raw.truncate(0)


@pytest.mark.parametrize(
  ("environment", "live"),
  [
    ({"TERM": "xterm"}, True),
    ({"TERM": "dumb"}, False),
    ({"TERM": "xterm", "CI": "true"}, False),
    ({}, False),
  ],
)
def test_auto_is_live_on_a_capable_terminal_only(monkeypatch, environment, live):
  for name in ("TERM", "CI"):
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  parent, child = pty.openpty()
  with os.fdopen(child, "w") as stream:
    assert isinstance(make(stream), progress._LiveDisplay) == live
  os.close(parent)


def test_off_is_silent_and_a_wrong_mode_is_named(capsys):
  with progress.make_display(
    HEADER, env_steps_total=1, learner_steps_total=1, force="off"
  ) as shown:
    shown.update(VALUES)
    shown.message("event")
  assert capsys.readouterr().out == ""
  with pytest.raises(ValueError, match="lively"):
    make(io.StringIO(), "lively")
