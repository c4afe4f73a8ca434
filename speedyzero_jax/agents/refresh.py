"""Priority Refresh (SpeedyZero, Mei et al. 2023): background recomputation of all priorities.

A task sweeps the whole replay with recent weights: it evaluates each state, stores the values with
the stamp `value_step`, and recomputes the priorities of the samples that depend on them.

See also `workers/sweeper.py` and `replay/sweep.py` for the schedule, `efficientzero/reanalyse.py`
for SpeedyZero's task, and `efficientzero/targets.refreshed_errors` for its errors v - z.
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
from speedyzero_jax.replay.sweep import CHUNK

REFRESHER = "refresher"  # subscription to weights
REFRESHED_STATES = "refresh/states"  # metric: states evaluated, per second and per learner step

Write = Callable[[Replay, np.ndarray, np.ndarray, dict[str, np.ndarray], int], None]


@dataclasses.dataclass(frozen=True)
class RefreshConfig:
  """Priority Refresh: continuous recomputation of all priorities."""

  enabled: bool = opt(
    False, "recompute all priorities continuously (SZ); off: only those of sampled transitions"
  )
  max_age: int = opt(100, "maximum age of a priority, learner steps (ours)", "[1, 1e9]")
  weights_interval: int = opt(
    10, "learner steps between updates of the refresher's weights (SZ: 10)", "[1, 1e9]"
  )
  block: int = opt(0, "states evaluated per call; 0: 256 on CPUs, else 4,096 (ours)", "[0, 1e6]")


def sweep_problems(name: str, section: Any, config: Config) -> Iterable[str]:
  """Yields `key: problem` for the configuration section `name` of a sweeping task."""
  intervals = {
    f"{name}.weights_interval": section.weights_interval,
    "actor.weights_interval": config.actor.weights_interval,
  }
  slowest = max(intervals, key=intervals.__getitem__)
  delay = intervals[slowest]  # maximum age of weights when they are used
  if 0 < section.block < CHUNK:
    yield f"{name}.block: must be 0 or at least {CHUNK}, got {section.block}"
  if section.max_age < delay + 2:
    yield (f"{name}.max_age: must be at least {slowest} + 2 = {delay + 2}, got {section.max_age}")


def refresh_task(
  config: RefreshConfig,
  program: Callable[[Any, Arrays, Any], Arrays],
  results: tuple[Column, ...],
  write: Write,
  reads: tuple[Column, ...] = (),
) -> Task:
  """Makes the task.

  `write` stores the values and calls `recompute_priorities`; see `Task` for the others.
  """
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


def recompute_priorities(
  replay: Replay,
  lane: np.ndarray,
  time: np.ndarray,
  reach: int,
  errors: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> None:
  """Host: recomputes the priorities of all samples that may depend on the given slots.

  Args:
    replay: must have a `PrioritizedSampler`.
    lane: [m], of slots with new values.
    time: [m], of the same slots.
    reach: a sample depends on values up to this many slots after its first one.
    errors: maps eligible samples (lane [k], time [k]) to their errors [k], NaN while unknown, and
      to the learner steps [k] of the oldest weights that they depend on.
  """
  store, sampler = replay.store, replay.selector
  if not isinstance(sampler, PrioritizedSampler):
    raise TypeError(f"Priority Refresh needs a PrioritizedSampler, got {type(sampler).__name__}")
  present, _ = replay.clamp(lane, time)
  times = time[present][:, None] - np.arange(reach + 1)
  lanes = np.broadcast_to(lane[present][:, None], times.shape)
  stored = times >= store.tail[lanes]
  lane, time = lanes[stored], times[stored]
  eligible = sampler.eligible(lane, time)
  cells = np.unique(store.flat(lane[eligible], time[eligible]))
  lane, cell = np.divmod(cells, store.capacity)
  time = store.time_of(lane, cell)
  error, step = errors(lane, time)
  known = ~np.isnan(error)
  sampler.set_priorities(lane[known], time[known], error[known], step[known])
