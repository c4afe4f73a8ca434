"""Whole-buffer sweeps against reanalysis of each batch, on Catch: what is learned, and how many searches it takes.

    python benchmarks/sweep.py [--seeds 5] [--out benchmarks/results/sweep-Catch.json]

`batch` searches the K+1 states of every sample anew, as EfficientZero and SpeedyZero do; `sweep S` goes over the whole
replay so that no policy, value or priority is more than S learner steps old. All else is the same: weights, their
intervals, batches, steps. Half of the quickstart's steps, so that there is something left to tell apart.
"""

import argparse
import itertools
import os
import time
from pathlib import Path

import grid
from common import ROOT, write

from speedyzero_jax.metrics import names

STEPS = 4000
BASE = [f"learner.steps={STEPS}", "run.env_steps=14000", "optim.decay_steps=4000", "run.checkpoint_interval=100000"]
BASE += ["reanalyse.weights_interval=10", "refresh.max_age=100", "run.log_interval=50"]
SCHEDULES = {
  "batch": ["reanalyse.schedule=batch"],
  **{f"sweep {age}": ["reanalyse.schedule=sweep", f"reanalyse.max_age={age}"] for age in (25, 50, 100)},
}


def learnt(rows: list[grid.Row]) -> dict:
  """Searches, ages, and the training return of the last quarter."""
  searched, before = 0.0, 0
  for row in rows:
    searched += row.get(names.REANALYSED_PER_STEP, 0.0) * (row["step"] - before)
    before = row["step"]
  late = [row for row in rows if row["step"] > 0.75 * STEPS and names.TARGET_AGE_MEAN in row]
  return {
    "searches_per_step": searched / STEPS,
    "target_age": sum(row[names.TARGET_AGE_MEAN] for row in late) / len(late),
    "target_age_max": max(row[names.TARGET_AGE_MAX] for row in late),
    "training": late[-1][names.EPISODE_RETURN],
  }


def main() -> None:
  """Runs, prints, writes."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--work", type=Path, default=ROOT / "runs" / "sweep", help="where the runs go")
  parser.add_argument("--out", type=Path, help="JSON file for the results")
  arguments = parser.parse_args()
  keys = list(itertools.product(SCHEDULES, range(arguments.seeds)))
  begin = time.time()
  results = grid.run_all(
    {(schedule, seed): [*BASE, *SCHEDULES[schedule], f"run.seed={seed}"] for schedule, seed in keys},
    arguments.work,
    learnt,
    lambda key: f"{key[0].replace(' ', '-')}-s{key[1]}",
  )
  table = []
  print(f"{'schedule':<10}{'score':>15}{'training':>16}{'searches/step':>15}{'age':>7}{'oldest':>8}{'seconds':>9}")
  for schedule in SCHEDULES:
    runs = [results[schedule, seed] for seed in range(arguments.seeds)]
    row = {"schedule": schedule, "runs": runs}
    for key in ("score", "training", "searches_per_step", "target_age", "target_age_max", "seconds"):
      row[key], row[f"{key}_stderr"] = grid.spread(runs, key)
    table.append(row)
    print(
      f"{schedule:<10}{row['score']:>7.2f} ± {row['score_stderr']:<5.2f}{row['training']:>8.2f} ± "
      f"{row['training_stderr']:<5.2f}{row['searches_per_step']:>15.0f}{row['target_age']:>7.0f}"
      f"{row['target_age_max']:>8.0f}{row['seconds']:>9.0f}"
    )
  write(
    arguments.out,
    {
      "minutes": round((time.time() - begin) / 60, 1),
      "placement": f"{len(os.sched_getaffinity(0))} runs at once, one core each",
      "preset": "quickstart",
      "settings": {"base": BASE, "schedules": SCHEDULES},
      "table": table,
    },
  )


if __name__ == "__main__":
  main()
