"""Forecasts of memory and time against what runs take."""

import math
import time

import jax
import numpy as np
import pytest

from speedyzero_jax.config import loader
from speedyzero_jax.run import builders, forecast, steps, warmup
from speedyzero_jax.run.forecast import Forecast
from speedyzero_jax.system import memory
from whole_runs import quick


@pytest.mark.parametrize("capacity", [0, 3000])
def test_the_mean_stored_is_that_of_the_steps_to_come(capacity):
  changes = ["run.env_steps=10000", f"replay.capacity={capacity}", "actor.lanes=4"]
  config = loader.load(["quickstart"], changes)
  agent = builders.make_agent(config)
  for collected in (500, 4000, 9999, 10000):
    stored = np.minimum(np.arange(collected, 10_000) + 0.5, capacity or np.inf)
    expected = stored.mean() if len(stored) else capacity or 10_000
    assert builders.mean_stored(config, agent, collected) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
@pytest.mark.parametrize("frames", ["host", "device"])
def test_a_batch_has_the_shapes_that_were_forecast(tmp_path, schedule, frames):
  overrides = f"reanalyse.schedule={schedule}", f"replay.frames={frames}"
  with quick(tmp_path, *overrides) as experiment:
    expected, _ = warmup.example_batch(experiment.own, experiment.agent)
    window = experiment.agent.window.after
    expected["frames"] = experiment.replay.blanks(experiment.own.learner.batch_size, window)
    while not experiment.ready():
      experiment.collector.collect()
    drawn = steps.draw(experiment, 0).arrays
    for name, x in drawn.items():
      assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
    assert drawn.keys() == expected.keys()


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_the_forecast_covers_what_is_held_and_done(tmp_path, schedule):
  lines: list[str] = []
  made = Forecast(lines.append)
  with quick(tmp_path, f"reanalyse.schedule={schedule}") as experiment:
    made.begin(experiment)
    timings = warmup.prepare(experiment)
    began = time.monotonic()
    made.prepared(experiment, timings)
    left = 12 * math.fsum(timing.calls * timing.seconds for timing in timings)  # 12 learner steps
    assert left < made.seconds < left + time.monotonic() - began + 60
    assert made.host >= memory.resident(peak=True)
    while not experiment.ready():
      experiment.collector.collect()
    prepared = steps.draw(experiment, 0)
    held = jax.tree.leaves((experiment.state, experiment.weights.snapshot(), prepared.arrays))
    held = [x for x in held if isinstance(x, jax.Array)]
  needed = sum(x.nbytes for x in held) + experiment.program_bytes
  assert needed <= made.device <= 2 * needed
  made.ended()
  assert memory.size(made.host) in lines[-1]  # beside what it took


def warnings(folder):
  lines: list[str] = []
  made = Forecast(lines.append)
  with quick(folder) as experiment:
    made.begin(experiment)
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
