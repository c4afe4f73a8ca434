"""A run that has ended: its files, resuming it, refusing changes of it, and evaluating it."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import tiny
from launched import CACHE, NEW, STEPS, hash_in, listing, newest, python, start

from launch import evaluate, multihost
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.run import run_dir, train
from speedyzero_jax.run.checkpoint import Checkpoints


def ended(folder, *arguments, devices=1):
  """A run to its end in a process; returns its output."""
  process = start("--config", *arguments, f"run.dir={folder}", devices=devices)
  out, errors = process.communicate(timeout=280)
  assert process.returncode == 0, errors
  return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Folder and output of a run, which tests must not change."""
  folder = tmp_path_factory.mktemp("runs") / "run"
  return folder, ended(folder, *NEW[1:])


@pytest.fixture
def copied(finished, tmp_path):
  """A copy of its folder, not yet evaluated."""
  copy = tmp_path / "copy"
  shutil.copytree(finished[0], copy)
  (copy / "evaluation.json").unlink()
  return copy


def test_a_run_leaves_everything(finished):
  folder, output = finished
  assert f"trained: 150 agent steps, {STEPS} learner steps" in output
  assert re.search(r"host memory \(.*[\d.]+ GB", output)  # what it took, and the estimate
  assert {path.name for path in folder.iterdir()} >= {
    "config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "journal.sqlite",
    "evaluation.json",
  }  # fmt: skip
  assert run_dir.read_config(folder).run.env_steps == 150
  evaluation = json.loads((folder / "evaluation.json").read_text())
  assert (evaluation["step"], evaluation["episodes"], evaluation["game"]) == (STEPS, 2, "Catch")
  rows, _ = jsonl.read_rows(folder / "metrics.jsonl")
  assert (rows[-1]["step"], rows[-1]["env_steps"]) == (STEPS, 150)
  assert rows[-1]["evaluation/mean"] == evaluation["mean"]


def test_resuming_it_evaluates_and_does_not_train(finished, copied, capsys):
  assert multihost.main(["--resume", str(copied), "evaluation.episodes=3", CACHE]) == 0
  captured = capsys.readouterr()
  assert hash_in(captured.out) == hash_in(finished[1])
  assert "compiling train step" not in captured.out
  before, after = listing(finished[0]), listing(copied)
  changed = {name for name in before | after if before.get(name) != after.get(name)}
  assert {name for name in changed if not re.match("tensorboard|journal", name)} == {
    "metrics.jsonl", "evaluation.json",
  }  # fmt: skip
  assert json.loads((copied / "evaluation.json").read_text())["episodes"] == 3


def test_another_configuration_in_its_folder_is_refused(finished, capsys):
  folder, _ = finished
  before = listing(folder)
  for arguments, message in (
    ([*NEW, f"run.dir={folder}", "run.seed=1"], "run.seed: 0 != 1"),
    (["--resume", str(folder), "learner.steps=99"], f"learner.steps: {STEPS} != 99"),
    ([*NEW, f"run.dir={folder}"], f"--resume {folder}"),
  ):
    assert multihost.main(arguments) == 2
    assert message in capsys.readouterr().err
  assert listing(folder) == before


def test_a_run_on_four_devices_does_not_continue_on_three(tmp_path, monkeypatch, capsys):
  folder = tmp_path / "run"
  output = ended(
    folder, "quickstart", *tiny.OVERRIDES, CACHE, "learner.devices=0", "run.mode=async", devices=4
  )
  assert "4 x cpu" in output and "trained: 150 agent steps, 12 learner steps" in output
  assert newest(folder) == 12
  rows, _ = jsonl.read_rows(folder / "metrics.jsonl")
  assert rows[-1]["charts/samples_per_insert"] == 12 * 8 / 110
  monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trains"))
  three = jax.local_devices()[:1] * 3
  monkeypatch.setattr(jax, "local_devices", lambda: three)
  before = listing(folder)
  for _ in range(2):  # the folder is free again
    assert multihost.main(["--resume", str(folder)]) == 2
    assert "learner.batch_size: must be a multiple of the 3" in capsys.readouterr().err
  assert listing(folder) == before


@pytest.mark.parametrize("part", ["checkpoints", "journal.sqlite"])
def test_a_run_that_cannot_continue_fails_in_one_line(copied, capsys, part):
  for path in [copied / part, *(copied / part).rglob("*")]:
    if path.is_file():
      path.write_bytes(b"")
  assert multihost.main(["--resume", str(copied), CACHE]) == 1
  errors = capsys.readouterr().err
  assert errors.startswith("error: ") and errors.count("\n") == 1
  assert Checkpoints(copied).steps() == [STEPS - 4, STEPS - 2, STEPS]  # left, to be repaired


# --- evaluating


def test_evaluating_it_only_adds_the_evaluation(copied):
  before = listing(copied)
  process = start(copied, "--episodes", 5, script="evaluate.py")
  out, errors = process.communicate(timeout=120)
  assert process.returncode == 0, errors
  written = json.loads((copied / "evaluation.json").read_text())
  assert written["episodes"] == len(written["returns"]) == 5 and written["step"] == STEPS
  assert f"mean {written['mean']:.2f}" in out
  after = listing(copied)
  assert after.pop("evaluation.json") and after == before


def test_evaluating_it_as_the_run_did_gives_the_same(finished, copied):
  assert evaluate.main([str(copied)]) == 0
  assert listing(copied)["evaluation.json"] == listing(finished[0])["evaluation.json"]
  assert evaluate.main([str(copied), "--seed", "4", "--max-episode-steps", "5"]) == 0


INTERRUPTED = """
import os, signal, sys
from launch import evaluate
from speedyzero_jax.workers import evaluator
make_env = evaluator.make_env
def interrupted(*args, **kwargs):
  os.kill(os.getpid(), signal.SIGINT)
  return make_env(*args, **kwargs)
evaluator.make_env = interrupted
sys.exit(evaluate.main(sys.argv[1:]))
"""


def test_an_interrupted_evaluation_leaves_the_one_before(finished):
  before = listing(finished[0])
  process = python("-c", INTERRUPTED, finished[0], "--episodes", "3")
  out, errors = process.communicate(timeout=120)
  assert (process.returncode, out, errors.count("\n")) == (130, "", 1)
  assert listing(finished[0]) == before


def test_a_lack_of_memory_for_an_evaluation_is_reported(finished, monkeypatch, capsys):
  too_much = lambda *args, **kwargs: np.zeros(2**55, np.uint8)  # noqa: E731
  monkeypatch.setattr("speedyzero_jax.workers.evaluator.make_env", too_much)
  assert evaluate.main([str(finished[0])]) == 1
  errors = capsys.readouterr().err
  assert errors.startswith("error: out of host memory: ") and errors.count("\n") == 1


def test_wrong_use_of_evaluation(finished, tmp_path, capsys):
  assert evaluate.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err.startswith(f"error: {tmp_path} holds no run")
  shutil.copy(finished[0] / "config.yaml", tmp_path)
  assert evaluate.main([str(tmp_path)]) == 1
  assert "there is no checkpoint in" in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
  for arguments in (["--episodes", "0"], ["--max-episode-steps", "10000000000"]):
    assert evaluate.main([str(tmp_path), *arguments]) == 2
    assert "error: evaluation." in capsys.readouterr().err
