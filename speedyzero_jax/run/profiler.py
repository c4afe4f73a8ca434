"""Profile of a few learner steps of a run: seconds per part, costs per program, and a trace."""

import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing
from speedyzero_jax.system import costs

_WARM_UP = 5  # learner steps before the profile, in which jax compiles what is small
_NOTES = (
  "Parts are timed in the run. A program's seconds are those of a call alone, before the run; its "
  "calls per learner step are those on average. FLOPs are of matrix products and convolutions, "
  "loops included, of one device."
)


def attach(experiment: Experiment, folder: Path, timings: Sequence[Timing]) -> None:
  """Profiles `profile.steps` learner steps of the run that begins.

  Writes `profile.json` and `plugins/profile/` into the folder, unless the run ends earlier.

  Args:
    experiment: to profile.
    folder: to write to.
    timings: of its programs.
  """
  flops = sum((timing.flops for timing in timings), Counter[str]())
  dtype = flops.most_common(1)[0][0] if flops else "float32"
  peak = costs.peak_flops(dtype, experiment.learner.mesh.local_devices)
  phases = _profile(experiment, folder, timings, {"peak_dtype": dtype, "peak_flops": peak})
  experiment.after_step.append(lambda: next(phases, None))


def _profile(
  experiment: Experiment, folder: Path, timings: Sequence[Timing], peak: dict[str, Any]
) -> Iterator[None]:
  """The profile; yields until the next learner step is done.

  Steps are first timed, then as many traced: a trace slows down work of many small programs.
  """
  sweepers = experiment.sweepers if experiment.membership.sweeps else []
  for _ in range(_WARM_UP):
    yield
  while not all(sweeper.states for sweeper in sweepers):
    yield
  steps = experiment.config.profile.steps
  begin = _measure(experiment)
  for _ in range(steps):
    yield
  end = _measure(experiment)
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # tracing every call of Python would slow it down
  with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
    for step in range(end.step, end.step + steps):
      with jax.profiler.StepTraceAnnotation("learner step", step_num=step):
        yield
    jax.block_until_ready(experiment.state)
  result = peak | _result(experiment, timings, begin, end, peak["peak_flops"])
  path = folder / "profile.json"
  path.write_text(json.dumps(result, indent=1) + "\n")
  experiment.logger.message(f"{tables(result)}{path}; the trace is beside it, in plugins/profile/")


class _Measured(NamedTuple):
  """Totals so far, at a moment with no learner step under way."""

  step: int
  seconds: float
  parts: dict[str, float]


def _measure(experiment: Experiment) -> _Measured:
  with experiment.times.part("train"):  # the last step may still be going on
    jax.block_until_ready(experiment.state)
  step, parts = experiment.limiter.learner_steps, experiment.times.totals()
  return _Measured(step, time.perf_counter(), parts)


def _result(
  experiment: Experiment,
  timings: Sequence[Timing],
  begin: _Measured,
  end: _Measured,
  peak: float,
) -> dict[str, Any]:
  config, devices = experiment.config, experiment.learner.mesh.local_devices
  seconds = (end.seconds - begin.seconds) / (end.step - begin.step)
  timings = [timing for timing in timings if timing.calls]
  flops = math.fsum(timing.calls * timing.flops.total() for timing in timings)
  return {
    "device": f"{len(devices)} x {devices[0].device_kind}",
    "mode": config.run.mode,
    "learner_steps": [begin.step, end.step],
    "transitions": experiment.replay.num_transitions,
    "seconds_per_step": seconds,
    "samples_per_second": config.learner.batch_size / seconds,
    "flops_per_step": flops,
    "share_of_peak": flops / seconds / peak,
    "parts": _parts(experiment, begin, end, seconds),
    "programs": [
      {
        "program": timing.program,
        "calls": timing.calls,
        "seconds": timing.seconds,
        "flops": timing.flops.total(),
        "share_of_peak": timing.flops.total() / timing.seconds / peak,
      }
      for timing in timings
    ],
    "notes": _NOTES,
  }


def _parts(
  experiment: Experiment, begin: _Measured, end: _Measured, seconds: float
) -> list[dict[str, Any]]:
  """Seconds per learner step of each part, by thread; `host` is the rest of the learner's."""
  threads = {"act": "actor", "sample": "batches", "gather": "batches"}
  threads |= {task.part: "batches" for task in experiment.agent.tasks.values()}
  threads |= {sweeper.task.part: "sweeps" for sweeper in experiment.sweepers}
  if experiment.config.run.mode == "lockstep":
    threads = {}
  rows: list[dict[str, Any]] = []
  for part, total in end.parts.items():
    each = (total - begin.parts.get(part, 0.0)) / (end.step - begin.step)
    if each:
      rows.append({"part": part, "thread": threads.get(part, "learner"), "seconds": each})
  spent = math.fsum(row["seconds"] for row in rows if row["thread"] == "learner")
  rows.append({"part": "host", "thread": "learner", "seconds": max(seconds - spent, 0.0)})
  return sorted(rows, key=lambda row: (row["thread"] != "learner", row["thread"], -row["seconds"]))


def tables(profile: dict[str, Any]) -> str:
  """A profile as text."""
  numbers = [
    {"number": name, "value": value} for name, value in profile.items() if type(value) is not list
  ]
  console = Console(file=io.StringIO(), width=140, color_system=None)
  with console.capture() as text:
    for rows in (profile["parts"], profile["programs"], numbers):
      table = Table(*(rows[0] if rows else ()), box=None)
      for row in rows:
        table.add_row(*(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()))
      console.print(table, "")
  return text.get()
