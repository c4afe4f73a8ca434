"""What a run tells the world while it runs: metrics.jsonl, TensorBoard, the progress display.

Collects what the roles report and writes one line every `run.log_interval` learner steps; what the display shows of
who is there, and how fast, goes on between them. Knows nothing of how the roles work; costs them nothing but a counter.
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import jsonl, names, units
from speedyzero_jax.metrics.aggregation import EpisodeStats, RateMeter, RunningMeans
from speedyzero_jax.metrics.board import Header
from speedyzero_jax.metrics.progress import make_display
from speedyzero_jax.metrics.recorder import Recorder
from speedyzero_jax.workers.evaluator import Evaluation

_RATES = (
  names.AGENT_STEPS_PER_SECOND,
  names.LEARNER_STEPS_PER_SECOND,
  names.SAMPLES_PER_SECOND,
  names.REANALYSED_PER_SECOND,
  names.REFRESHED_PER_SECOND,
)
_RESTARTS = (names.RESTARTS_LEARNERS, names.RESTARTS_ACTORS, names.RESTARTS_REANALYSERS)
_REFRESH = 3.0  # seconds between looks at what changes without a learner step


class Reporter:
  """Takes reports from any thread. A context manager: inside it the display is on.

  Args:
    config: of what is reported on: the run, or a unit's share of it.
    run_dir: where to write.
    preset: the run's name on the display.
    resume_step: None for a new run, else the learner step it goes on from.
    share: tells other units this one's numbers, and returns what is to be reported on as one: all units' newest, or
      only these. May be called at any time and from any thread, but not twice at once.
  """

  def __init__(
    self,
    config: Config,
    run_dir: Path,
    preset: str,
    resume_step: int | None,
    share: Callable[[Mapping[str, float]], Sequence[Mapping[str, float]]] = lambda numbers: [
      numbers
    ],
  ):
    self._config, self._run_dir, self._resume_step = config, run_dir, resume_step
    self._share = share
    self._last_step = resume_step or 0  # of a line
    self._restarts = _restarts_before(run_dir / "metrics.jsonl", resume_step)
    self._recorder = Recorder(run_dir, resume_step=resume_step)
    self._display = make_display(
      Header(game=config.env.game, preset=preset, run_dir=str(run_dir), seed=config.run.seed),
      env_steps_total=config.run.env_steps,
      learner_steps_total=config.learner.steps,
      actors_total=config.topology.actors,
      reanalysers_total=config.topology.reanalysers,
    )
    self._means = RunningMeans()
    self._rates = {name: RateMeter() for name in _RATES}
    self._latest: dict[str, Any] = {}
    self._lock = threading.Lock()
    self._sources: list[Callable[[], Mapping[str, float]]] = []
    self._own: dict[str, Any] = {}  # what is known now
    self._telling = threading.Lock()  # held while it changes, and is told and shown
    self._closing = threading.Event()
    self._refresher = threading.Thread(target=self._keep_fresh, name="display", daemon=True)

  def __enter__(self) -> "Reporter":
    self._display.__enter__()
    self._refresher.start()
    return self

  def __exit__(self, *error: object) -> None:
    self._closing.set()
    self._refresher.join()
    self._display.__exit__(*error)
    self._recorder.close()

  def rewind(self, step: int) -> None:
    """The run goes on from this learner step, maybe an earlier one than expected: lines of later steps are removed."""
    if step != self._resume_step:
      self._recorder.close()
      self._recorder, self._resume_step = Recorder(self._run_dir, resume_step=step), step
      self._last_step = step

  def message(self, text: str) -> None:
    """Shows an event."""
    self._display.message(text)

  def mean(self, values: Mapping[str, Any]) -> None:
    """Values to be averaged until the next line; device scalars are not waited for."""
    self._means.add(values)

  def count(self, name: str, events: float) -> None:
    """Events of a rate."""
    self._rates[name].add(events)

  def latest(self, values: Mapping[str, Any]) -> None:
    """Values that stay until replaced."""
    with self._lock:
      self._latest.update(values)

  def watch(self, source: Callable[[], Mapping[str, float]]) -> None:
    """Values that can be asked for at any time, from any thread."""
    self._sources.append(source)

  def line(
    self, *, learner_steps: int, replay: Mapping[str, float], episodes: EpisodeStats
  ) -> None:
    """Writes a line and updates the display."""
    means = self._means.take()  # waits for the device
    if steps := learner_steps - self._last_step:
      means[names.REANALYSED_PER_STEP] = self._rates[names.REANALYSED_PER_SECOND].take() / steps
      self._last_step = learner_steps
    with self._lock:
      latest = dict(self._latest)
    with self._telling:
      self._own = {
        names.REPLAY_TRANSITIONS: replay["transitions"],
        names.REPLAY_BYTES_PER_TRANSITION: replay["bytes_per_transition"],
        names.REPLAY_MEMORY: replay["bytes"] / 1e9,
        names.PRIORITY_AGE_MEAN: replay["priority_age_mean"],
        names.PRIORITY_AGE_MAX: replay["priority_age_max"],
        **means,
        **episodes.summary(),
        **latest,
        **self._now(),
      }
      values = self._together()
      collected = max(values[names.ENV_STEPS] - self._config.actor.random_steps, 1)
      values[names.SAMPLES_PER_INSERT] = learner_steps * self._config.learner.batch_size / collected
      self._display.update(self._recorder.write(learner_steps, values))

  def refresh(self) -> None:
    """Tells other units, and shows, what has changed without a learner step."""
    with self._telling:
      self._own.update(self._now())
      self._display.refresh(self._together())

  def _keep_fresh(self) -> None:
    while not self._closing.wait(_REFRESH):
      self.refresh()

  def _now(self) -> dict[str, float]:
    values = {name: meter.rate() for name, meter in self._rates.items()}
    for source in self._sources:
      values.update(source())
    return values

  def _together(self) -> dict[str, Any]:
    """What is known of all units, with the restarts before the last one."""
    values = self._own | units.together(self._share(units.to_tell(self._own)))
    return values | {name: values.get(name, 0) + before for name, before in self._restarts.items()}

  def evaluated(self, evaluation: Evaluation) -> None:
    """An evaluation is done."""
    self.message(str(evaluation))
    known = dataclasses.asdict(evaluation)
    self.latest(
      {
        names.EVALUATION_STEP: evaluation.step,
        names.EVALUATION_MEAN: known["mean"],
        names.EVALUATION_MEDIAN: known["median"],
        names.EVALUATION_STD: known["std"],
      }
    )
    if evaluation.human_normalised is not None:
      self.latest({names.EVALUATION_HUMAN_NORMALISED: evaluation.human_normalised})


def _restarts_before(path: Path, resume_step: int | None) -> dict[str, int]:
  """How often the run's processes had been started again, as far as its metrics tell, and this time."""
  again = resume_step is not None and path.exists()  # the supervisor resumes also what never began
  rows = jsonl.read_rows(path)[0] if again else []
  told = {name: [row[name] for row in rows if isinstance(row.get(name), int)] for name in _RESTARTS}
  before = {name: max(values) for name, values in told.items() if values}
  return before | {names.RESTARTS_LEARNERS: before.get(names.RESTARTS_LEARNERS, 0) + again}
