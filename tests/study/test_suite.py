"""Tests of launch/suite.py as a process that is interrupted and continued."""

import json
import signal

import yaml

import tiny
from launch import suite
from launched import finish, newest, start, wait_until

SETTINGS = [
  "agent=quick_agent", *tiny.OVERRIDES, "learner.tail_steps=0", "run.checkpoint_interval=2",
  "run.log_interval=1", "evaluation.at_end=true",
]  # fmt: skip


def test_a_study_continues_where_it_was_stopped_and_reports(tmp_path, capsys):
  folder, description = tmp_path / "runs", tmp_path / "study.yaml"
  steps = {"short": ["learner.steps=5"], "long": ["learner.steps=40"], "other": ["learner.steps=4"]}
  document = {"config": ["quickstart"], "settings": SETTINGS, "vary": {"steps": steps}, "seeds": 1}
  description.write_text(yaml.safe_dump(document, sort_keys=False))
  arguments = (description, "--dir", folder)
  stray = folder / "other-Catch-s0"  # the launcher refuses it
  stray.mkdir(parents=True)
  (stray / "mine").touch()

  process = start(*arguments, script="suite.py")
  assert wait_until(lambda: newest(folder / "long-Catch-s0") > 0, process)
  process.send_signal(signal.SIGHUP)
  code, output = finish(process)
  assert code == 128 + signal.SIGHUP and "repeat the command to continue" in output
  assert not (folder / "other-Catch-s0.log").exists()  # no further run was begun
  assert "stopped and saved" in (folder / "long-Catch-s0.log").read_text()
  before = (folder / "short-Catch-s0/evaluation.json").stat().st_mtime_ns

  out = tmp_path / "out.json"
  code, output = finish(start(*arguments, "--together", 2, "--out", out, script="suite.py"))
  assert code == 1 and "long-Catch-s0 finished" in output
  assert "other-Catch-s0 failed with exit code 2" in output and "short-Catch-s0 " not in output
  assert [newest(folder / f"{name}-Catch-s0") for name in ("short", "long")] == [5, 40]
  assert (folder / "short-Catch-s0/evaluation.json").stat().st_mtime_ns == before
  assert b"long-Catch-s0" in (folder / "report.html").read_bytes()
  last = [run["curve"][-1][0] for run in json.loads(out.read_text())["runs"] if run["curve"]]
  assert last == [5, 40]  # of the learner steps

  (stray / "mine").unlink()
  code, output = finish(start(*arguments, "--part", "2/3", script="suite.py"))
  assert code == 0 and output.count("finished") == 1 and newest(stray) == 4

  assert suite.main([*map(str, arguments), "optim.learning_rate=1e-4"]) == 2
  assert "another configuration (optim.learning_rate)" in capsys.readouterr().err


def test_presets_and_settings_apply_in_their_order():
  argv = ["--config", "quickstart", "learner.steps=10", "--config", "sweep", "learner.steps=20"]
  study = suite._study(suite._parser().parse_intermixed_args(argv), argv)
  assert study.config == ("quickstart", "sweep")
  assert study.settings == ("learner.steps=10", "learner.steps=20")


def test_wrong_use_starts_nothing(tmp_path, capsys):
  preset = ["--config", "quickstart"]
  for wrong in (["--part", "3/3", *preset], ["--config", "none"], [], [*preset, "a", "b"]):
    assert suite.main([*wrong, "--dir", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "x").exists()
