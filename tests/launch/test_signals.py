"""Tests of runs stopped by signals: at once, after saving, or by a later Ctrl-C."""

import contextlib
import os
import pty
import signal
import subprocess

import pytest

from launch import multihost
from launched import NEW, ROOT, newest, python, wait_until
from speedyzero_jax.run import factories, steps
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.run.collector import Collector
from whole_runs import rows_of

MOMENTS = {
  "folder": (multihost, "check_possible"), "building": (factories, "make_replay"),
  "collecting": (Collector, "collect"),
}  # fmt: skip


def test_a_stop_during_the_last_evaluation(tmp_path, monkeypatch, capsys):
  folder, evaluate = tmp_path / "run", steps.evaluate_now

  def stopped(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    return evaluate(*arguments)

  monkeypatch.setattr(steps, "evaluate_now", stopped)
  assert multihost.main([*NEW, "learner.steps=4", f"run.dir={folder}"]) == 143
  assert f"repeat it with --resume {folder}" in capsys.readouterr().out
  assert newest(folder) == 4 and not (folder / "evaluation.json").exists()


def test_an_evaluation_that_was_stopped_is_made_by_the_resumed_run(tmp_path, monkeypatch):
  folder, evaluate = tmp_path / "run", steps.evaluate_now

  def stopped(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    assert evaluate(*arguments) is None

  settings = (
    "learner.steps=6",
    "run.log_interval=9",
    "evaluation.interval=4",
    "evaluation.at_end=false",
  )
  with monkeypatch.context() as patch:
    patch.setattr(steps, "evaluate_now", stopped)
    assert multihost.main([*NEW, *settings, f"run.dir={folder}"]) == 143
  assert newest(folder) == 4
  assert not any("evaluation/step" in row for row in rows_of(folder))
  assert multihost.main(["--resume", str(folder)]) == 0
  rows = [row for row in rows_of(folder) if "evaluation/step" in row]
  assert [(row["step"], row["evaluation/step"]) for row in rows] == [(4, 4), (6, 4)]


@pytest.mark.parametrize(
  ("moment", "number", "code"),
  [("folder", signal.SIGINT, 130), ("building", signal.SIGTERM, 143),
   ("collecting", signal.SIGTERM, 143)],
)  # fmt: skip
def test_a_stop_while_a_run_starts(tmp_path, monkeypatch, capsys, moment, number, code):
  """The process sends the signal itself, so that its moment is known."""
  folder, (owner, name) = tmp_path / "run", MOMENTS[moment]
  function = getattr(owner, name)

  def stopped(*args, **kwargs):
    os.kill(os.getpid(), number)
    return function(*args, **kwargs)

  monkeypatch.setattr(owner, name, stopped)
  assert multihost.main([*NEW, f"run.dir={folder}"]) == code
  out, errors = capsys.readouterr()
  assert f"--resume {folder}" in out and not errors
  assert Checkpoints(folder).steps() == ([0] if moment == "collecting" else [])


REPEATED = """
import os, signal, time
from speedyzero_jax.run.signals import Signals
with Signals() as signals:
  os.kill(os.getpid(), signal.SIGTERM)
  os.kill(os.getpid(), signal.SIGINT)  # soon after, as of timeout(1)
  assert signals.exit_code == 143
  time.sleep(1.1)
  os.kill(os.getpid(), signal.SIGTERM)
  os.kill(os.getpid(), signal.SIGHUP)
  print("alive", flush=True)
  os.kill(os.getpid(), signal.SIGINT)
  time.sleep(60)
"""


def test_a_later_sigint_ends_the_process_at_once_and_repeated_others_do_not():
  process = python("-c", REPEATED, stdout=subprocess.PIPE)
  assert process.communicate(timeout=60)[0] == "alive\n"
  assert process.returncode == -signal.SIGINT


LOCKED = """
import os, signal, threading
from speedyzero_jax.run.signals import Signals
lock, stopped = threading.Lock(), threading.Event()
def stop():
  with lock:
    stopped.set()
with Signals() as signals:
  signals.on_stop = stop
  with lock:
    os.kill(os.getpid(), signal.SIGTERM)
  assert stopped.wait(30)
"""


def test_a_signal_while_a_lock_is_held_stops_all_the_same():
  process = python("-c", LOCKED)
  process.communicate(timeout=60)
  assert process.returncode == 0


ON_A_TERMINAL = """
import os, runpy, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it this session's
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_closed_terminal_stops_and_saves(tmp_path):
  """Other processes cannot use the folder until the run has ended."""
  folder, (ours, theirs) = tmp_path / "run", pty.openpty()
  process = python(
    "-c", ON_A_TERMINAL, ROOT / "launch/multihost.py", *NEW, "learner.steps=3000",
    f"run.dir={folder}", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
  )  # fmt: skip
  os.close(theirs)
  os.set_blocking(ours, False)

  def saved():
    with contextlib.suppress(BlockingIOError):
      os.read(ours, 1 << 16)
    return newest(folder) >= 2

  try:
    assert wait_until(saved, process)
    assert multihost.main(["--resume", str(folder)]) == 2
    os.close(ours)
    assert process.wait(timeout=60) == 129
  finally:
    process.kill()
    process.wait()
  assert newest(folder) >= 2
