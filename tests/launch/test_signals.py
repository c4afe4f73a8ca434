"""Real processes that are stopped by signals or killed at any moment, and continue exactly."""

import contextlib
import json
import os
import pty
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from launched import NEW, ROOT, STEPS, hash_in, newest, python, start, wait_until

from launch import multihost
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.run.checkpoint import Checkpoints

NUMBERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT}


def disturb(folder, log, signals, seed):
  """Starts a run, sends these signals, resumes it after each; returns the signals that it got."""
  rng, got = random.Random(seed), []
  process = start(*NEW, f"run.dir={folder}", log=log)
  for name in signals:
    before = newest(folder)
    if name == "early":  # it has begun, but has no checkpoint
      assert wait_until((folder / "metrics.jsonl").exists, process)
    elif wait_until(lambda step=before + 2: newest(folder) >= step, process):
      time.sleep(rng.uniform(0, 0.5))
    if process.poll() is not None:
      break  # it was faster: the rest finds it finished
    number = NUMBERS.get(name, signal.SIGKILL)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected, errors
    output = log.read_text()
    assert (f"resuming at learner step {before}," in output) == (before >= 0)
    if number != signal.SIGKILL:
      (saved,) = re.findall(r"stopped and saved at learner step (\d+);", output)
      assert int(saved) == newest(folder) > before and errors == ""
    got.append(name)
    process = start("--resume", folder, log=log)
  _, errors = process.communicate(timeout=400)
  assert process.returncode == 0, errors
  return got


@pytest.mark.timeout(1200)
def test_runs_stopped_or_killed_at_any_moment_end_as_an_undisturbed_one(tmp_path):
  plans = [[], ["early", "TERM", "KILL", "INT"]]
  folders, logs = ([tmp_path / f"{kind}{i}" for i in range(2)] for kind in ("run", "log"))
  with ThreadPoolExecutor(2) as pool:
    reference, got = pool.map(disturb, folders, logs, plans, (2, 3))
  assert got[:3] == plans[1][:3] and not reference
  hashes = {hash_in(log.read_text()) for log in logs}
  evaluations = {(folder / "evaluation.json").read_text() for folder in folders}
  assert len(hashes) == len(evaluations) == 1
  for folder in folders:
    rows, damaged = jsonl.read_rows(folder / "metrics.jsonl")
    assert not damaged and [row["step"] for row in rows] == [*range(1, STEPS + 1), STEPS]
    assert not (folder / "damaged").exists()
    assert Checkpoints(folder).steps() == [STEPS - 4, STEPS - 2, STEPS]
  assert json.loads(evaluations.pop())["step"] == STEPS


STOPPED = """
import os, signal, sys
from launch import multihost
from speedyzero_jax.run import builders
from speedyzero_jax.run.collector import Collector
moment, name, *arguments = sys.argv[1:]
owner, function = {
  "folder": (multihost, "check_possible"), "building": (builders, "make_replay"),
  "collecting": (Collector, "collect"),
}[moment]
original = getattr(owner, function)
def stopped(*args, **kwargs):
  os.kill(os.getpid(), signal.Signals[name])
  return original(*args, **kwargs)
setattr(owner, function, stopped)
code = multihost.main(arguments)
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.parametrize(
  ("moment", "name", "code"),
  [("folder", "SIGINT", 130), ("building", "SIGTERM", 143), ("collecting", "SIGTERM", 143)],
)
def test_a_stop_while_a_run_starts(tmp_path, moment, name, code):
  """The signal is sent by the process itself, so that its moment is known."""
  folder = tmp_path / "run"
  process = python("-c", STOPPED, moment, name, *NEW, f"run.dir={folder}")
  out, errors = process.communicate(timeout=120)
  assert (process.returncode, errors) == (code, ""), out
  assert f"--resume {folder}" in out
  assert Checkpoints(folder).steps() == ([0] if moment == "collecting" else [])


SECOND = """
import os, signal, sys, time
from speedyzero_jax.run.signals import Signals
with Signals() as signals:
  os.kill(os.getpid(), signal.SIGTERM)
  os.kill(os.getpid(), signal.SIGTERM)  # an echo, as of timeout(1)
  assert signals.exit_code == 143
  time.sleep(1.1)
  os.kill(os.getpid(), int(sys.argv[1]))
  time.sleep(60)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(second):
  process = python("-c", SECOND, int(second))
  process.communicate(timeout=60)
  assert process.returncode == -second


ON_A_TERMINAL = """
import os, runpy, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it this session's
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_closed_terminal_stops_and_saves(tmp_path):
  """Until then the folder is refused to other processes."""
  folder, (ours, theirs) = tmp_path / "run", pty.openpty()
  process = python(
    "-c", ON_A_TERMINAL, ROOT / "launch/multihost.py", *NEW, f"run.dir={folder}",
    stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
  )  # fmt: skip
  os.close(theirs)
  os.set_blocking(ours, False)

  def saved():
    with contextlib.suppress(BlockingIOError):
      os.read(ours, 1 << 16)
    return newest(folder) >= 4

  try:
    assert wait_until(saved, process)
    assert multihost.main(["--resume", str(folder)]) == 2
    os.close(ours)
    assert process.wait(timeout=60) == 129
  finally:
    process.kill()
    process.wait()
  assert newest(folder) >= 4
