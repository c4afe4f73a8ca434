"""Tests of matches of a tiny AlphaZero against every kind of opponent."""

import json
import shutil
from unittest import mock

import pytest

import trained
from launch import match
from speedyzero_jax.config import loader
from speedyzero_jax.workers import evaluator

TINY = (
  "network.channels=4", "network.blocks=1", "search.simulations=4", "learner.batch_size=8",
  "run.env_steps=300", "actor.lanes=4", "replay.capacity=200", "learner.steps=20",
  "run.checkpoint_interval=10", "run.mode=lockstep", "learner.devices=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp("user@host")
  config = loader.load(["alphazero"], TINY)
  (folder / "config.yaml").write_text(loader.to_yaml(config))
  trained.run(config, folder)
  return folder


def played(*arguments, out):
  code = match.main([*map(str, arguments), "--games", "6", "--out", str(out)])
  return code, json.loads(out.read_text()) if code == 0 else None


def test_every_kind_of_opponent_is_played_from_both_sides(run, tmp_path):
  against = "random", "minimax", "mcts:20"
  out = tmp_path / "out.json"
  code, rows = played(f"{run}@10", "--against", *against, run, out=out)
  found = [(row["step"], row["against"], row["against_step"]) for row in rows]
  assert code == 0 and found == [*((10, name, None) for name in against), (10, str(run), 20)]
  for row in rows:
    sides = row["moving_first"], row["moving_second"]
    assert [sum(side.values()) for side in sides] == [3, 3] and row["games"] == 6
    wins, draws, _ = (sum(side[kind] for side in sides) for kind in ("wins", "draws", "losses"))
    assert row["score"] == pytest.approx((wins + draws / 2) / 6)
    assert row["against"] != "minimax" or wins == 0  # it never loses


def test_without_a_file_nothing_is_written(run, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  before = sorted(run.rglob("*"))
  assert match.main([str(run), f"{run}@10", "--against", "random", "--games", "6"]) == 0
  assert capsys.readouterr().out.count("against random") == 2
  assert not list(tmp_path.iterdir()) and sorted(run.rglob("*")) == before
  with pytest.raises(SystemExit):
    played(run, "--against", "random", out=tmp_path)  # a folder


def test_an_interrupted_match_writes_nothing(run, tmp_path, monkeypatch):
  monkeypatch.setattr(evaluator, "evaluate", mock.Mock(side_effect=KeyboardInterrupt))
  assert played(run, "--against", "random", out=tmp_path / "out.json")[0] == 130
  assert not list(tmp_path.iterdir())


def test_a_player_against_itself_is_even(run, tmp_path):
  """Each opening is played from both sides, without noise: wins and losses are equal."""
  code, (row,) = played(run, "--against", run, out=tmp_path / "out.json")
  first, second = row["moving_first"], row["moving_second"]
  assert (first["wins"], first["losses"]) == (second["losses"], second["wins"])
  assert code == 0 and row["score"] == 0.5 and row["elo_difference"] == 0


def test_no_player_explores(tmp_path, run):
  noisy = tmp_path / "noisy"
  shutil.copytree(run, noisy)
  config = loader.override(loader.load(["alphazero"], TINY), ["evaluation.explore=true"])
  (noisy / "config.yaml").write_text(loader.to_yaml(config))
  with mock.patch.object(evaluator, "evaluate", side_effect=KeyboardInterrupt) as evaluate:
    assert played(noisy, "--against", "random", out=tmp_path / "out.json")[0] == 130
  assert not evaluate.call_args.args[0].evaluation.explore


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("mcts:0", "--against: expected random, minimax, mcts:N or a run folder, got 'mcts:0'"),
    ("nobody", "got 'nobody'"),
    ("{run}@last", "expected random, minimax, mcts:N or a run folder"),
    ("{run}@17", "has no checkpoint of step 17; the one before is 10"),
  ],
)
def test_wrong_opponents_are_named(run, tmp_path, capsys, name, message):
  assert played(run, "--against", name.format(run=run), out=tmp_path / "out.json")[0] == 2
  assert message in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_minimax_plays_no_large_game():
  with pytest.raises(ValueError, match="minimax can't search the whole game tree of ConnectFour"):
    match._opponent("minimax", "ConnectFour")


def test_openings_that_could_end_a_game_are_refused(run, tmp_path, capsys):
  out = tmp_path / "out.json"
  assert played(run, "--against", "random", "--opening", 4, out=out)[0] == 2
  assert "--opening: must lie in [0, 3] in TicTacToe, got 4" in capsys.readouterr().err


def test_a_step_without_a_checkpoint_is_an_error(run, tmp_path, capsys):
  code, _ = played(f"{run}@5", "--against", "random", out=tmp_path / "out.json")
  assert code == 1 and capsys.readouterr().err.startswith("error: ")
