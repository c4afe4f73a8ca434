"""Validation of settings that depend on each other, for any agent."""

from collections.abc import Iterable, Mapping
from typing import Any

from speedyzero_jax.config.schema import Config

_AT_MOST = (
  ("actor.random_steps", "run.env_steps"),
  ("learner.tail_steps", "learner.steps"),
  ("optim.trust_min", "optim.trust_max"),
)


def problems(config: Config, values: Mapping[str, Any]) -> Iterable[str]:
  """Yields `key: ...` for settings that contradict each other; `values` has them by dotted key."""
  actor, learner, topology = config.actor, config.learner, config.topology
  for key, bound in _AT_MOST:
    if values[key] > values[bound]:
      yield f"{key}: must be at most {bound} ({values[bound]}), got {values[key]}"
  if 0 < actor.max_lag <= actor.weights_interval:
    yield (
      f"actor.max_lag: must be 0 or more than actor.weights_interval ({actor.weights_interval}), "
      f"got {actor.max_lag}"
    )
  if learner.devices and learner.batch_size % learner.devices:
    yield (
      f"learner.batch_size: must be a multiple of learner.devices ({learner.devices}), "
      f"got {learner.batch_size}"
    )
  if topology.refreshers and not config.agent.refreshes:
    yield (
      f"topology.refreshers: must be 0, as {config.agent.name} with these settings recomputes "
      f"nothing, got {topology.refreshers}"
    )
  tls = (topology.tls_certificate, topology.tls_key, topology.tls_authority)
  if any(tls) and not all(tls):
    yield "topology.tls_certificate: goes together with topology.tls_key and tls_authority"
