"""Profile of a few learner steps: seconds per part and per program, and a trace."""

import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing

_WARM_UP = 5  # learner steps before the profile, in which jax compiles small functions
_NOTES = (
  "Parts are timed during the run. A program's seconds are those of one call in isolation, before "
  "the run; its calls are the average number per learner step."
)


def profile(experiment: Experiment, folder: Path, timings: Sequence[Timing]) -> Iterator[None]:
  """Profiles `profile.steps` learner steps; advance this generator after each learner step.

  Writes `profile.json`, which includes `timings`, and `plugins/profile/` into the folder, unless
  the run ends earlier. Steps are timed first and as many again traced afterwards, as tracing slows
  down work that consists of many small programs.
  """
  sweepers = experiment.sweepers if experiment.membership.runs_sweeps else []
  for _ in range(_WARM_UP):
    yield
  while not all(sweeper.states for sweeper in sweepers):
    yield
  steps = experiment.config.profile.steps
  begin, before = _measure(experiment)
  for _ in range(steps):
    yield
  end, after = _measure(experiment)
  first = experiment.limiter.learner_steps
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # tracing every Python call would slow it down
  with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
    for step in range(first, first + steps):
      with jax.profiler.StepTraceAnnotation("learner step", step_num=step):
        yield
    jax.block_until_ready(experiment.state)
  seconds = (end - begin) / steps
  spent = {part: (total - before.get(part, 0.0)) / steps for part, total in after.items()}
  devices = experiment.learner.mesh.local_devices
  result = {
    "device": f"{len(devices)} x {devices[0].device_kind}",
    "mode": experiment.config.run.mode,
    "learner_steps": [first - steps, first],
    "transitions": experiment.replay.num_transitions,
    "seconds_per_step": seconds,
    "samples_per_second": experiment.config.learner.batch_size / seconds,
    "parts": _parts(experiment, spent, seconds),
    "programs": [timing._asdict() for timing in timings if timing.calls],
    "notes": _NOTES,
  }
  path = folder / "profile.json"
  path.write_text(json.dumps(result, indent=1) + "\n")
  experiment.logger.message(f"{tables(result)}profile: {path}; trace: {folder}/plugins/profile/")


def _measure(experiment: Experiment) -> tuple[float, dict[str, float]]:
  """Waits for the last learner step; returns the time, and the seconds of each part so far."""
  with experiment.logger.part("train"):
    jax.block_until_ready(experiment.state)
  return time.perf_counter(), experiment.logger.part_times()


def _parts(experiment: Experiment, spent: dict[str, float], seconds: float) -> list[dict[str, Any]]:
  """Seconds per learner step of each part, by thread; `host` is the learner thread's remainder."""
  threads = {"act": "actor", "sample": "batches", "gather": "batches"}
  threads |= {task.part: "batches" for task in experiment.agent.tasks.values()}
  threads |= {sweeper.task.part: "sweeps" for sweeper in experiment.sweepers}
  if experiment.config.run.mode == "lockstep":
    threads = {}
  rows: list[dict[str, Any]] = [
    {"part": part, "thread": threads.get(part, "learner"), "seconds": each}
    for part, each in spent.items()
    if each
  ]
  known = math.fsum(row["seconds"] for row in rows if row["thread"] == "learner")
  rows.append({"part": "host", "thread": "learner", "seconds": max(seconds - known, 0.0)})
  return sorted(rows, key=lambda row: (row["thread"] != "learner", row["thread"], -row["seconds"]))


def tables(profile: dict[str, Any]) -> str:
  """Formats a profile as text tables."""
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
