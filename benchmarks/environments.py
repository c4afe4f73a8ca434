"""How fast environments step, and what our interface adds to envpool: agent steps a second of both in one run.

    python benchmarks/environments.py --out benchmarks/results/environments.json       # a minute on two cores

Random play. Both sides are the same envpool with the same options; they take turns, `--seconds` each, `--rounds` times.
Ours transposes frames to [H, W, C], sorts out lives and caps, and checks the actions.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import write

from speedyzero_jax.config.schema import EnvConfig
from speedyzero_jax.envs.batched_env import make_env

KINDS = {
  "96x96 RGB": EnvConfig(game="Breakout"),
  "48x48 grey": EnvConfig(game="Breakout", frame_size=48, grayscale=True),
  "Catch": EnvConfig(game="Catch"),
}


def rate(step: Callable[[np.ndarray], Any], lanes: int, actions: int, seconds: float) -> float:
  """Agent steps a second, of all lanes together."""
  rng, count, begin = np.random.default_rng(0), 0, time.perf_counter()
  while (spent := time.perf_counter() - begin) < seconds:
    step(rng.integers(actions, size=lanes, dtype=np.int32))
    count += lanes
  return count / spent


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
  parser.add_argument("--lanes", type=int, nargs="+", default=[1, 4, 16, 64])
  parser.add_argument("--threads", type=int, default=0, help="of envpool; 0 lets it choose")
  parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  rows = []
  print("environment   lanes   ours, steps/s    envpool   envpool / ours")
  for kind in arguments.kinds:
    config = dataclasses.replace(KINDS[kind], threads=arguments.threads)
    for lanes in arguments.lanes:
      ours, other = (make_env(config, lanes, 0, training=True) for _ in range(2))
      raw = other._pool
      ours.reset()
      raw.reset()
      rates: dict[str, list[float]] = {"ours": [], "envpool": []}
      for _ in range(arguments.rounds):
        for side, step in (("ours", ours.step), ("envpool", raw.step)):
          rates[side].append(rate(step, lanes, ours.num_actions, arguments.seconds))
      ours.close()
      del raw
      other.close()
      mine, theirs = (statistics.median(values) for values in rates.values())
      rows.append(
        {
          "environment": kind,
          "lanes": lanes,
          "ours": mine,
          "envpool": theirs,
          "ratio": theirs / mine,
        }
      )
      print(f"{kind:12} {lanes:6} {mine:15.0f} {theirs:10.0f} {theirs / mine:16.2f}")
  write(arguments.out, {"threads": arguments.threads, "rows": rows})


if __name__ == "__main__":
  main()
