"""Tests of metrics sent to Weights & Biases, with the real package in offline mode if installed."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import recorded
from launch import wandb_sync

SCRIPT = Path(wandb_sync.__file__)


def test_a_missing_package_is_wrong_use(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "wandb", None)
  assert wandb_sync.main([str(tmp_path), "--project", "p"]) == 2
  assert "wandb is not installed: make wandb" in capsys.readouterr().err


def test_a_mistyped_folder_is_wrong_use(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
  assert wandb_sync.main([str(tmp_path / "rum"), "--project", "p"]) == 2
  assert capsys.readouterr().err == f"error: no run in {tmp_path / 'rum'}\n"


def test_a_folder_of_runs_sends_each_under_its_own_name(tmp_path, monkeypatch):
  """Beside runs, a study's folder has their logs."""
  for name, value in (("a", 1.0), ("b", 2.0)):
    recorded.run(tmp_path / name, returns=(value, value))
    (tmp_path / f"{name}.log").touch()
  sent = {}

  @contextlib.contextmanager
  def init(name, **_):
    rows = sent[name] = []
    yield SimpleNamespace(id=name, define_metric=lambda *_, **__: None, log=rows.append)

  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
  for given in (sorted(tmp_path.iterdir()), [tmp_path]):
    for run in "ab":
      (tmp_path / run / "wandb.json").unlink(missing_ok=True)
    sent.clear()
    assert wandb_sync.main([*map(str, given), "--project", "p"]) == 0
    returns = {name: {row["charts/episode_return"] for row in rows} for name, rows in sent.items()}
    assert returns == {"a": {1.0}, "b": {2.0}}


def test_every_row_is_sent_once(tmp_path):
  pytest.importorskip("wandb")
  folder = recorded.run(tmp_path / "run", returns=(1.0, 2.0, 3.0))

  def sent():
    command = [sys.executable, str(SCRIPT), str(folder), "--project", "p"]
    offline = os.environ | {"WANDB_MODE": "offline"}
    subprocess.run(command, env=offline, check=True, capture_output=True)
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"), key=os.path.getmtime)
    return files, files[-1].read_bytes().count(b"charts/episode_return")

  files, first = sent()
  assert len(files) == 1 and first >= 3 and b"optim.learning_rate" in files[0].read_bytes()
  assert sent() == (files, first)  # there was nothing new
  with (folder / "metrics.jsonl").open("a") as lines:
    lines.write(json.dumps({"step": 40, "time": 240.0, "charts/episode_return": 4.0}) + "\n")
  more, last = sent()
  assert len(more) == 2 and last < first
  assert more[0].name == more[1].name  # which has the run's id
