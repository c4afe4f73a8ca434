"""Events into numbers: rates over a sliding window, statistics of finished episodes, means between lines, time spent.

Counting must cost nothing beside what is counted, and any thread may count. Clocks are handed in; nothing here knows of
files or screens.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from speedyzero_jax.metrics import names

if TYPE_CHECKING:
  from speedyzero_jax.types import EnvStep

_BUCKETS = 60  # of a rate meter's window
_UNREDUCED = 1000  # values of a metric that are kept apart


class RateMeter:
  """Events per second over the last `window` seconds, in constant memory. Thread-safe.

  Time is cut into 60 buckets per window and events are counted in the current one. A rate is the count of the newest 60
  buckets over the time since the oldest of them began, so it spans between 59/60 of the window and all of it, less
  only while the meter is younger than that.
  """

  def __init__(self, window: float = 60.0, clock: Callable[[], float] = time.monotonic):
    """Raises ValueError unless `window` (seconds) is positive."""
    if not window > 0:
      raise ValueError(f"window is {window} seconds, it must be positive")
    self._width = window / _BUCKETS
    self._clock = clock
    self._started = clock()
    self._bucket = 0  # number of the newest bucket
    self._counts = collections.deque([0.0], maxlen=_BUCKETS)
    self._new = 0.0  # events since they were taken
    self._lock = threading.Lock()

  def add(self, events: float = 1) -> None:
    """Counts events happening now."""
    with self._lock:
      self._advance()
      self._counts[-1] += events
      self._new += events

  def rate(self) -> float:
    """Events per second; 0 before any time has passed."""
    with self._lock:
      elapsed = self._advance()
      oldest = (self._bucket - len(self._counts) + 1) * self._width
      span = elapsed - oldest
      return sum(self._counts) / span if span > 0 else 0.0

  def take(self) -> float:
    """The events since the last call, whenever they were."""
    with self._lock:
      new, self._new = self._new, 0.0
      return new

  def _advance(self) -> float:
    elapsed = self._clock() - self._started
    bucket = max(self._bucket, int(elapsed / self._width))
    self._counts.extend([0.0] * min(bucket - self._bucket, _BUCKETS))
    self._bucket = bucket
    return elapsed


@dataclasses.dataclass(frozen=True)
class Episode:
  """A finished game: from its reset to its end or its cap, across lost lives."""

  score: float  # sum of raw rewards
  length: int  # agent steps


class EpisodeStats:
  """Returns and lengths of the last `window` finished games. Thread-safe: an actor updates, anyone reads."""

  def __init__(self, lanes: int, window: int = 100):
    """Raises ValueError unless `lanes` and `window` are positive."""
    if lanes < 1 or window < 1:
      raise ValueError(f"lanes is {lanes} and window is {window}, both must be at least 1")
    self._score = np.zeros(lanes, np.float64)
    self._length = np.zeros(lanes, np.int64)
    self._recent: collections.deque[Episode] = collections.deque(maxlen=window)
    self._best = -np.inf
    self._count = 0
    self._lock = threading.Lock()

  def update(self, step: "EnvStep") -> list[Episode]:
    """Adds what all lanes showed after one step.

    A game ends where `game_over` or `truncated` is set; a lost life alone (`terminated`) does not end it, nor does the
    `first` frame after it count as a step.

    Returns:
      The games that ended with this step, in the order of their lanes.

    Raises:
      ValueError: the step has another number of lanes.
    """
    if step.reward.shape != self._score.shape:
      raise ValueError(
        f"a step of {self._score.size} lanes has rewards of shape {step.reward.shape}"
      )
    with self._lock:
      self._score += np.where(step.first, 0.0, step.reward)
      self._length += ~step.first
      ended = np.flatnonzero(step.game_over | step.truncated)
      finished = [Episode(float(self._score[lane]), int(self._length[lane])) for lane in ended]
      self._score[ended] = 0.0
      self._length[ended] = 0
    for episode in finished:
      self.record(episode)
    return finished

  def record(self, episode: Episode) -> None:
    """Adds a game that was finished elsewhere, by an actor in another process."""
    with self._lock:
      self._recent.append(episode)
      self._best = max(self._best, episode.score)
      self._count += 1

  def clear(self) -> None:
    """Forgets all games, finished or not: the lanes begin anew."""
    with self._lock:
      self._score[:], self._length[:] = 0.0, 0
      self._recent.clear()
      self._best, self._count = -np.inf, 0

  def summary(self) -> dict[str, float]:
    """The `charts/episode*` metrics. Without a finished game, only their number: 0."""
    with self._lock:
      if not self._recent:
        return {names.EPISODES: self._count}
      return {
        names.EPISODES: self._count,
        names.EPISODE_RETURN: float(np.mean([episode.score for episode in self._recent])),
        names.EPISODE_RETURN_LAST: self._recent[-1].score,
        names.EPISODE_RETURN_BEST: float(self._best),
        names.EPISODE_LENGTH: float(np.mean([episode.length for episode in self._recent])),
      }


class RunningMeans:
  """Gathers metrics step by step and gives one value for each: their mean, or whatever `names` says of it. Thread-safe.

  Values may be device arrays of one element. They are not waited for when added: the step that computes them may still
  be running, and its caller has the next one to launch. They do not pile up, however long nobody takes them.
  """

  def __init__(self) -> None:
    self._gathered: dict[str, _Gathered] = {}
    self._lock = threading.Lock()

  def add(self, values: Mapping[str, Any]) -> None:
    """Adds one value for each metric named."""
    for value in values.values():
      if hasattr(
        value, "copy_to_host_async"
      ):  # a jax array: on its way to the host by the time it is asked for
        value.copy_to_host_async()
    with self._lock:
      for name, value in values.items():
        self._gathered.setdefault(name, _Gathered(names.reduction(name))).add(value)

  def take(self) -> dict[str, float]:
    """One value for each metric added since the last call, then starts anew. A NaN among them gives NaN."""
    with self._lock:
      gathered, self._gathered = self._gathered, {}
    return {name: values.as_one() for name, values in gathered.items()}


class _Gathered:
  """Values of one metric, of which those of long ago are one already."""

  def __init__(self, reduction: names.Reduction):
    self._reduction = reduction
    self._values: list[Any] = []
    self._weight = 1  # how many the first one stands for

  def add(self, value: Any) -> None:
    self._values.append(value)
    if len(self._values) == 2 * _UNREDUCED:
      self._reduce(_UNREDUCED)  # so old that no device is waited for

  def as_one(self) -> float:
    self._reduce(len(self._values))
    return self._values[0]

  def _reduce(self, count: int) -> None:
    """Makes the first `count` values one."""
    values = [float(value) for value in self._values[:count]]
    if self._reduction == "mean":
      one = float(np.average(values, weights=[self._weight] + [1] * (count - 1)))
    else:  # unlike min and max, these keep a NaN
      one = float(np.min(values) if self._reduction == "min" else np.max(values))
    self._values[:count] = [one]
    self._weight += count - 1


class PartTimes:
  """Seconds that threads spend in named parts of their work. Thread-safe.

  Parts are timed as their thread sees them: one that sends work to a device is short, the one that waits for it long.

  Args:
    mark: makes a context in which a thread is also marked otherwise as being in a part.
    clock: seconds, from any origin.
  """

  def __init__(
    self,
    mark: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._mark, self._clock = mark, clock
    self._totals: dict[str, float] = {}
    self._told: tuple[int, dict[str, float]] = (0, {})
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Inside this context the thread is in that part. Parts in parts would count twice."""
    begin = self._clock()
    try:
      with self._mark(name):
        yield
    finally:
      seconds = self._clock() - begin
      with self._lock:
        self._totals[name] = self._totals.get(name, 0.0) + seconds

  def totals(self) -> dict[str, float]:
    """Seconds spent in each part so far, over all threads."""
    with self._lock:
      return dict(self._totals)

  def take(self, learner_step: int) -> dict[str, float]:
    """The `time/` metrics: seconds per learner step since the last call; none if no step was taken since then."""
    totals = self.totals()
    (step, before), self._told = self._told, (learner_step, totals)
    if learner_step <= step:
      return {}
    return {
      names.TIME_PREFIX + name: (seconds - before.get(name, 0.0)) / (learner_step - step)
      for name, seconds in totals.items()
    }
