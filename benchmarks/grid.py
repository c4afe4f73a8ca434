"""Runs several trainings and tells what came of them. For comparisons over settings and seeds."""

import concurrent.futures
import json
import os
import queue
import statistics
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from common import ROOT

from speedyzero_jax.config import loader
from speedyzero_jax.metrics.jsonl import read_rows
from speedyzero_jax.run import run_dir, topology

Row = Mapping[str, float]


def run_all(
  runs: Mapping[Hashable, Sequence[str]],
  work: Path,
  summarise: Callable[[list[Row]], dict],
  name: Callable[[Hashable], str],
  *,
  presets: Sequence[str] = ("quickstart",),
  environment: Mapping[str, str] | None = None,
  parallel: bool = True,
  worst: float | None = -1.0,
) -> dict:
  """Runs each one's settings on the presets and returns, by key, what became of it.

  A whole run of launch/multihost.py, in its own process or, if its topology asks for it, in several; its output goes
  to a .log file beside its folder. One that ended is not repeated, one that was interrupted goes on.

  Args:
    runs: settings by key.
    work: where the run folders go.
    summarise: what else to keep, from the lines of its metrics.
    name: of a key's run folder.
    presets: that all runs have in common.
    environment: variables that they have besides this process' own.
    parallel: pinned to one core each, as many at once as there are cores; or one after another, on all of them.
    worst: the score of a run that diverged, by default Catch's least; None: it has none.

  Returns:
    `score` (mean of the final evaluation), `seconds`, `diverged`, and what `summarise` found. Of a run that diverged,
    only `diverged` and its score.

  Raises RuntimeError if a run failed otherwise, or if a folder holds a run of other settings.
  """
  cores = sorted(os.sched_getaffinity(0))
  places: queue.Queue[list[str]] = queue.Queue()  # commands that put a run where it is to be
  for place in [["taskset", "-c", str(core)] for core in cores] if parallel else [[]]:
    places.put(place)

  def one(key: Hashable) -> dict:
    place = places.get()
    try:
      diverged = _run(
        presets, runs[key], work.resolve() / name(key), place, os.environ | (environment or {})
      )
    finally:
      places.put(place)
    if diverged:
      return {"diverged": True} | ({} if worst is None else {"score": worst})
    folder = work / name(key)
    rows, _ = read_rows(folder / "metrics.jsonl")
    score = json.loads((folder / "evaluation.json").read_text())["mean"]
    return {"score": score, "seconds": rows[-1]["time"], "diverged": False, **summarise(rows)}

  with concurrent.futures.ThreadPoolExecutor(places.qsize()) as pool:
    futures = {key: pool.submit(one, key) for key in runs}
    try:
      return {key: future.result() for key, future in futures.items()}
    except BaseException:  # Ctrl-C reaches those that are running, too: they save and end
      pool.shutdown(cancel_futures=True)
      raise


def _run(
  presets: Sequence[str],
  settings: Sequence[str],
  folder: Path,
  place: Sequence[str],
  environment: Mapping[str, str],
) -> bool:
  """Runs to the end what has not ended. Returns whether it diverged."""
  command = [
    sys.executable,
    "launch/multihost.py",
    "--config",
    *presets,
    *settings,
    f"run.dir={folder}",
  ]
  wanted = topology.settle(loader.load(presets, settings))
  if (folder / "config.yaml").exists():
    found = run_dir.read_config(folder)
    different = [line for line in loader.diff(found, wanted) if not line.startswith("run.dir:")]
    if different:
      raise RuntimeError(
        f"{folder} holds another run ({'; '.join(different)}): remove it, or choose another --work"
      )
    command = [sys.executable, "launch/multihost.py", "--resume", str(folder)]
    evaluation = folder / "evaluation.json"
    if evaluation.exists() and json.loads(evaluation.read_text())["step"] == wanted.learner.steps:
      return False
  shape = topology.resolve(wanted)
  if shape.num_processes > 1:
    command += [
      "--processes",
      f"learner={shape.learners},actor={shape.actors},reanalyser={shape.reanalysers}",
    ]
  folder.parent.mkdir(parents=True, exist_ok=True)
  with folder.with_name(f"{folder.name}.log").open("a+") as log:
    before = log.tell()
    done = subprocess.run(
      [*place, *command],
      cwd=ROOT,
      env=environment,
      stdout=log,
      stderr=subprocess.STDOUT,
      check=False,
    )
    log.seek(before)
    said = log.read()
  # Divergence is a result, not a fault of the benchmark; anything else is.
  if done.returncode and "diverged" not in said:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{said[-2000:]}")
  return done.returncode != 0


def spread(runs: Sequence[dict], key: str) -> tuple[float, float]:
  """Mean and standard error of a number over the runs that have it; nan where none has."""
  values = [run[key] for run in runs if key in run]
  if not values:
    return float("nan"), float("nan")
  return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(
    values
  ) > 1 else 0.0
