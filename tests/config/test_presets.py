"""Tests of the presets in configs/: validity, published settings, and stacking."""

import math

import pytest

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.presets import preset_names


def get(config, key):
  return loader.flat(config)[key]


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_valid_and_says_what_it_is_for(preset):
  loader.load([preset])
  lines = [line.split() for line in loader.help_text().splitlines()]
  assert any(line[:1] == [preset] and len(line) > 4 for line in lines)


EFFICIENTZERO = {  # the paper and the released code, as in its Atari configuration
  "env.frame_size": 96, "env.frame_stack": 4, "env.frame_skip": 4, "env.noop_max": 30,
  "env.max_episode_steps": 3000,
  "env.grayscale": False, "env.episodic_life": True, "env.clip_rewards": True,
  "env.sticky_actions": 0,
  "env.fire_reset": False, "reanalyse.explore": True, "loss.state_gradient": 0.5,
  "network.channels": 64, "network.lstm_hidden": 512, "network.support": 300,
  "network.value_prefix_horizon": 5,
  "search.algorithm": "puct", "search.simulations": 50, "search.c1": 1.25, "search.c2": 19652,
  "search.dirichlet_alpha": 0.3, "search.dirichlet_fraction": 0.25,
  "actor.random_steps": 2000, "actor.weights_interval": 100, "search.temperatures": (1, 0.5, 0.25),
  "search.temperature_stages": (0.4166666667, 0.625), "network.init": "pytorch",
  "loss.gradient_scaling": "efficientzero", "loss.absorbing_states": False,
  "priority.alpha": 0.6, "priority.beta_start": 0.4,
  "priority.beta_end": 1,
  "loss.td_steps": 5, "loss.age_interval": 30_000, "reanalyse.schedule": "batch",
  "reanalyse.ratio": 0.99, "reanalyse.simulations": 0, "reanalyse.reuse": False,
  "reanalyse.weights_interval": 200, "refresh.enabled": False, "optim.name": "sgd",
  "optim.learning_rate": 0.2,
  "optim.momentum": 0.9, "optim.weight_decay": 1e-4, "optim.clip_norm": 5,
  "optim.warmup_steps": 1000,
  "optim.decay_steps": 100_000, "optim.decay_rate": 0.1, "learner.batch_size": 256,
  "learner.steps": 120_000,
  "learner.tail_steps": 20_000, "loss.unroll_steps": 5, "loss.value_coefficient": 0.25,
  "loss.consistency_coefficient": 2, "evaluation.episodes": 32,
  "evaluation.max_episode_steps": 27_000,
  "run.env_steps": 100_000,
}  # fmt: skip
SPEEDYZERO = {  # the paper's main setting
  "run.env_steps": 300_000, "learner.steps": 15_000, "learner.batch_size": 8 * 256,
  "reanalyse.weights_interval": 25,
  "actor.weights_interval": 10, "refresh.weights_interval": 10, "refresh.enabled": True,
  "optim.name": "clipped_lars",
}  # fmt: skip


@pytest.mark.parametrize(
  ("preset", "published"), [("efficientzero", EFFICIENTZERO), ("atari300k", SPEEDYZERO)]
)
def test_published_settings(preset, published):
  config = loader.load([preset])
  assert {key: get(config, key) for key in published} == published
  assert math.isclose(config.env.discount, 0.997**4, rel_tol=1e-15)


def test_efficientzero_undoes_what_was_stacked_before_it():
  """All but what is not its own (Gumbel search, sweeps, Priority Refresh, LARS) and the log."""
  presets = ["quickstart", "atari_small", "atari300k", "efficientzero"]
  alone, stacked = (
    loader.flat(loader.load(names, ["env.game=Breakout"])) for names in (presets[-1:], presets)
  )
  assert {key for key in alone if alone[key] != stacked[key]} == {
    "search.uniform_fraction", "reanalyse.max_age", "reanalyse.block", "refresh.block",
    "optim.trust_max", "optim.min_weight_norm", "run.log_interval",
  }  # fmt: skip


GAMES = ("Catch", "CartPole", "MemoryCatch", "Pong")


@pytest.mark.parametrize("preset", ["impala", "a2c", "a3c", "appo", "ppo", "ppo_atari"])
def test_on_policy_presets_train_on_what_they_collect(preset):
  for game in ("Pong", "Breakout") if preset == "ppo_atari" else GAMES:
    config = loader.load([preset], [f"env.game={game}"])
    with pytest.raises(ConfigError, match=r"learner\.steps: must be at most"):
      loader.override(config, [f"learner.steps={round(config.learner.steps / 0.9)}"])


def test_ez_v2_replaces_the_search_of_what_was_stacked_before_it():
  game = ["env.game=Breakout"]
  alone, stacked = loader.load(["ez_v2"], game), loader.load(["atari100k_adam", "ez_v2"], game)
  assert alone.agent.search == stacked.agent.search


def test_atari100k_samples_each_transition_as_often_as_atari300k():
  small, large = loader.load(["atari100k"]), loader.load(["atari300k"])
  assert small.run.env_steps == 100_000

  def samples_per_transition(config):
    return config.learner.steps * config.learner.batch_size / config.run.env_steps

  assert samples_per_transition(small) == samples_per_transition(large)
  assert loader.load(["atari100k", "atari300k"]) == large
  # And n-step returns grow shorter over the same share of it.
  assert (
    small.agent.loss.age_interval / small.run.env_steps
    == large.agent.loss.age_interval / large.run.env_steps
  )


ON_TOP = {
  "sweep": ("reanalyse.schedule", "sweep"),
  "tryout": ("learner.steps", 20),
  "gpu": ("network.dtype", "bfloat16"),
}


@pytest.mark.parametrize("preset", ["atari_small", "atari300k", "efficientzero", "ez_v2"])
def test_presets_that_stack_on_any_do(preset):
  for on_top, (key, value) in ON_TOP.items():
    assert get(loader.load([preset, on_top], ["env.game=Pong"]), key) == value
