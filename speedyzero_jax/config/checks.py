"""Validation of a configuration: intervals of numbers, and settings that depend on each other."""

from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from speedyzero_jax.config.fields import inside
from speedyzero_jax.config.schema import Config


def interval_problems(fields: Mapping[str, Field[Any]], values: Mapping[str, Any]) -> Iterable[str]:
  """Yields `key: ...` for each number outside the interval of its field."""
  for key, field in fields.items():
    interval, value = field.metadata["interval"], values[key]
    numbers = value if isinstance(value, tuple) else (value,)
    if interval and not all(inside(number, interval) for number in numbers):
      shown = list(value) if isinstance(value, tuple) else value
      yield f"{key}: must lie in {interval}, got {shown}"


def problems(config: Config) -> Iterable[str]:
  """Yields `key: ...` for settings that contradict each other, for any agent."""
  actor, learner, run = config.actor, config.learner, config.run
  if actor.random_steps > run.env_steps:
    yield (
      f"actor.random_steps: must be at most run.env_steps ({run.env_steps}), "
      f"got {actor.random_steps}"
    )
  if 0 < actor.max_lag <= actor.weights_interval:
    yield (
      f"actor.max_lag: must be 0 or more than actor.weights_interval ({actor.weights_interval}), "
      f"got {actor.max_lag}"
    )
  if learner.tail_steps > learner.steps:
    yield (
      f"learner.tail_steps: must be at most learner.steps ({learner.steps}), "
      f"got {learner.tail_steps}"
    )
  if learner.devices and learner.batch_size % learner.devices:
    yield (
      f"learner.batch_size: must be a multiple of learner.devices ({learner.devices}), "
      f"got {learner.batch_size}"
    )
  if config.topology.refreshers and not config.agent.refreshes:
    yield (
      f"topology.refreshers: must be 0, as {config.agent.name} with these settings recomputes "
      f"nothing, got {config.topology.refreshers}"
    )
  given = [k for k in ("certificate", "key", "authority") if getattr(config.topology, f"tls_{k}")]
  if given and len(given) < 3:
    yield (
      f"topology.tls_{given[0]}: needs topology.tls_certificate, tls_key and tls_authority together"
    )
  if config.optim.trust_min > config.optim.trust_max:
    yield (
      f"optim.trust_min: must be at most optim.trust_max ({config.optim.trust_max}), "
      f"got {config.optim.trust_min}"
    )
