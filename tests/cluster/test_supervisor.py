"""Real processes that end in every way, under a real supervisor: who is started again, and how often."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from supervised import NOW_AND_THEN, SAVE, SHOT, SLEEP, STOP, STUBBORN, pids, wait_for

from speedyzero_jax.cluster import child
from speedyzero_jax.cluster.child import Child
from speedyzero_jax.cluster.supervisor import Supervisor


def test_ends_when_the_vital_ones_have(run, tmp_path):
  (tmp_path / "typed").write_text("not for them")
  with (tmp_path / "typed").open() as typed:
    one = run(
      (
        "learner-0",
        "print('hello', repr(sys.stdin.read())); [until(f'ready-{n}') for n in ('slow', 'stubborn')]",
        True,
      ),
      ("learner-1", "print('in a log'); time.sleep(0.2)", True),
      ("done", "print('done'); print('broken', file=sys.stderr)", False),
      ("willing", "until('ready-slow'); time.sleep(0.3); print('by itself')", False),
      ("slow", STOP, False),
      ("stubborn", STUBBORN, False),
      stdin=typed,
      grace=1.0,
    )
  output = one.end(0)
  assert output.splitlines()[:1] == ["make False"] and len(output.splitlines()) == 2
  assert one.log("learner-0").endswith("\nhello ''\n")
  assert one.restarts() == dict.fromkeys(
    ("learner-0", "learner-1", "done", "willing", "slow", "stubborn"), 0
  )
  command = re.escape(f"{sys.executable} -S learner-1.py learner-1 {one.mark}")
  assert re.fullmatch(
    rf"--- [0-9]{{4}}-[0-9-]+ [0-9:]+ pid [0-9]+: {command}\nin a log\n", one.log("learner-1")
  )
  assert set(one.log("done").splitlines()[1:]) == {"done", "broken"}
  assert one.log("willing").endswith("by itself\n") and one.log("slow").endswith("told to\n")


def test_starts_again_who_is_killed(run):
  one = run(
    ("learner-0", "until('finish')", True), ("actor-0", SLEEP, False), ("actor-1", SLEEP, False)
  )
  one.until("ready-actor-0", "ready-actor-1")
  before = one.status()
  assert before["pid"] == one.process.pid
  assert [child["name"] for child in before["children"]] == ["learner-0", "actor-0", "actor-1"]
  wait_for(lambda: one.ready("actor-1") == str(one.child("actor-1")["pid"]))
  assert abs(one.child("actor-1")["started"] - time.time()) < 20
  for _ in range(2):
    old = one.child("actor-1")["pid"]
    os.kill(old, signal.SIGKILL)
    wait_for(lambda old=old: one.ready("actor-1") not in ("", str(old)))
    assert one.child("actor-1")["pid"] == int(one.ready("actor-1"))
  assert one.child("actor-0") == before["children"][1]
  (one.folder / "finish").touch()
  output = one.end(0)
  assert one.restarts() == {"learner-0": 0, "actor-0": 0, "actor-1": 2}
  line = r"actor-1 was killed by SIGKILL after \d s; starting it again in (\S+) s"
  assert re.findall(line, output) == ["0.05", "0.1"]
  assert one.log("actor-1").count("--- ") == 3


@pytest.mark.parametrize(
  ("end", "words"),
  [
    ("sys.exit(3)", "exited with code 3"),
    ("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
    ("os._exit(134)", "exited with code 134 (SIGABRT)"),
  ],
)
def test_gives_up_on_who_fails_again_and_again(run, end, words):
  code = f"until('ready-learner-0'); [print(f'line {{i}}.') for i in range(30)]; sys.stdout.flush(); {end}"
  one = run(
    ("learner-0", SAVE, True), ("actor-0", code, False), ("actor-1", SLEEP, False), max_failures=3
  )
  output = one.end(1)
  assert output.count(f"actor-0 {words} after") == 3 + 1  # the last one again, when all have ended
  log, after = output.split("; the end of logs/actor-0.log:\n")[1].split(
    "\nIt was the last of 3 failures in a row."
  )
  assert log.splitlines() == [f"  line {i}." for i in range(10, 30)]
  assert "stopping (SIGTERM): waiting for learner-0 to save" in after
  assert (one.folder / "saved-learner-0").exists()
  assert one.restarts() == {"learner-0": 0, "actor-0": 2, "actor-1": 0}


@pytest.mark.parametrize(
  ("end", "settled"),
  [("1/0", 0.2), (SHOT, 600.0), ("os.kill(os.getpid(), 15)", 600.0), ("sys.exit(143)", 600.0)],
)
def test_goes_on_with_who_dies_now_and_then(run, end, settled):
  """A failure of one that had settled, and what others do to it, before that as well."""
  learner, actor = (
    ("learner-0", "until('finish')", True),
    ("actor-0", NOW_AND_THEN + f"time.sleep(0.3); {end}", False),
  )
  output = run(learner, actor, settled=settled, max_failures=1).end(0)
  assert re.findall("starting it again in (.*) s", output)[:4] == ["0.05", "0.1", "0.2", "0.2"]


def test_gives_up_on_who_is_killed_too_often(run):
  one = run(("learner-0", SAVE, True), ("actor-0", f"time.sleep(0.3); {SHOT}", False), max_deaths=4)
  output = one.end(1)
  assert "It was the last of 4 deaths in a row, each after less than 600 s." in output
  assert one.restarts() == {"learner-0": 0, "actor-0": 3}


def test_who_had_settled_is_killed_as_often_as_you_like(run):
  learner, actor = (
    ("learner-0", "until('finish')", True),
    ("actor-0", NOW_AND_THEN + f"time.sleep(0.3); {SHOT}", False),
  )
  one = run(learner, actor, settled=0.2, max_deaths=1)
  one.end(0)
  assert one.restarts()["actor-0"] >= 4


def test_pause_is_short_again_for_the_healthy(run):
  learner, actor = (
    ("learner-0", "until('finish')", True),
    ("actor-0", NOW_AND_THEN + "n == 2 and time.sleep(2); 1/0", False),
  )
  output = run(learner, actor, healthy=2.0, max_failures=9).end(0)
  assert re.findall("starting it again in (.*) s", output)[:4] == ["0.05", "0.1", "0.05", "0.1"]


def test_wrong_use_is_not_tried_again(run):
  wrong = "until('ready-learner-0'); print('no such key'); sys.exit(2)"
  one = run(("learner-0", SAVE, True), ("actor-0", wrong, False))
  output = one.end(2)
  assert "actor-0 exited with code 2 after" in output and "\n  no such key\n" in output
  assert one.restarts() == {"learner-0": 0, "actor-0": 0}
  one.until("saved-learner-0")


def test_a_command_that_is_not_there_is_wrong_use(tmp_path):
  sleep = Child("learner-0", ["sleep", "100"], {}, True)
  missing = Child("actor-0", ["/not/there"], {}, False)
  said: list[str] = []
  assert (
    Supervisor(lambda _: [sleep, missing], tmp_path / "logs", said.append, grace=0.0).run() == 2
  )
  assert (
    "actor-0 exited with code 2" in said[0]
    and "error: can't run /not/there: No such file or directory" in said[0]
  )


@pytest.mark.parametrize("code", [1, 2, 77])
def test_fails_with_a_vital_one(run, code):
  fail = f"until('ready-actor-0'); print('no space'); sys.exit({code})"
  learners = [("learner-0", SLEEP, True), ("learner-1", fail, True)]
  one = run(*learners, ("actor-0", STOP, False), ("actor-1", STUBBORN, False))
  output = one.end(code)
  assert re.search(
    rf"learner-1 exited with code {code} after .*; the end of logs/learner-1.log:\n.*\n  no space",
    output,
  )
  assert one.log("actor-0").endswith("told to\n")
  assert set(one.restarts().values()) == {0}


def test_inherits_the_files_that_it_should(tmp_path):
  with (tmp_path / "shown").open("w") as shown, (tmp_path / "hidden").open("w") as hidden:
    os.set_inheritable(hidden.fileno(), True)
    write = (
      f"echo yes >&{shown.fileno()}; echo logged; echo no 2>/dev/null >&{hidden.fileno()}; true"
    )
    children = [Child("learner-0", ["bash", "-c", write], {}, True, (shown.fileno(),))]
    assert Supervisor(lambda _: children, tmp_path, print).run() == 0
  assert (tmp_path / "shown").read_text() == "yes\n" and (tmp_path / "hidden").read_text() == ""
  assert "logged\n" in (tmp_path / "learner-0.log").read_text()


def test_starts_all_again_when_a_vital_one_is_killed(run):
  one = run(
    ("learner-0", f"if resumed: until('finish')\nelse: {SLEEP}", True),
    ("actor-0", f"if resumed: until('finish'); sys.exit()\n{STUBBORN}", False),
    ("actor-1", "pass", False),  # done, and yet wanted after a restart
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
  assert re.findall("make .*", output) == ["make False", "make True"]
  line = r"^learner-0 was killed by SIGKILL after \d+ s; starting all again in 0.05 s$"
  assert len(re.findall(line, output, re.MULTILINE)) == 1
  assert one.restarts() == {"learner-0": 1, "actor-0": 1, "actor-1": 1}


@pytest.mark.parametrize(
  ("first", "second", "cause"),
  [
    ("os.abort()", SHOT, "learner-0 was killed by SIGKILL"),
    ("os._exit(134)", SHOT, "learner-0 was killed by SIGKILL"),
    ("sys.exit(1)", SHOT, "learner-0 was killed by SIGKILL"),  # an exception about a lost peer
    ("os.abort()", "sys.exit(1)", None),  # a failure, and who was hurt by it
    ("os.abort()", "time.sleep(100)", "learner-1 was killed by SIGABRT"),
  ],
)
def test_finds_the_first_cause(run, first, second, cause):
  """learner-1 dies first, and learner-0 shortly after."""
  one = run(
    ("learner-0", f"if not resumed: ready(); until('dying'); time.sleep(0.05); {second}", True),
    ("learner-1", f"if not resumed: until('ready-learner-0'); touch('dying'); {first}", True),
  )
  output = one.end(0 if cause else 1)
  if cause:
    assert re.findall("(.*) after .* s; starting all again", output) == [cause]
    assert one.restarts() == {"learner-0": 1, "learner-1": 1}
  else:
    assert "learner-0 exited with code 1 after" in output and "again" not in output


def test_restarts_of_all_are_bounded(run):
  one = run(("learner-0", "os.abort()", True), ("actor-0", SLEEP, False), max_restarts=3)
  output = one.end(1)
  assert re.findall("make .*", output) == ["make False"] + 3 * ["make True"]
  assert re.findall("starting all again in (.*) s", output) == ["0.05", "0.1", "0.2"]
  assert "It was the last of 4 failures in a row." in output
  assert one.restarts() == {"learner-0": 3, "actor-0": 3}


@pytest.mark.parametrize(
  ("end", "limits", "why"),
  [
    ("os.abort()", {"max_restarts": 2}, "3 failures in a row."),
    (SHOT, {"max_restarts": 0, "max_deaths": 3}, "3 deaths in a row, each after less than 600 s."),
  ],
)
def test_restarts_of_all_before_they_have_settled_are_bounded(run, end, limits, why):
  one = run(("learner-0", f"time.sleep(0.3); {end}", True), **limits)
  assert f"It was the last of {why}" in one.end(1)
  assert one.restarts() == {"learner-0": 2}


def test_who_aborts_because_another_was_killed_has_not_failed(run):
  abort = "if not resumed: touch('waiting'); until('dying'); os.abort()\nready()"
  shot = (
    f"if not resumed: until('waiting'); time.sleep(0.3); touch('dying'); time.sleep(0.1); {SHOT}"
  )
  one = run(("learner-0", abort, True), ("learner-1", shot, True), max_restarts=0)
  assert "learner-1 was killed by SIGKILL" in one.end(0)
  assert one.restarts() == {"learner-0": 1, "learner-1": 1}


def test_whose_supervisor_died_early_does_not_run(tmp_path):
  command = [sys.executable, "-c", "open('ran', 'w')"]
  bootstrap = [sys.executable, "-I", "-S", child.__file__, str(os.getpid()), *command]
  orphan = ["sh", "-c", '"$@"; exit $?', "sh", *bootstrap]  # its parent is the shell
  assert subprocess.run(orphan, cwd=tmp_path, check=False).returncode == 1
  assert not (tmp_path / "ran").exists()
  assert subprocess.run(bootstrap, cwd=tmp_path, check=False).returncode == 0
  assert (tmp_path / "ran").exists()


def test_what_a_process_leaves_behind_is_killed(run):
  code = """
if os.fork() == 0:
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  touch("ready-grandchild"); time.sleep(100)
until("ready-grandchild")
"""
  run(("learner-0", code, True)).end(0)


def test_waiting_takes_no_time(run):
  one = run(("learner-0", SLEEP, True), ("actor-0", "pass", False)).until("ready-learner-0")
  wait_for(lambda: one.child("actor-0")["pid"] is None)

  def used():
    """Times it woke up, and ticks of 10 ms that it computed."""
    process = Path(f"/proc/{one.process.pid}")
    wakeups = re.search(
      r"^voluntary_ctxt_switches:\s*(\d+)", (process / "status").read_text(), re.M
    )
    return np.array(
      [int(wakeups[1]), sum(map(int, (process / "stat").read_text().rsplit(")")[1].split()[11:13]))]
    )

  time.sleep(0.2)
  before = used()
  time.sleep(1.0)
  assert np.all(used() - before <= [10, 2])


@pytest.mark.parametrize(
  "children", [[], [("actor-0", "pass", False)], 2 * [("learner-0", "pass", True)]]
)
def test_refuses_children_it_can_not_tell_apart_or_wait_for(tmp_path, children):
  made = [Child(name, ["true"], {}, vital) for name, _, vital in children]
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with pytest.raises(ValueError, match="distinct names, and one of them must be vital"):
    Supervisor(lambda _: made, tmp_path / "logs", print).run()
  assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
