"""Means of learning curves by variant and game, from a study's JSON file.

    python benchmarks/curve_means.py benchmarks/results/large_batch.json --begin 1000

The file is that of `launch/suite.py --out` or `launch/report.py --json`. The number of a run is the
mean of its training return, linear between the points of the file, over the agent steps from
`--begin` (default: the first that all runs have) to `--end` or its last point; with
`--reach RETURN` it is the agent steps of the first point of at least RETURN. Prints the mean over
seeds and its standard error, and with `--difference A B` the mean of A - B over common seeds and
its 95% interval (Student's t). `--noise FILE --batches B C` predicts the curves of batch C with B/C
times the learner steps from those of batch B and the scale N that `noise_scale.py` has found along
one of its runs: learning then needs (N + C) / (N + B) times the agent steps (see there). All of the
file's variants are taken to be of batch B: ignore lines of others. The delay of returns that are
means over many games is multiplied, too.
"""

import argparse
import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.integrate
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.picture import Curve, curve_of, variant_of


def mean_between(curve: Curve, begin: float, end: float | None) -> float:
  """The mean over [begin, end] of a piecewise linear curve; an end of None is the curve's.

  Raises:
    ValueError: the interval is empty or not within the curve's range.
  """
  x, y = curve
  end = x[-1] if end is None else end
  if not x[0] <= begin < end <= x[-1]:
    raise ValueError(f"agent steps must be within {x[0]:g} to {x[-1]:g}, got {begin:g} to {end:g}")
  grid = np.array([begin, *x[(x > begin) & (x < end)], end])
  return float(np.trapezoid(np.interp(grid, x, y), grid) / (end - begin))


def predicted(curve: Curve, noise: Curve, batch: float, larger: float) -> Curve:
  """The curve expected with batches of `larger` samples, and as many samples in all.

  `curve` is of `batch` samples, and `noise` has the noise scale at some of its agent steps, between
  which the scale's logarithm is linear.
  """
  (x, y), (at, scale) = curve, noise
  steps = np.linspace(x[0], x[-1], 1000)
  scales = np.exp(np.interp(steps, at, np.log(scale)))
  slowdown = (scales + larger) / (scales + batch)
  later = x[0] + scipy.integrate.cumulative_trapezoid(slowdown, steps, initial=0)
  return steps, np.interp(steps, later, np.interp(steps, x, y))


def read_noise(path: Path, batch: int) -> Curve:
  """Agent steps and noise scales of one run of this batch size. Raises OSError or ValueError."""
  try:
    rows = json.loads(path.read_text())["runs"]
    noise = [(row["env_steps"], row["scale"], row["batch_size"]) for row in rows]
  except (KeyError, TypeError) as error:
    raise ValueError(f"{path} is not a result of noise_scale.py") from error
  if any(scale is None or size != batch for _, scale, size in noise):
    raise ValueError(f"{path}: all scales must be finite, and of batch size {batch}")
  if len({step for step, *_ in noise}) < max(len(noise), 1):
    raise ValueError(f"{path}: must have scales of one run, at different agent steps")
  steps, scales, _ = np.array(sorted(noise)).T
  return steps, scales


def reached(curve: Curve, level: float) -> float:
  """The x of the first point of at least `level`; nan if there is none."""
  x, y = curve
  return float(x[np.argmax(y >= level)]) if (y >= level).any() else np.nan


def estimate(values: list[float]) -> tuple[float, float, float]:
  """Mean, standard error and half the 95% interval; nan for the last two of a single value."""
  if len(values) < 2:
    return float(np.mean(values)), np.nan, np.nan
  error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
  return float(np.mean(values)), error, error * float(scipy.stats.t.ppf(0.975, len(values) - 1))


def report(
  content: dict[str, Any],
  options: argparse.Namespace,
  transform: Callable[[Curve], Curve] = lambda curve: curve,
) -> list[str]:
  """Lines of text on every variant and game of a study's JSON, for transformed curves."""
  numbers: dict[tuple[str, str], dict[int, float]] = collections.defaultdict(dict)
  runs = [run for run in content["runs"] if len(run["curve"]) and not run.get("repeats")]
  curves = [(run, transform(curve_of(content, run))) for run in runs]
  begin = options.begin
  if begin is None:
    begin = max((float(x[0]) for _, (x, _) in curves), default=0.0)
  for run, curve in curves:
    try:
      number = (
        mean_between(curve, begin, options.end)
        if options.reach is None
        else reached(curve, options.reach)
      )
    except ValueError as error:
      raise ValueError(f"{run['path']}: {error}") from None
    seeds = numbers[variant_of(run), run["game"]]
    if run["seed"] in seeds:
      raise ValueError(f"{run['path']}: another run has the same variant, game and seed")
    seeds[run["seed"]] = number
  lines = []
  for (variant, game), seeds in numbers.items():
    mean, error, _ = estimate(list(seeds.values()))
    values = ", ".join(_text(value) for _, value in sorted(seeds.items()))
    lines.append(f"{variant}, {game}: {_text(mean)} ± {_text(error)} ({values})")
  first, second = options.difference
  unknown = {first, second} - {"", *(variant for variant, _ in numbers)}
  if unknown:
    raise ValueError(f"no variant {', '.join(sorted(unknown))}")
  for game in [game for variant, game in numbers if variant == first]:
    a, b = numbers[first, game], numbers[second, game]
    if not (seeds := sorted(a.keys() & b.keys())):
      raise ValueError(f"{first} and {second} have no common seed of {game}")
    mean, error, half = estimate([a[seed] - b[seed] for seed in seeds])
    interval = f"95% interval {_text(mean - half)} to {_text(mean + half)}"
    lines.append(f"{first} - {second}, {game}: {_text(mean)} ± {_text(error)}, {interval}")
  return lines


def _text(number: float) -> str:
  return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def main() -> None:
  """Prints the numbers of the command line's file."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("file", type=Path, help="JSON file of a study")
  parser.add_argument("--begin", type=float, help="first agent step of the mean")
  parser.add_argument("--end", type=float, help="last agent step of the mean")
  parser.add_argument("--reach", type=float, metavar="RETURN", help="print agent steps to RETURN")
  parser.add_argument(
    "--difference", nargs=2, default=("", ""), metavar=("A", "B"), help="variants to compare"
  )
  parser.add_argument("--noise", type=Path, metavar="FILE", help="JSON file of noise_scale.py")
  parser.add_argument("--batches", type=int, nargs=2, metavar=("B", "C"), help="batch sizes")
  options = parser.parse_args()
  if (options.noise is None) != (options.batches is None):
    parser.error("--noise and --batches go together")
  if options.batches and not 0 < options.batches[0] <= options.batches[1]:
    parser.error("--batches: B must be positive and C at least B")
  try:
    content = json.loads(options.file.read_text())
    if options.noise is None:
      print("\n".join(report(content, options)))
    else:
      noise = read_noise(options.noise, options.batches[0])
      print("\n".join(report(content, options, lambda x: predicted(x, noise, *options.batches))))
  except (OSError, ValueError) as error:
    parser.error(str(error))
  except KeyError as error:
    parser.error(f"{options.file} is not the JSON of a study: it has no {error}")


if __name__ == "__main__":
  main()
