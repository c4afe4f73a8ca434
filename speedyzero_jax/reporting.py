"""What a run tells the world while it runs: metrics.jsonl, TensorBoard, the progress display.

Collects what the roles report and writes one line every `run.log_interval` learner steps. Knows nothing of how the
roles work; costs them nothing but a counter.
"""

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speedyzero_jax.config import Config
from speedyzero_jax.evaluation import Evaluation
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.display import Header, make_display
from speedyzero_jax.metrics.rates import EpisodeStats, RateMeter, RunningMeans
from speedyzero_jax.metrics.recorder import Recorder

_RATES = (
  names.AGENT_STEPS_PER_SECOND,
  names.LEARNER_STEPS_PER_SECOND,
  names.SAMPLES_PER_SECOND,
  names.REANALYSED_PER_SECOND,
  names.REFRESHED_PER_SECOND,
)


class Reporter:
  """Takes reports from any thread. A context manager: inside it the display is on.

  Args:
    config: of the run.
    run_dir: where to write.
    preset: the run's name on the display.
    resume_step: None for a new run, else the learner step it goes on from.
  """

  def __init__(self, config: Config, run_dir: Path, preset: str, resume_step: int | None):
    self._config, self._run_dir, self._resume_step = config, run_dir, resume_step
    self._recorder = Recorder(run_dir, resume_step=resume_step)
    self._display = make_display(
      Header(game=config.env.game, preset=preset, run_dir=str(run_dir), seed=config.run.seed),
      env_steps_total=config.run.env_steps,
      learner_steps_total=config.learner.steps,
    )
    self._means = RunningMeans()
    self._rates = {name: RateMeter() for name in _RATES}
    self._latest: dict[str, Any] = {}
    self._lock = threading.Lock()

  def __enter__(self) -> "Reporter":
    self._display.__enter__()
    return self

  def __exit__(self, *error: object) -> None:
    self._display.__exit__(*error)
    self._recorder.close()

  def rewind(self, step: int) -> None:
    """The run goes on from this learner step, maybe an earlier one than expected: lines of later steps are removed."""
    if step != self._resume_step:
      self._recorder.close()
      self._recorder, self._resume_step = Recorder(self._run_dir, resume_step=step), step

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

  def line(self, *, learner_steps: int, env_steps: int, replay: Mapping[str, float], episodes: EpisodeStats) -> None:
    """Writes a line and updates the display."""
    collected = max(env_steps - self._config.actor.random_steps, 1)
    with self._lock:
      latest = dict(self._latest)
    values = {
      names.ENV_STEPS: env_steps,
      names.SAMPLES_PER_INSERT: learner_steps * self._config.learner.batch_size / collected,
      names.REPLAY_TRANSITIONS: replay["transitions"],
      names.REPLAY_BYTES_PER_TRANSITION: replay["bytes_per_transition"],
      names.REPLAY_MEMORY: replay["bytes"] / 1e9,
      names.PRIORITY_AGE_MEAN: replay["priority_age_mean"],
      names.PRIORITY_AGE_MAX: replay["priority_age_max"],
      **{name: meter.rate() for name, meter in self._rates.items()},
      **self._means.take(),
      **episodes.summary(),
      **latest,
    }
    self._display.update(self._recorder.write(learner_steps, values))

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
