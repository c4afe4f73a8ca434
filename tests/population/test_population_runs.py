"""A population of real runs, whose controller is killed, and a run that pauses."""

import json
import os
import signal

import pytest
import yaml

from launched import NEW, newest, start, wait_until
from speedyzero_jax.run import run_dir


def finish(process):
  out, error = process.communicate(timeout=300)
  return process.returncode, (out or "") + error


def test_a_run_pauses_is_evaluated_and_resumes_to_the_same_end(tmp_path):
  own = [*NEW, "run.mode=lockstep", "evaluation.episodes=3"]
  code, whole = finish(start(*own, f"run.dir={tmp_path / 'whole'}"))
  assert code == 0
  code, output = finish(start(*own, f"run.dir={tmp_path / 'run'}", "run.pause_at=7"))
  assert code == 0 and "stopped and saved at learner step 7;" in output
  assert newest(tmp_path / "run") == 7
  assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["step"] == 7
  code, output = finish(start("--resume", tmp_path / "run", "run.pause_at=0"))
  assert code == 0
  parameters = [text.split("parameters ")[1][:16] for text in (whole, output)]
  assert parameters[0] == parameters[1]


@pytest.fixture
def description(tmp_path):
  settings = [text for text in NEW[2:] if not text.startswith("learner.steps")]
  path = tmp_path / "population.yaml"
  path.write_text(yaml.safe_dump({
    "config": ["quickstart"],
    "settings": [*settings, "learner.steps=9", "evaluation.episodes=3"],
    "members": 2, "rounds": 2, "share": 0.5,
    "explore": {"optim.learning_rate": ["1e-3", "1e-1", "log"]},
  }))  # fmt: skip
  return path


def test_a_population_whose_controller_is_killed_continues(tmp_path, description):
  folder = tmp_path / "all"
  arguments = description, "--dir", folder
  events = folder / "events.jsonl"

  def members_that_train():
    return len(list(folder.glob("m*/config.yaml"))) == 2

  process = start(*arguments, script="population.py")
  assert wait_until(members_that_train, process)  # the second member is in its first round
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert "copied" not in events.read_text()
  code, output = finish(start(*arguments, script="population.py"))
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
  result = json.loads((folder / "population.json").read_text())
  assert len(result["scores"]) == 2 and result["best"] in (0, 1)


def test_ctrl_c_saves_the_members(tmp_path, description):
  folder = tmp_path / "all"
  process = start(description, "--dir", folder, script="population.py")
  assert wait_until(lambda: newest(folder / "m0") > 0, process)
  process.send_signal(signal.SIGINT)
  code, output = finish(process)
  assert code == 128 + signal.SIGINT and "the same command continues" in output
  description.write_text(description.read_text() + "seed: 1\n")
  code, output = finish(start(description, "--dir", folder, script="population.py"))
  assert code == 2 and "holds another population" in output


def test_wrong_use_writes_nothing(tmp_path):
  code, output = finish(
    start(tmp_path / "none.yaml", "--dir", tmp_path / "x", script="population.py")
  )
  assert code == 2 and output.startswith("error: ") and not (tmp_path / "x").exists()
