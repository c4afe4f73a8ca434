"""Final scores and learning curves of a preset over several seeds.

    python benchmarks/learning.py --config quickstart --seeds 5 --out benchmarks/results/NAME.json
    python benchmarks/learning.py --config atari_small --seeds 2 --set env.game=Assault

Run folders are kept: seeds that have finished are not repeated and interrupted ones resume.
"""

import sys
from pathlib import Path
from typing import Any

from common import ROOT, parser_of, positive, spread, write
from runs import ENV_STEPS, EPISODE_RETURN, EVALUATION, STEP, TIME, Row, Run, run_all, value_of

_POINTS = 50  # of a training curve


def curves(rows: list[Row]) -> dict[str, Any]:
  """Evaluations during training, and the training return at about `_POINTS` steps."""
  evaluations: list[dict[str, Any]] = []
  for row in rows:
    found = {k.removeprefix(EVALUATION): x for k, x in row.items() if k.startswith(EVALUATION)}
    if "step" in found and (not evaluations or evaluations[-1]["step"] != found["step"]):
      names = ("step", "mean", "median", "std", "human_normalised")
      kept = {name: found[name] for name in names if name in found}
      evaluations.append(kept | {"env_steps": row[ENV_STEPS], "seconds": row[TIME]})
  played = [row for row in rows if row.get(EPISODE_RETURN) is not None]
  kept = [*played[: -1 : max(len(played) // _POINTS, 1)], *played[-1:]]
  training = [[row[name] for name in (STEP, ENV_STEPS, TIME, EPISODE_RETURN)] for row in kept]
  return {
    "learner_steps": rows[-1][STEP],
    "env_steps": rows[-1][ENV_STEPS],
    "evaluations": evaluations,
    "training": {"columns": ["learner_steps", "env_steps", "seconds", "return"], "rows": training},
  }


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("--config", nargs="+", required=True, metavar="PRESET")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--seeds", type=positive, default=5, metavar="N", help="run.seed=0 to N-1")
  parser.add_argument("--parallel", action="store_true", help="one core per seed, several at once")
  parser.add_argument("--work", type=Path, default=ROOT / "runs/learning", help="run folders")
  arguments = parser.parse_args()
  label = "+".join(Path(preset).stem for preset in arguments.config)
  if game := value_of(arguments.set, "env.game", ""):
    label += f"-{game}"
  runs = {
    seed: Run(
      arguments.work / f"{label}-s{seed}", arguments.config, [*arguments.set, f"run.seed={seed}"]
    )
    for seed in range(arguments.seeds)
  }
  try:
    found = run_all(runs, curves, parallel=arguments.parallel)
  except KeyboardInterrupt:
    sys.exit("stopped; the same command resumes")
  except RuntimeError as error:
    sys.exit(f"error: {error}")
  print("seed      mean    median      std   human  agent steps  minutes")
  for seed, run in found.items():
    if run["diverged"]:
      print(f"{seed:>4}  diverged")
      continue
    last = run["evaluation"]
    human = "-" if last["human_normalised"] is None else f"{last['human_normalised']:.3f}"
    print(
      f"{seed:>4}{last['mean']:>10.2f}{last['median']:>10.2f}{last['std']:>9.2f}{human:>8}"
      f"{run['env_steps']:>13,}{run['seconds'] / 60:>9.1f}"
    )
  score, error = spread(list(found.values()), "score")
  print(f"{label}: {score:.2f} ± {error:.2f} (mean and standard error over seeds)")
  result = {
    "presets": arguments.config,
    "settings": arguments.set,
    "placement": "one core each" if arguments.parallel else "one after another, all cores",
    "score_mean": score,
    "score_stderr": error,
    "runs": [{"seed": seed, **run} for seed, run in found.items()],
  }
  write(arguments.out, result)


if __name__ == "__main__":
  main()
