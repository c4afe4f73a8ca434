"""What a run calls is compiled before it begins, as it will be called, and what it takes is added up right."""

import pytest
import tiny

from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import loops, warmup
from speedyzero_jax.system.compilation import Compilations

BIG = {"_local_step", "_search_windows", "_search_part", "_value_windows", "_local_gather"}


@pytest.mark.parametrize(
  "overrides",
  [
    ("run.mode=async", "learner.devices=2", "replay.frames=device"),
    (
      "run.mode=async",
      "reanalyse.schedule=batch",
      "reanalyse.ratio=0.5",
      "replay.frames=host",
      "learner.devices=1",
    ),
  ],
)
def test_a_run_compiles_nothing_that_was_not_compiled_before_it(tmp_path, overrides):
  config = tiny.config(*overrides, "learner.steps=25", "run.env_steps=250")
  with Compilations() as compilations, tiny.training(config, tmp_path) as training:
    assert warmup.prepare(training) > 0
    before = len(compilations.names)
    assert {"_local_step", "_value_windows"} < set(compilations.names)
    assert (
      training.state.step == 0
      and training.pacer.learner_steps == 0
      and training.pacer.env_steps == 0
    )
    assert loops.run(training)
    assert not BIG & set(compilations.names[before:])


def prepared(monkeypatch, folder, *overrides):
  """Seconds a learner step, if each call of anything took one second."""
  tiny.share_compiled(monkeypatch)
  monkeypatch.setattr(warmup, "_alone", lambda run: 1.0)
  config = tiny.config(
    "run.env_steps=1000", "actor.random_steps=200", "learner.steps=100", *overrides
  )
  with tiny.training(config, folder) as training:
    return config, warmup.prepare(training), training


def acting(config: Config) -> float:
  return 800 / config.actor.lanes / 100


def test_a_step_takes_its_share_of_acting_its_batch_and_the_step_itself(tmp_path, monkeypatch):
  off = "refresh.enabled=false"
  config, seconds, _ = prepared(monkeypatch, tmp_path / "batch", "reanalyse.schedule=batch", off)
  assert seconds == pytest.approx(acting(config) + 2 + 1)  # searches and values of the batch
  config, seconds, _ = prepared(
    monkeypatch, tmp_path / "values", "reanalyse.schedule=batch", "reanalyse.ratio=0", off
  )
  assert seconds == pytest.approx(acting(config) + 1 + 1)
  config, seconds, _ = prepared(monkeypatch, tmp_path / "off", "reanalyse.schedule=off", off)
  assert seconds == pytest.approx(acting(config) + 1)


def test_sweeps_take_what_their_bound_asks_of_a_growing_replay(tmp_path, monkeypatch):
  both = ("reanalyse.max_age=30", "refresh.max_age=20", "replay.capacity=0")
  config, seconds, training = prepared(monkeypatch, tmp_path, *both)
  swept = 0.0
  for sweeper, part in zip(
    training.sweepers, (config.agent.reanalyse, config.agent.refresh), strict=True
  ):
    delay = max(part.weights_interval, config.actor.weights_interval)
    swept += (500 / part.block + 1.5) / (
      part.max_age - delay - 1
    )  # 500 states on average, of 1,000 in the end
    assert sweeper.block == part.block
  assert seconds == pytest.approx(acting(config) + swept + 1)


def test_who_is_stopped_compiles_nothing_more(tmp_path, monkeypatch):
  with tiny.training(tiny.config(), tmp_path) as training:
    training.interrupt()
    with Compilations() as compilations:
      assert warmup.prepare(training) is None
    assert not BIG & set(compilations.names)
    assert not loops.run(training)
