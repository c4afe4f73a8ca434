"""Tests of forecasts of memory and time against measurements of runs."""

import re

import jax
import numpy as np
import pytest

from speedyzero_jax.config import loader
from speedyzero_jax.run import factories, forecast, steps, warmup
from speedyzero_jax.system import memory
from whole_runs import quick


@pytest.mark.parametrize("capacity", [0, 3000])
def test_the_mean_stored_is_that_of_the_steps_to_come(capacity):
  changes = ["run.env_steps=10000", f"replay.capacity={capacity}", "actor.lanes=4"]
  config = loader.load(["quickstart"], changes)
  agent = factories.make_agent(config)
  for collected in (500, 4000, 9999, 10000):
    stored = np.minimum(np.arange(collected, 10_000) + 0.5, capacity or np.inf)
    expected = stored.mean() if len(stored) else capacity or 10_000
    assert factories.mean_stored(config, agent, collected) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("schedule", "frames"), [("sweep", "device"), ("batch", "host")])
def test_the_forecast_covers_what_is_held_and_done(tmp_path, capsys, schedule, frames):
  overrides = f"reanalyse.schedule={schedule}", f"replay.frames={frames}"
  with quick(tmp_path, *overrides) as experiment:
    timings = warmup.prepare(experiment)
    assert forecast.seconds_per_step(timings) > 0
    peak = memory.resident(peak=True)
    forecast.report(experiment, timings)
    host, device = forecast.host_bytes(experiment), forecast.device_bytes(experiment)
    assert host >= peak
    expected, _ = warmup.example_batch(experiment.local_config, experiment.agent)
    window = experiment.agent.window.after
    expected["frames"] = experiment.replay.blanks(
      experiment.local_config.learner.batch_size, window
    )
    while not experiment.can_draw():
      experiment.collector.collect()
    drawn = steps.draw(experiment, 0).arrays
    for name, x in drawn.items():
      assert (x.shape, x.dtype) == (expected[name].shape, expected[name].dtype), name
    assert drawn.keys() == expected.keys()
    held = jax.tree.leaves((experiment.state, experiment.weights.snapshot(), drawn))
    needed = sum(x.nbytes for x in held if isinstance(x, jax.Array)) + experiment.program_bytes
    needed += experiment.replay.bytes_on_devices
    assert needed <= device <= 2 * needed
  line = next(line for line in capsys.readouterr().out.splitlines() if "needs about" in line)
  shown = float(re.search(r"needs about ([\d.]+) GB of ", line)[1])
  assert peak / 1e9 - 0.1 <= shown <= host / 1e9 + 0.1 and "s a learner step (" in line


def test_there_is_a_warning_for_too_little_memory_and_no_other(tmp_path, monkeypatch, capsys):
  with quick(tmp_path) as experiment:
    for name, figure, advice in (
      ("usable", 0, "replay.capacity"), ("device_limit", 10**4, "replay.frames=host"),
      ("usable", 2**60, None),
    ):  # fmt: skip
      with monkeypatch.context() as patch:
        patch.setattr(memory, name, lambda *_, figure=figure: figure)
        forecast.report(experiment, [])
      lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning")]
      assert [advice in line for line in lines] == ([True] if advice else [])
