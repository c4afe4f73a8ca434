"""Profile of a few learner steps of a run: seconds per part, costs per program, and a trace."""

import contextlib
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing
from speedyzero_jax.system import costs
from speedyzero_jax.system.compilation import Compilations, WarmUp

_NOTES = (
  "Parts are timed in the run. A program's seconds are those of a call alone, before the run. "
  "FLOPs are of matrix products and convolutions, loops included; bytes are XLA's count, in which "
  "the body of a loop counts once. Both are of one device."
)


class _Totals(NamedTuple):
  """Counts so far, at a moment with no learner step under way."""

  step: int
  seconds: float
  parts: dict[str, float]
  calls: list[int]  # of each program
  compiled: int


class Profiler:
  """Times `profile.steps` learner steps once a run has warmed up, then traces as many more.

  A trace slows down work that consists of many small programs, hence the two passes. A context
  manager, to be entered before the run begins. Writes `profile.json` and `plugins/profile/`.

  Args:
    experiment: to profile.
    folder: to write to.
    timings: of the programs, from `warmup.prepare`.
    compilations: listening.
    warm_up: stepped before.
    then: called at the end.
  """

  def __init__(
    self,
    experiment: Experiment,
    folder: Path,
    timings: Sequence[Timing],
    compilations: Compilations,
    warm_up: WarmUp,
    then: Callable[[], None] = lambda: None,
  ):
    self._experiment, self._folder, self._timings = experiment, folder, timings
    self._compilations, self._warm_up, self._then = compilations, warm_up, then
    self.done = False

  def __enter__(self) -> "Profiler":
    flops = sum((timing.form.flops for timing in self._timings), Counter[str]())
    self._dtype = flops.most_common(1)[0][0] if flops else "float32"
    self._peak = costs.peak_flops(self._dtype, self._experiment.learner.mesh.local_devices)
    self._phases = self._profile()
    self._experiment.after_step.append(lambda: next(self._phases, None))
    return self

  def __exit__(self, *_: object) -> None:
    self._phases.close()
    if not self.done:
      self._experiment.logger.message("no profile: the run ended before its steps were taken")

  def _profile(self) -> Generator[None]:
    """The profile, which yields until the next learner step is done."""
    experiment, steps = self._experiment, self._experiment.config.profile.steps
    while not self._warm_up.over:
      yield
    begin = self._totals()
    for _ in range(steps):
      yield
    end = self._totals()
    with self._trace():
      for step in range(end.step, end.step + steps):
        with jax.profiler.StepTraceAnnotation("learner step", step_num=step):
          yield
      jax.block_until_ready(experiment.state)
    result = self._result(begin, end)
    path = self._folder / "profile.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    experiment.logger.message(
      f"{tables(result)}{path}; the trace is beside it, in plugins/profile/"
    )
    self.done = True
    self._then()

  def _totals(self) -> _Totals:
    x = self._experiment
    with x.times.part("train"):  # the last step may still be going on
      jax.block_until_ready(x.state)
    return _Totals(
      x.limiter.learner_steps,
      time.perf_counter(),
      x.times.totals(),
      [timing.program.calls[timing.form.label] for timing in self._timings],
      len(self._compilations.names),
    )

  @contextlib.contextmanager
  def _trace(self) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every call of Python would slow it down
    jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
    try:
      yield
    finally:
      with self._experiment.times.part("profile"):
        jax.profiler.stop_trace()

  def _result(self, begin: _Totals, end: _Totals) -> dict[str, Any]:
    x, steps = self._experiment, end.step - begin.step
    seconds = (end.seconds - begin.seconds) / steps
    calls = [(b - a) / steps for a, b in zip(begin.calls, end.calls, strict=True)]
    programs = [
      self._program(timing, count)
      for timing, count in zip(self._timings, calls, strict=True)
      if count
    ]
    flops = math.fsum(program["flops"] * program["calls"] for program in programs)
    devices = x.learner.mesh.local_devices
    return {
      "device": f"{len(devices)} x {devices[0].device_kind}",
      "jax": jax.__version__,
      "mode": x.config.run.mode,
      "learner_steps": [begin.step, end.step],
      "transitions": x.replay.num_transitions,
      "seconds_per_step": seconds,
      "samples_per_second": x.config.learner.batch_size / seconds,
      "parts": self._parts(begin, end, seconds),
      "programs": programs,
      "flops_per_step": flops,
      "share_of_peak": flops / seconds / self._peak,
      "peak_flops": self._peak,
      "peak_dtype": self._dtype,
      "compiled_meanwhile": self._compilations.names[begin.compiled : end.compiled],
      "notes": _NOTES,
    }

  def _program(self, timing: Timing, calls: float) -> dict[str, Any]:
    form, flops = timing.form, timing.form.flops.total()
    return {
      "program": timing.name,
      "label": form.label,
      "calls": calls,  # per learner step
      "compile_seconds": form.compile_seconds,
      "seconds": timing.seconds,
      "flops": flops,
      "bytes": form.traffic,
      "share_of_peak": flops / timing.seconds / self._peak,
    }

  def _parts(self, begin: _Totals, end: _Totals, step: float) -> list[dict[str, Any]]:
    """Parts by thread; `host` is the rest of the learner's thread."""
    threads = {"act": "actor", "sample": "batches", "gather": "batches"}
    threads |= {task.part: "batches" for task in self._experiment.agent.tasks.values()}
    threads |= {sweeper.task.part: "sweeps" for sweeper in self._experiment.sweepers}
    if self._experiment.config.run.mode == "lockstep":
      threads = {}
    rows: list[dict[str, Any]] = []
    for part, total in end.parts.items():
      seconds = (total - begin.parts.get(part, 0.0)) / (end.step - begin.step)
      if seconds:
        rows.append({"part": part, "thread": threads.get(part, "learner"), "seconds": seconds})
    spent = math.fsum(row["seconds"] for row in rows if row["thread"] == "learner")
    rows.append({"part": "host", "thread": "learner", "seconds": max(step - spent, 0.0)})
    return sorted(rows, key=lambda r: (r["thread"] != "learner", r["thread"], -r["seconds"]))


def tables(profile: dict[str, Any]) -> str:
  """A profile as text."""
  numbers = [
    {"number": name, "value": value}
    for name, value in profile.items()
    if name not in ("parts", "programs", "notes")
  ]
  console = Console(file=io.StringIO(), width=140, color_system=None)
  with console.capture() as text:
    for rows in (profile["parts"], profile["programs"], numbers):
      table = Table(box=None)
      for column, value in rows[0].items() if rows else ():
        table.add_column(column, justify="left" if isinstance(value, str) else "right")
      for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
      console.print(table, "")
    console.print(profile["notes"])
  return text.get()
