"""Execution of an agent's tasks: on a sampled batch, or in sweeps of the whole replay."""

import jax
import numpy as np

from speedyzero_jax.agents.base import Agent, Arrays, Task, Work
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.system.platform import platform
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import WeightsStore

_SLACK = 2  # learner steps by which a sweep may be behind
_ON_CPU, _ON_ACCELERATOR = 256, 4096  # states per call that saturate two cores, or a GPU


def write_results(replay: Replay, task: Task, work: Work, results: Arrays, step: int) -> None:
  """Writes a task's results [B, n, ...] into the replay, unless newer ones are stored.

  Raises ValueError for other results than the task's, or some that are not finite.
  """
  real, names = work.real, {column.name for column in task.results}
  if results.keys() != names:
    raise ValueError(f"{work.task}: results must be {sorted(names)}, got {sorted(results)}")
  for column in task.results:  # before any is written
    found, form = results[column.name], (column.dtype, (*real.shape, *column.shape))
    if (found.dtype, found.shape) != form or not np.isfinite(found).all():
      raise ValueError(f"{work.task}: result {column.name} must be finite, of {form}")
  time = (work.time[:, None] + np.arange(real.shape[1]))[real]
  lane = np.broadcast_to(work.lane[:, None], real.shape)[real]
  with replay.lock:
    task.write(replay, lane, time, {name: x[real] for name, x in results.items()}, step)


def run_task(
  task: Task,
  inference: Inference,
  replay: Replay,
  weights: WeightsStore,
  work: Work,
  key: jax.Array,
) -> int:
  """Runs one piece of a task's work in this process; returns the number of states."""
  version = weights.latest(task.subscription)
  states = work.lane, work.time, work.real.shape[1] - 1
  inputs = {"frames": replay.windows(*states), **replay.values(task.reads, *states)}
  results = inference.compute(version, work.task, inputs, key)
  write_results(replay, task, work, results, version.step)
  return int(work.real.sum())


class Sweeper:
  """The schedule of one task's sweeps over a replay.

  The intervals are learner steps between updates of the actors' and of the task's weights.
  """

  def __init__(self, name: str, task: Task, actor_interval: int, weights_interval: int):
    self.name, self.task, self.max_age = name, task, task.max_age
    on_cpu = platform() == "cpu"
    self.block = task.block or (_ON_CPU if on_cpu else _ON_ACCELERATOR)
    # Weights are as old as their interval when used, and so are slots when appended.
    self._delay = max(weights_interval, actor_interval)
    self.calls = 0
    self.credit = 0  # states that may be computed
    self.credited = 0  # learner steps credited
    self.states = 0  # states computed

  def state_dict(self) -> dict[str, int]:
    """The counters, for a checkpoint."""
    return {"calls": self.calls, "credit": self.credit, "credited": self.credited}

  def load_state_dict(self, state: dict[str, int]) -> None:
    """Restores `state_dict`."""
    self.calls, self.credit, self.credited = state["calls"], state["credit"], state["credited"]

  def due(self, replay: Replay, learner_step: int) -> bool:
    """Whether a block is due: covered by the credit, or overdue."""
    while self.credited < learner_step:
      self.credit += replay.quota(self.name, self.block, self.max_age, self._delay)
      self.credited += 1
    return self.credit >= self.block or self.overdue(replay, learner_step)

  def calls_per_step(self, stored: float) -> float:
    """Mean blocks per learner step with `stored` states in the replay (see `Sweep.quota`)."""
    return (stored / self.block + 1.5) / (self.max_age - self._delay - 1)  # half a block of padding

  def overdue(self, replay: Replay, learner_step: int) -> bool:
    """Whether some stamp would exceed the bound after one more learner step."""
    return learner_step + 1 - replay.oldest_step(self.task.stamp) > self.max_age

  def behind(self, replay: Replay, learner_step: int) -> bool:
    """Whether the sweep is more than a block and `_SLACK` learner steps behind.

    Then the learner should wait, rather than for longer at the bound.
    """
    quota = replay.quota(self.name, self.block, self.max_age, self._delay)
    return self.credit + (learner_step - self.credited) * quota > self.block + _SLACK * quota

  def next(self, replay: Replay) -> Work:
    """The next block; spends its credit."""
    lane, time = replay.next_block(self.name, self.block)
    self.credit = max(self.credit - self.block, 0)
    return Work(self.name, lane, time, np.ones((len(lane), 1), bool))


def make_sweepers(agent: Agent, actor_interval: int) -> list[Sweeper]:
  """The sweeps of an agent's tasks."""
  return [
    Sweeper(name, task, actor_interval, agent.subscriptions[task.subscription])
    for name, task in agent.tasks.items()
    if task.max_age
  ]
