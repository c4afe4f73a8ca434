"""Evaluates a run's newest checkpoint: python launch/evaluate.py RUN_DIR [--video FILE.gif]

Plays full episodes with raw rewards, of at most the run's `evaluation.max_episode_steps`, with the
best action or, with `--explore`, as in training. Prints mean, median, standard deviation and
human-normalized score; `--out` also writes them, with every episode's return, as JSON. The run may
still be training; its folder is not changed. `--video` writes the first episode as a GIF, with the
agent's values, policy or, without exploration, search results beside each frame.

Exit codes: 0 done; 1 no readable checkpoint, out of memory, or a file can't be written; 2 usage
error; 130 stopped by Ctrl-C.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for uninstalled clones

from launch import multihost
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import run_dir
from speedyzero_jax.system.exit_codes import FAILED, USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line. Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="launch/evaluate.py", description="Evaluates the newest checkpoint of a run."
  )
  parser.add_argument("run_dir", type=Path, help="the run's folder")
  parser.add_argument(
    "--episodes", metavar="N", help="episodes to play (default: the run's evaluation.episodes)"
  )
  parser.add_argument(
    "--max-episode-steps", metavar="N",
    help="step limit of an episode, agent steps (default: the run's evaluation.max_episode_steps)",
  )  # fmt: skip
  parser.add_argument(
    "--explore",
    action=argparse.BooleanOptionalAction,
    help="act as in training, with noise, by sampling, or with each lane's epsilon (default: the "
    "run's evaluation.explore)",
  )
  parser.add_argument(
    "--seed", type=int, help="seed of the environments (default: that of the run's evaluations)"
  )
  parser.add_argument("--out", type=Path, metavar="FILE.json", help="the result as JSON")
  parser.add_argument("--video", type=Path, metavar="FILE.gif", help="GIF of the first episode")
  arguments = parser.parse_args(argv)
  if arguments.seed is not None and arguments.seed < 0:
    parser.error("--seed: must be at least 0")
  if arguments.video and arguments.video.suffix.lower() != ".gif":
    parser.error(f"--video: the name must end in .gif, got {arguments.video.name}")
  for option, path in (("--out", arguments.out), ("--video", arguments.video)):
    if path and not path.parent.is_dir():
      parser.error(f"{option}: folder {path.parent} does not exist")
    if path and path.is_dir():
      parser.error(f"{option}: {path} is a folder")
  given = {key: getattr(arguments, key) for key in ("episodes", "max_episode_steps", "explore")}
  changes = [f"evaluation.{key}={value}" for key, value in given.items() if value is not None]
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  try:
    config = loader.override(run_dir.read_config(arguments.run_dir), changes)
    multihost.check_env(config)
    return evaluate(config, arguments.run_dir, arguments.seed, arguments.out, arguments.video)
  except ConfigError as error:
    _report(f"error: {error}")
    return USAGE_ERROR
  except KeyboardInterrupt:
    _report("stopped")
    return 128 + signal.SIGINT


def evaluate(
  config: Config, folder: Path, seed: int | None, out: Path | None, video_path: Path | None
) -> int:
  """Plays the episodes; prints the result and writes the files. Returns the exit code."""
  import jax

  from speedyzero_jax.run import factories
  from speedyzero_jax.run.checkpoint import CheckpointError
  from speedyzero_jax.system import memory
  from speedyzero_jax.workers import evaluator
  from speedyzero_jax.workers.video import Video

  memory.retain_freed()
  factories.enable_compilation_cache(config)
  factories.device_count()
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
      if out:
        result.write(out)
        _report(f"wrote {out}")
    finally:
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


def _report(line: str) -> None:
  print(line, file=sys.stderr)


if __name__ == "__main__":
  sys.exit(main())
