"""Learning with several processes against learning with one, on Catch: the same curve, within the noise of seeds?

    python benchmarks/units.py [--seeds 5] [--steps 4000] [--out benchmarks/results/units-Catch.json]

`one` is a process with one device. `several` are two learners with two (fake) devices each, an actor and a reanalyser;
learner 1 acts and reanalyses itself. All else is the same, to the seed. Compared are greedy evaluations at the same
learner steps; `z` is the difference of the means in standard errors. Runs have the pace of the preset, but end after
--steps of its 8,000 learner steps: on two cores the several take many times as long, most of it in the kernel's TCP
(batch norm over all devices is 67 small collectives a step).
"""

import argparse
import math
import time
from pathlib import Path

import grid
from common import ROOT, write

from speedyzero_jax.metrics import names

INTERVAL = 250  # learner steps between evaluations
RANDOM = 500
SEVERAL = ["topology.learners=2", "topology.actors=1", "topology.reanalysers=1"]
TOPOLOGIES = {"one": [], "several": SEVERAL}
DEVICES = {"one": "1", "several": "2"}  # of each process


def settings(steps: int) -> list[str]:
  """What both topologies run, for this many learner steps."""
  return [
    f"learner.steps={steps}",
    f"actor.random_steps={RANDOM}",
    f"run.env_steps={RANDOM + steps * 27_500 // 8000}",
    f"evaluation.interval={INTERVAL}",
    "run.checkpoint_interval=100000",
    "run.log_interval=50",
  ]


def learnt(rows: list[grid.Row]) -> dict:
  """The evaluations by learner step, and how many agent steps there were."""
  curve = {
    int(row[names.EVALUATION_STEP]): row[names.EVALUATION_MEAN]
    for row in rows
    if names.EVALUATION_STEP in row
  }
  return {"curve": curve, "env_steps": rows[-1][names.ENV_STEPS]}


def main() -> None:
  """Runs, prints, writes."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=5)
  parser.add_argument("--steps", type=int, default=4000, help="learner steps of a run")
  parser.add_argument(
    "--work", type=Path, default=ROOT / "runs" / "units", help="where the runs go"
  )
  parser.add_argument("--out", type=Path, help="JSON file for the results")
  arguments = parser.parse_args()
  begin = time.time()
  runs = {
    name: grid.run_all(
      {
        seed: [*settings(arguments.steps), *topology, f"run.seed={seed}"]
        for seed in range(arguments.seeds)
      },
      arguments.work,
      learnt,
      lambda seed, name=name: f"{name}-s{seed}",
      environment={"JAX_NUM_CPU_DEVICES": DEVICES[name]},
      parallel=False,
    )
    for name, topology in TOPOLOGIES.items()
  }
  table = []
  print(f"{'step':>6}{'one':>16}{'several':>16}{'z':>8}")
  steps = sorted(
    set.intersection(*(set(run["curve"]) for found in runs.values() for run in found.values()))
  )
  for step in steps:
    points = {
      name: grid.spread([{"score": run["curve"][step]} for run in found.values()], "score")
      for name, found in runs.items()
    }
    (one, one_error), (several, several_error) = points["one"], points["several"]
    error = math.hypot(one_error, several_error)
    z = (several - one) / error if error else 0.0
    table.append({"step": step, "points": points, "z": z})
    print(
      f"{step:>6}{one:>8.2f} ± {one_error:<5.2f}{several:>8.2f} ± {several_error:<5.2f}{z:>8.1f}"
    )
  for name, found in runs.items():
    (score, error), (seconds, _) = (
      grid.spread(list(found.values()), key) for key in ("score", "seconds")
    )
    print(f"{name}: {score:.2f} ± {error:.2f} at the end; {seconds:.0f} s each")
  write(
    arguments.out,
    {
      "minutes": round((time.time() - begin) / 60, 1),
      "preset": "quickstart",
      "settings": {"base": settings(arguments.steps), "topologies": TOPOLOGIES, "devices": DEVICES},
      "table": table,
      "runs": runs,
    },
  )


if __name__ == "__main__":
  main()
