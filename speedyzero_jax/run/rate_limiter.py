"""The rate limiter: a fixed ratio of learner steps to agent steps, on machines of any speed.

Learner step k (from 0) is due once random_steps + ceil(k * ratio) agent steps are collected, with
ratio = (env_steps - random_steps) / (steps - tail_steps); the last tail_steps are due once all
agent steps are collected. Actors pause while they are `slack` agent steps ahead of the learner.
With a bound on policy lag, the learner waits while an actor uses weights that the next step would
make too old.

Synchronous agents (A2C, PPO) have no such schedule: the learner trains whenever a batch is
complete, and until all learner steps are taken, actors collect only what the next batch still needs
(`urgent` in `reserve`). If actors compute the gradients (A3C), no batch is ever complete in the
learner's replay: each actor alternates between collecting and computing a gradient, and the run
ends when the agent steps or the learner steps are used up.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from speedyzero_jax.config.schema import Config


class Stopped(Exception):
  """Raised in waiting threads when the run stops."""


class RateLimiter:
  """Counts a run's agent and learner steps and keeps the ratio between them. Thread-safe.

  Callers may read `env_steps`, `learner_steps`, `synchronous`, `unpaced`, `stopping`, `failure`.
  """

  def __init__(self, config: Config, *, synchronous: bool = False):
    self.synchronous = synchronous
    self._complete = config.complete
    self._total_env, self._total_learner = config.run.env_steps, config.learner.steps
    self._random = config.actor.random_steps
    self._start = min(self._random, self._total_env)
    self._paced = self._total_learner - config.learner.tail_steps
    self._slack = max(2 * config.actor.lanes, 2 * (self._earned(1) if self._paced else 0))
    self._bounds_lag = config.actor.max_lag > 0
    # Learner steps allowed during one actor step; its weights may be one weights_interval old.
    self._lag_budget = config.actor.max_lag - config.actor.weights_interval
    self._acting: dict[Hashable, int] = {}  # actor -> learner step at which its step began
    self.env_steps = self.learner_steps = 0
    self._reserved = 0  # agent steps granted to actors and not yet collected
    self.stopping = self.unpaced = False
    self.failure: BaseException | None = None  # raised at the end of the run
    self._changed = threading.Condition()

  @contextlib.contextmanager
  def _change(self) -> Iterator[None]:
    """Context manager for a change, after which waiting threads re-evaluate their conditions."""
    with self._changed:
      yield
      self._changed.notify_all()

  def restore(self, env_steps: int, learner_steps: int) -> None:
    """Restores the counters of a checkpoint."""
    with self._changed:
      self.env_steps, self.learner_steps = env_steps, learner_steps

  @property
  def collected(self) -> bool:
    return self.env_steps >= self._total_env

  @property
  def finished(self) -> bool:
    return self._complete(self.learner_steps, self.env_steps)

  @property
  def pool(self) -> int:
    """Agent steps neither collected nor granted."""
    return self._total_env - self.env_steps - self._reserved

  @property
  def playing_randomly(self) -> bool:
    """Whether the next agent steps belong to the initial random play."""
    return self.env_steps < self._random

  @property
  def progress(self) -> float:
    """Share of the learner steps taken, in [0, 1]."""
    return self.learner_steps / self._total_learner if self._total_learner else 1.0

  def required(self, step: int) -> int:
    """Agent steps that must be collected before learner step `step` (from 0)."""
    if step >= self._paced:
      return self._total_env
    return self._start + self._earned(step)

  def _earned(self, step: int) -> int:
    """ceil(step * ratio), in integers to avoid rounding errors."""
    return -(-step * (self._total_env - self._start) // self._paced)

  def may_learn(self) -> bool:
    return self.learner_steps < self._total_learner and self.may_draw(self.learner_steps)

  def may_draw(self, step: int) -> bool:
    """Whether the batch of learner step `step` is due."""
    return self.unpaced or self.synchronous or self.env_steps >= self.required(step)

  def may_collect(self) -> bool:
    if self.synchronous and self.learner_steps < self._total_learner:
      return False
    ahead = self.env_steps + self._reserved - self.required(self.learner_steps)
    return self.pool > 0 and ahead < self._slack

  def reserve(self, steps: int, seconds: float, urgent: Callable[[], bool]) -> int | None:
    """Grants up to `steps` agent steps as soon as collection may continue or `urgent()` holds.

    Returns the number granted: 0 if collection is complete, None on a timeout or if the run stops.
    """
    with self._changed:
      found = self.wait_for(
        lambda: self.collected or (self.pool and (self.may_collect() or urgent())), seconds
      )
      if self.stopping or not found:
        return None
      if self.collected:
        return 0
      count = min(steps, self.pool)
      self._reserved += count
      return count

  def add_env_steps(self, count: int, *, reserved: int = 0) -> None:
    """Adds `count` agent steps; the unused rest of a grant of `reserved` returns to the pool."""
    with self._change():
      self.env_steps += count
      self._reserved -= reserved

  def add_learner_step(self) -> None:
    with self._change():
      self.learner_steps += 1

  def begin_acting(self, actor: Hashable) -> None:
    """Records that an actor begins a step. Its weights are at most a publication behind."""
    with self._changed:
      self._acting[actor] = self.learner_steps

  def end_acting(self, actor: Hashable) -> None:
    """Records that the actor's step is in the replay, or lost."""
    with self._change():
      self._acting.pop(actor, None)

  @property
  def lag_exceeded(self) -> bool:
    """Whether the next learner step would make some actor's weights older than `actor.max_lag`."""
    with self._changed:
      since = min(self._acting.values(), default=self.learner_steps)
      return self._bounds_lag and self.learner_steps - since >= self._lag_budget

  def notify(self) -> None:
    """Wakes waiting threads to re-evaluate their conditions."""
    with self._change():
      pass

  def stop_pacing(self) -> None:
    """Lets learner steps proceed without waiting for agent steps, as other learners need them."""
    with self._change():
      self.unpaced = True

  def stop(self, failure: BaseException | None = None) -> None:
    """Stops the run: wakes all waiting threads, and `wait_until` raises Stopped in them.

    The run then raises the first `failure`, if any.
    """
    with self._change():
      self.stopping, self.failure = True, self.failure or failure

  def wait_for(self, predicate: Callable[[], Any], seconds: float | None = None) -> Any:
    """Blocks until `predicate()` holds, the run stops, or `seconds` have passed.

    Returns the predicate's last value, or True if the run stops.
    """
    with self._changed:
      return self._changed.wait_for(lambda: self.stopping or predicate(), seconds)

  def wait_until(self, predicate: Callable[[], Any]) -> None:
    """Blocks until `predicate()` holds; raises Stopped if the run stops first."""
    self.wait_for(predicate)
    if self.stopping:
      raise Stopped
