"""Tests of runs as child processes, with a fake launcher that prints its CPU cores."""

import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from speedyzero_jax.cluster import rendezvous
from speedyzero_jax.run import processes
from speedyzero_jax.run.processes import Interrupted, MachineShare, RunProcesses

SLURM = {  # of a task of srun
  "SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "n1,n2", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
  "SLURM_LOCALID": "0", "JAX_COORDINATOR_PORT": "1234",
}  # fmt: skip


@pytest.fixture
def made(tmp_path, monkeypatch):
  launcher = tmp_path / "launcher.py"
  launcher.write_text("import os; print(*os.sched_getaffinity(0))")
  monkeypatch.setattr(processes, "_LAUNCHER", launcher)
  return RunProcesses([MachineShare({}, [max(os.sched_getaffinity(0))])])


@pytest.mark.parametrize("lock", ["run.5.log", "run.5/run.lock", "run.5/supervisor.lock"])
def test_a_run_of_another_process_is_waited_for_and_may_have_finished(tmp_path, made, lock):
  run = tmp_path / "run.5"  # a name with a dot
  run.mkdir()
  log, done = processes.log_of(run), tmp_path / "finished"
  with ThreadPoolExecutor(1) as pool, (tmp_path / lock).open("a") as other:
    for finished, expected in ((False, f"{max(os.sched_getaffinity(0))}\n"), (True, "")):
      log.write_text("")
      fcntl.flock(other, fcntl.LOCK_EX)
      future = pool.submit(made.train, run, [], finished=done.exists)
      time.sleep(0.2)
      assert not future.done()
      if finished:
        done.touch()
      fcntl.flock(other, fcntl.LOCK_UN)
      assert future.result(60) == 0 and log.read_text() == expected


def test_runs_do_not_join_the_tasks_of_a_cluster(tmp_path, made, monkeypatch):
  root = Path(__file__).resolve().parents[2]
  detects = f"import sys; sys.path.insert(0, {str(root)!r})\n"
  detects += "from speedyzero_jax.cluster import rendezvous; print(rendezvous.detect())"
  (tmp_path / "launcher.py").write_text(detects)
  for name, value in SLURM.items():
    monkeypatch.setenv(name, value)
  assert rendezvous.detect() == ("n1:1234", 4, 2)
  assert made.train(tmp_path / "run", []) == 0
  assert processes.log_of(tmp_path / "run").read_text() == "None\n"


SAVES = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("saves", flush=True))
print("ready", flush=True)
time.sleep(60)
"""


def test_only_a_later_sigint_ends_a_run_that_saves(tmp_path, made):
  processes._LAUNCHER.write_text(SAVES)
  log = processes.log_of(tmp_path / "run")
  with ThreadPoolExecutor(1) as pool:
    future = pool.submit(made.train, tmp_path / "run", [])
    for lines, number in enumerate((signal.SIGINT, signal.SIGTERM, signal.SIGINT), start=1):
      while not log.exists() or log.read_text().count("\n") < lines:
        time.sleep(0.05)
      assert not future.done()
      made.stop(number, None)
    with pytest.raises(Interrupted):
      future.result(60)
  assert made.received == signal.SIGINT and log.read_text().startswith(
    "ready\nsaves\nsaves\nTraceback"
  )


def test_a_signal_ends_the_wait(tmp_path, made):
  run = tmp_path / "run"
  with ThreadPoolExecutor(1) as pool, processes.log_of(run).open("a") as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    future = pool.submit(made.train, run, [])
    made.stop(signal.SIGTERM, None)
    with pytest.raises(Interrupted):
      future.result(60)
  assert made.received == signal.SIGTERM and processes.log_of(run).read_text() == ""


def test_a_run_sees_the_devices_of_its_share(tmp_path, made):
  processes._LAUNCHER.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
  share = MachineShare({"CUDA_VISIBLE_DEVICES": "7"}, [max(os.sched_getaffinity(0))])
  assert RunProcesses([share]).train(tmp_path / "run", []) == 0
  assert processes.log_of(tmp_path / "run").read_text() == "7\n"
