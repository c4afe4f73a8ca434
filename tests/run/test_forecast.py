"""Forecasts of memory and time against what runs take."""

import math

import jax
import numpy as np
import pytest
import tiny

from speedyzero_jax.config import loader
from speedyzero_jax.run import builders, forecast, loops, steps, warmup
from speedyzero_jax.run.forecast import Forecast
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import Compilations, WarmUp


@pytest.mark.parametrize("capacity", [0, 3000])
@pytest.mark.parametrize("collected", [500, 4000, 9999, 10000])
def test_the_mean_stored_is_that_of_the_steps_to_come(capacity, collected):
  changes = ["run.env_steps=10000", f"replay.capacity={capacity}", "actor.lanes=4"]
  config = loader.load(["quickstart"], changes)
  agent = builders.make_agent(config)
  stored = np.minimum(np.arange(collected, 10_000) + 0.5, capacity or np.inf)
  expected = stored.mean() if len(stored) else capacity or 10_000
  assert builders.mean_stored(config, agent, collected) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
@pytest.mark.parametrize("frames", ["host", "device"])
def test_a_batch_has_the_shapes_that_were_forecast(tmp_path, schedule, frames):
  overrides = f"reanalyse.schedule={schedule}", f"replay.frames={frames}"
  with tiny.experiment(tmp_path, *overrides) as experiment:
    expected, _ = warmup.example_batch(experiment)
    while not experiment.pipeline.ready():
      experiment.collector.collect()
    drawn = experiment.pipeline.draw(0).arrays
    for name, x in drawn.items():
      assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
    assert drawn.keys() == expected.keys()


def run(folder, *overrides, seconds_per_step):
  """A run to its end with a forecast, under a clock of learner steps; returns both."""
  lines: list[str] = []
  clock = {"now": lambda: 0.0}
  made = Forecast(lines.append, lambda: clock["now"]())
  with Compilations() as compilations, tiny.experiment(folder, *overrides) as experiment:
    clock["now"] = lambda: experiment.limiter.learner_steps * seconds_per_step
    warm_up = WarmUp(compilations)
    experiment.after_step.append(warm_up.step)
    made.watch(experiment, warm_up)
    timings = warmup.prepare(experiment)
    made.prepared(timings)
    assert loops.run(experiment)
    made.ended()
  return made, timings, lines


LONG = ("learner.steps=60", "run.env_steps=600", "learner.tail_steps=0", "replay.capacity=0")


def test_the_forecast_of_steady_work_is_right(tmp_path):
  steady = ("reanalyse.schedule=off", "refresh.enabled=false")
  made, timings, lines = run(tmp_path, *LONG, *steady, seconds_per_step=2)
  first, second = made.seconds
  assert first == 0 and 20 < second < 60
  each = math.fsum(timing.per_step * timing.seconds for timing in timings)
  assert made.seconds[0] == pytest.approx(60 * each)
  assert made.seconds[second] == pytest.approx(2 * 60)
  assert memory.size(made.host) in lines[-1]  # beside what it took


def test_sweeps_that_grow_with_the_replay_are_forecast(tmp_path):
  made, _, _ = run(tmp_path, *LONG, seconds_per_step=2)
  assert 2 * 60 < made.seconds[max(made.seconds)] < 3 * 2 * 60


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_the_memory_forecast_covers_what_is_held(tmp_path, schedule):
  made = Forecast(lambda _: None)
  with tiny.experiment(tmp_path, f"reanalyse.schedule={schedule}") as experiment:
    made.watch(experiment, WarmUp(Compilations()))
    made.prepared(warmup.prepare(experiment))
    while not experiment.pipeline.ready():
      experiment.collector.collect()
    prepared = steps.draw(experiment, 0)
    held = jax.tree.leaves((experiment.state, experiment.weights.snapshot(), prepared.arrays))
    held = [x for x in held if isinstance(x, jax.Array)]
  assert made.device >= sum(x.nbytes for x in held) + experiment.program_bytes
  assert made.device <= 2 * (sum(x.nbytes for x in held) + experiment.program_bytes)
  assert made.host >= memory.resident(peak=True)


def warnings(folder):
  lines: list[str] = []
  made = Forecast(lines.append)
  with tiny.experiment(folder) as experiment:
    made.watch(experiment, WarmUp(Compilations()))
  return [line for line in lines if line.startswith("warning")]


def test_there_is_a_warning_for_too_little_memory_and_no_other(tmp_path, monkeypatch):
  assert warnings(tmp_path / "enough") == []
  monkeypatch.setattr(memory, "available", lambda: 10**8)
  (host,) = warnings(tmp_path / "host")
  assert "replay.capacity" in host
  monkeypatch.setattr(memory, "available", lambda: 10**12)
  monkeypatch.setattr(forecast.memory, "of_devices", lambda what: 10**5)
  (device,) = warnings(tmp_path / "device")
  assert "replay.frames=host" in device
