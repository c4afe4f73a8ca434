"""The collector: adds experience to the journal, the replay and the counters atomically."""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode, EpisodeStats
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR, WeightsStore


class Collector:
  """Collects experience with a local actor, or receives it from remote ones. Thread-safe.

  `record` appends segments to the journal.
  """

  def __init__(
    self,
    replay: Replay,
    limiter: RateLimiter,
    weights: WeightsStore,
    logger: MetricsLogger,
    episodes: EpisodeStats,
    record: Callable[[Sequence[Segment]], None],
  ):
    self._replay, self._limiter, self._weights, self._logger = replay, limiter, weights, logger
    self._record = record
    self.episodes = episodes
    self.local: Actor | None = None
    self.failure: BaseException | None = None
    self.lock = threading.Lock()  # held while actor, journal and replay are updated

  def collect(self) -> None:
    """Takes one step in all lanes with the local actor. Call it when collection is due."""
    local, limiter = self.local, self._limiter
    assert local is not None
    limiter.begin_acting(self)
    version = self._weights.latest(ACTOR)
    with self._logger.part("act"), self.lock:
      segments, count = local.step(
        version,
        budget=limiter.pool,
        progress=limiter.progress,
        random=limiter.playing_randomly,
      )
      self._store(segments)
      limiter.add_env_steps(count)
    self._logger.count(names.AGENT_STEPS_PER_SECOND, count)
    self._log_lag(version.step)
    limiter.end_acting(self)

  def take(self, segments: Sequence[Segment], episodes: Sequence[Episode], *, granted: int) -> None:
    """Adds experience that another process collected with a grant of `granted` agent steps.

    Raises ValueError for invalid segments, before anything changes. A failure to store them ends
    the run and is raised here as well.
    """
    count = sum(int((segment.action >= 0).sum()) for segment in segments)
    with self.lock:
      self._replay.check(segments)
      try:
        self._store(segments)
      except Exception as error:  # the segments are lost, or in the journal only
        self.fail(error)
        raise
      self._limiter.add_env_steps(count, reserved=granted)
    for episode in episodes:
      self.episodes.record(episode)
    self._logger.count(names.AGENT_STEPS_PER_SECOND, count)
    if count:
      self._log_lag(min(int(segment.step.min()) for segment in segments))

  def fail(self, error: BaseException) -> None:
    """Stops the run, which then raises `error`."""
    self.failure = error
    self._limiter.stop()

  def truncate(self, lanes: Sequence[int]) -> None:
    """Truncates the episodes of lanes whose environments are lost."""
    with self.lock:
      for lane in lanes:
        self._replay.truncate(lane)

  def replay_recorded(self, recorded: Sequence[Segment]) -> None:
    """Appends segments from the journal, at most one per lane, recorded after the checkpoint."""
    for segment in recorded:
      if segment.first[0]:
        self._replay.truncate(segment.lane)  # its previous environment had been lost
    now = self._limiter.learner_steps  # weights of later steps were lost with the learner
    clamped = [segment._replace(step=np.minimum(segment.step, now)) for segment in recorded]
    for part in _parts(clamped, self._replay.store.capacity):
      self._replay.append_many(part)
    self._limiter.add_env_steps(sum(int((segment.action >= 0).sum()) for segment in recorded))

  def _store(self, segments: Sequence[Segment]) -> None:
    self._record(segments)
    self._replay.append_many(segments)

  def _log_lag(self, acted_with: int) -> None:
    lag = self._limiter.learner_steps - acted_with
    self._logger.log_mean({names.POLICY_LAG: lag, names.POLICY_LAG_MAX: lag})

  def close(self) -> None:
    if self.local is not None:
      self.local.close()


def _parts(segments: Sequence[Segment], slots: int) -> Iterator[list[Segment]]:
  """Yields the first `slots` slots of each segment, then the next ones, and so on."""
  for begin in range(0, max(len(segment.frame) for segment in segments), slots):
    part = operator.itemgetter(slice(begin, begin + slots))
    yield [s.map(part, s.start + begin) for s in segments if len(s.frame) > begin]
