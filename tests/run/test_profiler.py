"""Profiles of runs, which they leave as they were, and the command that makes one."""

import json
import math

import jax
import numpy as np
import pytest
import tiny

from launch import profile as launcher
from speedyzero_jax.agents.base import ActInputs
from speedyzero_jax.config import loader
from speedyzero_jax.run import loops, run_dir, snapshot, warmup
from speedyzero_jax.run.profiler import Profiler
from speedyzero_jax.system import costs
from speedyzero_jax.system.compilation import Compilations, WarmUp
from speedyzero_jax.workers.weights import ACTOR

LONGER = ("learner.steps=30", "run.env_steps=300")  # enough to warm up


def profiled(folder, *overrides):
  """Runs to the end with a profiler; returns the hash of the parameters, and the profile."""
  with (
    Compilations() as compilations,
    tiny.experiment(folder, *LONGER, "profile.steps=3", *overrides) as experiment,
  ):
    warm_up = WarmUp(compilations, lambda: experiment.in_full_work)
    experiment.after_step.append(warm_up.step)
    timings = warmup.prepare(experiment)
    with Profiler(experiment, folder, timings, compilations, warm_up) as profiler:
      assert loops.run(experiment)
    path = folder / "profile.json"
    assert profiler.done == path.exists()
    result = json.loads(path.read_text()) if profiler.done else None
    return snapshot.parameters_hash(experiment), result


def programs(profile):
  return {row["program"]: row for row in profile["programs"]}


def test_a_lockstep_run_stays_as_it_was(tmp_path):
  with tiny.experiment(tmp_path / "plain", *LONGER) as experiment:
    assert loops.run(experiment)
    expected = snapshot.parameters_hash(experiment)
  found, profile = profiled(tmp_path / "profiled")
  assert found == expected
  first, last = profile["learner_steps"]
  assert first >= 5 and last == first + 3
  assert profile["compiled_meanwhile"] == []
  # In lockstep the parts share one thread, and with the rest they make up all of the time.
  assert {row["thread"] for row in profile["parts"]} == {"learner"}
  parts = {row["part"]: row["seconds"] for row in profile["parts"]}
  assert {"act", "sample", "search", "refresh", "gather", "train", "host"} <= parts.keys()
  assert math.fsum(parts.values()) == pytest.approx(profile["seconds_per_step"], rel=1e-3)
  rows = programs(profile)
  assert rows.keys() == {"train", "act", "reanalyse", "refresh"} and rows["train"]["calls"] == 1
  for row in rows.values():
    assert row["seconds"] > 0 and row["flops"] > 0 and row["bytes"] > 0
    achieved = row["flops"] / row["seconds"]
    assert row["share_of_peak"] == pytest.approx(achieved / profile["peak_flops"])
  total = math.fsum(row["flops"] * row["calls"] for row in rows.values())
  assert profile["flops_per_step"] == pytest.approx(total)
  traces = [path.name for path in (tmp_path / "profiled" / "plugins").rglob("*")]
  assert "perfetto_trace.json.gz" in traces and any(name.endswith(".xplane.pb") for name in traces)


def test_the_flops_of_a_program_are_those_of_one_device(tmp_path):
  flops = []
  for devices in "12":
    with tiny.experiment(tmp_path / devices, f"learner.devices={devices}") as experiment:
      timings = warmup.prepare(experiment)
      flops.append({timing.name: timing.form.flops.total() for timing in timings})
  one, two = flops
  assert one.keys() == two.keys() > {"train", "reanalyse", "refresh"}
  for name in ("train", "reanalyse", "refresh"):
    assert two[name] == pytest.approx(one[name] / 2, rel=0.05)


def test_every_simulation_of_a_search_counts(tmp_path):
  flops = []
  for simulations in (2, 4, 8):
    with tiny.experiment(tmp_path, f"search.simulations={simulations}") as experiment:
      frames = np.zeros((3, 2, 1, 1, 50), np.float32)
      inputs = ActInputs(frames, np.ones(3, bool), np.zeros(3, np.int32), ())
      variables = experiment.weights.latest(ACTOR).variables
      act, args = experiment.inference.act, (variables, inputs, jax.random.key(0), np.float32(0))
      flops.append(costs.matmul_flops(act.function, *args, explore=True).total())
  assert 0 < flops[1] - flops[0] == (flops[2] - flops[1]) / 2


def test_a_run_too_short_to_warm_up_is_not_profiled(tmp_path):
  assert profiled(tmp_path, "learner.steps=4")[1] is None


# --- the command


def test_one_command_profiles_a_new_run(tmp_path, capsys):
  folder = tmp_path / "out"
  changes = [*tiny.OVERRIDES, *LONGER, "run.mode=async", "reanalyse.schedule=batch"]
  arguments = ["--config", "quickstart", *changes, "--fill", "60", "--out", str(folder)]
  assert launcher.main(arguments) == 0
  profile = json.loads((folder / "profile.json").read_text())
  assert profile["learner_steps"][1] - profile["learner_steps"][0] == launcher.STEPS
  assert 60 < profile["transitions"] < run_dir.read_config(folder).run.env_steps  # it ended there
  threads = {row["part"]: row["thread"] for row in profile["parts"]}
  assert threads["train"] == threads["host"] == "learner" and threads["act"] == "actor"
  assert threads["search"] == threads["sample"] == threads["gather"] == "batches"
  assert "share_of_peak" in capsys.readouterr().out
  assert launcher.main(arguments) == 2  # the folder is taken
  assert str(folder) in capsys.readouterr().err


def test_a_filled_run_keeps_its_pace():
  changes = ["run.env_steps=10500", "learner.steps=5200", "learner.tail_steps=200"]
  filled = launcher.filled(loader.load(["quickstart"], changes), 5500, max_age=100)
  found = filled.actor.random_steps, filled.run.env_steps, filled.learner.steps
  assert found == (5500, 10500, 2500)  # 5,000 steps for 10,000 agent steps, 2,500 for 5,000
  assert filled.learner.tail_steps == 0


def test_a_filled_run_is_long_enough_for_its_sweeps():
  config = loader.load(["quickstart"], ["profile.steps=5", "learner.steps=100"])
  filled = launcher.filled(config, 27_000, max_age=150)
  assert filled.learner.steps >= 2 * 150 + 2 * 5
  assert filled.run.env_steps > 28_000


@pytest.mark.parametrize("fill", ["100", "28000"])
def test_an_impossible_fill_is_refused(tmp_path, monkeypatch, capsys, fill):
  monkeypatch.chdir(tmp_path)
  assert launcher.main(["--config", "quickstart", "--fill", fill]) == 2
  assert "--fill" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())
