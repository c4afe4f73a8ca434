"""Evaluates a run's newest checkpoint: python launch/evaluate.py RUN_DIR [--video FILE.gif]

Plays full episodes with raw rewards, of at most the run's `evaluation.max_episode_steps`, with the
best action or, with `--explore`, as in training. Prints mean, median, standard deviation and
human-normalized score, and writes evaluation.json into the run folder, unless that has a later
checkpoint, or the same one with more episodes or another step limit or exploration; without the
same one these must be the run's own. The run may still be training. `--video` also writes the first
episode as a GIF, with the agent's values, policy or, without exploration, search results beside
each frame.

Exit codes: 0 done; 1 no readable checkpoint, out of memory, or the result can't be written; 2 usage
error; 130 stopped by Ctrl-C, without changing evaluation.json.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir
from speedyzero_jax.run.run_dir import RunFolderError
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR

if TYPE_CHECKING:
  from speedyzero_jax.workers.evaluator import Evaluation


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/evaluate.py", description="Evaluates the newest checkpoint of a run."
  )
  parser.add_argument("run_dir", type=Path, help="the run's folder")
  for key, meaning in (
    ("episodes", "episodes to play"),
    ("max_episode_steps", "step limit of an episode, agent steps"),
  ):
    option = "--" + key.replace("_", "-")
    parser.add_argument(
      option, metavar="N", help=f"{meaning} (default: the run's evaluation.{key})"
    )
  parser.add_argument(
    "--explore",
    action=argparse.BooleanOptionalAction,
    help="act as in training, with noise, by sampling, or with each lane's epsilon (default: the "
    "run's evaluation.explore)",
  )
  parser.add_argument(
    "--seed", type=int, help="seed of the environments (default: that of the run's evaluations)"
  )
  parser.add_argument("--video", type=Path, metavar="FILE.gif", help="GIF of the first episode")
  arguments = parser.parse_args(argv)
  if arguments.seed is not None and arguments.seed < 0:
    parser.error("--seed: must be at least 0")
  if arguments.video and arguments.video.suffix.lower() != ".gif":
    parser.error(f"--video: the name must end in .gif, got {arguments.video.name}")
  if arguments.video and not arguments.video.parent.is_dir():
    parser.error(f"--video: folder {arguments.video.parent} does not exist")
  given = {key: getattr(arguments, key) for key in ("episodes", "max_episode_steps", "explore")}
  changes = [f"evaluation.{key}={value}" for key, value in given.items() if value is not None]
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  try:
    stored = run_dir.read_config(arguments.run_dir)
    config = loader.override(stored, changes)
    return evaluate(config, stored, arguments.run_dir, arguments.seed, arguments.video)
  except (ConfigError, RunFolderError) as error:
    _report(f"error: {error}")
    return USAGE_ERROR
  except KeyboardInterrupt:
    _report("stopped; no evaluation was written")
    return 128 + signal.SIGINT


def evaluate(
  config: Config, stored: Config, folder: Path, seed: int | None, video_path: Path | None
) -> int:
  """Plays the episodes; prints and stores the result. Returns the exit code.

  See `_write` for what is stored; `stored` is the run's configuration.
  """
  import jax

  from speedyzero_jax.run import factories
  from speedyzero_jax.run.checkpoint import CheckpointError
  from speedyzero_jax.system import memory
  from speedyzero_jax.system.platform import device_count
  from speedyzero_jax.workers import evaluator
  from speedyzero_jax.workers.video import Video

  memory.retain_freed()
  factories.enable_compilation_cache(config)
  try:
    device_count()
  except RuntimeError as error:
    _report(f"error: {error}")
    return USAGE_ERROR
  try:
    agent, inference, version = factories.restore_for_evaluation(
      config, folder, warn=lambda line: _report(f"warning: {line}"), report=_report
    )
    video = Video(config.env.game, agent.schema.num_actions) if video_path else None
    result = evaluator.evaluate(
      config,
      agent,
      inference,
      version,
      episodes=config.evaluation.episodes,
      seed=factories.evaluation_seed(config) if seed is None else seed,
      video=video,
      report=_report,
    )
    assert result is not None  # without `should_stop`
    print(result)
    try:
      _write(result, folder / "evaluation.json", stored, config)
    finally:  # even if the folder is read-only
      if video and video_path:
        video.save(video_path)
        _report(f"wrote {video_path}")
  except (CheckpointError, OSError) as error:
    _report(f"error: {error}")
    return FAILED
  except (MemoryError, jax.errors.JaxRuntimeError) as error:
    where = memory.exhausted(error)
    if where is None:
      raise
    _report(f"error: {memory.exhausted_message(where, error)}")
    return FAILED
  return 0


def _write(result: "Evaluation", path: Path, stored: Config, config: Config) -> None:
  """Writes the result, unless the file has a better one, or its kind is not that of the run.

  The kind, step limit and exploration, is that of an evaluation of the same checkpoint in the file,
  or else that of the run's configuration.
  """
  own, played = stored.evaluation, config.evaluation
  differs = (own.explore, own.max_episode_steps) != (played.explore, played.max_episode_steps)
  if differs and not result.same_kind(path):
    _report("not written: exploration or step limit is not the run's own")
  elif better := result.write(path, keep_own=True):
    _report(f"not written: evaluation.json has {better}")


def _report(line: str) -> None:
  print(line, file=sys.stderr)


if __name__ == "__main__":
  sys.exit(main())
