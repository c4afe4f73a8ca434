"""Programs compiled for GPUs that are not there: figures, and limits that they must keep."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = (
  "env.frame_size=32", "network.downsample=4", "network.channels=8", "network.reduced_channels=4",
  "network.lstm_hidden=16", "network.support=10", "network.projection_hidden=16",
  "network.projection_out=16", "network.prediction_hidden=8", "search.simulations=2",
  "learner.batch_size=64", "loss.unroll_steps=1", "loss.td_steps=2", "reanalyse.block=256",
)  # fmt: skip
# The most that a call may take: kernels, collectives, loops of unknown length. To be lowered
# with every improvement.
LIMITS = {
  (1, "train"): (486, 0, 0), (1, "reanalyse"): (193, 0, 0),
  (8, "train"): (586, 44, 0), (8, "reanalyse"): (190, 0, 0),
}  # fmt: skip

pytestmark = pytest.mark.skipif(
  not (ROOT / ".venv" / "gpu-compiler").exists() and "CI" not in os.environ,
  reason="make gpu-plan installs the compiler",
)


def planned(folder, *arguments):
  """The plans that launch/plan.py writes, by number of devices, and its exit code."""
  out = folder / "plan.json"
  command = [sys.executable, "launch/plan.py", "--config", "atari300k", "sweep", "gpu"]
  done = subprocess.run(
    [*command, *arguments, "--out", str(out)],
    cwd=ROOT,
    env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},  # it is the compiler's work we count
    capture_output=True,
    text=True,
  )
  plans = {plan["devices"]: plan for plan in json.loads(out.read_text())["plans"]}
  for plan in plans.values():
    plan["programs"] = {row["name"]: row for row in plan["programs"]}
  return plans, done


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  return planned(
    tmp_path_factory.mktemp("plan"), *TINY, "--devices", "1,8", "--only", "train,reanalyse"
  )


def test_programs_keep_their_limits(tiny):
  plans, _ = tiny
  found = {
    (devices, name): (row["launches"], row["collectives"], row["unknown_loops"])
    for devices, plan in plans.items()
    for name, row in plan["programs"].items()
  }
  assert found.keys() == LIMITS.keys()
  for key, figures in found.items():
    pairs = zip(figures, LIMITS[key], strict=True)
    assert all(figure <= limit for figure, limit in pairs), (key, figures)


def test_programs_use_the_devices_as_they_should(tiny):
  for plan in tiny[0].values():
    for row in plan["programs"].values():
      assert (row["transfers"], row["slow_convolutions"], row["donated"]) == (0, 0, True)


def test_devices_share_the_work(tiny):
  one, eight = (tiny[0][devices]["programs"]["train"] for devices in (1, 8))
  assert 0.1 < eight["flops"] / one["flops"] < 0.2  # the batch is divided, the optimizer is not


def test_a_plan_is_printed_with_its_assumptions(tiny):
  plans, done = tiny
  assert done.returncode == 0 and plans[8]["fits"]
  assert "8 x NVIDIA H200" in done.stdout and "Parts do not overlap" in done.stdout


def test_full_size_evaluation_of_values(tmp_path):
  """1.24 TFLOP by arithmetic: 15 convolutions of 4,096 states."""
  plans, done = planned(tmp_path, "refresh.max_age=50", "--only", "refresh")
  row = plans[1]["programs"]["refresh"]
  assert done.returncode == 0
  assert row["batch"] == 4096 and row["slow_convolutions"] == row["transfers"] == 0
  assert row["flops"] == pytest.approx(1.24e12, rel=0.02)
  assert row["bytes"] < 11.5e9 and row["launches"] <= 55 and row["temporary_bytes"] < 2.2e9


@pytest.mark.parametrize(
  "arguments, message",
  [
    (["--target", "v100"], "error: unknown target 'v100'; known are a100, h100, h200"),
    (["--devices", "0"], "error: --devices: 0 can't be divided over 1 learners"),
    (["--only", "trian"], "error: no program is named 'trian'; there are train, publish, "),
  ],
)
def test_wrong_use_is_reported_in_one_line(arguments, message):
  command = [sys.executable, "launch/plan.py", "--config", "quickstart", *arguments]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.splitlines()[-1].startswith(message)
