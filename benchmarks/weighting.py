"""How much younger targets could be when they are used if sweeps visited likely states oftener, searching as much.

    python benchmarks/weighting.py --config quickstart --steps 2000 4000 --out benchmarks/results/weighting-Catch.json
    python benchmarks/weighting.py --config atari_small --steps 500 1000 2000

Searches of a sweep go to all states equally often. If state i is sampled with probability p_i, and looked at every a_i
learner steps, targets are sum(p_i a_i) / 2 steps old when they are used, on average, for sum(1 / a_i) searches a step.
For a given number of those they are youngest if a_i is in proportion to 1 / sqrt(p_i) (Cauchy-Schwarz), by the factor
mean(sqrt(p))^2 / mean(p). That is the most that weighting can do, and it gives up the bound on every state's age: rare
states would wait the longer. The priorities are those of a run that sweeps, at the learner steps named.
"""

import argparse
import contextlib
import tempfile
from pathlib import Path

import numpy as np
from common import load, write

from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run import loops
from speedyzero_jax.run.experiment import Training


def youngest(probability: np.ndarray) -> float:
  """Mean age of the targets in use, at best, as a share of what it is with equal visits; `probability` sums to any."""
  return float(np.mean(np.sqrt(probability)) ** 2 / np.mean(probability))


def look(replay: Replay) -> dict[str, float]:
  """What weighting could do for this replay."""
  priority = replay.state_dict()["priority"]
  priority = priority[priority > 0]  # of what may be sampled
  best, visits = youngest(priority), np.sqrt(priority)
  return {
    "states": len(priority),
    "age_at_best": best,
    "visits_99_to_1_percent": float(np.quantile(visits, 0.99) / np.quantile(visits, 0.01)),
    "longest_wait": float(np.mean(visits) / visits.min()),
  }


def main() -> None:
  """Runs, prints, writes."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", default=["quickstart"], metavar="PRESET")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
  parser.add_argument(
    "--steps", type=int, nargs="+", default=[2000, 4000], help="learner steps at which to look"
  )
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  config = load(parser, arguments.config, ["reanalyse.schedule=sweep", *arguments.set])
  rows = []
  print(
    f"{'learner step':>12}{'states':>9}{'mean age, of equal visits':>27}{'longest wait, of equal visits':>31}"
  )
  with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
    reporter = stack.enter_context(Reporter(config, Path(folder), "weighting", None))
    training = stack.enter_context(
      contextlib.closing(Training(config, Path(folder), reporter, resume=False))
    )

    def stepped() -> None:
      step = training.pacer.learner_steps
      if step in arguments.steps:
        rows.append({"step": step, **look(training.replay)})
        row = rows[-1]
        print(
          f"{step:>12}{row['states']:>9}{row['age_at_best']:>27.2f}{row['longest_wait']:>31.1f}",
          flush=True,
        )
      if step == max(arguments.steps):
        training.interrupt()

    training.after_step.append(stepped)
    loops.run(training)
  write(arguments.out, {"preset": arguments.config, "set": arguments.set, "rows": rows})


if __name__ == "__main__":
  main()
