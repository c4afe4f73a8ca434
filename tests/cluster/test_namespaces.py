"""A run whose processes are on hosts of their own, with nothing in common but a disk and a wire to each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).resolve().parents[2]
NO_HOSTS = 3
SETTINGS = [
  *tiny.OVERRIDES, f"run.compile_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}", "run.mode=async", "actor.lanes=4",
  "run.env_steps=200", "learner.steps=30", "run.checkpoint_interval=100",
]  # fmt: skip


def test_learners_and_reanalysers_on_hosts_of_their_own(tmp_path):
  """They find each other where a host's own name is a loopback's, and fetch what cannot be mapped."""
  out = tmp_path / "out.json"
  command = [sys.executable, ROOT / "benchmarks/namespaces.py", "--quick", "--out", out, *SETTINGS]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode == NO_HOSTS:
    pytest.skip(done.stderr.strip())
  assert done.returncode == 0, done.stdout + done.stderr
  row = json.loads(out.read_text())["rows"][0]
  sent = row["wires_bytes_per_learner_step"]
  for unit in range(2):
    frames = row["messages_bytes_per_learner_step"]["learner, reanalyser"]["frames"] / 2
    assert sent[f"learner-{unit} to reanalyser-{unit}.0"] > frames
    assert sent[f"reanalyser-{unit}.0 to learner-{unit}"] > 0
    assert sent[f"learner-{unit} to learner-{1 - unit}"] > 0
  assert [name for name, count in sent.items() if name.endswith(" to lo") and count] in (
    [],
    ["learner-0 to lo"],
  )
