"""Execution of background tasks, on a sampled batch or in sweeps of the whole replay.

See also `replay/sweep.py` for the order of a sweep, and `agents/refresh.py` for Priority Refresh.
"""

import jax
import numpy as np

from speedyzero_jax.agents.base import Agent, Arrays, Task, Work
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.system.platform import platform
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import WeightsStore

_SLACK = 2  # learner steps by which a sweep may lag behind
_ON_CPU, _ON_ACCELERATOR = 256, 4096  # states per call, enough to saturate two cores, or a GPU


def write_results(replay: Replay, task: Task, work: Work, results: Arrays, step: int) -> None:
  """Writes a task's results [B, n, ...] into the replay, unless newer ones are stored.

  Results of windows whose first state is evicted are dropped, as they may be those of later states.

  Raises ValueError if names, dtypes or shapes are not the task's, or if a value is not finite.
  """
  real, names = work.real, {column.name for column in task.results}
  if results.keys() != names:
    raise ValueError(f"{work.task}: results must be {sorted(names)}, got {sorted(results)}")
  for column in task.results:  # check all before writing any
    array, form = results[column.name], (column.dtype, (*real.shape, *column.shape))
    if (array.dtype, array.shape) != form or not np.isfinite(array).all():
      raise ValueError(
        f"{work.task}: result {column.name} must be finite {form[0]}{list(form[1])}, got "
        f"{array.dtype}{list(array.shape)}"
      )
  with replay.lock:
    stored, _ = replay.clamp(work.lane, work.time)
    real = real & stored[:, None]
    time = (work.time[:, None] + np.arange(real.shape[1]))[real]
    lane = np.broadcast_to(work.lane[:, None], real.shape)[real]
    task.write(replay, lane, time, {name: x[real] for name, x in results.items()}, step)


def split(work: Work, parts: int) -> list[Work]:
  """Splits work into about equal parts."""
  count = min(parts, len(work.lane))
  arrays = (np.array_split(x, count) for x in (work.lane, work.time, work.real))
  return [Work(work.task, *part) for part in zip(*arrays, strict=True)]


def run_task(
  task: Task,
  inference: Inference,
  replay: Replay,
  weights: WeightsStore,
  work: Work,
  key: jax.Array,
) -> int:
  """Recomputes the states of `work` in this process; returns their number."""
  version = weights.latest(task.subscription)
  states = work.lane, work.time, work.real.shape[1] - 1
  inputs = {"frames": replay.windows(*states), **task.inputs(replay, *states)}
  results = inference.compute(version, work.task, inputs, key)
  write_results(replay, task, work, results, version.step)
  return int(work.real.sum())


class Sweeper:
  """Schedules one task's sweeps over a replay.

  Args:
    task: must have `max_age`.
    actor_interval: learner steps between updates of the actors' weights.
    weights_interval: learner steps between updates of the task's weights.

  Raises ValueError if `max_age` is too short for these intervals.
  """

  def __init__(self, name: str, task: Task, actor_interval: int, weights_interval: int):
    self.name, self.task, self.max_age = name, task, task.max_age
    on_cpu = platform() == "cpu"
    self.block = task.block or (_ON_CPU if on_cpu else _ON_ACCELERATOR)
    # Weights may be one interval old when they are used; so may values when slots are appended.
    self._delay = max(weights_interval, actor_interval)
    if self.max_age < self._delay + 2:
      raise ValueError(f"{name}: max_age must be at least {self._delay + 2}, got {self.max_age}")
    self.calls = 0
    self.credit = 0  # states to recompute
    self.credited = 0  # learner steps included in `credit`
    self.states = 0  # states recomputed

  def state_dict(self) -> dict[str, int]:
    """Returns the counters for a checkpoint."""
    return {"calls": self.calls, "credit": self.credit, "credited": self.credited}

  def load_state_dict(self, state: dict[str, int]) -> None:
    """Restores `state_dict`."""
    self.calls, self.credit, self.credited = state["calls"], state["credit"], state["credited"]

  def due(self, replay: Replay, learner_step: int) -> bool:
    """Adds the credit up to `learner_step`; returns whether a block is covered by it or overdue.

    The credit is at most a whole pass: after it, every age is within its bound again, however long
    the sweep was behind.
    """
    steps_per_pass = max(self.max_age - self._delay - 1, _SLACK + 1)
    while self.credited < learner_step:
      quota = replay.quota(self.name, self.block, self.max_age, self._delay)
      self.credit = min(self.credit + quota, quota * steps_per_pass + self.block)
      self.credited += 1
    return self.credit >= self.block or self.overdue(replay, learner_step)

  def calls_per_step(self, stored: float) -> float:
    """Mean number of blocks per learner step with `stored` states in the replay."""
    # As `Sweep.quota`, with half a block of padding in each phase on average.
    return (stored / self.block + 1 + self.task.phases / 2) / (self.max_age - self._delay - 1)

  def overdue(self, replay: Replay, learner_step: int) -> bool:
    """Whether any stamp would exceed the maximum age after one more learner step."""
    return replay.is_older(self.task.stamp, learner_step + 1 - self.max_age)

  def behind(self, replay: Replay, learner_step: int) -> bool:
    """Whether the sweep is more than a block and `_SLACK` learner steps behind its schedule.

    The learner should then wait, instead of waiting for longer once the maximum age is reached.
    """
    quota = replay.quota(self.name, self.block, self.max_age, self._delay)
    return self.credit + (learner_step - self.credited) * quota > self.block + _SLACK * quota

  def next(self, replay: Replay) -> Work:
    """Returns the next block and subtracts it from the credit."""
    lane, time = replay.next_block(self.name, self.block)
    self.credit = max(self.credit - self.block, 0)
    return Work(self.name, lane, time, np.ones((len(lane), 1), bool))


def make_sweepers(agent: Agent, actor_interval: int) -> list[Sweeper]:
  """Makes the sweepers of an agent's tasks that have a `max_age`."""
  return [
    Sweeper(name, task, actor_interval, agent.subscriptions[task.subscription])
    for name, task in agent.tasks.items()
    if task.max_age
  ]
