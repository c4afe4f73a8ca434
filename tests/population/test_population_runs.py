"""Tests of a population of real runs whose controller is interrupted and killed."""

import json
import os
import signal
import subprocess
import sys

import yaml

import tiny
from launched import ROOT, newest, wait_until
from speedyzero_jax.population import trainer
from speedyzero_jax.run import run_dir

SETTINGS = (
  "agent=quick_agent", *tiny.OVERRIDES, "learner.steps=9", "learner.tail_steps=0",
  "run.checkpoint_interval=2", "run.log_interval=1", "evaluation.at_end=true",
  "evaluation.episodes=3", "reanalyse.schedule=off",
)  # fmt: skip


def start(*arguments):
  paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support")])
  return subprocess.Popen(
    [sys.executable, ROOT / "launch/population.py", *arguments], text=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": paths},
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def finish(process):
  out, error = process.communicate(timeout=300)
  return process.returncode, out + error


def test_a_population_that_is_interrupted_and_killed_continues(tmp_path):
  folder, description = tmp_path / "all", tmp_path / "population.yaml"
  description.write_text(yaml.safe_dump({
    "config": ["quickstart"], "settings": [*SETTINGS], "members": 2, "rounds": 2, "share": 0.5,
    "explore": {"optim.learning_rate": ["1e-3", "1e-1", "log"]},
  }))  # fmt: skip
  arguments, events = (description, "--dir", folder), folder / "events.jsonl"

  process = start(*arguments)
  assert wait_until(lambda: newest(folder / "m0") > 0, process)
  process.send_signal(signal.SIGINT)
  code, output = finish(process)
  assert code == 128 + signal.SIGINT and "repeat the command to continue" in output

  process = start(*arguments)
  assert wait_until((folder / "m1/config.yaml").exists, process)  # it is in its first round
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert "copied" not in events.read_text()
  code, output = finish(start(*arguments))
  assert code == 0, output
  found = [json.loads(line) for line in events.read_text().splitlines()]
  trained = [(e["round"], e["member"]) for e in found if e["event"] == "trained"]
  assert sorted(trained) == [(r, m) for r in range(2) for m in range(2)]
  (copy,) = next(e for e in found if e["event"] == "selected")["copies"]
  member = run_dir.read_config(folder / f"m{copy['member']}")
  assert member.optim.learning_rate == copy["settings"]["optim.learning_rate"]
  assert member.run.dir == str(folder / f"m{copy['member']}")
  assert [newest(folder / f"m{m}") for m in range(2)] == [9, 9]
  assert sorted(p.name for p in folder.glob("m*")) == ["m0", "m0.log", "m1", "m1.log"]
  assert "stopped and saved at learner step 4;" in (folder / "m0.log").read_text()
  result = json.loads((folder / "population.json").read_text())
  assert len(result["scores"]) == 2 and result["best"] in (0, 1)

  description.write_text(description.read_text() + "seed: 1\n")
  code, output = finish(start(*arguments))
  assert code == 2 and "holds another population" in output


def test_wrong_use_writes_nothing(tmp_path):
  code, output = finish(start(tmp_path / "none.yaml", "--dir", tmp_path / "x"))
  assert code == 2 and output.startswith("error: ") and not (tmp_path / "x").exists()
  code, output = finish(start(ROOT / "configs/populations/cartpole.yaml", "--dir", "/proc/x"))
  assert code == 2 and output.startswith("error: can't use /proc/x")
  code, output = finish(start(ROOT / "configs/populations/cartpole.yaml", "--dir", ROOT / "docs"))
  assert code == 2 and "is not empty and holds no population" in output


def test_an_unfinished_copy_is_none(tmp_path):
  assert trainer._copied(tmp_path) is None
  for text, copied in (("", None), ("3", 3)):
    (tmp_path / "copied.json").write_text(text)
    assert trainer._copied(tmp_path) == copied
