"""Tests of a population of real runs whose controller is interrupted and killed."""

import contextlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import yaml

import tiny
from launch import population
from launched import ROOT, finish, newest, start, wait_until
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.population import trainer
from speedyzero_jax.population.config import Population
from speedyzero_jax.population.controller import Outcome
from speedyzero_jax.population.selection import Knob
from speedyzero_jax.run import run_dir, topology

SETTINGS = (
  "agent=quick_agent", *tiny.OVERRIDES, "learner.steps=9", "learner.tail_steps=0",
  "run.checkpoint_interval=2", "run.log_interval=1", "evaluation.at_end=true",
  "evaluation.episodes=3", "reanalyse.schedule=off",
)  # fmt: skip


def test_a_population_that_is_interrupted_and_killed_continues(tmp_path, capsys):
  folder, description = tmp_path / "all", tmp_path / "population.yaml"
  description.write_text(yaml.safe_dump({
    "config": ["quickstart"], "settings": [*SETTINGS], "members": 2, "rounds": 2, "share": 0.5,
    "explore": {"optim.learning_rate": ["1e-3", "1e-1", "log"]},
  }))  # fmt: skip
  arguments, events = (description, "--dir", folder), folder / "events.jsonl"

  process = start(*arguments, script="population.py")
  assert wait_until(lambda: newest(folder / "m0") > 0, process)
  process.send_signal(signal.SIGINT)
  code, output = finish(process)
  assert code == 128 + signal.SIGINT and "repeat the command to continue" in output

  process = start(*arguments, script="population.py")
  assert wait_until((folder / "m1/config.yaml").exists, process)  # it is in its first round
  os.kill(process.pid, signal.SIGKILL)
  process.communicate()
  assert "copied" not in events.read_text()
  description.write_text("# A comment is no difference.\n" + description.read_text())
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
  assert "stopped and saved at learner step 4;" in (folder / "m0.log").read_text()
  result = json.loads((folder / "population.json").read_text())
  assert len(result["scores"]) == 2
  assert result["scores"][-1][result["best"]] == max(result["scores"][-1])

  description.write_text(description.read_text() + "seed: 1\n")
  assert population.main([*map(str, arguments)]) == 2
  assert "holds another population" in capsys.readouterr().err


def test_wrong_use_writes_nothing(tmp_path, capsys):
  missing, known = tmp_path / "none.yaml", ROOT / "configs/populations/cartpole.yaml"
  for description, folder, message in (
    (missing, tmp_path / "x", ""), (known, "/proc/x", "can't use /proc/x"),
    (known, ROOT / "docs", f"{ROOT / 'docs'} is not empty and holds no population"),
  ):  # fmt: skip
    assert population.main([str(description), "--dir", str(folder)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
  assert not (tmp_path / "x").exists()


def test_a_population_has_one_controller(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(population, "_run", lambda *_: 0)
  monkeypatch.setenv("HOME", str(tmp_path.parent))
  description = ROOT / "configs/populations/cartpole.yaml"
  with run_dir.supervised(tmp_path):
    assert population.main([str(description), f"--dir=~/{tmp_path.name}"]) == 2
  assert "in use by another process" in capsys.readouterr().err


def test_after_an_error_no_further_member_is_trained(tmp_path, monkeypatch):
  description = Population(("quickstart",), (), ())
  members = trainer.RunTrainer(description, tmp_path, mock.Mock(count=1), print)
  trained = []

  def train(member, *_):
    trained.append(member)
    if not member:
      raise ConfigError("in use")
    time.sleep(1)

  monkeypatch.setattr(members, "_train", train)
  with pytest.raises(ConfigError, match="in use"):
    list(members.train({member: {} for member in range(5)}, 0))
  assert trained in ([0], [0, 1])  # the second may have begun
  members._processes.stop.assert_called_once_with(signal.SIGTERM, None)


def test_members_are_started_with_their_own_settings_seeds_and_processes(tmp_path):
  """`--processes` is passed to a new run and to a resumed one."""
  processes = mock.Mock(count=1, train=mock.Mock(return_value=1))
  description = Population(("a3c",), ("topology.actors=2",), (), seed=3)
  members = trainer.RunTrainer(description, tmp_path, processes, print)
  rates = {0: {"optim.learning_rate": 0.5}, 4: {"optim.learning_rate": 0.25}}
  assert sorted(members.train(rates, 1)) == [Outcome(0, []), Outcome(4, [])]
  started = {path: (new, changes) for (path, new, changes), _ in processes.train.call_args_list}
  changes = ["--processes", "learner=1,actor=2", "run.pause_at=296"]
  common = ["--config", "a3c", "topology.actors=2"]
  assert started == {
    tmp_path / "m0": ([*common, "optim.learning_rate=0.5", "run.seed=3000"], changes),
    tmp_path / "m4": ([*common, "optim.learning_rate=0.25", "run.seed=3004"], changes),
  }


def test_members_with_settings_of_an_edited_preset_are_refused(tmp_path):
  """The learning rate is explored, and seeds and pauses are each member's own."""
  (tmp_path / "m1").mkdir()
  own = ["optim.learning_rate=0.02", "run.seed=1", "run.pause_at=3", f"run.dir={tmp_path / 'm1'}"]
  config = topology.with_learners(loader.override(loader.load(["quickstart"], SETTINGS), own))
  (tmp_path / "m1/config.yaml").write_text(loader.to_yaml(config))
  knob = Knob("optim.learning_rate", 1e-3, 1e-1, True)
  trainer.RunTrainer(Population(("quickstart",), SETTINGS, (knob,)), tmp_path, None, print)
  edited = Population(("quickstart",), (*SETTINGS, "learner.steps=18"), (knob,))
  with pytest.raises(ConfigError, match=r"m1 contains .* \(learner.steps\); choose another"):
    trainer.RunTrainer(edited, tmp_path, None, print)


class Killed(BaseException):
  pass


def two_members(folder):
  """A trainer of members 0 and 1, whose files `checkpoints/9` have their names."""
  config = topology.with_learners(loader.load(["quickstart"], SETTINGS))
  for name in ("m0", "m1"):
    checkpoint = folder / name / "checkpoints" / "9"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_text(name)
    own = loader.override(config, [f"run.dir={folder / name}"])
    (folder / name / "config.yaml").write_text(loader.to_yaml(own))
  knob = Knob("optim.learning_rate", 1e-3, 1e-1, True)
  description = Population(("quickstart",), SETTINGS, (knob,))
  return trainer.RunTrainer(description, folder, None, print)


def test_a_member_is_replaced_even_if_one_replaced_before_cannot_be_removed(tmp_path, monkeypatch):
  members = two_members(tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a file is open, on NFS
    members.copy(1, 0, {}, 3)
    assert len(list(tmp_path.iterdir())) == 3
    members.copy(1, 0, {}, 4)
  assert (tmp_path / "m1/checkpoints/9").read_text() == "m0"
  members.copy(1, 0, {}, 5)
  assert {path.name for path in tmp_path.iterdir()} == {"m0", "m1"}


@pytest.mark.parametrize("lives", range(10))
def test_a_copy_that_is_cut_short_anywhere_is_completed(tmp_path, monkeypatch, lives):
  """The controller is killed before or in the middle of one of its nine changes of files."""
  members, left = two_members(tmp_path), [lives]

  def mortal(owner, name, killed=lambda *args: None):
    call = getattr(owner, name)

    def limited(*args, **kwargs):
      left[0] -= 1
      if left[0] < 0:
        killed(*args)
        raise Killed
      return call(*args, **kwargs)

    patches.setattr(owner, name, limited)

  def copy():
    members.copy(1, 0, {"optim.learning_rate": 0.02}, 3)

  write = Path.write_text
  with monkeypatch.context() as patches:
    mortal(shutil, "rmtree")
    mortal(shutil, "copytree")  # called for every folder
    mortal(trainer, "sync_folder")
    mortal(Path, "rename")
    mortal(Path, "write_text", lambda path, text: write(path, text[: len(text) // 2]))
    with contextlib.nullcontext() if lives == 9 else pytest.raises(Killed):
      copy()
  copy()
  copied = run_dir.read_config(tmp_path / "m1")
  assert (copied.optim.learning_rate, copied.run.dir) == (0.02, str(tmp_path / "m1"))
  assert (tmp_path / "m1/checkpoints/9").read_text() == "m0"
  assert (tmp_path / "m0/checkpoints/9").read_text() == "m0"
  assert {path.name for path in tmp_path.iterdir()} == {"m0", "m1"}
  (tmp_path / "m1/checkpoints/10").touch()  # it is trained, and the decision repeated
  copy()
  assert (tmp_path / "m1/checkpoints/10").exists()
