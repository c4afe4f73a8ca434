"""What a run will take of this machine's memory and time: told at its start, compared at its end with what it took."""

import math
import time
from collections.abc import Callable

import jax

from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.builders import Game, game_of, mean_stored, replay_bytes, replay_capacity
from speedyzero_jax.run.experiment import Training
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import WarmUp

_PROGRAMS = 1.2e9  # bytes of host memory for libraries and compiled programs, as seen on CPUs with small networks
_COPIES = 3  # of the network, for those who act, reanalyse and refresh with weights of other steps
_APART = ("evaluate", "profile")  # parts in which nothing else goes on
# Learner steps over which the time is measured, and seconds: this many of both, or fewer steps if they take long.
_STEPS, _SECONDS, _FEW_STEPS, _LONG = 20, 5.0, 5, 60.0


def batch_bytes(config: Config, game: Game) -> int:
  """Of a `LearnerBatch`."""
  learner, loss, stack = config.learner, config.agent.loss, config.env.frame_stack
  frames = (stack + loss.unroll_steps) * math.prod(game.frame_shape) * game.frame_dtype.itemsize
  numbers = (loss.unroll_steps + 1) * (game.num_actions + 3) + 4 * loss.unroll_steps + 1
  return learner.batch_size * (frames + 4 * numbers)


def sweep_growth(config: Config, block: int, collected: int) -> float:
  """How much more whole-buffer passes cost from now to the run's end, on average, than they do now.

  Args:
    config: of the run, or the unit.
    block: states in one call; a pass may compute as many more than there are.
    collected: agent steps so far.
  """
  now = min(collected, replay_capacity(config) * config.actor.lanes)
  return (mean_stored(config, collected) + block) / (now + block)


class Forecast:
  """Estimates a run's needs, and says at its end how right it was.

  To be made before anything is built.

  Args:
    config: of the run, or of the unit.
    report: takes lines.
    clock: seconds, from any origin.
  """

  def __init__(
    self, config: Config, report: Callable[[str], None], clock: Callable[[], float] = time.monotonic
  ):
    self._config, self._report, self._clock = config, report, clock
    self._began = clock()
    self._resident, self._room = memory.resident() or 0, memory.available()
    self._host = self._device = 0.0  # bytes
    self._told: dict[str, list[str]] = {
      "seconds": [],
      "host": [],
      "device": [],
    }  # what was estimated, and when
    self._measured = False
    self._since: tuple[int, float, dict[str, float]] | None = (
      None  # learner step, time and parts where measuring began
    )
    self._training: Training | None = None

  def watch(self, training: Training, warm_up: WarmUp) -> None:
    """Estimates for this run, and goes on doing so; to be called before it begins to work."""
    self._training, self._warm_up = training, warm_up
    training.after_step.append(lambda: self._stepped(training))
    self._estimate_memory(training)
    self._report(
      f"this configuration on this machine: {self._memory()}, without what its programs need"
    )
    self._warn()

  def prepared(self, training: Training, each: float | None) -> None:
    """Estimates for the run whose programs are known now.

    Args:
      training: as watched.
      each: seconds that a learner step will take on average; None where nobody knows.
    """
    self._estimate_memory(training)
    tried = memory.resident(peak=True)  # with the memory that the programs took, if they were tried
    if tried is not None:
      self._host = max(self._host, self._will_hold(training, tried))
    expected = ""
    if each is not None:
      left = each * (self._config.learner.steps - training.pacer.learner_steps)
      expected = f"; about {_duration(left)}, {each:.3g} s a learner step, by what each of its parts takes alone"
      self._tell("seconds", _duration(self._clock() - self._began + left), "at the start")
    self._tell("host", memory.size(self._host), "at the start")
    self._tell("device", memory.size(self._device), "at the start")
    self._report(
      f"with {memory.size(training.program_bytes)} for its programs on each device: {self._memory()}{expected}"
    )
    self._warn()

  def _tell(self, what: str, value: str, when: str) -> None:
    self._told[what].append(f"{value} {when}")

  def _estimate_memory(self, training: Training) -> None:
    config, devices = self._config, training.learner.mesh.local_devices
    variables, optimizer, _ = (
      sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(part))
      for part in training.learner.abstract()
    )
    batches = (config.learner.prefetch + 2 if config.run.mode == "async" else 1) * batch_bytes(
      config, game_of(config)
    )
    self._device = (
      (1 + _COPIES) * variables
      + optimizer
      + batches / len(devices)
      + training.replay.bytes_on_devices
    )
    self._device += training.program_bytes
    self._host = self._resident + _PROGRAMS + replay_bytes(config) + self._checkpoint()
    if _devices_are_host():
      self._host += self._device * len(devices)

  def _checkpoint(self) -> float:
    """Bytes of the frames that a checkpoint copies."""
    return replay_bytes(self._config) * min(
      self._config.run.checkpoint_interval / self._config.learner.steps, 1.0
    )

  def _memory(self) -> str:
    room = "" if self._room is None else f" of {memory.size(self._resident + self._room)}"
    host = f"about {memory.size(self._host)}{room} host memory"
    limit = memory.of_devices(jax.local_devices(), "bytes_limit")
    if _devices_are_host() or limit is None:
      return host
    return f"{host}, {memory.size(self._device)} of {memory.size(limit)} on each device"

  def _warn(self) -> None:
    if self._room is not None and self._host - self._resident > self._room:
      self._report(
        "warning: that is more host memory than there is; replay.capacity bounds the replay, learner.prefetch and "
        "learner.batch_size the batches"
      )
    limit = memory.of_devices(jax.local_devices(), "bytes_limit")
    if limit is not None and self._device > limit:
      self._report(
        "warning: that is more than a device has; replay.frames=host keeps the frames off it, learner.batch_size makes "
        "batches and the training step smaller"
      )

  def _stepped(self, training: Training) -> None:
    if self._measured:
      return
    step, now, parts = training.pacer.learner_steps, self._clock(), training.times.totals()
    if self._since is None:
      if self._warm_up.over:
        self._since = step, now, parts
      return
    spent = {name: total - self._since[2].get(name, 0.0) for name, total in parts.items()}
    apart = math.fsum(spent.pop(name, 0.0) for name in _APART)
    steps, seconds = step - self._since[0], now - self._since[1] - apart
    if not (steps >= _STEPS and seconds >= _SECONDS) and not (
      steps >= _FEW_STEPS and seconds >= _LONG
    ):
      return
    each = seconds / steps * self._growth(training, spent)
    left = each * (self._config.learner.steps - step)
    whole, self._measured = _duration(now - self._began + left), True
    self._estimate_memory(training)  # all programs are known now
    self._host = max(
      self._will_hold(training, memory.resident() or 0), memory.resident(peak=True) or 0
    )
    self._tell("seconds", whole, f"at step {step}")
    self._tell("host", memory.size(self._host), f"at step {step}")
    self._report(
      f"this will take about {whole}, {_duration(left)} of them from now, evaluations not counted: "
      f"{each:.3g} s a learner step on average, {seconds / steps:.3g} s now; {self._memory()}"
    )
    self._warn()

  def _growth(self, training: Training, spent: dict[str, float]) -> float:
    """How much longer a step will take on average than now, by what sweeps take of all work."""
    work = math.fsum(seconds for name, seconds in spent.items() if name != "wait")
    growth = 1.0
    for sweeper in training.sweepers if work and training.part.reanalyses else ():
      name = "refresh" if sweeper.kind == "refresh" else "search"
      more = sweep_growth(self._config, sweeper.block, training.pacer.env_steps) - 1
      growth += spent.get(name, 0.0) / work * more
    return growth

  def _will_hold(self, training: Training, resident: int) -> float:
    """Host memory when the replay is full, from what is held now, being `resident` in all."""
    held = training.replay.stats(training.pacer.learner_steps)["bytes"]
    return resident + max(replay_bytes(self._config) - held, 0) + self._checkpoint()

  def ended(self) -> None:
    """Says what the run took, beside what was estimated."""
    took = [f"took {_duration(self._clock() - self._began)}{self._estimated('seconds')}"]
    host = memory.resident(peak=True)
    if host is not None:
      took.append(f"at most {memory.size(host)} of host memory{self._estimated('host')}")
    device = memory.of_devices(jax.local_devices(), "peak_bytes_in_use")
    if device is not None:
      took.append(f"{memory.size(device)} of a device's{self._estimated('device')}")
    self._report(", ".join(took))

  def _estimated(self, what: str) -> str:
    return f" (estimated: {', '.join(self._told[what])})" if self._told[what] else ""


def _devices_are_host() -> bool:
  return jax.default_backend() == "cpu"


def _duration(seconds: float) -> str:
  return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
