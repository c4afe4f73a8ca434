"""Tests of descriptions of studies and of the runs that they define."""

import json
from pathlib import Path

import pytest

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.envs.scores import atari100k_games
from speedyzero_jax.report.runs import read_run
from speedyzero_jax.study import study as studies
from speedyzero_jax.study.study import Study

STUDIES = Path(__file__).resolve().parents[2] / "configs/studies"
DESCRIPTION = """
settings: [learner.steps=40]
games: [Catch, CartPole]
seeds: 2
vary:
  optimizer: {sgd: [optim.name=sgd], adam: []}
  agent: {ez: [quickstart], dqn: [dqn, learner.steps=50]}
"""


def load(tmp_path, text):
  path = tmp_path / "study.yaml"
  path.write_text(text)
  return studies.load(path)


def test_runs_are_all_combinations_seed_by_seed(tmp_path):
  runs = studies.runs_of(load(tmp_path, DESCRIPTION), tmp_path)
  variants = ["sgd-ez", "sgd-dqn", "adam-ez", "adam-dqn"]
  assert [run.path.name for run in runs] == [
    f"{v}-{g}-s{s}" for s in range(2) for v in variants for g in ("Catch", "CartPole")
  ]
  for run in runs:
    optimizer, agent = run.variant.split("-")
    assert run.config.optim.name == optimizer
    assert run.config.agent.name == {"ez": "efficientzero", "dqn": "dqn"}[agent]
    assert run.config.learner.steps == {"ez": 40, "dqn": 50}[agent]
    assert (run.config.env.game, run.config.run.seed) == (run.game, run.seed)
  # Settings of the preset for its games hold.
  assert {run.config.evaluation.max_episode_steps for run in runs if run.game == "CartPole"} == {
    500
  }


def test_all_games_and_the_presets_own_game(tmp_path):
  runs = studies.runs_of(Study(("atari100k",), games=("all",), seeds=3), tmp_path)
  assert [run.game for run in runs] == [*atari100k_games()] * 3
  (run,) = studies.runs_of(Study(("quickstart",), seeds=1), tmp_path)
  assert run.path == tmp_path / "quickstart-Catch-s0"


@pytest.mark.parametrize(
  ("preset", "agent_steps", "finished"),
  [("a3c", 59_000, False), ("a3c", 60_000, True), ("impala", 60_000, False)],
)
def test_only_gradients_from_actors_let_a_run_end_by_agent_steps(
  tmp_path, preset, agent_steps, finished
):
  (run,) = studies.runs_of(Study((preset,), seeds=1), tmp_path)
  run.path.mkdir()
  (run.path / "config.yaml").write_text(loader.to_yaml(run.config))
  row = {"step": 34, "env_steps": agent_steps, "time": 60.0}
  (run.path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
  evaluation = {"game": "Catch", "step": 34, "episodes": 32, "mean": 0.5, "std": 0.1}
  (run.path / "evaluation.json").write_text(json.dumps(evaluation))
  assert run.finished() == finished
  problems = read_run(run.path).problems
  assert any("unfinished" in problem for problem in problems) != finished


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_descriptions_that_come_along_can_run(path, tmp_path):
  runs = studies.runs_of(studies.load(path), tmp_path)
  assert len({run.path for run in runs}) == len(runs) > 1
  for run in runs:
    helpers = run.config.topology.actors + run.config.topology.refreshers
    assert bool(run.processes) == bool(helpers)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("config: [quickstart]\ngame: [Catch]", "unknown key 'game'"),
    ("vary: [sgd]", "vary: expected a mapping"),
    ("vary: {optimizer: sgd}", "vary.optimizer: expected a mapping"),
    ("vary: {optimizer: }", "vary.optimizer: needs at least one variant"),
    ("vary: {optimizer: {}}", "vary.optimizer: needs at least one variant"),
    ("settings: {a: b}", "settings: expected a list of strings"),
    ("seeds: many", "seeds"),
    ("- a", "top level: expected a mapping"),
  ],
)
def test_mistakes_in_a_description_name_the_file(tmp_path, text, message):
  with pytest.raises(ConfigError, match=message) as caught:
    load(tmp_path, text)
  assert "study.yaml" in str(caught.value)


def test_a_missing_description_is_named_once(tmp_path):
  path = tmp_path / "study.yaml"
  with pytest.raises(ConfigError, match=f"^{path}: No such file or directory$"):
    studies.load(path)


@pytest.mark.parametrize(
  ("study", "message"),
  [
    (Study(("quickstart",), ("learner.stepz=1",)), "learner.steps"),
    (Study(("quickstart",), ("run.seed=1",)), "run.seed, run.dir, env.game can't be set"),
    (Study(("quickstart",), seeds=0), "seeds: must be at least 1"),
    (Study(settings=("optim.name=sgd",)), "config: at least one preset is needed"),
    (Study(("quickstart",), ("run.pause_at=3",)), "runs of a study end with an evaluation"),
    (Study(("quickstart",), games=("Catch", "Catch")), "named quickstart-Catch-s0"),
    (
      Study(("quickstart",), vary={"a": {"x": (), "x-y": ()}, "b": {"y-z": (), "z": ()}}),
      "named x-y-z-Catch-s0",
    ),
    (Study(("quickstart",), vary={"a": {"bad": ("learner.steps=x",)}}), "bad: learner.steps"),
    (Study(("atari_small",), games=("all", "Breakot")), "did you mean Breakout"),
  ],
)
def test_what_cannot_run_is_refused(tmp_path, study, message):
  with pytest.raises(ConfigError, match=message):
    studies.runs_of(study, tmp_path)
