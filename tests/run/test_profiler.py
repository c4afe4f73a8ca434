"""Tests of profiles of runs, which do not change results, and of the command that makes one."""

import json
import math

import pytest

import tiny
from launch import profile_run as launcher
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import loops, profiler, run_dir, snapshot, warmup
from whole_runs import quick


def finished(folder, *overrides):
  """Runs to the end; returns the hash of the parameters, and the profile if there is one."""
  with quick(folder, *overrides) as experiment:
    if experiment.config.profile.steps:
      phases = profiler.profile(experiment, folder, warmup.prepare(experiment))
      experiment.after_step.append(lambda: next(phases, None))
    assert loops.run(experiment)
    path = folder / "profile.json"
    profile = json.loads(path.read_text()) if path.exists() else None
    return snapshot.hash_of(experiment.state.variables), profile


def test_a_lockstep_run_stays_as_it_was(tmp_path):
  expected, _ = finished(tmp_path / "plain")
  found, profile = finished(tmp_path / "profiled", "profile.steps=2")
  assert found == expected
  first, last = profile["learner_steps"]
  assert first >= 5 and last == first + 2
  # In lockstep the parts share one thread, and with the rest they make up all of the time.
  assert {row["thread"] for row in profile["parts"]} == {"learner"}
  parts = {row["part"]: row["seconds"] for row in profile["parts"]}
  assert {"act", "sample", "search", "refresh", "gather", "train", "host"} <= parts.keys()
  assert math.fsum(parts.values()) == pytest.approx(profile["seconds_per_step"], rel=1e-3)
  rows = {row["program"]: row for row in profile["programs"]}
  assert rows.keys() == {"train", "act", "reanalyse", "refresh"} and rows["train"]["calls"] == 1
  assert all(row["seconds"] > 0 for row in rows.values())
  traces = [path.name for path in (tmp_path / "profiled" / "plugins").rglob("*")]
  assert "perfetto_trace.json.gz" in traces and any(name.endswith(".xplane.pb") for name in traces)


def test_a_run_too_short_to_warm_up_is_not_profiled(tmp_path):
  assert finished(tmp_path, "learner.steps=4", "profile.steps=1")[1] is None


# --- the command


def test_one_command_profiles_a_new_run(tmp_path, capsys):
  folder = tmp_path / "out"
  changes = [*tiny.OVERRIDES, "run.mode=async", "reanalyse.schedule=batch"]
  arguments = [
    "--config",
    "quickstart",
    "agent=quick_agent",
    *changes,
    "--fill",
    "60",
    "--out",
    str(folder),
  ]
  assert launcher.main(arguments) == 0
  profile = json.loads((folder / "profile.json").read_text())
  assert profile["learner_steps"][1] - profile["learner_steps"][0] == launcher.STEPS
  assert 60 < profile["transitions"] <= run_dir.read_config(folder).run.env_steps
  threads = {row["part"]: row["thread"] for row in profile["parts"]}
  assert threads["train"] == threads["host"] == "learner" and threads["act"] == "actor"
  assert threads["search"] == threads["sample"] == threads["gather"] == "batches"
  assert "samples_per_second" in capsys.readouterr().out
  assert launcher.main(arguments) == 2  # the folder is taken
  assert str(folder) in capsys.readouterr().err


def test_a_shortened_run_keeps_its_pace_and_is_long_enough_for_its_sweeps():
  changes = ["run.env_steps=10500", "learner.steps=5200", "learner.tail_steps=200"]
  config = loader.load(["quickstart"], [*changes, "profile.steps=20", "reanalyse.max_age=100"])
  short = launcher.shortened(config, 5500)
  assert 50 + 2 <= short.run.pause_at < 50 + 100  # 43 blocks in 100 learner steps
  assert short.learner.tail_steps == 0
  found = short.actor.random_steps, short.run.env_steps, short.learner.steps
  assert found == (5500, 10500, 2500)
  nearly_full = launcher.shortened(config, 10490)
  assert nearly_full.learner.steps >= nearly_full.run.pause_at


@pytest.mark.parametrize("preset", ["impala", "ppo", "ppo_atari", "alphazero"])
def test_a_run_without_random_play_is_only_paused(preset):
  config = loader.load([preset], [])
  short = launcher.shortened(config, None)
  for whole, part in ((config.learner, short.learner), (config.actor, short.actor)):
    assert whole == part
  assert short.run.env_steps == config.run.env_steps and 0 < short.run.pause_at < 30
  with pytest.raises(ConfigError, match="random_steps"):
    launcher.shortened(config, 1000)


@pytest.mark.parametrize("fill", ["100", "28000"])
def test_an_impossible_fill_is_refused(tmp_path, monkeypatch, capsys, fill):
  monkeypatch.chdir(tmp_path)
  assert launcher.main(["--config", "quickstart", "--fill", fill]) == 2
  assert "--fill" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
