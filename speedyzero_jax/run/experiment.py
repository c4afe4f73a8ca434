"""The experiment: all parts of a run in one learner process, and its membership in the run."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from speedyzero_jax.agents.base import Agent, Task, Work
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.logger import Exchange, MetricsLogger
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.batch_pipeline import PreparedBatch
from speedyzero_jax.run.collector import Collector
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.run.recovery import RecoveryManager
from speedyzero_jax.run.topology import derived_seed
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner, LearnerState
from speedyzero_jax.workers.sweeper import Sweeper, run_task
from speedyzero_jax.workers.weights import WeightsStore

INIT, LEARN, ACT, BATCH, SWEEP = range(5)  # purposes of random keys; sweeper i has SWEEP + i


class TrainingError(Exception):
  """The run can't continue; the message says why and what is safe."""


@dataclasses.dataclass(frozen=True)
class Membership:
  """The place of this learner process in the run. The defaults are for a single process."""

  unit: int = 0  # index of this learner process
  units: int = 1  # number of learner processes
  mesh: Mesh | None = None  # of all learner processes' devices; None: of this process' devices
  runs_actor: bool = True  # has a local actor
  runs_sweeps: bool = True  # runs the sweeps of the agent's tasks
  durable: bool = False  # experience is on disk before it counts, as remote actors require
  # All-gathers one integer over the learner processes.
  all_gather: Callable[[int], Sequence[int]] = lambda step: [step]
  # Publishes metrics and returns those to report: in unit 0 the latest of all units.
  exchange_metrics: Exchange = lambda values: [values]


ALONE = Membership()


@dataclasses.dataclass
class Experiment:
  """The parts of a run in one learner process; `steps.py` and `loops.py` run them."""

  config: Config  # of the run
  local_config: Config  # this process' share
  membership: Membership
  agent: Agent
  logger: MetricsLogger
  learner: Learner
  inference: Inference
  replay: Replay
  weights: WeightsStore
  limiter: RateLimiter
  collector: Collector
  sweepers: list[Sweeper]
  recovery: RecoveryManager
  state: LearnerState
  execute: Callable[[list[Work], int], None] = dataclasses.field(init=False)
  after_step: list[Callable[[], object]] = dataclasses.field(default_factory=list)
  drawn: int = 0  # batches whose sampling has begun, since this process started
  learned: int = 0  # those trained on, with the new weights published
  # Batches drawn, or gradients received from actors, that are not trained on yet.
  batches: deque[PreparedBatch] = dataclasses.field(default_factory=deque)
  interrupted: bool = False
  stop_agreed: bool = False  # an interruption has reached all learner processes
  evaluated: int = 0  # learner step of the last evaluation during training
  learning: bool = False  # training has begun: learner steps now propagate interruptions

  def __post_init__(self) -> None:
    self.execute = self._execute_here
    self._sweeping = False

  def can_draw(self) -> bool:
    """Whether a batch can be drawn."""
    return self.replay.ready(self.local_config.learner.batch_size)

  def key(self, purpose: int) -> jax.Array:
    """A random key of this process."""
    return jax.random.fold_in(jax.random.key(self.seed("search")), purpose)

  def seed(self, name: str) -> int:
    return unit_seed(self.config, name, self.membership)

  @functools.cached_property
  def learn_key(self) -> jax.Array:
    """The random key of all learner steps, the same in all processes."""
    return jax.random.fold_in(jax.random.key(self.config.run.seed), LEARN)

  def needs_data(self) -> bool:
    """Whether the learner lacks data for a batch, whatever the rate limiter allows."""
    # `can_draw` comes first, so that a batch drawn between the two checks counts as in training.
    return not self.can_draw() and not (self.agent.synchronous and self.drawn > self.learned)

  def sweeping(self) -> bool:
    """Whether sweeps have begun, which they do once the first batch can be drawn."""
    self._sweeping = self._sweeping or self.can_draw()
    return self._sweeping

  def sweep_key(self, sweeper: Sweeper) -> jax.Array:
    """The random key of a sweep's next block."""
    purpose = SWEEP + self.sweepers.index(sweeper)
    return jax.random.fold_in(self.key(purpose), sweeper.calls)

  def _execute_here(self, works: list[Work], learner_step: int) -> None:
    key = jax.random.fold_in(self.key(BATCH), learner_step)
    for i, work in enumerate(works):
      self.run_task(work, jax.random.fold_in(key, i))

  def run_task(self, work: Work, key: jax.Array) -> int:
    """Runs one piece of work in this process; returns the number of states."""
    task = self.agent.tasks[work.task]
    states = run_task(task, self.inference, self.replay, self.weights, work, key)
    self.count_states(task, states)
    return states

  def count_states(self, task: Task, states: int) -> None:
    """Adds states that a task has computed to its rate metrics."""
    for suffix in (names.RATE_SUFFIX, names.PER_STEP_SUFFIX) if task.rate else ():
      self.logger.count(task.rate + suffix, states)

  @property
  def program_bytes(self) -> int:
    """Bytes on each device that the compiled programs need in addition to their arguments."""
    return self.learner.update.bytes + self.inference.program_bytes

  def interrupt(self) -> None:
    """Stops the run soon. Thread-safe.

    A single process stops at once. Several learner processes in training continue until the
    interruption has reached all, so that none waits in a collective operation.
    """
    self.interrupted = True
    unfinished = self.limiter.learner_steps < self.config.learner.steps
    if self.membership.units > 1 and self.learning and unfinished:
      self.limiter.stop_pacing()
    else:
      self.limiter.stop()

  def pause(self) -> None:
    """Stops the run at this learner step, which all learner processes reach."""
    self.stop_agreed = True
    self.limiter.stop()

  def close(self) -> None:
    try:
      self.collector.close()
    finally:  # an environment may fail
      self.recovery.close()


def unit_seed(config: Config, name: str, membership: Membership) -> int:
  """Returns the seed of one learner process for one purpose."""
  seed, unit = config.run.seed, membership.unit
  return derived_seed(seed, f"{name} of unit {unit}") if unit else seed
