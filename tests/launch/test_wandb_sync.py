"""Tests of metrics sent to Weights & Biases, with the real package in offline mode if installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import recorded
from launch import wandb_sync

SCRIPT = Path(wandb_sync.__file__)


def test_a_missing_package_is_wrong_use(tmp_path, monkeypatch, capsys):
  monkeypatch.setitem(sys.modules, "wandb", None)
  assert wandb_sync.main([str(tmp_path), "--project", "p"]) == 2
  assert "wandb is not installed: make wandb" in capsys.readouterr().err


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
