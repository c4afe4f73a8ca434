"""Tests of reading presets: inheritance, stacking, settings of single games, bad YAML."""

import pytest

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError


def test_stacking_merges_key_by_key_and_the_later_wins(tmp_path):
  (tmp_path / "a.yaml").write_text("env: {game: Pong, frame_skip: 2}\nlearner: {steps: 5}\n")
  (tmp_path / "b.yaml").write_text("env: {frame_skip: 3}\nlearner:\n  # steps: 9\n")
  (tmp_path / "c.yaml").write_text("base: [a.yaml, b.yaml]\nlearner.steps: 8\n")
  a, b, c = (str(tmp_path / f"{name}.yaml") for name in "abc")

  def seen(presets, *overrides):
    config = loader.load(presets, overrides)
    return config.env.game, config.env.frame_skip, config.learner.steps

  assert seen([a, b]) == ("Pong", 3, 5)
  assert seen([b, a]) == ("Pong", 2, 5)
  assert seen([c]) == ("Pong", 3, 8)
  assert seen([c, a]) == ("Pong", 2, 5)
  assert seen([a, b], "env.frame_skip=7", "env.frame_skip=6") == ("Pong", 6, 5)


@pytest.mark.parametrize(
  ("text", "words"),
  [
    ("env: {game: Pong, game: Qbert}", ["'game'", "duplicate"]),
    ("env: {game: Pong}\nenv: {frame_skip: 2}", ["'env'", "duplicate"]),
    ("env: {game: Pong}\nenv.game: Pong", ["env.game", "duplicate"]),
    ("env: {gaem: Pong}", ["'env.gaem'", "env.game"]),
    ("evn: {game: Pong}", ["'evn.game'", "env"]),
    ("env: Pong", ["env", "mapping", "'Pong'"]),
    ("env: [game]", ["env", "mapping"]),
    ("env: {game: [Pong]}", ["env.game", "string"]),
    ("env: {game: {a: b}}", ["env.game", "string"]),
    ("env.game: {a: b}", ["env.game", "string"]),
    ("search: {temperatures: [[1], 2]}", ["search.temperatures", "list of numbers"]),
    ("- env", ["mapping"]),
    ("env: {", ["YAML"]),
    ("? [a, b]\n: c", ["YAML"]),
    ("env: &e {game: *e}", ["YAML"]),
    ("base: {a: b}", ["base"]),
    ("base: [nowhere.yaml]", ["nowhere.yaml"]),
    ("base: p.yaml", ["based on itself"]),
    (
      "search.simulations: !!python/object/apply:os.system ['true']",
      ["search.simulations", "an integer"],
    ),
  ],
)
def test_bad_yaml_is_refused(tmp_path, text, words):
  path = tmp_path / "p.yaml"
  path.write_text(text)
  with pytest.raises(ConfigError) as caught:
    loader.load([str(path)])
  for word in [*words, str(tmp_path)]:
    assert word in str(caught.value)


def test_unreadable_files_are_refused(tmp_path):
  (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
  for name in ("bytes.yaml", "missing.yaml"):
    with pytest.raises(ConfigError, match=name):
      loader.load([str(tmp_path / name)])


def test_unknown_preset_names_the_nearest():
  with pytest.raises(ConfigError, match=r"'atari10k'.*atari100k"):
    loader.load(["atari10k"])
  with pytest.raises(ConfigError, match=r"'zzz'.*quickstart"):
    loader.load(["zzz"])


def test_presets_are_found_from_any_folder(tmp_path, monkeypatch):
  here = loader.load(["quickstart"])
  monkeypatch.chdir(tmp_path)
  assert loader.load(["quickstart"]) == here


def test_settings_of_a_game_apply_to_that_game_right_after_their_preset(tmp_path):
  (tmp_path / "p.yaml").write_text(
    "learner: {steps: 5}\ngames:\n  Pong: {learner: {steps: 6}, run.seed: 3}\n"
  )
  (tmp_path / "q.yaml").write_text("run: {seed: 4}\n")
  p, q = (str(tmp_path / f"{name}.yaml") for name in "pq")

  def seen(presets, *overrides):
    config = loader.load(presets, overrides)
    return config.learner.steps, config.run.seed

  assert seen([p]) == (5, 0) and seen([p], "env.game=Pong") == (6, 3)
  assert seen([p, q], "env.game=Pong") == (6, 4)
  assert seen([p], "env.game=Pong", "learner.steps=9") == (9, 3)
  (tmp_path / "p.yaml").write_text("games: {Breakout: {learner.steps: 8}}\n")
  assert seen([p]) == (8, 0)  # of the default game


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("games: {Pong: {env.game: Breakout}}", "env.game and agent can't be set"),
    ("games: {po-ng: {run.seed: 1}}", "games: 'po-ng' is spelled differently from env.game=Pong"),
    ("games: {Breakout: {learner.stepz: 1}}", "p.yaml: unknown key 'learner.stepz'"),
    ("agent: [dqn]", "agent: expected a string"),
  ],
)
def test_a_preset_that_cannot_be_meant_is_refused(tmp_path, text, message):
  (tmp_path / "p.yaml").write_text(text)
  with pytest.raises(ConfigError, match=message):
    loader.load([str(tmp_path / "p.yaml")], ["env.game=Pong"])
