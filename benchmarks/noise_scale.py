"""Gradient noise scale of runs, which predicts up to which batch size larger batches save steps.

    python benchmarks/noise_scale.py runs/quickstart-Catch-s0 --out noise.json

The simple noise scale of McCandlish et al. 2018 (arXiv 1812.06162), tr(S) / |G|^2: S and G are the
covariance and the mean of the gradients of single samples. Their theory, for SGD with the best
learning rate for each batch size: if tiny batches need E samples to reach a loss, batches of B need
E (1 + B / scale). Here the scale is estimated from independent batches of the run's size, drawn
from its replay as in training, at the weights of its last checkpoint; with batch norm each has its
own statistics. To measure a run during training, pause it (`run.pause_at`).
"""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import pieces
from common import parser_of, positive, write
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run import run_dir, steps
from speedyzero_jax.run.build import build
from speedyzero_jax.run.checkpoint import CheckpointError
from speedyzero_jax.run.experiment import Experiment, Membership, TrainingError


class Noise(NamedTuple):
  """Noise of the gradients of single samples around their mean."""

  squared_mean: float  # |G|^2, an estimate without bias, which may be negative
  trace: float  # of the covariance
  scale: float  # samples; infinite if `squared_mean` is not positive
  error: float  # standard error of the scale (jackknife)


def noise_of(gradients: np.ndarray, size: int) -> Noise:
  """Returns the noise of gradients [K, P] of independent batches of `size` samples."""
  count = len(gradients)
  products = np.zeros((count, count))
  for part in np.array_split(gradients, 100, axis=1):  # in float64 all would take much memory
    products += part.astype(np.float64) @ part.T.astype(np.float64)

  def estimate(products: np.ndarray) -> tuple[float, float, float]:
    k = len(products)
    squares, total = np.trace(products), products.sum()
    variance = (squares - total / k) / (k - 1)  # of batches
    mean = (total - squares) / (k * (k - 1))
    return mean, size * variance, size * variance / mean if mean > 0 else np.inf

  rest = [estimate(np.delete(np.delete(products, i, axis=0), i, axis=1))[2] for i in range(count)]
  error = np.sqrt((count - 1) * np.var(rest)) if np.isfinite(rest).all() else np.inf
  return Noise(*estimate(products), error)


def gradients_of(experiment: Experiment, batches: int) -> np.ndarray:
  """Returns the gradients [K, P] of K batches, at the experiment's present weights."""
  learner, rows = experiment.learner, []
  step = max(experiment.limiter.learner_steps - batches, 0)  # for schedules, such as beta's
  for i in range(batches):
    arrays = steps.draw(experiment, step + i).arrays
    gradient = learner.gradient(
      experiment.state, arrays, jax.random.fold_in(experiment.learn_key, i)
    )
    rows.append(np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient.params)]))
  return np.stack(rows)


def measure(folder: Path, batches: int) -> dict:
  """Returns the noise of a run's gradients at its last checkpoint, with the run's batch size.

  Raises ConfigError, CheckpointError, JournalError, TrainingError, OSError or ValueError if the run
  is in use, has no checkpoint, or can't be read here.
  """
  if run_dir.in_use(folder):
    raise ConfigError(f"{folder} is in use; pause it first")
  with tempfile.TemporaryDirectory() as temporary:
    copy = Path(temporary) / "run"
    shutil.copytree(folder, copy)
    config = run_dir.read_config(copy)
    if config.topology.learners > 1:
      raise ConfigError(f"{folder} has several learners, of which each has a part of the replay")
    idle = Membership(runs_actor=False, runs_sweeps=False)
    with MetricsLogger(config, copy) as logger:
      experiment = build(config, copy, logger, resume=True, membership=idle)
      try:
        if experiment.agent.on_policy:
          raise TrainingError(f"{folder} is of an on-policy agent, which has no replay")
        if not experiment.limiter.learner_steps:
          raise TrainingError(f"{folder} has no checkpoint")
        noise = noise_of(gradients_of(experiment, batches), config.learner.batch_size)
      finally:
        experiment.close()
  return {
    "run": folder.name,
    "learner_steps": experiment.limiter.learner_steps,
    "env_steps": experiment.limiter.env_steps,
    "batch_size": config.learner.batch_size,
    **noise._asdict(),
  }


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders")
  parser.add_argument(
    "--batches", type=positive, default=128, metavar="K", help="batches for a run, at least 3"
  )
  arguments = parser.parse_args()
  if arguments.batches < 3:
    parser.error("--batches: at least 3 are needed")
  rows = []
  for folder in arguments.runs:
    try:
      pieces.enable_compilation_cache(run_dir.read_config(folder))
      rows.append(measure(folder, arguments.batches))
    except (
      ConfigError, CheckpointError, JournalError, TrainingError, OSError, ValueError
    ) as error:  # fmt: skip
      parser.error(str(error))
    write(arguments.out, {"batches": arguments.batches, "runs": rows})
    print("{run}: step {learner_steps}, {scale:.3g} +- {error:.2g} samples".format(**rows[-1]))


if __name__ == "__main__":
  main()
