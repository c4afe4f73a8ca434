"""Tests of benchmarks/gpu.py on a CPU: its visits and its check of a plan."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import gpu
import plan_check
from launched import wait_until
from supervised import wait_for

ROOT = Path(__file__).resolve().parents[2]
WRITE = "import os, pathlib, sys; pathlib.Path(sys.argv[2]).write_text(os.environ['XLA_FLAGS'])"
SLEEP = "import time; time.sleep(60)"
IGNORE = "signal.signal(signal.SIGINT, signal.SIG_IGN); "


def ended(pid):
  """Whether a process has ended; in containers, no parent may wait for an orphan."""
  try:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
  except psutil.NoSuchProcess:
    return True


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)


def take(folder, seconds=30.0, **steps):
  return gpu.take(steps, folder, seconds / 120, time.monotonic() + seconds)


def test_results_are_not_made_again_and_failures_are(tmp_path):
  (tmp_path / "old.json").write_text("kept")
  steps = {"old": ["-c", WRITE], "new": ["-c", WRITE], "bad": ["-c", "raise SystemExit(3)"]}
  failed = take(tmp_path, **{name: gpu.Step(command, "") for name, command in steps.items()})
  assert failed == ["bad"] and not (tmp_path / "bad.gave-up").exists()
  assert (tmp_path / "old.json").read_text() == "kept" and (tmp_path / "new.json").exists()


def test_a_step_that_takes_a_whole_visit_is_given_up_unless_it_resumes(tmp_path):
  assert take(tmp_path, 1.5, train=gpu.Step(["-c", SLEEP], resumes=True)) is None
  assert take(tmp_path, 1.5, long=gpu.Step(["-c", SLEEP])) is None
  assert not any(SLEEP in child.cmdline() for child in psutil.Process().children(recursive=True))
  assert [path.name for path in tmp_path.glob("*.gave-up")] == ["long.gave-up"]
  assert take(tmp_path, long=gpu.Step(["-c", WRITE])) == ["long"]


@pytest.mark.parametrize("ignores", [False, True])
def test_a_step_takes_all_that_it_started_along(tmp_path, monkeypatch, ignores):
  """It is killed if it ignores interrupts, and with other sessions it started, as training runs do.
  A child that ignores its parent's death would keep the device in use."""
  if ignores:
    monkeypatch.setattr(gpu, "ENDING", 0.5)
  pid = tmp_path / "pid"
  child = f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))"
  parent = (
    f"import signal, subprocess, sys; {IGNORE if ignores else ''}"
    f"subprocess.run([sys.executable, '-c', {child!r} + '; {SLEEP}'], start_new_session={ignores})"
  )
  process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
  assert wait_until(lambda: pid.exists() and pid.read_text(), process)
  gpu.end(process)
  wait_for(lambda: ended(int(pid.read_text())))


def test_an_interrupted_visit_ends_its_step(tmp_path):
  pid = tmp_path / "pid"
  step = f"import os, pathlib; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); {SLEEP}"
  log = f"pathlib.Path({str(tmp_path / 'log')!r})"
  code = f"import gpu, pathlib; gpu.visit(['-c', {step!r}], '', {log}, 60)"
  path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
  process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
  assert wait_until(lambda: pid.exists() and pid.read_text(), process)
  process.send_signal(signal.SIGINT)
  assert process.wait(30) != 0
  wait_for(lambda: ended(int(pid.read_text())))


def test_the_fastest_flags_are_used_if_they_gain_enough(tmp_path):
  def write(name, seconds):
    (tmp_path / f"{name}.json").write_text(
      json.dumps({"rows": [{"calls": 10, "seconds": seconds}, {"calls": 1, "seconds": 1.0}]})
    )

  assert gpu.fastest(tmp_path) == ""  # nothing was measured
  write("check", 1.0)
  write("flags-graph-loops", 0.99)
  assert gpu.fastest(tmp_path) == ""
  write("flags-graph-all", 0.5)
  write("flags-latency-hiding", 0.7)
  assert take(tmp_path, last=gpu.Step(["-c", WRITE])) == []
  assert (tmp_path / "last.json").read_text() == gpu.FLAGS["graph-all"]
  unless = f"import os, sys; sys.exit(139) if os.environ['XLA_FLAGS'].strip() else None; {WRITE}"
  assert take(tmp_path, crashes=gpu.Step(["-c", unless])) == []
  assert (tmp_path / "crashes.json").read_text() == ""
  (tmp_path / "crashes.json").unlink()
  assert take(tmp_path, crashes=gpu.Step(["-c", WRITE])) == []  # the flags are not tried again
  assert (tmp_path / "crashes.json").read_text() == ""


def test_a_plan_is_checked_and_wrong_outputs_are_found(tmp_path, monkeypatch):
  options = ["--config", "quickstart", "--set", "agent=quick_agent", "--only", "act", "publish"]
  options += ["--calls", "2"]
  out = tmp_path / "check.json"
  monkeypatch.setattr(sys, "argv", ["plan_check.py", *options, "--out", str(out)])
  assert plan_check.main() == 0
  result = json.loads(out.read_text())
  assert {row["program"] for row in result["rows"]} == {"act", "publish"}
  assert all(row["seconds"] > 0 and row["predicted_seconds"] > 0 for row in result["rows"])
  act = next(row for row in result["rows"] if row["program"] == "act")
  act["outputs"][-1][0] += 2 * max(abs(act["outputs"][-1][1]), 0.1)
  out.write_text(json.dumps(result))
  command = [sys.executable, "benchmarks/plan_check.py", *options, "--reference", str(out)]
  environment = os.environ | {"PYTHONPATH": str(ROOT / "tests/support")}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
  assert done.returncode == 1
  assert "act: outputs differ" in done.stdout and "publish: outputs differ" not in done.stdout
