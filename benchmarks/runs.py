"""Whole runs of launch/multihost.py in subprocesses, over settings and seeds.

Reads only what a run leaves on disk: metrics.jsonl and evaluation.json. The names of metrics that
the benchmarks read are listed here, as they appear in metrics.jsonl.
"""

import concurrent.futures
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT

STEP, ENV_STEPS, TIME = "step", "env_steps", "time"
EPISODE_RETURN = "charts/episode_return"
PRIORITY_AGE = "replay/priority_age_mean"
SEARCHES = "reanalyse/states_per_learner_step"
TARGET_AGE, TARGET_AGE_MAX = "replay/target_age_mean", "replay/target_age_max"
EVALUATION = "evaluation/"  # + step, mean, median, std, human_normalised

Row = dict[str, Any]


class Run(NamedTuple):
  """One training run."""

  folder: Path
  presets: Sequence[str]
  settings: Sequence[str]


def read_metrics(folder: Path) -> list[Row]:
  """Lines of a run's metrics.jsonl; an incomplete last line is left out."""
  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def value_of(settings: Sequence[str], key: str, default: str) -> str:
  """The value of the last `key=value` in a list of settings."""
  found = [text.partition("=")[2] for text in settings if text.partition("=")[0] == key]
  return found[-1] if found else default


def run_all(
  runs: Mapping[Any, Run],
  summarise: Callable[[list[Row]], dict[str, Any]],
  *,
  parallel: bool = True,
  worst: float | None = None,
) -> dict[Any, dict[str, Any]]:
  """Trains each run to its end and returns a summary by key.

  Runs that have ended are not repeated; interrupted ones resume. Output goes to a .log file beside
  the run folder.

  Args:
    runs: by key.
    summarise: results to keep, from the lines of metrics.jsonl.
    parallel: one core per run, as many runs at once as cores; else one at a time on all cores.
    worst: score of a run that diverged.

  Returns:
    `score` (mean of the final evaluation), `evaluation`, `seconds`, `diverged` and the summary. A
    run that diverged has only `score` and `diverged`.

  Raises RuntimeError if a run fails for another reason or a folder holds a run of other settings.
  """
  cores = sorted(os.sched_getaffinity(0)) if parallel else [None]
  free: queue.Queue[int | None] = queue.Queue()
  for core in cores:
    free.put(core)

  def one(run: Run) -> dict[str, Any]:
    core = free.get()
    try:
      outcome = _train(run, [] if core is None else ["taskset", "-c", str(core)])
    finally:
      free.put(core)
    if outcome == "diverged":
      return {"diverged": True, "score": worst}
    rows = read_metrics(run.folder)
    evaluation = json.loads((run.folder / "evaluation.json").read_text())
    return {
      "score": evaluation["mean"], "evaluation": evaluation, "seconds": rows[-1][TIME],
      "diverged": False, **summarise(rows),
    }  # fmt: skip

  with concurrent.futures.ThreadPoolExecutor(len(cores)) as pool:
    futures = {key: pool.submit(one, run) for key, run in runs.items()}
    try:
      return {key: future.result() for key, future in futures.items()}
    except BaseException:  # Ctrl-C also reaches the children, which save and exit
      pool.shutdown(cancel_futures=True)
      raise


def _train(run: Run, prefix: list[str]) -> str:
  """Trains unless done; the outcome, `finished` or `diverged`, is kept beside the folder."""
  folder = run.folder.resolve()
  record = folder.with_name(f"{folder.name}.json")
  wanted = {"presets": list(run.presets), "settings": list(run.settings)}
  known = json.loads(record.read_text()) if record.exists() else wanted | {"outcome": None}
  if {key: known[key] for key in wanted} != wanted:
    raise RuntimeError(f"{folder} holds a run of other settings: remove it or change --work")
  if known["outcome"]:
    return known["outcome"]
  folder.parent.mkdir(parents=True, exist_ok=True)
  record.write_text(json.dumps(known) + "\n")
  arguments = ["--config", *run.presets, *run.settings, f"run.dir={folder}"]
  if (folder / "config.yaml").exists():
    arguments = ["--resume", str(folder)]
  command = [*prefix, sys.executable, "launch/multihost.py", *arguments]
  with folder.with_name(f"{folder.name}.log").open("a+") as log:
    begin = log.tell()
    done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    log.seek(begin)
    output = log.read()
  if done.returncode and "diverged" not in output:
    raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{output[-2000:]}")
  known["outcome"] = "diverged" if done.returncode else "finished"
  record.write_text(json.dumps(known) + "\n")
  return known["outcome"]
