"""Whole-buffer sweeps against reanalysis of each batch: what is learned, how fast, and how many searches it takes.

    python benchmarks/sweep.py [--seeds 5] [--out benchmarks/results/sweep-Catch.json]
    python benchmarks/sweep.py --set env.game=CartPole network.support=9 [--out benchmarks/results/sweep-CartPole.json]

`batch` searches the K+1 states of every sample anew, as EfficientZero and SpeedyZero do; `sweep S` goes over the whole
replay so that no policy, value or priority is more than S learner steps old. All else is the same: weights, their
intervals, batches, steps. On Catch, unless told otherwise, with half of the quickstart's steps, so that there is
something left to tell apart. How fast it learns is said by the training return (mean of the last 100 games): at 25%,
50% and 75% of the learner steps, which keep pace with the samples, at the end, and on average over all of them.
"""

import argparse
import functools
import itertools
import math
import os
import statistics
import time
from pathlib import Path

import grid
from common import ROOT, load, positive, write

from speedyzero_jax.metrics import names

BASE = [
  "learner.steps=4000",
  "run.env_steps=14000",
  "optim.decay_steps=4000",
  "run.checkpoint_interval=100000",
]
BASE += ["reanalyse.weights_interval=10", "refresh.max_age=100", "run.log_interval=50"]
SCHEDULES = {
  "batch": ["reanalyse.schedule=batch"],
  **{
    f"sweep {age}": ["reanalyse.schedule=sweep", f"reanalyse.max_age={age}"]
    for age in (25, 50, 100)
  },
}
TRAINING = {  # returns, by name: when
  "training_at_25": "25%", "training_at_50": "50%", "training_at_75": "75%", "training": "end", "training_mean": "mean",
}  # fmt: skip


def learnt(rows: list[grid.Row], steps: int) -> dict:
  """Searches; ages in the last quarter; training returns at the end, at some percent of the steps, and on average."""
  searched, before = 0.0, 0
  for row in rows:
    searched += row.get(names.REANALYSED_PER_STEP, 0.0) * (row["step"] - before)
    before = row["step"]
  late = [row for row in rows if row["step"] > 0.75 * steps and names.TARGET_AGE_MEAN in row]
  returns = {
    row["step"]: row[names.EPISODE_RETURN]
    for row in rows
    if row.get(names.EPISODE_RETURN) is not None
  }
  on_the_way = {}
  for percent in (25, 50, 75):
    until = [x for step, x in returns.items() if step <= percent / 100 * steps]
    if until:
      on_the_way[f"training_at_{percent}"] = until[-1]
  return {
    "searches_per_step": searched / steps,
    "target_age": sum(row[names.TARGET_AGE_MEAN] for row in late) / len(late),
    "target_age_max": max(row[names.TARGET_AGE_MAX] for row in late),
    "training": late[-1][names.EPISODE_RETURN],
    **on_the_way,
    "training_mean": statistics.fmean(returns.values()),
  }


def main() -> None:
  """Runs, prints, writes."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--preset", nargs="+", default=["quickstart"])
  parser.add_argument(
    "--set", nargs="*", default=[], metavar="key=value", help="overrides of all runs"
  )
  parser.add_argument("--seeds", type=positive, default=5)
  parser.add_argument(
    "--work", type=Path, default=ROOT / "runs" / "sweep", help="where the runs go"
  )
  parser.add_argument("--out", type=Path, help="JSON file for the results")
  arguments = parser.parse_args()
  base = [*BASE, *arguments.set]
  config = load(parser, arguments.preset, base)
  game = config.env.game
  keys = list(itertools.product(SCHEDULES, range(arguments.seeds)))
  begin = time.time()
  results = grid.run_all(
    {
      (schedule, seed): [*base, *SCHEDULES[schedule], f"run.seed={seed}"] for schedule, seed in keys
    },
    arguments.work,
    functools.partial(learnt, steps=config.learner.steps),
    lambda key: f"{game}-{key[0].replace(' ', '-')}-s{key[1]}",
    presets=arguments.preset,
    worst=-1.0 if game == "Catch" else None,
  )
  table = []
  print(
    f"{'schedule':<10}{'score':>15}{'training':>16}{'searches/step':>15}{'age':>7}{'oldest':>8}{'seconds':>9}"
  )
  for schedule in SCHEDULES:
    runs = [results[schedule, seed] for seed in range(arguments.seeds)]
    row = {"schedule": schedule, "runs": runs}
    for key in ("score", *TRAINING, "searches_per_step", "target_age", "seconds"):
      row[key], row[f"{key}_stderr"] = grid.spread(runs, key)
    row["target_age_max"] = max(
      (run["target_age_max"] for run in runs if not run["diverged"]), default=math.nan
    )
    table.append(row)
    print(
      f"{schedule:<10}{row['score']:>7.2f} ± {row['score_stderr']:<5.2f}{row['training']:>8.2f} ± "
      f"{row['training_stderr']:<5.2f}{row['searches_per_step']:>15.0f}{row['target_age']:>7.0f}"
      f"{row['target_age_max']:>8.0f}{row['seconds']:>9.0f}"
    )
  print(f"\n{'training':<10}" + "".join(f"{when:>16}" for when in TRAINING.values()))
  for row in table:
    print(
      f"{row['schedule']:<10}"
      + "".join(f"{row[key]:>8.2f} ± {row[f'{key}_stderr']:<5.2f}" for key in TRAINING)
    )
  write(
    arguments.out,
    {
      "minutes": round((time.time() - begin) / 60, 1),
      "placement": f"{len(os.sched_getaffinity(0))} runs at once, one core each",
      "preset": arguments.preset,
      "game": game,
      "settings": {"base": base, "schedules": SCHEDULES},
      "table": table,
    },
  )


if __name__ == "__main__":
  main()
