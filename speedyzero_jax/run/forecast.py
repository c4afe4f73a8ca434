"""Forecast of the memory and time that a run will take, compared at its end with what it took."""

import math
import time
from collections.abc import Callable, Sequence

import jax

from speedyzero_jax.run.builders import replay_bytes
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing, example_batch
from speedyzero_jax.system import memory

_LIBRARIES = 1.2e9  # bytes of host memory for libraries and compiled programs, measured on CPUs


class Forecast:
  """Estimates what a run needs, and reports it in lines. To be made before the run's parts are.

  Attributes:
    host: bytes of host memory that this process needs.
    device: bytes that each device needs.
    seconds: duration of the whole run; 0 if not estimated.
  """

  def __init__(self, report: Callable[[str], None]):
    self._report, self._began = report, time.monotonic()
    self._resident, self._room = memory.resident() or 0, memory.available()
    self.host = self.device = self.seconds = 0.0

  def begin(self, experiment: Experiment) -> None:
    """Estimates memory before anything is compiled."""
    config, agent = experiment.own, experiment.agent
    frames = experiment.replay.blanks(config.learner.batch_size, agent.window.after)
    self._batch_bytes = _bytes((example_batch(config, agent)[0], frames))
    self._estimate_memory(experiment)
    self._report_memory("this configuration needs {}, without its programs")

  def prepared(self, experiment: Experiment, timings: Sequence[Timing]) -> None:
    """Estimates memory with compiled programs and, if all work is done in this process, time."""
    limiter, duration = experiment.limiter, ""
    self._estimate_memory(experiment)
    peak = memory.resident(peak=True)  # includes what the programs took when they were timed
    if peak is not None:
      held = experiment.replay.stats(limiter.learner_steps)["bytes"]
      growth = replay_bytes(experiment.own, experiment.agent) - held
      self.host = max(self.host, peak + max(growth, 0))
    if timings and experiment.membership.acts and experiment.membership.sweeps:
      each = math.fsum(timing.calls * timing.seconds for timing in timings)
      left = each * (experiment.config.learner.steps - limiter.learner_steps)
      self.seconds = time.monotonic() - self._began + left
      duration = f"; about {_duration(left)}, {each:.3g} s a learner step"
    programs = memory.size(experiment.program_bytes)
    self._report_memory(f"with {programs} for programs on each device: {{}}{duration}")

  def _estimate_memory(self, experiment: Experiment) -> None:
    config, agent = experiment.own, experiment.agent
    devices, state = len(experiment.learner.mesh.local_devices), experiment.learner.abstract()
    batches = (config.learner.prefetch + 2) if config.run.mode == "async" else 1
    copies = 1 + len(agent.subscriptions)  # of the variables, with weights of other steps
    self.device = (
      _bytes(state)
      + copies * _bytes(state.variables)
      + batches * self._batch_bytes / devices
      + experiment.replay.bytes_on_devices
      + experiment.program_bytes
    )
    self.host = self._resident + _LIBRARIES + replay_bytes(config, agent)
    if jax.default_backend() == "cpu":
      self.host += self.device * devices

  def _report_memory(self, line: str) -> None:
    """Reports a line with the estimates in it, and a warning if they exceed what there is."""
    room, limit = self._room, memory.of_devices("bytes_limit")
    of_room = "" if room is None else f" of {memory.size(self._resident + room)}"
    needs = f"about {memory.size(self.host)}{of_room} of host memory"
    if jax.default_backend() != "cpu" and limit is not None:
      needs += f", {memory.size(self.device)} of {memory.size(limit)} on each device"
    self._report(line.format(needs))
    if room is not None and self.host - self._resident > room:
      self._report(
        "warning: that is more host memory than is available; replay.capacity bounds the replay, "
        "learner.prefetch and learner.batch_size the batches"
      )
    if limit is not None and self.device > limit:
      self._report(
        "warning: that is more than a device has; replay.frames=host keeps frames off it, a "
        "smaller learner.batch_size makes batches and the training step smaller"
      )

  def ended(self) -> None:
    """Reports what the run took, beside the estimates."""
    estimated = f" (estimated: {_duration(self.seconds)})" if self.seconds else ""
    took = [f"took {_duration(time.monotonic() - self._began)}{estimated}"]
    for name, peak, estimate in (
      ("host memory", memory.resident(peak=True), self.host),
      ("a device", memory.of_devices("peak_bytes_in_use"), self.device),
    ):
      if peak is not None:
        took.append(f"at most {memory.size(peak)} of {name} (estimated: {memory.size(estimate)})")
    self._report(", ".join(took))


def _bytes(tree: object) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _duration(seconds: float) -> str:
  return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
