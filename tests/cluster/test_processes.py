"""Tests of runs of many real processes that are killed, stopped and resumed.

No experience may be lost or counted twice: at the end, each test compares the last checkpoints with
the journals, slot by slot.
"""

import contextlib
import json
import os
import random
import re
import signal
import time

import numpy as np
import pytest

import tiny
from launch import multihost
from launched import ROOT, newest, python
from speedyzero_jax.agents import impala
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.run import build, factories, run_dir
from speedyzero_jax.run.experiment import Membership
from supervised import pids, wait_for

ENV_STEPS, STEPS = 300, 100  # enough for some seconds in the middle
SETTINGS = [
  "run.mode=async", "actor.lanes=4", f"run.env_steps={ENV_STEPS}",
  f"learner.steps={STEPS}", "run.checkpoint_interval=20", "run.log_interval=1",
  "run.keep_checkpoints=2",
]  # fmt: skip
QUICK = [
  "--config", "quickstart", "agent=quick_agent", *tiny.OVERRIDES, "refresh.enabled=false",
  *SETTINGS,
]  # fmt: skip
PPO = [  # 8 learner steps between collections
  "--config", "ppo", *SETTINGS, "loss.unroll_length=5", "loss.minibatches=2", "loss.epochs=4",
  "learner.batch_size=2", "learner.devices=1", "actor.weights_interval=8", "replay.capacity=0",
  "evaluation.at_end=false",
]  # fmt: skip

A3C = [
  "--config", "a3c", *SETTINGS, "network.hidden=8", "learner.batch_size=2", "learner.devices=1",
  "run.env_steps=1200", "evaluation.at_end=false",
]  # fmt: skip


class Run:
  """A launcher in its own process group. A context manager that leaves nothing running."""

  def __init__(self, folder, *arguments, devices=1, **options):
    self.folder, self.log = folder, folder.with_suffix(".log")
    self._before = self.log.stat().st_size if self.log.exists() else 0
    launcher = ROOT / "launch/multihost.py"
    with self.log.open("a") as out:
      self.process = python(
        launcher, *arguments, devices=devices, stdout=out, stderr=out, process_group=0, **options
      )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self.process.poll() is None:
      os.killpg(self.process.pid, signal.SIGKILL)
      self.process.wait()
    wait_for(lambda: not pids(str(self.folder)), 60, "processes are left")

  @property
  def output(self):
    return self.log.read_text()[self._before :]

  def _wait(self, condition, what):
    wait_for(lambda: condition() or self.process.poll() is not None, 240, what)
    assert condition(), self.output

  def until(self, pattern):
    """Waits for output that matches the pattern."""
    self._wait(lambda: re.search(pattern, self.output), pattern)

  def learn(self, steps):
    """Waits for this many more learner steps; returns whether the run continues after them."""
    wanted = min(learned(self.folder) + steps, STEPS)
    self._wait(lambda: learned(self.folder) >= wanted, "no learner steps")
    return wanted < STEPS

  def children(self):
    """The supervisor's children by name."""
    with contextlib.suppress(FileNotFoundError):
      state = json.loads((self.folder / "logs/supervisor.json").read_text())
      return {child["name"]: child for child in state["children"]}
    return {}

  def kill(self, name, number=signal.SIGKILL):
    """Sends a child a signal that ends it at once, and waits for its restart.

    If it is no learner, the learner is suspended until then, so that the run cannot end before.
    """
    wait_for(lambda: self.children()[name]["pid"], 60, f"{name} does not run")
    children = self.children()
    learner = children["learner-0"]["pid"] if "learner" not in name else None
    if learner:
      os.kill(learner, signal.SIGSTOP)
    os.kill(children[name]["pid"], number)
    restarts = children[name]["restarts"]
    try:  # other learners would notice a longer suspension
      seconds = 15 if learner else 60
      wait_for(lambda: self.children()[name]["restarts"] > restarts, seconds, f"{name} stays dead")
    finally:
      if learner:
        os.kill(learner, signal.SIGCONT)

  def end(self, code, seconds=400):
    """Waits for the end; returns the output."""
    self.process.wait(timeout=seconds)
    assert self.process.returncode == code, self.output
    return self.output


def rows_of(folder):
  path = folder / "metrics.jsonl"
  return jsonl.read_rows(path)[0] if path.exists() else []


def learned(folder):
  """Learner steps of the last line of metrics."""
  return max((row["step"] for row in rows_of(folder)), default=0)


def acknowledged(folder):
  """Agent steps in the journal of a run that is not in use."""
  config = run_dir.read_config(folder)
  schema = factories.make_agent(config).schema
  with contextlib.closing(
    Journal(folder / "journal.sqlite", config.actor.lanes, schema)
  ) as journal:
    return sum(int((slots["action"] >= 0).sum()) for slots in journal.read(journal.tails))


def audit(folder, units):
  """Total agent steps of all final replays; asserts that each agrees with its journal."""
  config, total = run_dir.read_config(folder), 0
  for number in range(units):
    place = folder / f"units/{number}" if number else folder
    own = loader.divide(config, number, units)
    membership = Membership(number, units, runs_actor=False)
    with (
      MetricsLogger(own, place) as logger,
      contextlib.closing(
        build.build(config, place, logger, resume=True, membership=membership)
      ) as restored,
    ):
      replay, journal = restored.replay, restored.recovery.journal
      assert replay.heads.tolist() == journal.heads.tolist()
      for slots in journal.read(journal.tails):
        cells = replay.store.cell(slots.time)
        # Where an environment was lost, the replay ended the episode at its last slot.
        cut = (replay.store.action[slots.lane, cells] < 0) & (slots["action"] >= 0)
        for name in ("frame", "action", "reward"):
          stored, kept = getattr(replay.store, name)[slots.lane, cells], ~cut | (name == "frame")
          np.testing.assert_array_equal(stored[kept], slots[name][kept], err_msg=name)
      steps = replay.num_transitions
      assert steps == restored.limiter.env_steps == own.run.env_steps
    total += steps
  return total


@pytest.mark.timeout(600)
def test_a_killed_learner_and_actor_lose_and_repeat_nothing(tmp_path):
  """A killed learner, which also acts, restarts all processes; a killed actor, only itself."""
  folder = tmp_path / "run"
  new = [*QUICK, "evaluation.interval=60", "replay.frames=device", "learner.devices=2"]
  processes = f"run.dir={folder}", "--processes", "learner=2,actor=1"
  with Run(folder, *new, *processes, devices=2) as run:
    run.learn(45)
    run.kill("learner-1")
    run.until("resuming at learner step (20|40|60|80),")
    if killed := run.learn(random.Random(0).randint(5, 20)):
      run.kill("actor-0.0")
    output = run.end(0)
    assert killed and sum(child["restarts"] for child in run.children().values()) == 4
  trained = rf"trained: {ENV_STEPS} agent steps, .*parameters (\w{{16}})"
  (ours,) = re.findall(trained, output)
  log = (folder / "logs/learner-1.log").read_text()
  (theirs,) = re.findall(trained, log)
  assert ours == theirs and "damaged" not in output
  evaluated = "Catch after 60 learner steps"
  assert evaluated in output and evaluated not in log  # learner 1 waited for it
  check_metrics(folder)
  assert audit(folder, 2) == ENV_STEPS


def test_a_stopped_learner_stops_all_at_the_same_step(tmp_path):
  folder = tmp_path / "run"
  new = [*QUICK, "learner.steps=2000", "run.env_steps=6000", f"run.dir={folder}"]
  with Run(folder, *new, "--processes", "learner=2,actor=1") as run:
    run.learn(5)
    os.kill(run.children()["learner-1"]["pid"], signal.SIGTERM)
    output = run.end(143, 120)
  step = newest(folder)
  assert step == newest(folder / "units/1") and 5 <= step < 2000
  assert set(re.findall(r"stopped and saved at learner step (\d+)", output)) == {str(step)}


def test_a_synchronous_agent_survives_killed_environments_with_central_inference(tmp_path):
  """Every batch is from the preceding weights, except for first actions of trajectories."""
  folder = tmp_path / "run"
  new = [*PPO, "topology.inference=central", f"run.dir={folder}"]
  with Run(folder, *new, "--processes", "learner=1,actor=1") as run:
    assert run.learn(30)
    run.kill("actor-0.0")
    assert f"{STEPS} learner steps" in run.end(0)
    assert run.children()["actor-0.0"]["restarts"] == 1
  rows = rows_of(folder)
  assert max(row.get("inference/lanes_mean", 0) for row in rows) == 4
  lags = [row[impala.TRAINED_LAG_MAX] for row in rows if impala.TRAINED_LAG_MAX in row]
  assert max(lags) == 15  # of first actions in a block's last minibatch
  means = [row[impala.TRAINED_LAG_MEAN] for row in rows]
  assert max(means) < 10  # one of at least three actions in a trajectory 15, the others 7
  assert audit(folder, 1) == ENV_STEPS


def test_actors_compute_the_gradients_of_a_run(tmp_path):
  """Standard input is closed; the progress is shown all the same."""
  folder = tmp_path / "run"
  arguments = *A3C, f"run.dir={folder}", "--processes", "learner=1,actor=2"
  with Run(folder, *arguments, preexec_fn=lambda: os.close(0)) as run:
    assert f"{STEPS} learner steps" in run.end(0)
  rows = rows_of(folder)
  assert {row[names.STALENESS_MAX] for row in rows if names.STALENESS_MAX in row} & {1, 2, 3}
  # Each gradient takes at most 12 agent steps.
  assert 900 < rows[-1]["env_steps"] < 1200


def check_metrics(folder):
  """Learner 0 reports on all processes, learner 1 on its own."""
  ours, theirs = rows_of(folder), rows_of(folder / "units/1")
  assert max(row["env_steps"] for row in theirs) <= ENV_STEPS / 2
  assert ours[-1]["env_steps"] == ENV_STEPS
  assert max(row["present/actors"] for row in ours) == 1
  assert not any("present/actors" in row for row in theirs)
  for wait in ("learner", "actor"):
    assert any(f"queue/{wait}_wait_seconds" in row for row in ours)


def test_a_refresher_that_dies_or_hangs_and_a_killed_launcher_lose_nothing(tmp_path, capsys):
  """With `bound_age` the learner waits for the refresher; a single process finishes the run."""
  folder, secret, steps = tmp_path / "run", tmp_path / "secret", 400
  secret.write_text("read by each process for itself")
  new = [*QUICK, f"run.dir={folder}", f"topology.token_file={secret}", f"learner.steps={steps}"]
  new += ["topology.bound_age=true", "--processes", "learner=1,refresher=1"]
  with Run(folder, *new) as run:
    run.learn(20)
    pid = run.children()["refresher-0.0"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert multihost.main(["--resume", str(folder), "--processes", "learner=1"]) == 2
    assert "in use" in capsys.readouterr().err
    waits = -1
    while learned(folder) > waits:  # it takes a few steps more
      waits = learned(folder)
      time.sleep(2)
    assert waits < steps
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: learned(folder) > waits, 60, "no learner steps")
    run.kill("refresher-0.0")
    before = learned(folder)
    wait_for(lambda: learned(folder) > before + 10, 120, "no learner steps")  # reanalyse.max_age 8
    run.process.kill()
    wait_for(lambda: not pids(str(folder)), 60, "processes outlive the launcher")
  before = acknowledged(folder)
  with Run(folder, "--resume", folder, "topology.refreshers=0") as run:
    output = run.end(0)
    begun = re.findall(r"resuming at .*, agent step (\d+)|replayed (\d+) agent steps", output)
    assert sum(int(at or more) for at, more in begun) == before
    assert f"trained: {ENV_STEPS} agent steps, {steps} learner steps" in output
  assert audit(folder, 1) == ENV_STEPS
