"""Signals, terminals and the end of the supervisor itself: the vital ones save, and nobody is left."""

import contextlib
import errno
import os
import pty
import re
import signal
import sys
import threading
import time

import pytest
from supervised import LIMITS, SAVE, SHOT, SLEEP, STOP, STUBBORN, pids, wait_for

from speedyzero_jax.cluster.child import Child
from speedyzero_jax.cluster.supervisor import Supervisor


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_vital_ones_save_first(run, number):
  watch = """
def stop(*_):
  touch("early" if not (Path("saved-learner-0").exists() and Path("saved-learner-1").exists()) else "late")
  sys.exit()
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
ready(); time.sleep(100)
"""
  learners = [("learner-0", SAVE, True), ("learner-1", SAVE, True)]
  one = run(*learners, ("actor-0", watch, False), ("actor-1", STUBBORN, False))
  one.until("ready-learner-0", "ready-learner-1", "ready-actor-0", "ready-actor-1")
  one.process.send_signal(number)
  output = one.end(128 + number)
  assert (
    f"stopping ({number.name}): waiting for learner-0, learner-1 to save" in output
    and "exited" not in output
  )
  one.until("saved-learner-0", "saved-learner-1", "late")
  assert not (one.folder / "early").exists()
  assert set(one.restarts().values()) == {0}


def test_ctrl_c_in_a_terminal_reaches_each_once(run):
  ours, theirs = pty.openpty()
  try:
    one = run(("learner-0", SAVE, True), ("actor-0", STUBBORN, False), stdin=theirs)
    one.until("ready-learner-0", "ready-actor-0")
    os.write(ours, b"\x03")
    one.end(130)
    one.until("saved-learner-0")
  finally:
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_is_closed_lets_the_vital_ones_save(run):
  ours, theirs = pty.openpty()
  try:
    one = run(("learner-0", SAVE, True), ("actor-0", STUBBORN, False), stdin=theirs)
    one.until("ready-learner-0", "ready-actor-0")
  finally:
    os.close(theirs)
    os.close(ours)
  assert "stopping (SIGHUP): waiting for learner-0 to save" in one.end(129)
  one.until("saved-learner-0")


def test_a_hang_up_that_is_ignored_stays_so(run):
  """As nohup starts it."""
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
  try:
    one = run(("learner-0", STOP, True))
  finally:
    signal.signal(signal.SIGHUP, before)
  one.until("ready-learner-0").process.send_signal(signal.SIGHUP)
  time.sleep(0.3)
  assert one.process.poll() is None
  one.process.send_signal(signal.SIGTERM)
  output = one.end(143)
  assert "stopping (SIGTERM)" in output and "SIGHUP" not in output


def test_what_can_not_be_said_stops_nothing(tmp_path):
  said = []

  def say(text):
    said.append(text)
    raise OSError(errno.EIO, "the terminal is gone")

  children = [Child("learner-0", ["sh", "-c", "kill -9 $$"], {}, True)]
  watcher = Supervisor(lambda _: children, tmp_path, say, **LIMITS, max_deaths=2)
  assert watcher.run() == 1
  assert len(said) == 2 and watcher.restarts == {"learner-0": 1}


# Draws on a terminal as a live display does, also while it saves.
DRAW = """
import os, signal, sys, time
stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(time.monotonic()))
while not stopping or time.monotonic() < stopping[0] + 0.3:
  os.write(int(sys.argv[1]), b"\\x1b[H\\x1b[2Jprogress\\n")
  time.sleep(0.02)
"""


def test_why_a_run_ended_is_left_on_a_terminal_that_a_child_draws_on(tmp_path):
  ours, theirs = pty.openpty()
  shown = []

  def read():
    with contextlib.suppress(OSError):  # once the other end is closed
      while text := os.read(ours, 1 << 16):
        shown.append(text)

  reader = threading.Thread(target=read)
  reader.start()
  learner = Child("learner-0", [sys.executable, "-S", "-c", DRAW, str(theirs)], {}, True, (theirs,))
  actor = Child("actor-0", ["bash", "-c", "sleep 0.2; echo the reason; exit 1"], {}, False)

  def say(text):
    os.write(theirs, f"{text}\n".encode())

  code = Supervisor(lambda _: [learner, actor], tmp_path, say, **LIMITS, max_failures=2).run()
  os.close(theirs)
  reader.join()
  os.close(ours)
  assert code == 1
  screen = b"".join(shown).decode().rpartition("\x1b[2J")[2]
  assert "\n  the reason" in screen and "It was the last of 2 failures in a row." in screen
  log = (tmp_path / "supervisor.log").read_text()
  reports = re.findall(
    r"^[0-9]{4}-[0-9-]+ [0-9:]{8} (actor-0 exited with code 1|stopping \(SIGTERM\))", log, re.M
  )
  assert (
    reports == ["actor-0 exited with code 1"] * 2 + ["stopping (SIGTERM)"]
    and log.count("It was the last") == 1
  )


def test_a_second_signal_kills(run):
  one = run(
    ("learner-0", STUBBORN, True), ("actor-0", STUBBORN, False), save_patience=100.0, grace=100.0
  )
  one.until("ready-learner-0", "ready-actor-0")
  one.process.send_signal(signal.SIGINT)
  time.sleep(0.5)
  assert one.process.poll() is None
  begin = time.monotonic()
  one.process.send_signal(signal.SIGTERM)
  assert "learner-0 was killed by SIGKILL" in one.end(130)
  assert time.monotonic() - begin < 5.0


def test_an_echo_is_no_second_signal(run):
  one = run(("learner-0", SAVE, True)).until("ready-learner-0")
  one.process.send_signal(signal.SIGTERM)
  time.sleep(0.02)
  one.process.send_signal(signal.SIGTERM)
  one.end(143)
  one.until("saved-learner-0")


def test_a_signal_while_others_have_their_grace_kills(run):
  one = run(
    ("learner-0", "until('ready-actor-0')", True), ("actor-0", STUBBORN, False), grace=100.0
  )
  one.until("ready-actor-0")
  wait_for(lambda: one.child("learner-0")["pid"] is None)
  one.process.send_signal(signal.SIGTERM)
  one.end(0)


def test_patience_with_saving_ends(run):
  one = run(("learner-0", STUBBORN, True), ("learner-1", SAVE, True), save_patience=1.0)
  one.until("ready-learner-0", "ready-learner-1").process.send_signal(signal.SIGTERM)
  output = one.end(143)
  assert "learner-0 has not ended in 1 s and is killed" in output
  one.until("saved-learner-1")


def test_a_save_that_fails_is_a_failure(run):
  code = "signal.signal(signal.SIGTERM, lambda *_: (print('disk full'), sys.exit(1))); ready(); time.sleep(100)"
  one = run(("learner-0", SAVE, True), ("learner-1", code, True)).until(
    "ready-learner-0", "ready-learner-1"
  )
  one.process.send_signal(signal.SIGTERM)
  output = one.end(1)
  assert "learner-1 exited with code 1 after" in output and output.count("  disk full") == 1


def test_a_signal_ends_the_pause_before_a_restart(run):
  one = run(("learner-0", SHOT, True), pause=100.0)
  one.until("logs/supervisor.json")
  wait_for(lambda: one.child("learner-0")["pid"] is None)
  one.process.send_signal(signal.SIGTERM)
  output = one.end(143)
  assert (
    "starting all again in 100 s" in output
    and "stopping (SIGTERM): nothing has to be saved" in output
  )


def test_a_vital_one_that_was_told_to_stop_takes_all_with_it(run):
  one = run(("learner-0", SAVE, True), ("learner-1", SAVE, True), ("actor-0", SLEEP, False))
  one.until("ready-learner-0", "ready-learner-1", "ready-actor-0")
  os.kill(one.child("learner-1")["pid"], signal.SIGTERM)
  assert "learner-1 exited with code 143 after" in one.end(143)
  one.until("saved-learner-0", "saved-learner-1")


def test_kill_of_the_supervisor_leaves_nobody(run):
  one = run(("learner-0", STUBBORN, True), ("actor-0", STUBBORN, False), ("done", "pass", False))
  one.until("ready-learner-0", "ready-actor-0")
  assert len(pids(one.mark)) >= 3
  one.process.kill()
  one.process.wait()
  wait_for(lambda: not pids(one.mark), seconds=5.0)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1])
def test_kill_while_starting_leaves_nobody(run, delay):
  one = run(*((f"learner-{i}", STUBBORN, True) for i in range(6)))
  wait_for(lambda: (one.folder / "logs" / "supervisor.json").exists())
  time.sleep(delay)
  one.process.kill()
  one.process.wait()
  wait_for(lambda: not pids(one.mark), seconds=5.0)
