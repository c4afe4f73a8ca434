"""The collector: adds experience to the journal, the replay and the counters atomically."""

import threading
from collections.abc import Callable, Sequence

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.metrics.values import ValueStats
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.types import Slots
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR, WeightsStore


class Collector:
  """Collects experience with a local actor, or receives it from remote ones. Thread-safe.

  `record` appends slots to the journal.
  """

  def __init__(
    self,
    replay: Replay,
    limiter: RateLimiter,
    weights: WeightsStore,
    logger: MetricsLogger,
    values: ValueStats,
    record: Callable[[Slots], None],
  ):
    self._replay, self._limiter, self._weights, self._logger = replay, limiter, weights, logger
    self._values, self._record = values, record
    self.episodes = EpisodeStats()
    self.local: Actor | None = None
    self.lock = threading.Lock()  # held while actor, journal and replay are updated

  def collect(self) -> None:
    """Takes one step in all lanes with the local actor. Call it when collection is due."""
    local, limiter = self.local, self._limiter
    assert local is not None
    limiter.begin_acting(self)
    version = self._weights.latest(ACTOR)
    with self._logger.part("act"), self.lock:
      slots, count = local.step(
        version, budget=limiter.pool, progress=limiter.progress, random=limiter.playing_randomly
      )
      self._replay.check(slots)  # before they are in the journal, which could not be resumed from
      self._store(slots)
      self.count(count, local.finished)
    self._log_lag(version.step)
    limiter.end_acting(self)

  def take(self, slots: Slots, episodes: Sequence[Episode], *, granted: int) -> None:
    """Adds experience that another process collected with a grant of `granted` agent steps.

    Raises ValueError for invalid slots, before anything changes. A failure to store them ends the
    run and is raised here as well.
    """
    count = int((slots["action"] >= 0).sum())
    with self.lock:
      self._replay.check(slots)
      try:
        self._store(slots)
      except Exception as error:  # the slots are lost, or in the journal only
        self._limiter.stop(error)
        raise
      self.count(count, episodes, granted=granted)
    if count:
      self._log_lag(int(slots["step"].min()))

  def count(self, steps: int, episodes: Sequence[Episode], *, granted: int = 0) -> None:
    """Counts agent steps and finished episodes, with a grant of `granted` agent steps."""
    self._limiter.add_env_steps(steps, reserved=granted)
    for episode in episodes:
      self.episodes.record(episode)
    self._logger.count(names.AGENT_STEPS_PER_SECOND, steps)

  def truncate(self, lanes: Sequence[int]) -> None:
    """Truncates the episodes of lanes whose environments are lost."""
    with self.lock:
      for lane in lanes:
        self._replay.truncate(lane)

  def replay_recorded(self, recorded: Slots) -> None:
    """Appends recorded slots that are newer than the checkpoint.

    They are consecutive slots of one lane, or one slot for each of several lanes, in ascending
    order.
    """
    begins = np.diff(recorded.lane, prepend=-1) > 0
    for lane in recorded.lane[begins & recorded["first"]].tolist():
      self._replay.truncate(lane)  # in case its previous environment had been lost
    # Weights of later steps were lost with the learner.
    step = np.minimum(recorded["step"], self._limiter.learner_steps)
    slots = Slots(recorded.lane, recorded.time, {**recorded.columns, "step": step})
    capacity = self._replay.store.capacity
    for begin in range(0, len(slots), capacity):
      self._replay.append(slots.select(slice(begin, begin + capacity)))
    self._limiter.add_env_steps(int((slots["action"] >= 0).sum()))

  def _store(self, slots: Slots) -> None:
    self._record(slots)
    self._replay.append(slots)
    self._logger.log_mean(self._values.add(slots))

  def _log_lag(self, acted_with: int) -> None:
    lag = self._limiter.learner_steps - acted_with
    self._logger.log_mean({names.POLICY_LAG: lag, names.POLICY_LAG_MAX: lag})

  def close(self) -> None:
    if self.local is not None:
      self.local.close()
