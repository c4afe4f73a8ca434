"""Tests of programs compiled for GPUs without such GPUs: figures, and limits on them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = (
  "env.frame_size=32", "network.downsample=4", "network.channels=16", "network.reduced_channels=8",
  "network.lstm_hidden=16", "network.support=10", "network.projection_hidden=16",
  "network.projection_out=16", "network.prediction_hidden=8", "search.simulations=2",
  "learner.batch_size=64", "loss.unroll_steps=1", "loss.td_steps=2", "reanalyse.block=256",
)  # fmt: skip
# The most that a call may take: kernels, collectives, loops of unknown length, bytes of traffic. To
# be lowered with every improvement. Channels are multiples of 8, as at full size: only frames'
# channels are padded.
LIMITS = {
  "train": (474, 44, 0, 24.3e6), "act": (141, 0, 0, 4.1e6), "reanalyse": (138, 0, 0, 11.34e6),
}  # fmt: skip
FLOPS = 129e6  # of the training step on each of eight devices, which share the batch

pytestmark = pytest.mark.skipif(
  not (ROOT / ".venv" / "gpu-compiler").exists() and "CI" not in os.environ,
  reason="make gpu-plan installs the compiler",
)


def planned(folder, *arguments):
  """The plans that launch/plan.py writes, by number of devices, and the completed process."""
  out = folder / "plan.json"
  command = [sys.executable, "launch/plan.py", "--config", "atari300k", "sweep", "gpu"]
  done = subprocess.run(
    [*command, *arguments, "--out", str(out)], cwd=ROOT, capture_output=True, text=True
  )
  plans = {each["devices"]: each for each in json.loads(out.read_text())["plans"]}
  for each in plans.values():
    each["programs"] = {row["name"]: row for row in each["programs"]}
  return plans, done


@pytest.mark.timeout(600)  # a minute on two quiet cores
def test_programs_on_eight_devices_keep_their_limits(tmp_path):
  plans, done = planned(tmp_path, *TINY, "--devices", "8", "--only", ",".join(LIMITS))
  programs = plans[8]["programs"]
  assert programs.keys() == LIMITS.keys()
  for name, row in programs.items():
    figures = row["launches"], row["collectives"], row["unknown_loops"], row["bytes"]
    pairs = zip(figures, LIMITS[name], strict=True)
    assert all(figure <= limit for figure, limit in pairs), (name, figures)
    assert (row["transfers"], row["slow_convolutions"], row["donated"]) == (0, 0, True)
  assert programs["train"]["flops"] < FLOPS
  assert done.returncode == 0 and plans[8]["fits"]
  assert "8 x NVIDIA H200" in done.stdout and "Parts do not overlap" in done.stdout
  train, act, reanalyse = (programs[name]["seconds"] for name in LIMITS)
  acting = plans[8]["acting_seconds"]
  assert acting["wait"] == pytest.approx(2 * train + reanalyse)
  assert act < acting["interval"] and "acting: a call every" in done.stdout


@pytest.mark.timeout(600)
def test_full_size_evaluation_of_values(tmp_path):
  """1.24 TFLOP by arithmetic: 15 convolutions of 4,096 states."""
  plans, done = planned(tmp_path, "refresh.max_age=50", "--only", "refresh")
  row = plans[1]["programs"]["refresh"]
  assert done.returncode == 0
  assert row["batch"] == 4096 and row["slow_convolutions"] == row["transfers"] == 0
  assert row["flops"] == pytest.approx(1.24e12, rel=0.02)
  assert row["bytes"] < 11.95e9 and row["launches"] <= 55 and row["temporary_bytes"] < 2.2e9
