"""What a preset learns: whole runs on several seeds, their last evaluations, and the curves that led there.

    python benchmarks/learning.py --config quickstart --seeds 5 [--parallel] [--out benchmarks/results/NAME.json]
    python benchmarks/learning.py --config atari_small --seeds 2 env.game=Assault evaluation.interval=1500

Seeds are run one after another on all cores, or with --parallel on one core each. The run folders are kept: seeds that
are done are not repeated, and one that was interrupted goes on when the same command is given again.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grid
from common import ROOT, load, write

from launch import multihost
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import names

_POINTS = 50  # of a training curve
_EVALUATION = {
  "step": names.EVALUATION_STEP,
  "mean": names.EVALUATION_MEAN,
  "median": names.EVALUATION_MEDIAN,
  "std": names.EVALUATION_STD,
  "human_normalised": names.EVALUATION_HUMAN_NORMALISED,
}


def curves(rows: list[grid.Row]) -> dict:
  """The evaluations on the way, and the training return at some steps, from a run's metrics."""
  evaluations: list[dict] = []
  for row in rows:
    step = row.get(names.EVALUATION_STEP)
    if step is not None and (not evaluations or evaluations[-1]["step"] != step):
      known = {short: row[name] for short, name in _EVALUATION.items() if name in row}
      evaluations.append(known | {"env_steps": row[names.ENV_STEPS], "seconds": row[names.TIME]})
  played = [row for row in rows if row.get(names.EPISODE_RETURN) is not None]
  kept = [*played[: -1 : max(len(played) // _POINTS, 1)], *played[-1:]]
  training = [
    [row[name] for name in (names.STEP, names.ENV_STEPS, names.TIME, names.EPISODE_RETURN)]
    for row in kept
  ]
  last = rows[-1]
  return {
    "learner_steps": last[names.STEP],
    "env_steps": last[names.ENV_STEPS],
    "evaluations": evaluations,
    "training": {"columns": ["learner_steps", "env_steps", "seconds", "return"], "rows": training},
  }


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
  """The command line, and what all seeds have in common. Overrides may stand anywhere, also right after the presets."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", action="extend", required=True, metavar="PRESET")
  parser.add_argument("--seeds", type=int, default=5, metavar="N", help="run.seed=0 to N-1")
  parser.add_argument(
    "--parallel", action="store_true", help="as many at once as there are cores, one core each"
  )
  parser.add_argument(
    "--work",
    type=Path,
    default=ROOT / "runs" / "learning",
    help="where the runs go; other settings need another place",
  )
  parser.add_argument("--out", type=Path, help="JSON file for the results")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all runs")
  arguments = parser.parse_args(argv)
  multihost.tell_apart(arguments, argv)
  return arguments, load(parser, arguments.config, arguments.overrides)


def main() -> None:
  """Runs, prints, writes."""
  arguments, config = parse(sys.argv[1:])
  label = "-".join(["+".join(Path(preset).stem for preset in arguments.config), config.env.game])

  def folder(seed: int) -> str:
    return f"{label}-s{seed}"

  try:
    found = grid.run_all(
      {seed: [*arguments.overrides, f"run.seed={seed}"] for seed in range(arguments.seeds)},
      arguments.work,
      curves,
      folder,
      presets=arguments.config,
      parallel=arguments.parallel,
      worst=None,
    )
  except KeyboardInterrupt:
    sys.exit("stopped; the same command goes on")
  except RuntimeError as error:
    sys.exit(f"error: {error}")
  runs = []
  print(
    f"{'seed':>4}{'mean':>10}{'median':>10}{'std':>9}{'human':>8}{'episodes':>10}{'agent steps':>13}{'minutes':>9}"
  )
  for seed, result in found.items():
    run = {"seed": seed, **result}
    if not run["diverged"]:
      last = json.loads((arguments.work / folder(seed) / "evaluation.json").read_text())
      run["evaluation"] = last
      human = "-" if last["human_normalised"] is None else f"{last['human_normalised']:.3f}"
      print(
        f"{seed:>4}{last['mean']:>10.2f}{last['median']:>10.2f}{last['std']:>9.2f}{human:>8}{last['episodes']:>10}"
        f"{run['env_steps']:>13,}{run['seconds'] / 60:>9.1f}"
      )
    else:
      print(f"{seed:>4}  diverged")
    runs.append(run)
  score, error = grid.spread(runs, "score")
  print(f"{label}: {score:.2f} ± {error:.2f} (mean and standard error over seeds)")
  write(
    arguments.out,
    {
      "presets": arguments.config,
      "settings": arguments.overrides,
      "game": config.env.game,
      "placement": "one core each" if arguments.parallel else "one after another, all cores",
      "score_mean": score,
      "score_stderr": error,
      "runs": runs,
    },
  )


if __name__ == "__main__":
  main()
