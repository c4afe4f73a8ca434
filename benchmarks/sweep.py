"""Whole-buffer sweeps against reanalysis of each batch: return, searches per step, target age.

    python benchmarks/sweep.py [--seeds 5] [--out benchmarks/results/sweep-Catch.json]
    python benchmarks/sweep.py --set env.game=CartPole

`batch` searches the K+1 states of every sample again, as EfficientZero and SpeedyZero do; `sweep S`
goes over the whole replay so that no policy, value or priority is more than S learner steps old.
Everything else is equal. The training return (mean of the last 100 games) is reported at 25%, 50%
and 75% of the learner steps, at the end, and as a mean over all log lines.
"""

import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from common import ROOT, parser_of, positive, spread, write
from runs import (
  EPISODE_RETURN,
  SEARCHES,
  STEP,
  TARGET_AGE,
  TARGET_AGE_MAX,
  Row,
  Run,
  run_all,
  value_of,
)

BASE = [  # fewer samples per agent step than the quickstart's, so that the schedules can differ
  "learner.steps=4000", "run.env_steps=14000", "optim.decay_steps=4000",
  "run.checkpoint_interval=100000", "reanalyse.weights_interval=10", "refresh.max_age=100",
  "run.log_interval=50",
]  # fmt: skip
SCHEDULES = {"batch": ["reanalyse.schedule=batch"]} | {
  f"sweep {age}": ["reanalyse.schedule=sweep", f"reanalyse.max_age={age}"] for age in (25, 50, 100)
}
TRAINING = ("training_at_25", "training_at_50", "training_at_75", "training", "training_mean")


def summary(rows: list[Row], steps: int) -> dict[str, Any]:
  """Searches per step; target ages in the last quarter; training returns."""
  taken = [b[STEP] - a[STEP] for a, b in zip([{STEP: 0}, *rows[:-1]], rows, strict=True)]
  late = [row for row in rows if row[STEP] > 0.75 * steps and TARGET_AGE in row]
  played = [row for row in rows if row.get(EPISODE_RETURN) is not None]
  at = {}
  for percent in (25, 50, 75):
    until = [row[EPISODE_RETURN] for row in played if row[STEP] <= percent / 100 * steps]
    at[f"training_at_{percent}"] = until[-1] if until else None
  return {
    "searches_per_step":
      sum(row.get(SEARCHES, 0.0) * n for row, n in zip(rows, taken, strict=True)) / steps,
    "target_age": statistics.mean(row[TARGET_AGE] for row in late),
    "target_age_max": max(row[TARGET_AGE_MAX] for row in late),
    **at,
    "training": played[-1][EPISODE_RETURN],
    "training_mean": statistics.mean(row[EPISODE_RETURN] for row in played),
  }  # fmt: skip


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("--config", nargs="+", default=["quickstart"], metavar="PRESET")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--seeds", type=positive, default=5)
  parser.add_argument("--work", type=Path, default=ROOT / "runs/sweep", help="run folders")
  arguments = parser.parse_args()
  base = [*BASE, *arguments.set]
  game, steps = value_of(base, "env.game", "Catch"), int(value_of(base, "learner.steps", ""))
  runs = {
    (schedule, seed): Run(
      arguments.work / f"{game}-{schedule.replace(' ', '-')}-s{seed}",
      arguments.config,
      [*base, *settings, f"run.seed={seed}"],
    )
    for schedule, settings in SCHEDULES.items()
    for seed in range(arguments.seeds)
  }
  begin = time.time()
  worst = -1.0 if game == "Catch" else None
  found = run_all(runs, functools.partial(summary, steps=steps), worst=worst)
  table = []
  print("schedule            score  searches/step    age  oldest  seconds")
  for schedule in SCHEDULES:
    of_seed = [found[schedule, seed] for seed in range(arguments.seeds)]
    row: dict[str, Any] = {"schedule": schedule, "runs": of_seed}
    for key in ("score", *TRAINING, "searches_per_step", "target_age", "seconds"):
      row[key], row[f"{key}_stderr"] = spread(of_seed, key)
    oldest = [run["target_age_max"] for run in of_seed if not run["diverged"]]
    row["target_age_max"] = max(oldest, default=math.nan)
    table.append(row)
    print(
      f"{schedule:<10}{row['score']:>7.2f} ± {row['score_stderr']:<5.2f}"
      f"{row['searches_per_step']:>15.0f}{row['target_age']:>7.0f}"
      f"{row['target_age_max']:>8.0f}{row['seconds']:>9.0f}"
    )
  print(f"\n{'training':<10}" + "".join(f"{x:>16}" for x in ("25%", "50%", "75%", "end", "mean")))
  for row in table:
    cells = [f"{row[key]:>8.2f} ± {row[f'{key}_stderr']:<5.2f}" for key in TRAINING]
    print(f"{row['schedule']:<10}" + "".join(cells))
  result = {
    "minutes": round((time.time() - begin) / 60, 1),
    "preset": arguments.config,
    "game": game,
    "settings": {"base": base, "schedules": SCHEDULES},
    "table": table,
  }
  write(arguments.out, result)


if __name__ == "__main__":
  main()
