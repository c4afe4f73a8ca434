"""Tests of the supervisor with real processes: exits of all kinds, restarts, back-off, failure."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from speedyzero_jax.cluster.child import Child
from speedyzero_jax.cluster.supervisor import Supervisor
from supervised import COUNTED, KILLED, SAVE, SLEEP, STOP, STUBBORN, pids, wait_for

FINISH = ("learner-0", "until('finish')", True)


def pauses(output):
  return re.findall(r"restarting .* in (\S+) s", output)


def test_ends_when_the_vital_ones_have(run, tmp_path):
  (tmp_path / "typed").write_text("not for children")
  learner = "print(repr(sys.stdin.read())); "
  learner += "; ".join(f"until('ready-{name}')" for name in ("willing", "slow", "stubborn"))
  with (tmp_path / "typed").open() as typed:
    one = run(
      ("learner-0", learner, True),
      ("learner-1", "print('in a log'); time.sleep(0.2)", True),
      ("done", "print('broken', file=sys.stderr)", False),
      ("willing", "ready(); until('ready-slow'); time.sleep(0.3); print('by itself')", False),
      ("slow", STOP, False),
      ("stubborn", STUBBORN, False),
      stdin=typed,
      grace=1.0,
      kill_after=2.0,
    )
  one.end(0)
  assert set(one.restarts().values()) == {0} and len(one.restarts()) == 6
  for name, end in (
    ("learner-0", "''"), ("learner-1", f"{one.mark}\nin a log"), ("done", "broken"),
    ("willing", "by itself"), ("slow", "got it"),
  ):  # fmt: skip
    assert one.log(name).endswith(f"{end}\n")


def test_restarts_a_killed_process_alone(run):
  one = run(FINISH, ("actor-0", SLEEP, False), ("actor-1", SLEEP, False))
  one.until("ready-actor-0", "ready-actor-1")
  before = one.status()
  assert before["pid"] == one.process.pid
  assert abs(one.child("actor-1")["started"] - time.time()) < 20
  ready = one.folder / "ready-actor-1"
  for _ in range(2):
    old = one.child("actor-1")["pid"]
    wait_for(lambda old=old: ready.read_text() == str(old))
    os.kill(old, signal.SIGKILL)
    wait_for(lambda old=old: one.child("actor-1")["pid"] not in (None, old))
  assert one.child("actor-0") == before["children"][1]
  (one.folder / "finish").touch()
  output = one.end(0)
  assert one.restarts() == {"learner-0": 0, "actor-0": 0, "actor-1": 2}
  assert "actor-1 was killed by SIGKILL after" in output and pauses(output) == ["0.05", "0.1"]
  assert one.log("actor-1").count("--- ") == 3


def test_gives_up_on_a_process_that_keeps_failing(run):
  lines = "[print(f'line {i}.') for i in range(30)]; sys.stdout.flush()"
  end = "os.kill(os.getpid(), signal.SIGSEGV)"
  code = f"until('ready-learner-0'); {lines}; {end}"
  one = run(
    ("learner-0", SAVE, True), ("actor-0", code, False), ("actor-1", SLEEP, False), max_failures=3
  )
  output = one.end(1)
  assert output.count("actor-0 was killed by SIGSEGV after") == 3
  shown = re.findall(r"^  (line .*)$", output, re.M)
  assert shown == [f"line {i}." for i in range(10, 30)]
  assert (one.folder / "saved-learner-0").exists()
  assert one.restarts() == {"learner-0": 0, "actor-0": 2, "actor-1": 0}


@pytest.mark.parametrize(
  ("end", "limits"),
  [
    ("1/0", {"reset_after": 0.2, "max_failures": 1}),
    (KILLED, {"reset_after": 0.2, "max_deaths": 1}),
    (KILLED, {"max_failures": 1}),  # deaths that others cause are no failures
    (f"os.abort() if n % 2 else {KILLED}", {"max_failures": 2}),  # and end a series of failures
  ],
)
def test_keeps_restarting_after_a_long_life_and_after_deaths_that_others_cause(run, end, limits):
  output = run(FINISH, ("actor-0", f"{COUNTED}time.sleep(0.3); {end}", False), **limits).end(0)
  doubling = ["0.05", "0.1", "0.2", "0.2"]
  assert pauses(output)[:4] == (4 * ["0.05"] if "reset_after" in limits else doubling)


def test_a_long_life_begins_the_pauses_anew(run):
  code = f"{COUNTED}time.sleep(3.2 if n == 2 else 0); {KILLED}"
  output = run(FINISH, ("actor-0", code, False), reset_after=3.0).end(0)
  assert pauses(output)[:4] == ["0.05", "0.1", "0.05", "0.05"]


def test_gives_up_on_a_process_that_is_killed_too_often(run):
  one = run(("learner-0", SAVE, True), ("actor-0", KILLED, False), max_deaths=4)
  one.end(1)
  assert one.restarts() == {"learner-0": 0, "actor-0": 3}


def test_a_restart_that_fails_lets_the_learner_save(run):
  one = run(("learner-0", SAVE, True), ("actor-0", f"until('gone'); {KILLED}", False))
  one.until("ready-learner-0", "logs/actor-0.log")
  (one.folder / "logs").rename(one.folder / "elsewhere")
  (one.folder / "gone").touch()
  output = one.process.communicate(timeout=30)[0]
  assert one.process.returncode == 1 and "stopping (SIGTERM)" in output, output
  assert "FileNotFoundError" in output and not pids(one.mark)
  assert (one.folder / "saved-learner-0").exists()


def test_wrong_use_is_not_tried_again(run):
  wrong = "until('ready-learner-0'); print('no such key'); sys.exit(2)"
  one = run(("learner-0", SAVE, True), ("actor-0", wrong, False))
  assert "\n  no such key\n" in one.end(2)
  assert one.restarts() == {"learner-0": 0, "actor-0": 0}
  assert (one.folder / "saved-learner-0").exists()


def test_fails_with_a_vital_one(run):
  code = 77
  fail = f"until('ready-actor-0'); print('no space'); sys.exit({code})"
  learners = [("learner-0", SLEEP, True), ("learner-1", fail, True)]
  one = run(*learners, ("actor-0", STOP, False), kill_after=2.0)
  output = one.end(code)
  assert f"learner-1 exited with code {code}" in output and "\n  no space" in output
  assert one.log("actor-0").endswith("got it\n")
  assert set(one.restarts().values()) == {0}


def test_reports_on_a_terminal_that_lacks_a_character(tmp_path):
  shown = []

  def show(text):
    shown.append(text.encode("ascii").decode())

  children = [Child("learner-0", ["bash", "-c", "printf '\\xb5s'; exit 3"], {}, True, ())]
  assert Supervisor(children, tmp_path, show).run() == 3
  assert any("learner-0 exited with code 3" in text for text in shown)
  assert "\ufffds" in (tmp_path / "supervisor.log").read_text(encoding="utf-8")


def test_passes_on_only_the_files_of_a_child(tmp_path):
  with (tmp_path / "shown").open("w") as shown, (tmp_path / "hidden").open("w") as hidden:
    os.set_inheritable(hidden.fileno(), True)
    write = f"echo yes >&{shown.fileno()}; echo no 2>/dev/null >&{hidden.fileno()}; true"
    children = [Child("learner-0", ["bash", "-c", write], {}, True, (shown.fileno(),))]
    assert Supervisor(children, tmp_path, print).run() == 0
  assert (tmp_path / "shown").read_text() == "yes\n" and (tmp_path / "hidden").read_text() == ""


def test_restarts_all_when_a_vital_one_is_killed(run):
  one = run(
    ("learner-0", f"if resumed: until('finish')\nelse: {SLEEP}", True),
    ("actor-0", f"if resumed: until('finish'); sys.exit()\n{STUBBORN}", False),
    ("actor-1", "pass", False),  # has finished, and is started again all the same
    grace=100.0,
    kill_after=100.0,
  )
  one.until("ready-learner-0", "ready-actor-0")
  old = one.child("learner-0")["pid"], one.child("actor-0")["pid"]
  os.kill(old[0], signal.SIGKILL)
  wait_for(lambda: one.child("actor-1")["restarts"])
  assert not set(old) & set(pids(one.mark))
  (one.folder / "finish").touch()
  output = one.end(0)
  assert pauses(output) == ["0.05"]
  assert one.restarts() == {"learner-0": 1, "actor-0": 1, "actor-1": 1}


def test_a_restart_of_all_begins_the_counts_of_the_others_anew(run):
  one = run(
    ("learner-0", f"if resumed: until('finish')\nelse: until('was-1'); {KILLED}", True),
    ("actor-0", f"{COUNTED}if n in (0, 2): os.abort()\nif n == 3: touch('finish')\n{SLEEP}", False),
    max_failures=2,
  )
  one.end(0)
  assert one.restarts() == {"learner-0": 1, "actor-0": 3}


def test_a_restart_of_all_replaces_a_pending_restart(run):
  die_later = f"ready(); until('was-0'); time.sleep(0.2); {KILLED}"
  one = run(
    ("learner-0", f"if resumed: until('finish')\nelse: {die_later}", True),
    ("actor-0", f"{COUNTED}if n: touch('finish')\nelse: until('ready-learner-0'); {KILLED}", False),
    pause=1.5,
    longest_pause=1.5,
  )
  one.end(0)
  assert one.restarts() == {"learner-0": 1, "actor-0": 1}


@pytest.mark.parametrize(
  ("first", "second", "cause"),
  [
    ("os.abort()", KILLED, "learner-0 was killed by SIGKILL"),
    ("sys.exit(1)", KILLED, "learner-0 was killed by SIGKILL"),  # as it lost its peer
    ("os.abort()", "sys.exit(1)", None),  # a failure, and the abort that it led to
    ("os.abort()", "time.sleep(100)", "learner-1 was killed by SIGABRT"),
  ],
)
def test_finds_the_cause_when_several_vital_ones_fail(run, first, second, cause):
  """learner-1 ends first and learner-0 shortly after. Only an abort counts as a failure."""
  one = run(
    ("learner-0", f"if not resumed: ready(); until('end'); time.sleep(0.05); {second}", True),
    ("learner-1", f"if not resumed: until('ready-learner-0'); touch('end'); {first}", True),
    max_failures=1 + ("ABRT" in str(cause)),
  )
  output = one.end(0 if cause else 1)
  if cause:
    assert re.findall("(.*) after .* s; restarting all", output) == [cause]
    assert one.restarts() == {"learner-0": 1, "learner-1": 1}
  else:
    assert "learner-0 exited with code 1 after" in output and "restarting" not in output


@pytest.mark.parametrize(
  ("end", "limits"),
  [("os.abort()", {"max_failures": 4}), (KILLED, {"max_failures": 1, "max_deaths": 4})],
)
def test_restarts_of_all_are_bounded(run, end, limits):
  one = run(("learner-0", end, True), ("actor-0", SLEEP, False), **limits)
  output = one.end(1)
  assert pauses(output) == ["0.05", "0.1", "0.2"]
  assert one.restarts() == {"learner-0": 3, "actor-0": 3}


def test_restarts_after_long_lives_without_progress_are_bounded(run):
  save = "if n < 2: touch(f'checkpoint-{n}')"
  code = f"{COUNTED}{save}\ntime.sleep(0.3); os.abort()"
  one = run(("learner-0", code, True), reset_after=0.2, max_failures=2)
  assert pauses(one.end(1)) == ["0.05", "0.05", "0.05"]
  assert one.restarts() == {"learner-0": 3}


def test_kills_what_a_process_leaves_behind(run):
  grandchild = "if os.fork() == 0: on_stop(signal.SIG_IGN); ready(); time.sleep(100); sys.exit()"
  run(("learner-0", f"{grandchild}\nuntil('ready-learner-0')", True)).end(0)


def test_waiting_takes_no_time(run):
  one = run(("learner-0", SLEEP, True), ("actor-0", "pass", False)).until("ready-learner-0")
  wait_for(lambda: ("actor-0", None) in [(c["name"], c["pid"]) for c in one.status()["children"]])

  def wakeups():
    status = Path(f"/proc/{one.process.pid}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)[1])

  time.sleep(0.2)
  before = wakeups()
  time.sleep(1.0)
  assert wakeups() - before <= 10
