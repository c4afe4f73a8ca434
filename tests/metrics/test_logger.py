"""Tests of the metrics logger: lines of one or more learners, and updates between lines."""

import json
import time
import types

import pytest

from speedyzero_jax.config import schema
from speedyzero_jax.metrics import logger, names
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.metrics.logger import MetricsLogger
from supervised import wait_for

CONFIG = schema.Config(
  agent=types.SimpleNamespace(name="dqn"),
  actor=schema.ActorConfig(random_steps=40),
  learner=schema.LearnerConfig(steps=12, batch_size=8),
  topology=schema.TopologyConfig(actors=2),
  run=schema.RunConfig(env_steps=300),
)


def write(metrics, step, **sources):
  """A line of a learner that has finished one game."""
  episodes = EpisodeStats()
  episodes.record(Episode(1.0, 10))
  metrics.add_source(lambda: {names.ENV_STEPS: 100, **sources})
  metrics.write_line(step, {"transitions": 30.0, "some_age_max": 9.0}, episodes)


def rows(folder):
  return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_holds_whatever_is_logged_combined_over_learners(tmp_path):
  shared = []
  other = {
    names.ENV_STEPS: 50, "replay/transitions": 40.0, names.POLICY_LAG: 2.0, names.EPISODES: 5,
    "agent/states_per_second": 1e6,
  }  # fmt: skip

  def exchange(values):
    shared.append(values)
    return [values, other]

  with MetricsLogger(CONFIG, tmp_path, exchange) as metrics:
    metrics.open(None)
    metrics.log_mean({names.POLICY_LAG: 6.0, "losses/own": 1.0})
    metrics.log_mean({names.POLICY_LAG: 10.0, "losses/own": 2.0})
    metrics.log_latest({names.CHECKPOINT_STEP: 4})
    metrics.log_latest({names.EVALUATION_MEAN: 5.0})
    metrics.count("agent/states_per_second", 10)
    with pytest.raises(ValueError, match="agent/states"):
      metrics.count("agent/states", 10)
    write(metrics, 6)
  (row,) = rows(tmp_path)
  expected = {
    names.STEP: 6, names.ENV_STEPS: 150, "replay/transitions": 70.0, "replay/some_age_max": 9.0,
    names.POLICY_LAG: 5.0, "losses/own": 1.5, names.EPISODES: 6, names.EPISODE_RETURN: 1.0,
    names.CHECKPOINT_STEP: 4, names.EVALUATION_MEAN: 5.0,
    names.SAMPLES_PER_INSERT: 6 * 8 / (150 - 40),
  }  # fmt: skip
  assert {name: row.get(name) for name in expected} == expected
  assert row["agent/states_per_second"] > 1e6
  assert shared[-1][names.ENV_STEPS] == 100 and "losses/own" not in shared[-1]


def test_events_are_counted_per_learner_step(tmp_path):
  name = "agent/states_per_learner_step"
  with MetricsLogger(CONFIG, tmp_path) as metrics:
    metrics.open(4)
    for step, events in ((6, 100), (8, 30), (8, 9), (10, 1)):
      metrics.count(name, events)
      write(metrics, step)
    assert [row.get(name) for row in rows(tmp_path)] == [50, 15, None, 5]
  with MetricsLogger(CONFIG, tmp_path) as metrics:
    metrics.open(6)
    metrics.count(name, 3)
    write(metrics, 9)
  assert [row["step"] for row in rows(tmp_path)] == [6, 9]
  assert rows(tmp_path)[-1][name] == 1


def test_changes_between_lines_are_shared_and_shown_but_not_written(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(logger, "REFRESH_SECONDS", 0.02)
  shared, now = [], {names.ENV_STEPS: 10, names.present("actor"): 0}

  def exchange(values):
    shared.append(dict(values))
    return [values, {names.present("actor"): 1}]

  with MetricsLogger(CONFIG, tmp_path, exchange) as metrics:
    metrics.open(3)
    metrics.add_source(lambda: now)
    metrics.count(names.AGENT_STEPS_PER_SECOND, 5)
    for actors in (0, 1):
      now[names.present("actor")] = actors
      wait_for(lambda n=actors: shared and shared[-1].get(names.present("actor")) == n)
    assert shared[-1][names.ENV_STEPS] == 10 and shared[-1][names.AGENT_STEPS_PER_SECOND] > 0
  shown = capsys.readouterr().out
  assert "actors 1/2" in shown and "learner 3/" in shown
  assert "actors 2/2" in shown  # at the end, as the next line is not due
  assert rows(tmp_path) == []


def test_parts_are_timed_also_if_they_fail(tmp_path):
  with MetricsLogger(CONFIG, tmp_path) as metrics:
    metrics.open(None)
    with pytest.raises(KeyError), metrics.part("save"):
      time.sleep(0.02)
      raise KeyError
    assert metrics.part_times().keys() == {"save"}
    write(metrics, 2)
  (row,) = rows(tmp_path)
  assert row["time/save"] > 0.005


def test_files_that_cannot_be_opened_are_named(tmp_path):
  (tmp_path / "run").touch()  # a file instead of a folder
  metrics = MetricsLogger(CONFIG, tmp_path / "run")
  with metrics, pytest.raises(OSError, match=f"can't write metrics in {tmp_path / 'run'}: "):
    metrics.open(None)
