"""Evaluates a run's newest checkpoint: python launch/evaluate.py RUN_DIR [--episodes 32]

Plays full episodes: no noise, best action, raw rewards, capped at 27,000 agent steps. Prints mean,
median, standard deviation and human-normalised score, and writes evaluation.json into the run
folder; the run may still be training.

Exit codes: 0 done; 1 no readable checkpoint, out of memory, or the result can't be written; 2 wrong
use; 130 stopped by Ctrl-C, without changing evaluation.json.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for a clone not installed

from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir
from speedyzero_jax.run.run_dir import RunFolderError

FAILED, WRONG_USE = 1, 2
_MAX = 10**9  # as in a run's settings


def _positive(text: str) -> int:
  number = int(text)
  if not 1 <= number <= _MAX:
    raise argparse.ArgumentTypeError(f"must be at least 1 and at most {_MAX}, got {number}")
  return number


def _natural(text: str) -> int:
  number = int(text)
  if number < 0:
    raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
  return number


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
    prog="launch/evaluate.py", description="Evaluates the last checkpoint of a run."
  )
  parser.add_argument("run_dir", type=Path, help="the run's folder")
  parser.add_argument(
    "--episodes", type=_positive, help="episodes to play (default: the run's evaluation.episodes)"
  )
  parser.add_argument(
    "--max-episode-steps", type=_positive, help="cap in agent steps (default: the run's)"
  )
  parser.add_argument(
    "--seed",
    type=_natural,
    help="of the environments (default: that of the run's own evaluations)",
  )
  return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  try:
    config = run_dir.read_config(arguments.run_dir)
    return evaluate(arguments, config)
  except RunFolderError as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE
  except KeyboardInterrupt:
    print("stopped; no evaluation was written", file=sys.stderr)
    return 128 + signal.SIGINT


def evaluate(arguments: argparse.Namespace, config: Config) -> int:
  """Plays, prints and writes. Returns the exit code."""
  import jax

  from speedyzero_jax.run.builders import (
    enable_compilation_cache,
    evaluation_seed,
    restore_for_evaluation,
  )
  from speedyzero_jax.run.checkpoint import CheckpointError
  from speedyzero_jax.system import memory
  from speedyzero_jax.workers import evaluator

  def report(line: str) -> None:
    print(line, file=sys.stderr)

  memory.keep_freed()
  enable_compilation_cache(config)
  try:
    agent, inference, version = restore_for_evaluation(
      config, arguments.run_dir, warn=lambda line: report(f"warning: {line}"), report=report
    )
    result = evaluator.evaluate(
      config,
      agent,
      inference,
      version,
      episodes=arguments.episodes or config.evaluation.episodes,
      seed=evaluation_seed(config) if arguments.seed is None else arguments.seed,
      max_episode_steps=arguments.max_episode_steps,
      report=report,
    )
    assert result is not None  # without `should_stop`
    print(result)
    result.write(arguments.run_dir / "evaluation.json")
  except (CheckpointError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    return FAILED
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    where = memory.ran_out(error)
    if where is None:
      raise
    print(f"error: {memory.out_of(where, error)}", file=sys.stderr)
    return FAILED
  return 0


if __name__ == "__main__":
  sys.exit(main())
