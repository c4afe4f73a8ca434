"""What a configuration must satisfy: the range of every number, and settings that must fit each other.

A new numeric field needs a range here. Knows nothing of files and texts, jax, devices or processes.
"""

from collections.abc import Callable, Iterable
from typing import Any

from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs import scores
from speedyzero_jax.replay.sweep import STRETCH

VECTOR_GAMES = ("Catch", "CartPole")  # games whose frames are vectors: no image to downsample

# Where a number has no bound of its own, it is one below which nothing overflows: counts are int32 in places, and what
# is computed with these numbers is float32.
RANGES = {
  "[1, 1e9]": """
    env.max_episode_steps network.value_prefix_horizon search.max_considered actor.weights_interval
    reanalyse.weights_interval reanalyse.max_age refresh.max_age refresh.weights_interval learner.steps
    evaluation.max_episode_steps run.env_steps run.checkpoint_interval run.keep_checkpoints run.log_interval
  """,
  "[0, 1e9]": """
    env.threads search.max_depth actor.random_steps actor.max_lag replay.capacity replay.age_interval
    reanalyse.mixed_start reanalyse.mixed_newest optim.weight_decay optim.trust_min optim.trust_eps optim.clip_norm
    optim.warmup_steps optim.decay_steps learner.tail_steps learner.devices evaluation.interval
  """,
  "(0, 1e9]": "optim.learning_rate optim.trust_coefficient optim.trust_max topology.block_timeout",
  "[1, 1e6]": "actor.random_hold learner.batch_size evaluation.episodes",
  "[0, 1e6]": """
    search.c_visit search.c_scale search.c1 learner.value_coefficient learner.value_prefix_coefficient
    learner.policy_coefficient learner.consistency_coefficient reanalyse.block refresh.block
  """,
  "[1, 1e5]": """
    network.channels network.reduced_channels network.head_hidden network.lstm_hidden network.support
    network.projection_hidden network.projection_out network.prediction_hidden search.simulations actor.lanes
  """,
  "[0, 1e5]": "profile.steps topology.learners topology.actors topology.reanalysers",
  "[1, 1000]": """
    env.frame_stack env.frame_skip env.noop_max network.blocks replay.td_steps learner.unroll_steps learner.prefetch
  """,
  "[0, 1000]": "learner.shift learner.intensity",
  "[8, 512]": "env.frame_size",  # what envs.py makes
  "[0, 4294967296)": "run.seed",  # the 32 bits that a jax key takes without 64-bit types
  "[1e-6, 1e6]": "search.c2 search.dirichlet_alpha search.min_value_range actor.temperatures",
  "[1e-12, 1e6]": "replay.min_priority",
  "[0, 10]": "replay.alpha",
  "[0, 2]": "replay.beta_start replay.beta_end",  # beyond, rare samples' weights overflow
  "[0, 1]": """
    env.sticky_actions network.bn_momentum search.dirichlet_fraction actor.temperature_stages replay.min_weight
    reanalyse.ratio learner.state_gradient
  """,
  "(0, 1]": "env.discount optim.decay_rate",
  "[0, 1)": "optim.momentum",
}


def _inside(value: float, interval: str) -> bool:
  low, high = (float(end) for end in interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  return above and (value <= high if interval[-1] == "]" else value < high)


def _unknown_game(game: str) -> str | None:
  """What to say of a name that is no game's. Only where the list of this package does not know it, others are asked."""
  if game in VECTOR_GAMES or game in scores.atari100k_games():
    return None
  from speedyzero_jax.envs import batched_env  # takes seconds

  try:
    batched_env.check_game(game)
  except ValueError as error:
    return f"env.game: {error}"
  return None


def problems(config: Config, show: Callable[[Any], str]) -> Iterable[str]:
  """One line for each key whose value cannot be used. `show` writes a value as the user would."""
  for interval, keys in RANGES.items():
    for key in keys.split():
      section, name = key.split(".")
      value = getattr(getattr(config, section), name)
      if not all(_inside(v, interval) for v in (value if isinstance(value, tuple) else (value,))):
        yield f"{key}: must lie in {interval}, got {show(value)}"

  env, network, actor, learner = config.env, config.network, config.actor, config.learner
  unknown = _unknown_game(env.game)
  if unknown:
    yield unknown
  elif env.game in VECTOR_GAMES:
    if network.downsample != 1:
      yield f"network.downsample: must be 1 for {env.game}, which shows vectors, got {network.downsample}"
  else:
    if network.downsample not in (4, 8, 16):
      yield f"network.downsample: must be 4, 8 or 16 for {env.game}, which shows images, got {network.downsample}"
    elif env.frame_size % network.downsample:
      yield f"env.frame_size: must be a multiple of network.downsample ({network.downsample}), got {env.frame_size}"
    if network.channels == 1:
      yield f"network.channels: must be at least 2 for {env.game}, which shows images (h begins with half), got 1"
  stages = actor.temperature_stages
  if len(actor.temperatures) != len(stages) + 1:
    yield (
      f"actor.temperatures: must be one more than actor.temperature_stages ({len(stages)}), "
      f"got {show(actor.temperatures)}"
    )
  if list(stages) != sorted(stages):
    yield f"actor.temperature_stages: must not fall, got {show(stages)}"
  if actor.random_steps > config.run.env_steps:
    yield f"actor.random_steps: must be at most run.env_steps ({config.run.env_steps}), got {actor.random_steps}"
  if 0 < actor.max_lag <= actor.weights_interval:
    yield (
      f"actor.max_lag: must be 0 or more than actor.weights_interval ({actor.weights_interval}), got {actor.max_lag}"
    )
  if learner.tail_steps > learner.steps:
    yield f"learner.tail_steps: must be at most learner.steps ({learner.steps}), got {learner.tail_steps}"
  if learner.devices and learner.batch_size % learner.devices:
    yield f"learner.batch_size: must be a multiple of learner.devices ({learner.devices}), got {learner.batch_size}"
  for name, part, used in (
    ("refresh", config.refresh, config.refresh.enabled),
    ("reanalyse", config.reanalyse, config.reanalyse.schedule == "sweep"),
  ):
    intervals = {
      f"{name}.weights_interval": part.weights_interval,
      "actor.weights_interval": actor.weights_interval,
    }
    slowest = max(intervals, key=intervals.__getitem__)
    delay = intervals[slowest]  # how old weights are when they are used first
    if 0 < part.block < STRETCH:
      yield f"{name}.block: must be 0 or at least {STRETCH}, got {part.block}"
    if used and part.max_age < delay + 2:
      yield f"{name}.max_age: must be at least two more than {slowest} ({delay}), so {delay + 2}, got {part.max_age}"
  tls = [
    key for key in ("certificate", "key", "authority") if getattr(config.topology, f"tls_{key}")
  ]
  if tls and len(tls) < 3:
    yield f"topology.tls_{tls[0]}: needs topology.tls_certificate, tls_key and tls_authority together"
  if config.optim.trust_min > config.optim.trust_max:
    yield f"optim.trust_min: must be at most optim.trust_max ({config.optim.trust_max}), got {config.optim.trust_min}"
