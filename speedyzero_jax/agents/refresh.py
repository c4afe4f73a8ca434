"""Priority Refresh (SpeedyZero, Mei et al. 2023): all stored priorities from recent weights.

A task sweeps the whole replay: it evaluates each state, stores the values and scores the samples
whose errors depend on them. An agent stamps such values as `value_step`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from speedyzero_jax.agents.base import Arrays, Task
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.sweep import STRETCH

REFRESHER = "refresher"  # subscription to weights
REFRESHED_STATES = "refresh/states"  # metric: states evaluated, per second and per learner step

Write = Callable[[Replay, np.ndarray, np.ndarray, dict[str, np.ndarray], int], None]


@dataclasses.dataclass(frozen=True)
class RefreshConfig:
  """Priority Refresh: continuous recomputation of all priorities."""

  enabled: bool = opt(
    False, "recompute all priorities continuously (SZ); off: only those of sampled transitions"
  )
  max_age: int = opt(
    100, "maximum age of a priority, learner steps (ours: SZ publishes no bound)", "[1, 1e9]"
  )
  weights_interval: int = opt(
    10, "learner steps between updates of the refresher's weights (SZ: 10)", "[1, 1e9]"
  )
  block: int = opt(0, "states evaluated per call; 0: 256 on CPUs, else 4,096 (ours)", "[0, 1e6]")


def sweep_problems(name: str, section: Any, config: Config) -> Iterable[str]:
  """Yields `key: problem` for the section `name` of a task that sweeps."""
  intervals = {
    f"{name}.weights_interval": section.weights_interval,
    "actor.weights_interval": config.actor.weights_interval,
  }
  slowest = max(intervals, key=intervals.__getitem__)
  delay = intervals[slowest]  # age of weights at their first use
  if 0 < section.block < STRETCH:
    yield f"{name}.block: must be 0 or at least {STRETCH}, got {section.block}"
  if section.max_age < delay + 2:
    yield (
      f"{name}.max_age: must be at least two more than {slowest} ({delay}), so {delay + 2}, "
      f"got {section.max_age}"
    )


def refresh_task(
  config: RefreshConfig,
  program: Callable[[Any, Arrays, Any], Arrays],
  results: tuple[Column, ...],
  write: Write,
  reads: tuple[Column, ...] = (),
) -> Task:
  """The task; `write` stores the values and calls `rescore`. Other arguments as of `Task`."""
  return Task(
    program=program,
    reads=reads,
    results=results,
    write=write,
    subscription=REFRESHER,
    part="refresh",
    rate=REFRESHED_STATES,
    stamp="value_step",
    max_age=config.max_age,
    block=config.block,
  )


def rescore(
  replay: Replay,
  lane: np.ndarray,
  time: np.ndarray,
  reach: int,
  errors: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> None:
  """Host: scores every sample that may depend on values of these slots (lane [m], time [m]).

  Those are the samples that begin there or up to `reach` slots before. `errors` gives, for the
  eligible ones (lane [k], time [k]), their errors [k], NaN if not known yet, and the oldest learner
  steps [k] behind them.
  """
  store, sampler = replay.store, replay.selector
  assert isinstance(sampler, PrioritizedSampler)
  present, _ = replay.clamp(lane, time)
  times = time[present][:, None] - np.arange(reach + 1)
  lanes = np.broadcast_to(lane[present][:, None], times.shape)
  stored = times >= store.tail[lanes]
  at, when = lanes[stored], times[stored]
  held = sampler.eligible(at, when)
  at, cell = np.divmod(np.unique(store.flat(at[held], when[held])), store.capacity)
  when = store.time_of(at, cell)
  error, step = errors(at, when)
  known = ~np.isnan(error)
  sampler.score(at[known], when[known], error[known], step[known])
