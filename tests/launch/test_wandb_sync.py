"""Tests of metrics sent to Weights & Biases."""

import contextlib
import json
import sys
from types import SimpleNamespace

import pytest

import recorded
from launch import wandb_sync


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


def test_every_row_is_sent_once(tmp_path, monkeypatch):
  folder, calls, rows = recorded.run(tmp_path / "run", returns=(1.0, 2.0)), [], []

  @contextlib.contextmanager
  def init(**options):
    calls.append(options)
    yield SimpleNamespace(id="a1", define_metric=lambda *_, **__: None, log=rows.append)

  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
  arguments = [str(folder), "--project", "p"]
  for _ in range(2):  # the second time there is nothing new
    assert wandb_sync.main(arguments) == 0
  with (folder / "metrics.jsonl").open("a") as lines:
    lines.write(json.dumps({"step": 40, "time": 240.0, "charts/episode_return": 4.0}) + "\n")
  assert wandb_sync.main(arguments) == 0
  assert [row["charts/episode_return"] for row in rows] == [1.0, 2.0, 4.0]
  assert [call["id"] for call in calls] == [None, "a1"]
  assert calls[0]["config"]["optim.learning_rate"] == 0.2
  assert wandb_sync.main([str(folder), "--project", "other"]) == 0
  assert calls[-1]["id"] is None and len(rows) == 6


def test_an_upload_that_is_cut_short_is_continued(tmp_path, monkeypatch):
  folder, ids, rows = recorded.run(tmp_path / "run", returns=(1.0, 2.0, 3.0)), [], []

  def log(row):
    if len(rows) == len(ids) == 1:
      raise ConnectionError
    rows.append(row["charts/episode_return"])

  @contextlib.contextmanager
  def init(**options):
    ids.append(options["id"])
    yield SimpleNamespace(id="a1", define_metric=lambda *_, **__: None, log=log)

  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
  with pytest.raises(ConnectionError):
    wandb_sync.main([str(folder), "--project", "p"])
  assert wandb_sync.main([str(folder), "--project", "p"]) == 0
  assert ids == [None, "a1"] and rows == [1.0, 2.0, 3.0]
