"""Forecast of the memory and time that a run will take, compared at its end with what it took."""

import math
import time
from collections.abc import Callable, Sequence

import jax

from speedyzero_jax.run.builders import mean_stored, replay_bytes, replay_capacity
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing, example_batch
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import WarmUp

_LIBRARIES = 1.2e9  # bytes of host memory for libraries and compiled programs, measured on CPUs
_APART = ("evaluate", "profile")  # parts in which nothing else goes on
# Time is measured over this many learner steps and seconds, or over fewer steps if they are long.
_STEPS, _SECONDS, _FEW_STEPS, _LONG = 20, 5.0, 5, 60.0


class Forecast:
  """Estimates what a run needs. To be made before the run's parts are.

  Args:
    report: takes lines.
    clock: seconds, from any origin.

  Attributes:
    host: bytes of host memory that this process needs.
    device: bytes that each device needs.
    seconds: estimates of the whole run's duration, by learner step.
  """

  def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
    self._report, self._clock, self._began = report, clock, clock()
    self._resident, self._room = memory.resident() or 0, memory.available()
    self.host = self.device = 0.0
    self.seconds: dict[int, float] = {}
    self._measured = False
    # Learner step, time and parts at the start of the measurement.
    self._since: tuple[int, float, dict[str, float]] | None = None

  def watch(self, experiment: Experiment, warm_up: WarmUp) -> None:
    """Reports a first estimate of memory; estimates time once the run has warmed up."""
    self._experiment, self._warm_up = experiment, warm_up
    self._batch_bytes = _bytes(example_batch(experiment)[0])
    experiment.after_step.append(self._stepped)
    self._estimate_memory()
    self._report_memory("this configuration needs {}, without its programs")

  def prepared(self, timings: Sequence[Timing]) -> None:
    """Reports the estimate that includes compiled programs and, if all work is done here, time."""
    x, expected = self._experiment, ""
    self._estimate_memory()
    tried = memory.resident(peak=True)  # includes what the programs took when they were timed
    if tried is not None:
      held = x.replay.stats(x.limiter.learner_steps)["bytes"]
      self.host = max(self.host, tried + max(replay_bytes(x.own, x.agent) - held, 0))
    if timings and x.membership.acts and x.membership.sweeps:
      each = math.fsum(timing.per_step * timing.seconds for timing in timings)
      expected = f"; about {_duration(self._expect(each))}, {each:.3g} s a learner step"
    programs = memory.size(x.program_bytes)
    self._report_memory(f"with {programs} for programs on each device: {{}}{expected}")

  def _expect(self, each: float) -> float:
    """Keeps an estimate of the run's duration; returns the seconds that are left of it.

    Args:
      each: seconds of a learner step on average, from now on.
    """
    step = self._experiment.limiter.learner_steps
    left = each * (self._experiment.config.learner.steps - step)
    self.seconds[step] = self._clock() - self._began + left
    return left

  def _estimate_memory(self) -> None:
    x = self._experiment
    config, devices, state = x.own, len(x.learner.mesh.local_devices), x.learner.abstract()
    batches = (config.learner.prefetch + 2) if config.run.mode == "async" else 1
    copies = 1 + len(x.agent.subscriptions)  # of the variables, with weights of other steps
    self.device = (
      _bytes(state)
      + copies * _bytes(state.variables)
      + batches * self._batch_bytes / devices
      + x.replay.bytes_on_devices
      + x.program_bytes
    )
    self.host = self._resident + _LIBRARIES + replay_bytes(config, x.agent)
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

  def _stepped(self) -> None:
    """Measures the time of a learner step, after each one."""
    x, now = self._experiment, self._clock()
    step, parts = x.limiter.learner_steps, x.times.totals()
    if self._measured or not self._warm_up.over:
      return
    if self._since is None:
      self._since = step, now, parts
      return
    spent = {name: total - self._since[2].get(name, 0.0) for name, total in parts.items()}
    apart = math.fsum(spent.pop(name, 0.0) for name in _APART)
    steps, seconds = step - self._since[0], now - self._since[1] - apart
    if not (
      (steps >= _STEPS and seconds >= _SECONDS) or (steps >= _FEW_STEPS and seconds >= _LONG)
    ):
      return
    self._measured = True
    each = seconds / steps * self._growth(spent)
    left = self._expect(each)
    self._report(
      f"this will take about {_duration(self.seconds[step])}, {_duration(left)} of them from now, "
      f"without evaluations: {each:.3g} s a learner step on average, {seconds / steps:.3g} s now"
    )

  def _growth(self, spent: dict[str, float]) -> float:
    """Factor by which a step will take longer on average: sweeps grow with the replay."""
    x = self._experiment
    work = math.fsum(seconds for name, seconds in spent.items() if name != "wait")
    now = min(x.limiter.env_steps, replay_capacity(x.own, x.agent) * x.own.actor.lanes)
    mean = mean_stored(x.own, x.agent, x.limiter.env_steps)
    growth = 1.0
    for sweeper in x.sweepers if work and x.membership.sweeps else ():
      more = sweeper.calls_per_step(mean) / sweeper.calls_per_step(now) - 1
      growth += spent.get(sweeper.task.part, 0.0) / work * more
    return growth

  def ended(self) -> None:
    """Reports what the run took, beside the estimates."""
    guesses = [f"{_duration(seconds)} at step {step}" for step, seconds in self.seconds.items()]
    estimated = f" (estimated: {', '.join(guesses)})" if guesses else ""
    took = [f"took {_duration(self._clock() - self._began)}{estimated}"]
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
