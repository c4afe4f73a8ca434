"""Metrics logger of a run: collects values from all threads, writes files, updates the display."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import aggregation, jsonl, names
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.metrics.progress import Display
from speedyzero_jax.metrics.recorder import Recorder

REFRESH_SECONDS = 3.0  # between updates of values that change without learner steps

Exchange = Callable[[Mapping[str, float]], Sequence[Mapping[str, float]]]


class MetricsLogger(contextlib.ExitStack):
  """Collects and writes metrics. Thread-safe; a context manager, within which the display is on.

  Before `open`, only messages are shown and values collected.

  Args:
    config: configuration of the run, or of one learner's share of it.
    folder: the run folder.
    exchange: publishes this learner's values and returns the newest values of all learners, to be
      combined. May be called from any thread, by one thread at a time.
  """

  def __init__(
    self,
    config: Config,
    folder: Path,
    exchange: Exchange = lambda values: [values],
  ):
    super().__init__()
    self._config, self._folder, self._exchange = config, folder, exchange
    self._begun = time.monotonic()
    self._display = Display(config, str(folder))
    self._means, self._counters = aggregation.RunningMeans(), aggregation.Counters()
    self._lock = threading.Lock()
    self._latest: dict[str, Any] = {}
    self._sources: list[Callable[[], Mapping[str, float]]] = []
    self._values: dict[str, Any] = {}  # this learner's values
    self._publishing = threading.Lock()  # held while values are updated, exchanged and shown
    self._closing = threading.Event()

  def __enter__(self) -> "MetricsLogger":
    self.enter_context(self._display)
    return self

  def open(self, resume_step: int | None) -> None:
    """Opens the files and starts to update the display.

    `resume_step` is None for a new run, else the learner step from which it resumes; lines of later
    steps are removed. Raises OSError if the files cannot be opened.
    """
    try:
      recorder = Recorder(self._folder, resume_step, begun=self._begun)
    except OSError as error:  # may name no file, as that of a full disk
      raise OSError(f"can't write metrics in {self._folder}: {error}") from error
    self._recorder = self.enter_context(contextlib.closing(recorder))
    self._counters.restart(resume_step or 0)
    thread = threading.Thread(target=self._update_periodically, daemon=True)
    thread.start()
    self.callback(thread.join)
    self.callback(self._closing.set)

  def last_row(self) -> dict[str, Any]:
    """The last row of metrics; {} if there is none."""
    return jsonl.last_row(self._folder / "metrics.jsonl")

  def message(self, text: str) -> None:
    self._display.message(text)

  def log_mean(self, values: Mapping[str, float]) -> None:
    """Adds values to be averaged until the next line."""
    self._means.add(values)

  def log_latest(self, values: Mapping[str, Any]) -> None:
    """Sets values that are logged until they are replaced."""
    with self._lock:
      self._latest.update(values)

  def count(self, name: str, events: float) -> None:
    """Adds to a counter; its name must end in `_per_second` or `_per_learner_step`."""
    if not name.endswith(names.COUNTER_SUFFIXES):
      raise ValueError(f"metric {name} must end in one of {', '.join(names.COUNTER_SUFFIXES)}")
    self._counters.add(name, events)

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    """Times a part of the work, as a context manager; also annotates profiler traces.

    Dispatch is asynchronous, so device time is attributed to the part that blocks on the result.
    Nested parts are each counted in full.
    """
    begin = time.monotonic()
    try:
      with jax.profiler.TraceAnnotation(name):
        yield
    finally:
      self._counters.add(names.TIME_PREFIX + name, time.monotonic() - begin)

  def part_times(self) -> dict[str, float]:
    """Total seconds of each part so far."""
    prefix, totals = names.TIME_PREFIX, self._counters.totals()
    return {name.removeprefix(prefix): x for name, x in totals.items() if name.startswith(prefix)}

  def restart_counts(self, step: int) -> None:
    """Discards all counts before this learner step."""
    self._counters.restart(step)

  def add_source(self, source: Callable[[], Mapping[str, float]]) -> None:
    """Adds a function that returns current values. It may be called at any time, in any thread."""
    with self._lock:
      self._sources.append(source)

  def write_line(self, step: int, replay: Mapping[str, float], episodes: EpisodeStats) -> None:
    """Writes and displays the line of a learner step; `replay` is logged under `replay/`."""
    means = self._means.take()
    with self._publishing:
      self._values = {names.REPLAY_PREFIX + name: value for name, value in replay.items()}
      self._values |= means | episodes.summary() | self._current()
      self._values |= self._counters.take(step)
      values = self._combined()
      collected = max(values.get(names.ENV_STEPS, 0) - self._config.actor.random_steps, 1)
      values[names.SAMPLES_PER_INSERT] = step * self._config.learner.batch_size / collected
      self._display.update(self._recorder.write(step, values))

  def update_display(self) -> None:
    """Exchanges and displays values that change without learner steps."""
    with self._publishing:
      self._values |= self._current() | self._counters.rates(REFRESH_SECONDS)
      values = self._combined() | {names.TIME: self._recorder.elapsed()}
      if names.ENV_STEPS in values:  # both counts appear at once when a run resumes
        values[names.STEP] = self._counters.step
      self._display.update(values)

  def _update_periodically(self) -> None:
    while not self._closing.wait(REFRESH_SECONDS):
      self.update_display()

  def _current(self) -> dict[str, Any]:
    with self._lock:
      values, sources = dict(self._latest), list(self._sources)
    for source in sources:
      values.update(source())
    return values

  def _combined(self) -> dict[str, Any]:
    """Exchanges values and returns the run's, combined over all learners."""
    shared = self._exchange(aggregation.shared_values(self._values))
    return self._values | aggregation.combine_learners(shared)
