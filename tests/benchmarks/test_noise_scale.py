"""Tests of the gradient noise scale: gradients of known noise, and a small run."""

import numpy as np
import pytest

import noise_scale
import tiny
from launched import listing
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import run_dir
from speedyzero_jax.run.experiment import TrainingError
from whole_runs import run


def test_the_scale_of_known_noise_is_estimated():
  rng, size = np.random.default_rng(0), 16
  mean, deviations = rng.normal(size=500), np.linspace(0, 8, 500)
  batches = mean + rng.normal(size=(400, 500)) * deviations / np.sqrt(size)
  noise = noise_scale.noise_of(batches, size)
  expected = (deviations**2).sum() / (mean**2).sum()
  assert noise.scale == pytest.approx(expected, rel=0.05)
  assert abs(noise.scale - expected) < 3 * noise.error
  assert noise.trace == pytest.approx((deviations**2).sum(), rel=0.02)


def test_pure_noise_has_an_infinite_scale():
  batches = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
  assert noise_scale.noise_of(batches, 8).scale == np.inf


@pytest.mark.parametrize(
  ("settings", "held", "message"),
  [
    (["quickstart"], True, "is in use"),
    (["quickstart", "topology.learners=2"], False, "has several learners"),
    (["quickstart"], False, "has no checkpoint"),
    (["ppo"], False, "on-policy agent"),
  ],
)
def test_runs_that_cannot_be_measured_are_refused(tmp_path, settings, held, message):
  config = loader.load(settings[:1], [*settings[1:], f"run.dir={tmp_path / 'run'}"])
  with run_dir.create(config, "") as opened:
    if not held:
      opened.close()
    with pytest.raises((ConfigError, TrainingError), match=message):
      noise_scale.measure(opened.path, 4)


def test_a_run_is_measured_and_not_changed(tmp_path):
  folder = tmp_path / "run"
  run(folder)
  (folder / "config.yaml").write_text(loader.to_yaml(tiny.config("agent=quick_agent")))
  before = listing(folder)
  row = noise_scale.measure(folder, 4)
  assert listing(folder) == before
  assert row["learner_steps"] == tiny.config().learner.steps
  assert row["trace"] > 0
