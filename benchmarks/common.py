"""Command-line types, provenance and result files of benchmarks; uses the standard library only."""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_INNERMOST = re.compile(r"\[\n[^\[\]{}]*\n *\]")  # arrays of scalars, written as one line
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "mctx", "envpool", "numpy")


def positive(text: str) -> int:
  """An `argparse` type: an integer of at least 1."""
  number = int(text)
  if number < 1:
    raise ValueError
  return number


def parser_of(doc: str | None, out: str = "JSON file for the results") -> argparse.ArgumentParser:
  """Creates a parser with `--out` that shows a module's docstring as help."""
  parser = argparse.ArgumentParser(
    description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--out", type=Path, help=out)
  return parser


def _output(*command: str) -> str:
  return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _revision() -> dict[str, Any]:
  """The current commit, and whether any file except results differs from it."""
  git = ("git", "-C", str(ROOT))
  try:
    changed = _output(*git, "status", "--porcelain", "--", ".", ":!benchmarks/results")
    return {"commit": _output(*git, "rev-parse", "HEAD"), "dirty": bool(changed)}
  except (OSError, subprocess.CalledProcessError):  # a copy without git history
    return {"commit": "unknown", "dirty": True}


_REVISION = _revision()  # read at start: files may change while a benchmark runs


def _hardware() -> str:
  """CPU cores and NVIDIA devices."""
  cores = f"{len(os.sched_getaffinity(0))} cores of {platform.machine()}"
  try:
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
  except (OSError, subprocess.CalledProcessError):
    gpus = []
  return ", ".join([cores, *gpus])


def _version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return "unknown"


def provenance() -> dict[str, Any]:
  """The command, code revision, machine and package versions of a result."""
  return {
    "command": " ".join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    **_REVISION,
    "date": datetime.date.today().isoformat(),
    "hardware": _hardware(),
    "load_average": os.getloadavg()[0],
    "python": platform.python_version(),
    "versions": {package: _version(package) for package in _PACKAGES},
  }


def _finite(value: Any) -> Any:
  """Prepares a value for JSON: numbers that are not finite become null."""
  if isinstance(value, dict):
    return {str(key): _finite(x) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(x) for x in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value


def write(path: Path | None, result: dict[str, Any]) -> None:
  """Writes a result and its provenance as JSON; does nothing without a path."""
  if path is not None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(provenance() | result), indent=1)
    path.write_text(_INNERMOST.sub(lambda found: " ".join(found[0].split()), text) + "\n")
