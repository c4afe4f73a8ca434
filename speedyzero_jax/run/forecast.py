"""Forecast of the memory and time that a run will take, compared at its end with what it took."""

import math
import time
from collections.abc import Callable

import jax

from speedyzero_jax.run.builders import mean_stored, replay_bytes, replay_capacity
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import example_batch
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
  """

  def __init__(self, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
    self._report, self._clock, self._began = report, clock, clock()
    self._resident, self._room = memory.resident() or 0, memory.available()
    self._host = self._device = 0.0  # bytes
    self._seconds: list[str] = []  # estimates of the whole duration
    self._measured = False
    # Learner step, time and parts at the start of the measurement.
    self._since: tuple[int, float, dict[str, float]] | None = None

  def watch(self, experiment: Experiment, warm_up: WarmUp) -> None:
    """Reports a first estimate of memory; estimates time once the run has warmed up."""
    self._experiment, self._warm_up = experiment, warm_up
    self._batch_bytes = sum(x.nbytes for x in jax.tree.leaves(example_batch(experiment)[0]))
    experiment.after_step.append(self._stepped)
    self._estimate_memory()
    self._report(f"this configuration needs {self._memory()}, without its programs")
    self._warn()

  def prepared(self, each: float | None) -> None:
    """Reports the estimate that includes compiled programs.

    Args:
      each: mean seconds of a learner step, None if unknown.
    """
    self._estimate_memory()
    tried = memory.resident(peak=True)  # includes what the programs took when they were measured
    if tried is not None:
      self._host = max(self._host, self._when_full(tried))
    expected = ""
    if each is not None:
      left = each * self._steps_left()
      expected = f"; about {_duration(left)}, {each:.3g} s a learner step"
      self._seconds.append(f"{_duration(self._clock() - self._began + left)} at the start")
    programs = memory.size(self._experiment.program_bytes)
    self._report(f"with {programs} for programs on each device: {self._memory()}{expected}")
    self._warn()

  def _steps_left(self) -> int:
    return self._experiment.config.learner.steps - self._experiment.limiter.learner_steps

  def _estimate_memory(self) -> None:
    x = self._experiment
    config, devices, state = x.own, len(x.learner.mesh.local_devices), x.learner.abstract()
    batches = (config.learner.prefetch + 2) if config.run.mode == "async" else 1
    copies = 1 + len(x.agent.subscriptions)  # of the variables, with weights of other steps
    self._device = (
      _bytes(state)
      + copies * _bytes(state.variables)
      + batches * self._batch_bytes / devices
      + x.replay.bytes_on_devices
      + x.program_bytes
    )
    self._host = self._resident + _LIBRARIES + replay_bytes(config, x.agent)
    if jax.default_backend() == "cpu":
      self._host += self._device * devices

  def _when_full(self, resident: int) -> float:
    """Host memory when the replay is full, from the `resident` memory now."""
    x = self._experiment
    held = x.replay.stats(x.limiter.learner_steps)["bytes"]
    return resident + max(replay_bytes(x.own, x.agent) - held, 0)

  def _memory(self) -> str:
    room = "" if self._room is None else f" of {memory.size(self._resident + self._room)}"
    host = f"about {memory.size(self._host)}{room} of host memory"
    limit = memory.of_devices(jax.local_devices(), "bytes_limit")
    if jax.default_backend() == "cpu" or limit is None:
      return host
    return f"{host}, {memory.size(self._device)} of {memory.size(limit)} on each device"

  def _warn(self) -> None:
    if self._room is not None and self._host - self._resident > self._room:
      self._report(
        "warning: that is more host memory than is available; replay.capacity bounds the replay, "
        "learner.prefetch and learner.batch_size the batches"
      )
    limit = memory.of_devices(jax.local_devices(), "bytes_limit")
    if limit is not None and self._device > limit:
      self._report(
        "warning: that is more than a device has; replay.frames=host keeps frames off it, a smaller "
        "learner.batch_size makes batches and the training step smaller"
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
    left = each * self._steps_left()
    whole = _duration(now - self._began + left)
    self._seconds.append(f"{whole} at step {step}")
    self._report(
      f"this will take about {whole}, {_duration(left)} of them from now, without evaluations: "
      f"{each:.3g} s a learner step on average, {seconds / steps:.3g} s now"
    )

  def _growth(self, spent: dict[str, float]) -> float:
    """Factor by which a step will take longer on average: sweeps grow with the replay."""
    x = self._experiment
    work = math.fsum(seconds for name, seconds in spent.items() if name != "wait")
    growth = 1.0
    for sweeper in x.sweepers if work and x.membership.sweeps else ():
      now = min(x.limiter.env_steps, replay_capacity(x.own, x.agent) * x.own.actor.lanes)
      mean = mean_stored(x.own, x.agent, x.limiter.env_steps)
      more = (mean + sweeper.block) / (now + sweeper.block) - 1
      growth += spent.get(sweeper.task.part, 0.0) / work * more
    return growth

  def ended(self) -> None:
    """Reports what the run took, beside the estimates."""
    estimates = f" (estimated: {', '.join(self._seconds)})" if self._seconds else ""
    took = [f"took {_duration(self._clock() - self._began)}{estimates}"]
    peaks = (
      ("host memory", memory.resident(peak=True), self._host),
      ("a device", memory.of_devices(jax.local_devices(), "peak_bytes_in_use"), self._device),
    )
    took += [
      f"at most {memory.size(peak)} of {name} (estimated: {memory.size(estimate)})"
      for name, peak, estimate in peaks
      if peak is not None
    ]
    self._report(", ".join(took))


def _bytes(tree: object) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _duration(seconds: float) -> str:
  return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
