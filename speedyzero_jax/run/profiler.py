"""Profiles a few steps of a run that is going on: a trace, and tables of where the time goes and what programs achieve.

Looks on from outside: while it works the run stands still, and then goes on as if nothing had been.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.agents.efficientzero.inference import make_recurrent_fn
from speedyzero_jax.agents.efficientzero.networks import Blueprint, Variables, initial_carry
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.run import loops, profile_report, warmup
from speedyzero_jax.run.experiment import Training
from speedyzero_jax.system import costs, memory
from speedyzero_jax.system.compilation import Compilations, Program, WarmUp
from speedyzero_jax.system.costs import Cost

# Which thread does what, when roles overlap; the rest is the learner's. In lockstep all is.
_THREADS = {"act": "actor", "sample": "batches", "gather": "batches", "refresh": "sweeps"}
_HOW = (
  "Run times are of programs alone, with the arguments that the run gave them; parts are timed in the run. FLOPs and "
  "bytes are XLA's count, in which loops count once: to a search's, simulations - 1 times those of one recurrent "
  "inference are added. On several devices they are one device's."
)


class Watched:
  """A program whose calls are counted from `begin` to `end`, by their labels, and the latest ones' arguments kept."""

  def __init__(self, function: Program):
    self.function = function
    self.calls: Counter[str] = Counter()
    self.latest: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    self._counting = False
    self._lock = threading.Lock()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    with self._lock:
      if self._counting:
        label = self.function.label(*args, **kwargs)
        self.calls[label] += 1
        self.latest[label] = args, kwargs
    return self.function(*args, **kwargs)

  def begin(self) -> None:
    """Counts from now on."""
    self._counting = True

  def end(self) -> None:
    """Counts no more."""
    with self._lock:
      self._counting = False

  def __getattr__(self, name: str) -> Any:  # all else is the program's
    return getattr(self.function, name)


@dataclasses.dataclass(frozen=True)
class Function:
  """What a compiled function did and can do."""

  name: str
  calls: float  # per learner step
  compile_seconds: float
  seconds: float  # of one call, alone
  flops: float  # of one call; nan where nobody can tell, as of what several programs do
  bytes: float


class _Found(NamedTuple):
  """What the timed steps took."""

  steps: int
  seconds: float
  parts: dict[str, float]  # totals at their end
  host_bytes: int
  compiled: int  # programs, until their end


class _Beginning(NamedTuple):
  """What was known when the profile began."""

  step: int
  time: float
  parts: dict[str, float]
  compiled: int
  host_bytes: int


class Profiler:
  """Profiles a run once it is warm. A context manager, around the run's work.

  Some steps are timed, then as many more are traced, since tracing slows what consists of many small programs.

  Args:
    folder: where `profile.json` and the trace (`plugins/profile/`) go.
    steps: learner steps to time, and to trace.
    compilations: listening since before the run was built.
    report: takes the tables.
    then: called when it is done.
  """

  def __init__(
    self,
    folder: Path,
    steps: int,
    compilations: Compilations,
    report: Callable[[str], None],
    then: Callable[[], None] = lambda: None,
  ):
    self._folder, self._steps, self._compilations, self._report, self._then = (
      folder,
      steps,
      compilations,
      report,
      then,
    )
    self._begun: _Beginning | None = None
    self._found: _Found | None = None
    self._tracing = False
    self._step_mark: jax.profiler.StepTraceAnnotation | None = None
    self._over = False
    self.done = False

  def __enter__(self) -> "Profiler":
    self._stack = contextlib.ExitStack()
    return self

  def __exit__(self, *_: object) -> None:
    self._end_trace()
    self._stack.close()
    if not self._over:
      self._report("no profile: the run ended before its steps were taken")

  def watch(self, training: Training, warm_up: WarmUp) -> None:
    """Profiles this run; to be called before it begins to work."""
    self._training, self._warm_up = training, warm_up
    self._watched = {
      "train": self._replace(training.learner, "update"),
      "search": self._replace(training.inference, "search"),
      "value": self._replace(training.inference, "value"),
    }
    training.after_step.append(self._stepped)

  def _replace(self, owner: object, name: str) -> Watched:
    function: Program = getattr(owner, name)
    watched = Watched(function)
    setattr(owner, name, watched)
    self._stack.callback(setattr, owner, name, function)
    return watched

  def _stepped(self) -> None:
    if self._over:
      return
    if self._begun is None:
      if self._warm_up.over:
        self._begin()
      return
    taken = self._training.pacer.learner_steps - self._begun.step
    if self._found is None:
      if taken >= self._steps:
        self._found = self._end_timing(self._begun, taken)
        self._begin_trace()
      return
    if taken - self._found.steps < self._steps:
      self._mark()
      return
    jax.block_until_ready(self._training.state)  # the last one may still be going on
    with self._training.times.part("profile"):
      self._end_trace()
      try:
        self._tell(self._begun, self._found)
        self.done = True
      except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if memory.ran_out(error) is None:
          raise
        self._report("no profile: its measurements need more memory than the run leaves")
    self._stack.close()  # nothing is watched any more
    self._watched.clear()  # nor are arguments kept
    self._over = True
    self._then()

  def _begin(self) -> None:
    training = self._training
    jax.block_until_ready(training.state)
    self._begun = _Beginning(
      training.pacer.learner_steps,
      time.perf_counter(),
      training.times.totals(),
      len(self._compilations.names),
      training.host_bytes,
    )
    for watched in self._watched.values():
      watched.begin()

  def _end_timing(self, begun: _Beginning, steps: int) -> _Found:
    training = self._training
    with training.times.part("train"):  # the last one may still be going on
      jax.block_until_ready(training.state)
    seconds = time.perf_counter() - begun.time
    for watched in self._watched.values():
      watched.end()
    moved = training.host_bytes - begun.host_bytes
    return _Found(steps, seconds, training.times.totals(), moved, len(self._compilations.names))

  def _begin_trace(self) -> None:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of Python would be traced, and be slower for it
    try:
      jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
      self._tracing = True
    except RuntimeError as error:
      self._report(f"warning: no trace: {error}")
    self._mark()

  def _mark(self) -> None:
    """Tells the trace where one learner step ends and another begins."""
    if self._step_mark is not None:
      self._step_mark.__exit__(None, None, None)
    self._step_mark = jax.profiler.StepTraceAnnotation(
      "learner step", step_num=self._training.pacer.learner_steps
    )
    self._step_mark.__enter__()

  def _end_trace(self) -> None:
    if self._step_mark is not None:
      self._step_mark.__exit__(None, None, None)
      self._step_mark = None
    if self._tracing:
      self._tracing = False
      try:
        jax.profiler.stop_trace()
      except (RuntimeError, ValueError, OSError) as error:
        self._report(f"warning: no trace, or not all of it: {error}")

  def _tell(self, begun: _Beginning, found: _Found) -> None:
    training, steps = self._training, found.steps
    seconds = found.seconds / steps
    parts = {
      name: (total - begun.parts.get(name, 0.0)) / steps
      for name, total in found.parts.items()
      if total > begun.parts.get(name, 0.0)
    }
    meanwhile = self._compilations.names[begun.compiled : found.compiled]
    compiled = Counter(self._compilations.names)
    functions = [
      self._measure(kind, label, count / steps)
      for kind, watched in self._watched.items()
      for label, count in sorted(watched.calls.items())
    ]
    known = {getattr(watched.function, "__name__", "") for watched in self._watched.values()}
    devices, dtype = training.learner.mesh.local_devices, training.config.agent.network.dtype
    result: dict[str, Any] = {
      "device": f"{len(devices)} x {devices[0].device_kind}",
      "jax": jax.__version__,
      "mode": training.config.run.mode,
      "learner_steps": [begun.step, begun.step + steps],
      "transitions": training.replay.num_transitions,
      "seconds_per_step": seconds,
      "samples_per_second": training.config.learner.batch_size / seconds,
      "host_to_device_bytes_per_step": found.host_bytes / steps,
      "parts": self._parts(parts, seconds),
      "functions": [dataclasses.asdict(function) for function in functions],
      "dtype": dtype,
      "peak_flops": costs.peak_flops(dtype),
      "peak_bytes_per_second": costs.peak_bandwidth(),
      "compiled_meanwhile": meanwhile,
      "other_compilations": {
        name: {"count": count, "seconds": self._compilations.seconds(name)}
        for name, count in compiled.items()
        if name not in known
      },
      "how": _HOW,
    }
    path = self._folder / "profile.json"
    profile_report.write(path, result)
    self._report(
      f"{profile_report.table(result)}\n  {path}; the trace is beside it, in plugins/profile/"
    )

  def _parts(self, parts: dict[str, float], seconds: float) -> list[dict[str, Any]]:
    """Each part with its thread and seconds per learner step; `host` is what is left of the learner's thread."""
    threads = _THREADS | {
      "search": "sweeps" if self._training.config.agent.reanalyse.schedule == "sweep" else "batches"
    }
    if self._training.config.run.mode == "lockstep":
      threads = {}
    rows: list[dict[str, Any]] = [
      {"part": name, "thread": threads.get(name, "learner"), "seconds": spent}
      for name, spent in parts.items()
    ]
    learner = math.fsum(row["seconds"] for row in rows if row["thread"] == "learner")
    rows.append({"part": "host", "thread": "learner", "seconds": max(seconds - learner, 0.0)})
    return sorted(
      rows, key=lambda row: (row["thread"] != "learner", row["thread"], -row["seconds"])
    )

  def _measure(self, kind: str, label: str, calls: float) -> Function:
    watched, training = self._watched[kind], self._training
    function, (args, kwargs) = watched.function, watched.latest[label]
    if kind == "train":  # the state it was given is gone, and the run needs the one it has
      state = training.learner.restore(*jax.tree.map(np.array, jax.device_get(training.state)))
      _, batch, key, *rest = args
      args = state, batch, key, *rest

      def call() -> None:
        nonlocal state
        state, _ = training.learner.step(state, batch, key)
        jax.block_until_ready(state)
    else:

      def call() -> None:
        jax.block_until_ready(function(*args, **kwargs))

    lowered = function.lower(*args, **kwargs)
    if kind == "search":
      variables, frames, *_ = args
      roots = -(-training.inference.states(frames) // training.inference.devices)  # of one device
      cost = search_cost(lowered, training.config, training.learner.blueprint, variables, roots)
    else:
      cost = costs.cost_of(lowered)
    return Function(
      label, calls, function.seconds(label), costs.median_seconds(call), cost.flops, cost.bytes
    )


def search_cost(
  lowered: jax.stages.Lowered,
  config: Config,
  blueprint: Blueprint,
  variables: Variables,
  roots: int,
) -> Cost:
  """The cost of `Inference.search` on a device that has so many roots.

  XLA counts the body of its loop once, so to its count are added simulations - 1 times those of a recurrent inference.
  """
  height, width, _ = blueprint.observation_shape
  side, network = config.agent.network.downsample, config.agent.network
  state = jax.ShapeDtypeStruct(
    (roots, height // side, width // side, network.channels), network.dtype
  )
  carry = jax.eval_shape(lambda: initial_carry(network, roots))
  action = jax.ShapeDtypeStruct((roots,), np.int32)
  body = costs.cost_of(jax.jit(make_recurrent_fn(blueprint)).lower(variables, state, carry, action))
  counted, repeated = costs.cost_of(lowered), config.agent.search.simulations - 1
  return Cost(counted.flops + repeated * body.flops, counted.bytes + repeated * body.bytes)


def profile(config: Config, folder: Path) -> bool:
  """Begins a run in this folder and ends it when `profile.steps` of it are profiled. Returns whether they were."""
  with (
    Compilations() as compilations,
    Reporter(config, folder, folder.name, None) as reporter,
    contextlib.closing(Training(config, folder, reporter, resume=False)) as training,
  ):
    warm_up = WarmUp(compilations, lambda: training.in_full_work)
    training.after_step.append(warm_up.step)
    steps, report = config.profile.steps, reporter.message
    with Profiler(folder, steps, compilations, report, then=training.interrupt) as profiler:
      profiler.watch(training, warm_up)
      warmup.prepare(training)
      loops.run(training)
    return profiler.done
