"""Tests of a finished run: files, resuming, refused changes, evaluation, and recovery.

Recovery: a run that was stopped and killed on its way must end like the undisturbed one.
"""

import json
import random
import re
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from PIL import Image

import tiny
from launch import evaluate, multihost
from launched import NEW, ROOT, STEPS, hash_in, listing, newest, start, wait_until
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.run import run_dir, train
from speedyzero_jax.run.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """Folder and output of a run, which tests must not change."""
  folder = tmp_path_factory.mktemp("runs") / "run"
  process = start(*NEW, f"run.dir={folder}")
  out, errors = process.communicate(timeout=280)
  assert process.returncode == 0, errors
  return folder, out


@pytest.fixture
def copied(finished, tmp_path):
  """A copy of the finished run's folder, without its evaluation."""
  copy = tmp_path / "copy"
  shutil.copytree(finished[0], copy)
  (copy / "evaluation.json").unlink()
  return copy


def test_a_run_leaves_everything(finished):
  folder, output = finished
  assert f"trained: 150 agent steps, {STEPS} learner steps" in output
  assert f"to compare runs: {sys.executable} {ROOT / 'launch/report.py'} {folder}" in output
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
  assert multihost.main(["--resume", str(copied), "evaluation.episodes=3"]) == 0
  captured = capsys.readouterr()
  assert hash_in(captured.out) == hash_in(finished[1])
  assert "compiling train step" not in captured.out and "repeating" not in captured.out
  before, after = listing(finished[0]), listing(copied)
  changed = {name for name in before | after if before.get(name) != after.get(name)}
  assert {name for name in changed if not re.match("tensorboard|journal", name)} == {
    "metrics.jsonl", "evaluation.json",
  }  # fmt: skip
  assert json.loads((copied / "evaluation.json").read_text())["episodes"] == 3


NUMBERS = {"TERM": signal.SIGTERM, "INT": signal.SIGINT}


@pytest.mark.timeout(1200)
def test_a_run_stopped_and_killed_at_any_moment_ends_as_the_undisturbed_one(finished, tmp_path):
  folder, log, rng = tmp_path / "run", tmp_path / "log", random.Random(3)
  process, resumed = start(*NEW, f"run.dir={folder}", log=log), []
  for name in ("early", "TERM", "KILL"):
    before = newest(folder)
    if name == "early":  # it has begun, but has no checkpoint
      assert wait_until((folder / "metrics.jsonl").exists, process)
    else:
      assert wait_until(lambda step=before + 2: newest(folder) >= step, process)
      time.sleep(rng.uniform(0, 0.1))
    number = NUMBERS.get(name, signal.SIGKILL)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
    assert process.returncode == expected, errors
    output = log.read_text()
    assert (f"resuming at learner step {before}," in output) == (before >= 0)
    if number != signal.SIGKILL:
      (saved,) = re.findall(r"stopped and saved at learner step (\d+);", output)
      assert int(saved) == newest(folder) > before and errors == ""
    resumed.append(max(newest(folder), 0))
    process = start("--resume", folder, log=log)
  _, errors = process.communicate(timeout=400)
  assert process.returncode == 0, errors
  assert hash_in(log.read_text()) == hash_in(finished[1])
  assert (folder / "evaluation.json").read_text() == (finished[0] / "evaluation.json").read_text()
  for of, begun in ((folder, resumed), (finished[0], [0])):
    starts, _ = jsonl.read_rows(of / "starts.jsonl")  # of those that got that far
    assert [row["step"] for row in starts][-len(begun) :] == begun and starts[0]["devices"] == 1
    rows, damaged = jsonl.read_rows(of / "metrics.jsonl")
    assert not damaged and [row["step"] for row in rows] == [*range(1, STEPS + 1), STEPS]
    assert not (of / "checkpoints" / "damaged").exists()
    assert Checkpoints(of).steps() == [STEPS - 4, STEPS - 2, STEPS]


def test_another_configuration_in_its_folder_is_refused(finished, capsys):
  folder, _ = finished
  before = listing(folder)
  for arguments, message in (
    (["--resume", str(folder), "learner.steps=99"], f"learner.steps: {STEPS} != 99"),
    ([*NEW, f"run.dir={folder}"], f"--resume {folder}"),
  ):
    assert multihost.main(arguments) == 2
    assert message in capsys.readouterr().err
  assert listing(folder) == before


def test_a_run_does_not_continue_where_devices_cannot_share_its_batch(
  tmp_path, monkeypatch, capsys
):
  run_dir.create(tiny.config("learner.devices=0", f"run.dir={tmp_path}"), "x").close()
  monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trains"))
  three = jax.local_devices()[:1] * 3
  monkeypatch.setattr(jax, "local_devices", lambda: three)
  before = listing(tmp_path)
  for _ in range(2):  # the folder is free again
    assert multihost.main(["--resume", str(tmp_path)]) == 2
    assert "learner.batch_size: must be a multiple of the 3" in capsys.readouterr().err
  assert listing(tmp_path) == before
  learners = tiny.config("learner.devices=2", "topology.learners=4", "learner.batch_size=12")
  with pytest.raises(ConfigError, match="must be a multiple of the 8 devices"):
    multihost.check_possible(learners)
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  monkeypatch.setattr(jax, "local_devices", lambda unit=0: [three, three[:1]][unit])
  with pytest.raises(ConfigError, match=r"learner\.devices: must be at most 1, the"):
    multihost.check_possible(tiny.config("learner.devices=2", "topology.learners=2"))


@pytest.mark.parametrize("part", ["checkpoints", "journal.sqlite"])
def test_a_run_that_cannot_continue_fails_in_one_line(copied, capsys, part):
  for path in [copied / part, *(copied / part).rglob("*")]:
    if path.is_file():
      path.write_bytes(b"")
  assert multihost.main(["--resume", str(copied)]) == 1
  errors = capsys.readouterr().err
  assert errors.startswith("error: ") and errors.count("\n") == 1
  assert Checkpoints(copied).steps() == [STEPS - 4, STEPS - 2, STEPS]  # left, to be repaired


# --- evaluating


def test_evaluating_it_as_the_run_did_gives_the_same(finished, tmp_path):
  path = tmp_path / "result.json"
  assert evaluate.main([str(finished[0]), "--out", str(path)]) == 0
  assert path.read_text() == (finished[0] / "evaluation.json").read_text()


def test_evaluating_it_writes_only_the_given_files(finished, tmp_path, capsys):
  before, path, video = listing(finished[0]), tmp_path / "result.json", tmp_path / "first.gif"
  arguments = ["--seed", "4", "--explore", "--episodes", "5", "--video", str(video)]
  assert evaluate.main([str(finished[0]), *arguments, "--out", str(path)]) == 0
  written, (out, errors) = json.loads(path.read_text()), capsys.readouterr()
  assert written["episodes"] == len(written["returns"]) == 5 and written["step"] == STEPS
  assert written["explore"] and written["seed"] == 4
  assert f"mean {written['mean']:.2f}" in out and f"wrote {path}\n" in errors
  with Image.open(video) as gif:
    assert gif.n_frames == written["lengths"][0] + 1  # with the frame at the end
  assert listing(finished[0]) == before


def test_an_interrupted_evaluation_leaves_the_one_before(finished, monkeypatch, capsys):
  def interrupted(*args, **kwargs):
    raise KeyboardInterrupt

  before = listing(finished[0])
  monkeypatch.setattr("speedyzero_jax.workers.evaluator.make_env", interrupted)
  assert evaluate.main([str(finished[0]), "--episodes", "3"]) == 130
  out, errors = capsys.readouterr()
  assert (out, errors.count("\n")) == ("", 1)
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
  with pytest.raises(SystemExit):
    evaluate.main([str(tmp_path), "--out", str(tmp_path)])
  assert f"--out: {tmp_path} is a folder" in capsys.readouterr().err
  for arguments in (["--episodes", "0"], ["--max-episode-steps", "10000000000"]):
    assert evaluate.main([str(tmp_path), *arguments]) == 2
    assert "error: evaluation." in capsys.readouterr().err
  config = tmp_path / "config.yaml"
  config.write_text(config.read_text().replace("game: Catch", "game: gymnasium:missing:No-v0"))
  assert evaluate.main([str(tmp_path)]) == 2
  assert "error: env: can't make gymnasium:missing:No-v0" in capsys.readouterr().err
