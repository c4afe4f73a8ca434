"""Learning compared with LightZero's EfficientZero and ReZero on CartPole: samples and minutes.

    taskset -c 0 python benchmarks/peers_learning.py --out benchmarks/results/peers-learning.json
    python benchmarks/peers_learning.py --quick                              # a test, minutes

The first command takes about 50 minutes on an idle core.

The task is CartPole-v0, whose episodes end after 200 steps. `ours` is the preset `quickstart`; the
others are LightZero's entries with its own configurations for CartPole (its ReZero is based on
MuZero). All train on 64 samples per agent step, as the preset does (LightZero: `replay_ratio`).
LightZero's 24 environments are in the same process instead of one process each. Each run is a new
process, in turns; all have the same cores (`--cores`) and allocator settings (see peers.py).

After every `--interval` agent steps' worth of samples, the mean return of 16 greedy episodes is a
point of the run's curve: [samples trained on, agent steps, seconds, CPU seconds, score]. Seconds
are of training, without evaluations, from when LightZero has made everything, or our program has
read its configuration; ours include compilation, as its cache is empty at first. The threshold is
195, where CartPole-v0 counts as solved.
"""

import os

from common import parser_of, positive, write
from peers import ALLOCATOR, NAN, Bench, lightzero, ours, parse_sides, table

THRESHOLD = 195
METHODS = {
  "ours": (ours, {}),
  "EfficientZero": (lightzero, {"method": "efficientzero"}),
  "ReZero": (lightzero, {"method": "rezero_mz"}),
}


def summary(curve: list[list[float]]) -> dict[str, float]:
  """Values of a curve's first point at the threshold, NaN if there is none, and its last score."""
  first = next((point for point in curve if point[-1] >= THRESHOLD), [NAN] * 5)
  samples, agent_steps, seconds, cpu_seconds, _ = first
  return {
    "samples": samples, "agent steps": agent_steps, "minutes": seconds / 60,
    "CPU minutes": cpu_seconds / 60, "last score": curve[-1][-1] if curve else NAN,
  }  # fmt: skip


def main() -> None:
  parser = parser_of(__doc__)
  add = parser.add_argument
  add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
  add("--seeds", type=positive, default=3)
  add("--agent-steps", type=positive, default=4000, help="length of a run")
  add("--interval", type=positive, default=400, help="agent steps between evaluations")
  add("--cores", type=positive, default=1, help="cores for each run")
  add("--quick", action="store_true", help="one seed, 600 agent steps, 4 episodes per evaluation")
  arguments = parse_sides(parser)
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
  length = {"agent_steps": arguments.agent_steps, "interval": arguments.interval, "episodes": 16}
  if arguments.quick:
    arguments.seeds, length = 1, {"agent_steps": 600, "interval": 200, "episodes": 4}
  if length["interval"] % 4 or length["agent_steps"] % length["interval"]:
    parser.error("--interval must be a multiple of 4 and divide --agent-steps")
  bench = Bench(arguments.venv, repeat=1, limit=0)
  bench.measure(lightzero("versions"))
  rows: dict[str, list[float]] = {}
  for seed in range(arguments.seeds):
    for name in arguments.methods:
      side, method = METHODS[name]
      (row,) = bench.measure(side("learn", **method, seed=seed, **length))
      row["summary"] = summary(row.get("curve", []))
      rows[f"{name}, seed {seed}"] = list(row["summary"].values())
      print(f"{name}, seed {seed}: {row.get('missing', row['summary'])}", flush=True)
      write(arguments.out, {"environment": ALLOCATOR, "measured": bench.rows})
  table(f"First score of {THRESHOLD}", list(row["summary"]), rows)


if __name__ == "__main__":
  main()
