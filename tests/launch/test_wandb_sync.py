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


class Uploads(list):
  """Options and sent returns of each upload. Unless `connected`, it fails while it ends."""

  connected = True

  @contextlib.contextmanager
  def init(self, **options):
    returns = []

    def log(row):
      returns.append(row["charts/episode_return"])

    yield SimpleNamespace(id="a1", define_metric=lambda *_, **__: None, log=log)
    if not self.connected:
      raise ConnectionError
    self.append((options, returns))

  def sent(self, option):
    return [(options[option], returns) for options, returns in self]


@pytest.fixture
def uploads(monkeypatch):
  made = Uploads()
  monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=made.init))
  return made


def test_a_folder_of_runs_sends_each_under_its_own_name(tmp_path, uploads):
  """Beside runs, a study's folder has their logs."""
  for name, value in (("a", 1.0), ("b", 2.0)):
    recorded.run(tmp_path / name, returns=(value, value))
    (tmp_path / f"{name}.log").touch()
  for given in (sorted(tmp_path.iterdir()), [tmp_path]):
    for run in "ab":
      (tmp_path / run / "wandb.json").unlink(missing_ok=True)
    uploads.clear()
    assert wandb_sync.main([*map(str, given), "--project", "p"]) == 0
    assert uploads.sent("name") == [("a", [1.0, 1.0]), ("b", [2.0, 2.0])]


def test_every_row_is_sent_once(tmp_path, uploads):
  folder = recorded.run(tmp_path / "run", returns=(1.0, 2.0))
  arguments = [str(folder), "--project", "p"]
  for _ in range(2):  # the second time there is nothing new
    assert wandb_sync.main(arguments) == 0
  with (folder / "metrics.jsonl").open("a") as lines:
    lines.write(json.dumps({"step": 40, "time": 240.0, "charts/episode_return": 4.0}) + "\n")
  assert wandb_sync.main(arguments) == 0
  assert wandb_sync.main([str(folder), "--project", "other"]) == 0
  assert uploads.sent("id") == [(None, [1.0, 2.0]), ("a1", [4.0]), (None, [1.0, 2.0, 4.0])]
  assert uploads[0][0]["config"]["optim.learning_rate"] == 0.2


def test_an_upload_that_is_cut_short_is_sent_to_the_same_run(tmp_path, uploads):
  folder, uploads.connected = recorded.run(tmp_path / "run", returns=(1.0, 2.0)), False
  with pytest.raises(ConnectionError):
    wandb_sync.main([str(folder), "--project", "p"])
  uploads.connected = True
  assert wandb_sync.main([str(folder), "--project", "p"]) == 0
  assert uploads.sent("id") == [("a1", [1.0, 2.0])]
