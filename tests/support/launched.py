"""Helpers to start launchers as real processes with tiny settings."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import tiny
from speedyzero_jax.run.checkpoint import Checkpoints

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40
# With a checkpoint every other step, a signal at a random time is likely to hit one being written.
NEW = [
  "--config", "quickstart", "agent=quick_agent", *tiny.OVERRIDES, f"learner.steps={STEPS}",
  "run.checkpoint_interval=2", "run.log_interval=1", "evaluation.at_end=true",
]  # fmt: skip


def start(*arguments, script="multihost.py", log=None):
  """Starts a launcher; its standard output goes to the file `log`, if given."""
  out = subprocess.PIPE if log is None else log.open("w")
  return python(ROOT / "launch" / script, *arguments, stdout=out)


def python(*arguments, devices=1, **options):
  """Starts a Python process with pipes for its output by default."""
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
  environment |= {"PYTHONPATH": str(ROOT / "tests/support")}
  options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
  return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, **options)


def finish(process):
  """Waits for the end of a launcher; returns its exit code, and its output with its errors."""
  out, errors = process.communicate(timeout=300)
  return process.returncode, out + errors


def newest(folder):
  """Learner step of the newest checkpoint; -1 without one."""
  return max(Checkpoints(folder).steps(), default=-1)


def wait_until(condition, process, seconds=300):
  """Waits for a condition; returns False if the process ends first."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline
    if process.poll() is not None:
      return False
    time.sleep(0.01)
  return True


def hash_in(output):
  """The hash of the parameters printed by a finished run."""
  (digest,) = re.findall(r"learner steps; parameters (\w{16})", output)
  return digest


def listing(folder):
  """Contents of all files in a folder, by relative path."""
  files = sorted(path for path in folder.rglob("*") if path.is_file())
  return {str(path.relative_to(folder)): path.read_bytes() for path in files}
