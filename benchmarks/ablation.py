"""Ablations on Catch: Priority Refresh on and off; Clipped LARS, LARS and SGD; batch 64 and 1024.

    python benchmarks/ablation.py [--seeds 5] [--out benchmarks/results/ablation.json]

Each row reports two means over seeds: the return of 100 greedy episodes at the end (-1 is never
catching, 1 always), and the training return over the second half of collection. Learning rates in
CHOSEN were the best of RATES on seed 100, which is not in the table; `--tune` repeats that search.
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from common import ROOT, parser_of, positive, spread, write
from runs import ENV_STEPS, EPISODE_RETURN, PRIORITY_AGE, Row, Run, run_all

ENV_TOTAL = 8000  # agent steps of a run
BASE = [
  f"run.env_steps={ENV_TOTAL}",
  "evaluation.episodes=100",
  "run.checkpoint_interval=100000",
  "optim.decay_steps=0",
]
STEPS = {64: 2000, 1024: 1000}  # learner steps by batch size
RATES = {
  "sgd": [0.25, 0.5, 1.0, 2.0],
  "lars": [0.5, 1.0, 2.0, 4.0],
  "clipped_lars": [0.5, 1.0, 2.0, 4.0],
}
CHOSEN = {
  64: {"sgd": 0.5, "lars": 2.0, "clipped_lars": 2.0},
  1024: {"sgd": 1.0, "lars": 2.0, "clipped_lars": 2.0},
}
TUNING_SEED = 100

Key = tuple[int, str, float, bool, int]  # batch, optimiser, rate, refresh, seed


def run_of(key: Key, work: Path) -> Run:
  """The run with these settings, on the preset `quickstart`."""
  batch, optimizer, rate, refresh, seed = key
  settings = [
    *BASE,
    f"optim.name={optimizer}",
    f"optim.learning_rate={rate}",
    f"optim.warmup_steps={STEPS[batch] // 20}",
    f"learner.batch_size={batch}",
    f"learner.steps={STEPS[batch]}",
    f"refresh.enabled={str(refresh).lower()}",
    f"run.seed={seed}",
  ]
  name = f"{optimizer}-b{batch}-{'on' if refresh else 'off'}-lr{rate}-s{seed}"
  return Run(work / name, ["quickstart"], settings)


def second_half(rows: list[Row]) -> dict[str, Any]:
  """Mean training return and priority age over the second half of collection."""
  half = [row for row in rows if row[ENV_STEPS] >= ENV_TOTAL / 2]
  returns = [row[EPISODE_RETURN] for row in half if row.get(EPISODE_RETURN) is not None]
  return {
    "training": statistics.mean(returns),
    "priority_age": statistics.mean(row[PRIORITY_AGE] for row in half),
  }


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("--seeds", type=positive, default=5)
  parser.add_argument("--work", type=Path, default=ROOT / "runs/ablation", help="run folders")
  parser.add_argument("--batches", type=int, nargs="+", choices=STEPS, default=list(STEPS))
  parser.add_argument("--optimizers", nargs="+", choices=RATES, default=list(RATES))
  parser.add_argument("--tune", action="store_true", help="search RATES on seed 100, with refresh")
  arguments = parser.parse_args()
  pairs = list(itertools.product(arguments.batches, arguments.optimizers))
  keys: list[Key]
  if arguments.tune:
    keys = [(b, o, rate, True, TUNING_SEED) for b, o in pairs for rate in RATES[o]]
  else:
    rest = list(itertools.product((True, False), range(arguments.seeds)))
    keys = [(b, o, CHOSEN[b][o], refresh, seed) for b, o in pairs for refresh, seed in rest]
  begin = time.time()
  found = run_all({key: run_of(key, arguments.work) for key in keys}, second_half, worst=-1.0)
  groups: dict[tuple, list[dict[str, Any]]] = {}
  for key, result in found.items():
    groups.setdefault(key[:-1], []).append(result)
  table = []
  print("batch  optimiser       rate  refresh          score        training  diverged")
  for (batch, optimizer, rate, refresh), runs in groups.items():
    row = {"batch": batch, "optimizer": optimizer, "learning_rate": rate, "refresh": refresh}
    for name in ("score", "training"):
      row[f"{name}_mean"], row[f"{name}_stderr"] = spread(runs, name)
    row |= {"diverged": sum(run["diverged"] for run in runs), "runs": runs}
    table.append(row)
    print(
      f"{batch:>5}  {optimizer:<14}{rate:>6}  {'on' if refresh else 'off':<8}"
      f"{row['score_mean']:>7.2f} ± {row['score_stderr']:<5.2f}"
      f"{row['training_mean']:>8.2f} ± {row['training_stderr']:<5.2f}{row['diverged']:>10}"
    )
  minutes = round((time.time() - begin) / 60, 1)
  settings = {"preset": "quickstart", "base": BASE, "steps": STEPS}
  write(arguments.out, {"minutes": minutes, "settings": settings, "table": table})


if __name__ == "__main__":
  main()
