"""Who may run ahead of whom, by how much: learner steps are tied to agent steps, whatever the machine's speed.

After the random play, each learner step is due for a fixed number of agent steps (samples per insert is constant);
`tail_steps` of them wait until everything is collected; and no step is taken while somebody acts with weights that
would then be too old. Counts only; knows nothing of roles.
"""

import threading
from collections.abc import Callable, Hashable
from typing import Any

from speedyzero_jax.config.schema import Config


class Stopped(Exception):
  """The run is stopping; the waiting role should return."""


class Pacer:
  """The two counters of a run and the rule between them. Thread-safe.

  Learner step k (from 0) may be taken once random_steps + ceil(k * ratio) agent steps are collected, with
  ratio = (env_steps - random_steps) / (steps - tail_steps); the last tail_steps only once all are. Collection may go
  on while it is less than `slack` agent steps ahead of what the learner has earned.

  Args:
    config: of the run.
    env_steps: agent steps already collected (a resumed run).
    learner_steps: learner steps already taken.
  """

  def __init__(self, config: Config, *, env_steps: int = 0, learner_steps: int = 0):
    self._total_env, self._total_learner = config.run.env_steps, config.learner.steps
    self._random = config.actor.random_steps
    self._start = min(self._random, self._total_env)
    self._paced = self._total_learner - config.learner.tail_steps
    self._slack = max(2 * config.actor.lanes, 2 * (self._earned(1) if self._paced else 0))
    self.bounds_lag = config.actor.max_lag > 0
    # Learner steps that may begin while somebody acts: the newest weights are up to an interval old when he begins.
    self._leeway = config.actor.max_lag - config.actor.weights_interval
    self._acting: dict[Hashable, int] = {}  # who, and since which learner step
    self._env_steps, self._learner_steps = env_steps, learner_steps
    self._reserved = 0  # agent steps promised to somebody who has not taken them yet
    self._stopping = self._hurrying = False
    self._changed = threading.Condition()  # its lock may be taken again by who holds it

  @property
  def env_steps(self) -> int:
    """Agent steps collected."""
    return self._env_steps

  @property
  def learner_steps(self) -> int:
    """Learner steps taken."""
    return self._learner_steps

  @property
  def collected(self) -> bool:
    """Whether every agent step has been taken."""
    return self._env_steps >= self._total_env

  @property
  def finished(self) -> bool:
    """Whether every learner step has been taken and everything is collected."""
    return self._learner_steps >= self._total_learner and self.collected

  @property
  def pool(self) -> int:
    """Agent steps that are neither taken nor promised."""
    return self._total_env - self._env_steps - self._reserved

  @property
  def playing_randomly(self) -> bool:
    """Whether the next agent steps belong to the random play at the start."""
    return self._env_steps < self._random

  @property
  def progress(self) -> float:
    """Share of the learner steps taken, in [0, 1]."""
    return self._learner_steps / self._total_learner if self._total_learner else 1.0

  def required(self, step: int) -> int:
    """Agent steps that learner step `step` (from 0) waits for."""
    if step >= self._paced:
      return self._total_env
    return self._start + self._earned(step)

  def _earned(self, step: int) -> int:
    """ceil(step * ratio), in integers: rounding would make some steps wait for one agent step too many."""
    return -(-step * (self._total_env - self._start) // self._paced)

  def may_learn(self) -> bool:
    """Whether the next learner step is due."""
    return self._learner_steps < self._total_learner and self._env_steps >= self.required(
      self._learner_steps
    )

  def may_collect(self) -> bool:
    """Whether collection may go on."""
    if not self.pool:
      return False
    return self._env_steps + self._reserved < self.required(self._learner_steps) + self._slack

  def reserve(self, steps: int, seconds: float, urgent: Callable[[], bool]) -> int | None:
    """Promises up to `steps` agent steps to somebody, as soon as collection may go on or `urgent()`.

    Returns how many, 0 if everything is collected, None if nothing could be promised for so many seconds.
    """
    with self._changed:
      self.wait_for(
        lambda: self.collected or (self.pool and (self.may_collect() or urgent())), seconds
      )
      if self._stopping or self.collected:
        return None if self._stopping else 0
      if not self.pool or not (self.may_collect() or urgent()):
        return None
      count = min(steps, self.pool)
      self._reserved += count
      return count

  def release(self, steps: int) -> None:
    """Takes a promise back."""
    with self._changed:
      self._reserved -= steps
      self._changed.notify_all()

  def add_env_steps(self, count: int, *, reserved: int = 0) -> None:
    """An actor took `count` agent steps, of so many promised."""
    with self._changed:
      self._env_steps += count
      self._reserved -= reserved
      self._changed.notify_all()

  def add_learner_step(self) -> None:
    """The learner took a step."""
    with self._changed:
      self._learner_steps += 1
      self._changed.notify_all()

  def begin_acting(self, who: Hashable) -> None:
    """Somebody takes agent steps, with the weights that are the newest after this call, or newer ones."""
    with self._changed:
      self._acting[who] = self._learner_steps

  def end_acting(self, who: Hashable) -> None:
    """What they took is in the replay, or lost."""
    with self._changed:
      self._acting.pop(who, None)
      self._changed.notify_all()

  @property
  def lagging(self) -> bool:
    """Whether the next learner step has to wait for somebody whose weights would then be older than `actor.max_lag`."""
    with self._changed:
      since = min(self._acting.values(), default=self._learner_steps)
      return self.bounds_lag and self._learner_steps - since >= self._leeway

  def notify(self) -> None:
    """Something that a `wait_until` looks at has changed."""
    with self._changed:
      self._changed.notify_all()

  def hurry(self) -> None:
    """From now on the learner waits for no agent steps: others wait for it."""
    with self._changed:
      self._hurrying = True
      self._changed.notify_all()

  @property
  def hurrying(self) -> bool:
    """Whether `hurry` was called."""
    return self._hurrying

  def may_draw(self, step: int) -> bool:
    """Whether the batch of learner step `step` is due."""
    return self._hurrying or self._env_steps >= self.required(step)

  def stop(self) -> None:
    """Wakes every waiting role with `Stopped`."""
    with self._changed:
      self._stopping = True
      self._changed.notify_all()

  @property
  def stopping(self) -> bool:
    """Whether `stop` was called."""
    return self._stopping

  def wait_for(self, predicate: Callable[[], Any], seconds: float) -> None:
    """Blocks until `predicate()` holds, the run stops, or so many seconds have passed."""
    with self._changed:
      self._changed.wait_for(lambda: self._stopping or predicate(), seconds)

  def wait_until(self, predicate: Callable[[], Any]) -> None:
    """Blocks until `predicate()` holds; raises Stopped if the run stops first."""
    with self._changed:
      self._changed.wait_for(lambda: self._stopping or predicate())
      if self._stopping:
        raise Stopped
