"""Ablations on Catch: Priority Refresh on and off, Clipped LARS, LARS and SGD, batch 64 and 1024.

    python benchmarks/ablation.py [--seeds 5] [--out benchmarks/results/ablation.json]

Every run is a whole run of launch/multihost.py in its own process, pinned to one core, as many at once as there are
cores. The score is the mean return of 100 greedy episodes with the last weights (-1 never catches, 1 always does), and
beside it the mean training return over the second half of collection, which says how fast it learned. Learning rates
were chosen per optimiser on a seed that is not in the table (--tune). Finished runs are not repeated.
"""

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path

import grid
from common import ROOT, write

from speedyzero_jax.metrics import names

BASE = [
  "run.env_steps=8000",
  "evaluation.episodes=100",
  "run.checkpoint_interval=100000",
  "optim.decay_steps=0",
]
STEPS = {
  64: 2000,
  1024: 1000,
}  # learner steps; with 300 of batch 1024 nothing was learned at any rate
OPTIMIZERS = {  # by name: settings
  "sgd": ["optim.name=sgd"],
  "lars": ["optim.name=lars"],
  "clipped_lars": ["optim.name=clipped_lars"],
  "clipped_lars-max10": ["optim.name=clipped_lars", "optim.trust_max=10"],
  "clipped_lars-eta0.01": ["optim.name=clipped_lars", "optim.trust_coefficient=0.01"],
}
RATES = {  # tried by --tune
  "sgd": [0.25, 0.5, 1.0, 2.0],
  "lars": [0.5, 1.0, 2.0, 4.0],
  "clipped_lars": [0.5, 1.0, 2.0, 4.0],
  "clipped_lars-max10": [0.5, 1.0, 2.0, 4.0],
  "clipped_lars-eta0.01": [0.25, 0.5, 1.0, 2.0],
}
# Best on seed 100 of those; by the training return where several score alike.
CHOSEN = {
  64: {"sgd": 0.5, "lars": 2.0, "clipped_lars": 2.0},
  1024: {"sgd": 1.0, "lars": 2.0, "clipped_lars": 2.0},
}


def overrides(optimizer: str, batch: int, refresh: bool, rate: float, seed: int) -> list[str]:
  """The settings of one run, besides the preset `quickstart`."""
  return [
    *BASE,
    *OPTIMIZERS[optimizer],
    f"optim.learning_rate={rate}",
    f"optim.warmup_steps={STEPS[batch] // 20}",
    f"learner.batch_size={batch}",
    f"learner.steps={STEPS[batch]}",
    f"refresh.enabled={str(refresh).lower()}",
    f"run.seed={seed}",
  ]


def learnt(rows: list[grid.Row]) -> dict:
  """How fast: the training return, and the age of priorities, over the second half of collection."""
  half = [row for row in rows if row["env_steps"] >= 4000]
  return {
    "training": statistics.mean(
      row[names.EPISODE_RETURN] for row in half if row.get(names.EPISODE_RETURN) is not None
    ),
    "priority_age": statistics.mean(row[names.PRIORITY_AGE_MEAN] for row in half),
  }


def folder(key: tuple) -> str:
  """A run's name."""
  optimizer, batch, refresh, rate, seed = key
  return f"{optimizer}-b{batch}-{'on' if refresh else 'off'}-lr{rate}-s{seed}"


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument(
    "--work", type=Path, default=ROOT / "runs" / "ablation", help="where the runs go"
  )
  parser.add_argument("--out", type=Path, help="JSON file for the results")
  parser.add_argument("--batches", type=int, nargs="+", choices=STEPS, default=list(STEPS))
  parser.add_argument(
    "--optimizers", nargs="+", choices=OPTIMIZERS, default=list(CHOSEN[64]), dest="names"
  )
  parser.add_argument(
    "--tune", action="store_true", help="try the learning rates on seed 100, with refresh, instead"
  )
  arguments = parser.parse_args()
  unknown = [(b, o) for b in arguments.batches for o in arguments.names if o not in CHOSEN[b]]
  if unknown and not arguments.tune:
    parser.error(
      f"no rate was chosen yet for {unknown}: find one with --tune, and write it into CHOSEN"
    )
  if arguments.tune:
    keys = [
      (o, b, True, r, 100)
      for o, b in itertools.product(arguments.names, arguments.batches)
      for r in RATES[o]
    ]
  else:
    seeds = range(arguments.seeds)
    keys = [
      (o, b, f, CHOSEN[b][o], s)
      for b, o, f, s in itertools.product(arguments.batches, arguments.names, (True, False), seeds)
    ]
  begin = time.time()
  results = grid.run_all({key: overrides(*key) for key in keys}, arguments.work, learnt, folder)

  groups: dict[tuple, list[dict]] = {}
  for (optimizer, batch, refresh, rate, _), result in results.items():
    groups.setdefault((batch, optimizer, rate, refresh), []).append(result)
  table = []
  print(
    f"{'batch':>5}  {'optimiser':<21}{'rate':>6}  {'refresh':<8}{'score':>15}  {'training':>15}  diverged"
  )
  for (batch, optimizer, rate, refresh), runs in groups.items():
    (score, score_error), (training, training_error) = (
      grid.spread(runs, "score"),
      grid.spread(runs, "training"),
    )
    row = {
      "batch": batch,
      "optimizer": optimizer,
      "learning_rate": rate,
      "refresh": refresh,
      "score_mean": score,
      "score_stderr": score_error,
      "training_mean": training,
      "training_stderr": training_error,
      "diverged": sum(r["diverged"] for r in runs),
      "runs": runs,
    }
    table.append(row)
    print(
      f"{batch:>5}  {optimizer:<21}{rate:>6}  {'on' if refresh else 'off':<8}"
      f"{row['score_mean']:>7.2f} ± {row['score_stderr']:<5.2f}"
      f"  {row['training_mean']:>7.2f} ± {row['training_stderr']:<5.2f}  {row['diverged']}"
    )
  write(
    arguments.out,
    {
      "minutes": round((time.time() - begin) / 60, 1),
      "placement": f"{len(os.sched_getaffinity(0))} runs at once, one core each",
      "preset": "quickstart",
      "settings": {"base": BASE, "steps": {str(k): v for k, v in STEPS.items()}},
      "table": table,
    },
  )


if __name__ == "__main__":
  main()
