"""Tests of signals, terminals and the supervisor's death: vital processes save, all end."""

import os
import pty
import signal
import time

import pytest

from speedyzero_jax.cluster.child import Child
from speedyzero_jax.cluster.supervisor import Limits, Supervisor
from supervised import KILLED, LIMITS, SAVE, SLEEP, STOP, STUBBORN, pids, wait_for


def test_a_signal_lets_the_vital_ones_save_first(run):
  watch = """
def stop(*_):
  saved = all(Path(f"saved-learner-{i}").exists() for i in range(2))
  touch("late" if saved else "early")
  sys.exit()
on_stop(stop); ready(); time.sleep(100)
"""
  learners = [("learner-0", SAVE, True), ("learner-1", SAVE, True)]
  one = run(*learners, ("actor-0", watch, False), ("actor-1", STUBBORN, False), kill_after=2.0)
  one.until("ready-learner-0", "ready-learner-1", "ready-actor-0", "ready-actor-1")
  one.process.send_signal(signal.SIGINT)
  time.sleep(0.02)
  one.process.send_signal(signal.SIGINT)  # timeout(1) signals the process and its group
  output = one.end(128 + signal.SIGINT)
  assert "stopping (SIGINT): waiting for learner-0, learner-1" in output
  assert (one.folder / "late").exists() and not (one.folder / "early").exists()
  assert set(one.restarts().values()) == {0}


@pytest.mark.parametrize("key", [b"\x03", None])
def test_ctrl_c_in_a_terminal_and_its_closing_let_the_vital_ones_save(run, key):
  ours, theirs = pty.openpty()
  one = run(("learner-0", SAVE, True), ("actor-0", STUBBORN, False), stdin=theirs)
  one.until("ready-learner-0", "ready-actor-0")
  os.close(theirs)
  if key:
    os.write(ours, key)
  else:
    os.close(ours)
  one.end(130 if key else 129)
  if key:
    os.close(ours)
  assert (one.folder / "saved-learner-0").exists()


def test_an_ignored_hang_up_stays_ignored(run):
  """SIGHUP is ignored, as under nohup."""
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    one = run(("learner-0", STOP, True))
  finally:
    signal.signal(signal.SIGHUP, before)
  one.until("ready-learner-0").process.send_signal(signal.SIGHUP)
  time.sleep(0.3)
  assert one.process.poll() is None
  one.process.send_signal(signal.SIGTERM)
  assert "SIGHUP" not in one.end(143)


def test_a_report_that_can_not_be_shown_stops_nothing(tmp_path):
  def show(_):
    raise OSError("the terminal is gone")

  children = [Child("learner-0", ["sh", "-c", "kill -9 $$"], {}, True)]
  supervisor = Supervisor(children, tmp_path, show, Limits(**LIMITS, max_deaths=2))
  assert supervisor.run() == 1 and supervisor.restarts == {"learner-0": 1}
  assert "killed by SIGKILL" in (tmp_path / "supervisor.log").read_text()


@pytest.mark.parametrize(
  ("learner", "code"), [(STUBBORN, 143), ("until('ready-actor-0')", 0)], ids=["saving", "grace"]
)
def test_a_signal_while_waiting_for_others_kills(run, learner, code):
  """While a learner saves only SIGINT does: schedulers may repeat SIGTERM."""
  one = run(
    ("learner-0", learner, True), ("actor-0", STUBBORN, False), save_patience=100.0, grace=100.0
  )
  one.until("ready-actor-0")
  if code:
    one.until("ready-learner-0")
    for number in (signal.SIGTERM, signal.SIGTERM):
      assert one.process.poll() is None
      one.process.send_signal(number)
      time.sleep(2)
    one.process.send_signal(signal.SIGINT)
  else:
    wait_for(lambda: one.child("learner-0")["pid"] is None)
    one.process.send_signal(signal.SIGTERM)
  one.end(code)


@pytest.mark.parametrize("stopped", ["twice", "learner-1"])
def test_patience_with_saving_ends(run, stopped):
  one = run(("learner-0", STUBBORN, True), ("learner-1", SAVE, True), save_patience=5.0)
  one.until("ready-learner-0", "ready-learner-1")
  if stopped == "learner-1":
    os.kill(one.child("learner-1")["pid"], signal.SIGTERM)
  else:
    one.process.send_signal(signal.SIGTERM)
  if stopped == "twice":
    time.sleep(2)
    one.process.send_signal(signal.SIGTERM)
  assert "learner-0 has not ended in 5 s and is killed" in one.end(1)
  assert (one.folder / "saved-learner-1").exists()


def test_a_save_that_fails_is_a_failure(run):
  fail = f"on_stop(lambda *_: (print('disk full'), sys.exit(1))); {SLEEP}"
  one = run(("learner-0", SAVE, True), ("learner-1", fail, True))
  one.until("ready-learner-0", "ready-learner-1").process.send_signal(signal.SIGTERM)
  output = one.end(1)
  assert "learner-1 exited with code 1 after" in output and output.count("  disk full") == 1


def test_a_signal_ends_the_pause_before_a_restart(run):
  one = run(("learner-0", KILLED, True), pause=100.0, longest_pause=100.0).until(
    "logs/supervisor.json"
  )
  wait_for(lambda: one.child("learner-0")["pid"] is None)
  one.process.send_signal(signal.SIGTERM)
  assert "restarting all processes in 100 s" in one.end(143)


def test_a_stop_signal_to_one_vital_process_stops_all(run):
  one = run(("learner-0", SAVE, True), ("learner-1", SAVE, True), ("actor-0", SLEEP, False))
  one.until("ready-learner-0", "ready-learner-1", "ready-actor-0")
  os.kill(one.child("learner-1")["pid"], signal.SIGTERM)
  assert "learner-1 exited with code 143 after" in one.end(143)
  assert (one.folder / "saved-learner-0").exists()


@pytest.mark.parametrize("delay", [0.0, 0.05, None])
def test_no_child_outlives_a_killed_supervisor(run, delay):
  """Killed while it starts its children, or (None) after all have started."""
  one = run(*((f"learner-{i}", STUBBORN, True) for i in range(6))).until("logs/supervisor.json")
  if delay is None:
    one.until(*(f"ready-learner-{i}" for i in range(6)))
    assert len(pids(one.mark)) >= 7
  time.sleep(delay or 0.0)
  one.process.kill()
  one.process.wait()
  wait_for(lambda: not pids(one.mark), seconds=5.0)
