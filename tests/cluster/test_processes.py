"""Whole runs of many processes: killed, stopped and started again, none of them loses or repeats
what was acknowledged.

The audit at the end of each takes the last checkpoints and the journals, and asks that they
agree slot by slot.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

from speedyzero_jax.cluster import learner_process
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.run import run_dir
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.run.experiment import Part, Training
from speedyzero_jax.run.topology import unit_config

ROOT = Path(__file__).resolve().parents[2]
ENV_STEPS, STEPS = 600, 200  # enough for some seconds in the middle
SETTINGS = [
  *tiny.OVERRIDES, f"run.compile_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}", "run.mode=async", "actor.lanes=4",
  f"run.env_steps={ENV_STEPS}", f"learner.steps={STEPS}", "run.checkpoint_interval=20", "run.log_interval=1",
  "run.keep_checkpoints=2",
]  # fmt: skip


class Run:
  """A launcher in its own process group. A context manager that leaves nothing running."""

  def __init__(self, folder, *arguments):
    self.folder, self.log = folder, folder.with_suffix(".log")
    command = [sys.executable, ROOT / "launch/multihost.py", *map(str, arguments)]
    self._before = self.log.stat().st_size if self.log.exists() else 0
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    with self.log.open("a") as out:
      self.process = subprocess.Popen(
        command, env=environment, stdout=out, stderr=out, process_group=0
      )

  @classmethod
  def new(cls, folder, *arguments):
    return cls(folder, "--config", "quickstart", *SETTINGS, f"run.dir={folder}", *arguments)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self.process.poll() is None:
      os.killpg(self.process.pid, signal.SIGKILL)
      self.process.wait()
    wait_for(lambda: not running(self.folder), "processes are left")

  @property
  def output(self):
    return self.log.read_text()[self._before :]

  def until(self, pattern):
    """Waits for this to be said."""
    wait_for(
      lambda: re.search(pattern, self.output) or self.process.poll() is not None, pattern, 240
    )
    assert re.search(pattern, self.output), self.output

  def learn(self, steps):
    """Waits for so many learner steps more; returns whether there were as many."""
    wanted = min(learned(self.folder) + steps, STEPS)
    wait_for(
      lambda: learned(self.folder) >= wanted or self.process.poll() is not None,
      "nothing is learned",
      240,
    )
    assert learned(self.folder) >= wanted, self.output
    return wanted < STEPS

  def children(self):
    """What the supervisor says of them, by name."""
    with contextlib.suppress(FileNotFoundError):
      return {
        child["name"]: child
        for child in json.loads((self.folder / "logs/supervisor.json").read_text())["children"]
      }
    return {}

  def kill(self, name):
    """Kills a child, and waits until another has taken its place."""
    wait_for(lambda: self.children()[name]["pid"], f"{name} does not run")
    child = self.children()[name]
    os.kill(child["pid"], signal.SIGKILL)
    wait_for(
      lambda: self.children()[name]["restarts"] > child["restarts"], f"{name} is not started again"
    )

  def end(self, code):
    """Waits for the end; returns what was said."""
    self.process.wait(timeout=400)
    assert self.process.returncode == code, self.output
    return self.output


def wait_for(condition, what, seconds=60):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, what
    time.sleep(0.05)


def running(folder):
  """Command lines of this machine that name the folder."""
  found = []
  for path in Path("/proc").glob("[0-9]*/cmdline"):
    with contextlib.suppress(OSError):
      line = path.read_text()
      if str(folder) in line and str(os.getpid()) != path.parent.name:
        found.append(line)
  return found


def learned(folder):
  """Learner steps of the last line of metrics."""
  path = folder / "metrics.jsonl"
  return max((row["step"] for row in jsonl.read_rows(path)[0]), default=0) if path.exists() else 0


def agent_steps(segments):
  return sum(int((segment.action >= 0).sum()) for batch in segments for segment in batch)


def acknowledged(folder):
  """Agent steps in the journal of a run that nobody resumed yet."""
  config = run_dir.read_config(folder)
  with learner_process.whole(config, folder) as part:
    return agent_steps(part.journal.read(part.journal.tails))


def audit(folder, units, monkeypatch):
  """Agent steps of all replays at the end, each of which agrees with its journal."""
  tiny.share_compiled(monkeypatch)
  config, total = run_dir.read_config(folder), 0
  for number in range(units):
    place = folder / f"units/{number}" if number else folder
    step = max(Checkpoints(place).steps())
    with (
      learner_process.whole(unit_config(config, number, units), place) as whole,
      Reporter(config, place, "", step) as reporter,
    ):
      journal, part = whole.journal, Part(number, units, acts=False)
      training = Training(config, place, reporter, resume=True, part=part)
      assert training.replay.heads.tolist() == journal.heads.tolist()
      slots = training.replay.export_slots(journal.tails)
      segments = [segment for batch in journal.read(journal.tails) for segment in batch]
      segments.sort(key=lambda segment: (segment.lane, segment.start))
      np.testing.assert_array_equal(
        slots["frame"], np.concatenate([segment.frame for segment in segments])
      )
      steps = training.replay.num_transitions
      assert steps == training.pacer.env_steps == unit_config(config, number, units).run.env_steps
      training.close()
    total += steps
  return total


@pytest.mark.timeout(600)
def test_kills_lose_and_repeat_nothing(tmp_path, monkeypatch):
  """Helpers are killed in any order, and a learner, for which all start again: one that acts and
  reanalyses itself."""
  folder, rng = tmp_path / "run", random.Random(0)
  helpers = ["actor-0.0", "reanalyser-0.0"]
  with Run.new(
    folder, "--processes", "learner=2,actor=1,reanalyser=1", "evaluation.interval=60"
  ) as run:
    run.learn(45)
    run.kill("learner-1")
    run.until("resuming at learner step (20|40|60),")
    killed = 0
    for name in rng.sample(helpers, 2):
      if run.learn(rng.randint(10, 40)):
        run.kill(name)
        killed += 1
    output = run.end(0)
    assert killed and sum(child["restarts"] for child in run.children().values()) == 4 + killed
  (ours,) = re.findall(r"trained: .*parameters (\w{16})", output)
  (theirs,) = re.findall(
    r"trained: .*parameters (\w{16})", (folder / "logs/learner-1.log").read_text()
  )
  assert ours == theirs
  assert "damaged" not in output
  assert "Catch after 180 learner steps" in output
  assert "Catch after" not in (folder / "logs/learner-1.log").read_text()  # it waited
  check_what_is_shown(folder, killed)
  assert audit(folder, 2, monkeypatch) == ENV_STEPS


def check_what_is_shown(folder, killed):
  """Unit 0 tells of all processes, unit 1 of its own."""
  ours, theirs = (
    jsonl.read_rows(place / "metrics.jsonl")[0] for place in (folder, folder / "units/1")
  )
  assert (
    max(row["env_steps"] for row in ours) > ENV_STEPS / 2 >= max(row["env_steps"] for row in theirs)
  )
  assert {row["restarts/learners"] for row in ours[-20:]} == {1}
  assert ours[-1]["restarts/actors"] + ours[-1]["restarts/reanalysers"] in range(killed + 1)
  assert max(row["present/actors"] for row in ours) == 1 and not any(
    "present/actors" in row for row in theirs
  )
  assert max(row["present/reanalysers"] for row in ours) in (0, 1)  # nothing waits for it to come
  for wait in ("learner", "actor", "reanalyser"):
    assert any(f"queue/{wait}_wait_seconds" in row for row in ours)
  assert "actors 1/1" in (folder.with_suffix(".log")).read_text()


@pytest.mark.timeout(600)
def test_a_killed_launcher_leaves_nothing_and_its_run_goes_on(tmp_path, monkeypatch):
  """Then it is stopped, in the middle and with another actor, and ends as a single process."""
  folder = tmp_path / "run"
  secret = tmp_path / "secret"
  secret.write_text("each process reads this for itself")
  with Run.new(
    folder, "--processes", "learner=1,actor=1,reanalyser=1", f"topology.token_file={secret}"
  ) as run:
    run.until("run folder")
    second = Run(folder, "--resume", folder, "--processes", "learner=1")
    run.learn(30)
    assert "in use" in second.end(2)
    run.process.kill()
    wait_for(lambda: not running(folder), "processes outlive the launcher")
  before = acknowledged(folder)
  with Run(folder, "--resume", folder, "--processes", "learner=1,actor=2") as run:
    assert run.learn(20)
    begun = re.findall(
      r"resuming at learner step \d+, agent step (\d+)|(\d+) agent steps more", run.output
    )
    assert sum(int(at or more) for at, more in begun) == before
    run.process.send_signal(signal.SIGTERM)
    assert "stopped and saved at learner step" in run.end(143)
    assert not running(folder)
  with Run(folder, "--resume", folder, "topology.actors=0", "topology.reanalysers=0") as run:
    assert f"trained: {ENV_STEPS} agent steps, {STEPS} learner steps" in run.end(0)
  assert audit(folder, 1, monkeypatch) == ENV_STEPS


@pytest.mark.timeout(600)
def test_a_hung_reanalyser_makes_targets_old_or_the_learner_wait(tmp_path):
  """As `topology.bound_age` says. It keeps the run from ending neither way."""
  folder = tmp_path / "run"

  def hang(run):
    wait_for(lambda: rows()[-1].get("present/reanalysers"), "no reanalyser comes", 120)
    pid = run.children()["reanalyser-0.0"]["pid"]
    os.kill(pid, signal.SIGSTOP)
    return pid, learned(folder)

  def rows():
    return jsonl.read_rows(folder / "metrics.jsonl")[0]

  with Run.new(folder, "--processes", "learner=1,reanalyser=1", "refresh.enabled=false") as run:
    run.learn(10)
    hang(run)
    assert run.learn(40)
    assert rows()[-1][names.TARGET_AGE_MAX] > 8  # reanalyse.max_age
    run.process.send_signal(signal.SIGTERM)
    assert "stopped and saved at learner step" in run.end(143)
  with Run(
    folder, "--resume", folder, "topology.bound_age=true", "--processes", "learner=1,reanalyser=1"
  ) as run:
    run.learn(5)
    pid, step = hang(run)
    time.sleep(5)
    waits = learned(folder)
    assert waits <= step + 10
    time.sleep(2)
    assert learned(folder) == waits < STEPS
    os.kill(pid, signal.SIGCONT)
    assert f"trained: {ENV_STEPS} agent steps, {STEPS} learner steps" in run.end(0)
