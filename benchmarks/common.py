"""What the benchmarks share: reading the command line, timing, where a figure comes from, writing results."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(
  0, str(Path(__file__).resolve().parent.parent)
)  # a clone works without being installed

from speedyzero_jax.config import loader
from speedyzero_jax.config.checks import VECTOR_GAMES
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.profile_report import without_nan
from speedyzero_jax.system import memory

ROOT = Path(__file__).resolve().parent.parent
memory.keep_freed()  # as a run does


def positive(text: str) -> int:
  """A number on a command line."""
  number = int(text)
  if number < 1:
    raise ValueError
  return number


def load(
  parser: argparse.ArgumentParser, presets: Sequence[str], settings: Sequence[str]
) -> Config:
  """What was asked for on a command line; wrong use of it ends the program."""
  try:
    return loader.load(presets, settings)
  except loader.ConfigError as error:
    parser.error(str(error))


def frame_shape(parser: argparse.ArgumentParser, config: Config) -> tuple[int, int, int]:
  """[H, W, C] of an Atari game's frames; another game ends the program as wrong use."""
  if config.env.game in VECTOR_GAMES:
    parser.error(
      f"env.game: {config.env.game} shows vectors; this measures frames: choose a preset of an Atari game"
    )
  return config.env.frame_size, config.env.frame_size, 1 if config.env.grayscale else 3


def _revision() -> dict[str, Any]:
  """The commit that is checked out, and whether anything but results differs from it."""

  def git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

  try:
    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
  except (OSError, subprocess.CalledProcessError):  # a copy without its history
    return {"commit": "unknown", "dirty": True}


_REVISION = _revision()  # at the start, whatever is changed while a benchmark runs


def _gpus() -> list[str]:
  """Names of this machine's NVIDIA devices, as their driver gives them."""
  command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
  try:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
  except (OSError, subprocess.CalledProcessError):
    return []


def provenance() -> dict[str, Any]:
  """The command, code, machine and versions behind a result."""
  cores = len(os.sched_getaffinity(0))
  names = ("jax", "jaxlib", "flax", "optax", "mctx", "envpool", "numpy")
  versions = {}
  for name in names:
    try:
      versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      versions[name] = "unknown"
  return {
    "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    **_REVISION,
    "date": datetime.date.today().isoformat(),
    "hardware": ", ".join([f"{cores} cores of {platform.machine()}", *_gpus()]),
    "python": platform.python_version(),
    "versions": versions,
  }


def seconds(call: Callable[[], Any], repeat: int) -> tuple[float, float]:
  """Runs `call`, which must wait for its own results; (time of the first call, median of `repeat` more)."""
  begin = time.perf_counter()
  call()
  first = time.perf_counter() - begin
  times = []
  for _ in range(repeat):
    begin = time.perf_counter()
    call()
    times.append(time.perf_counter() - begin)
  return first, statistics.median(times)


def write(path: Path | None, result: dict[str, Any]) -> None:
  """Writes a result with its provenance, if there is a path. What is not a number becomes null."""
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(without_nan(provenance() | result), indent=1) + "\n")
