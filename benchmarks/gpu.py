"""All GPU benchmarks, run in sessions of limited length ("visits").

    python benchmarks/gpu.py --out runs/gpu   # repeat while it exits with 75
    python benchmarks/gpu.py --only check train-Pong profile-0.5   # if there is little time
    python benchmarks/gpu.py --out /tmp/gpu --preset quickstart --games Catch --small  # on a CPU

The steps, in order: compare the projected costs with measurements (plan_check.py); try XLA flags,
checking all outputs; train each game with the fastest flags, or without if that fails; measure the
rates of the parts (speed.py, replay.py); profile with the replay at three sizes and project a run's
time from that; compare with LightZero (peers.py).

Each step is a command, printed before it starts, that writes a JSON file (profiles: a folder) into
`--out`. Steps with existing results are skipped. When the visit's time is over, the current command
is stopped: in the next visit training resumes and other commands start again. A command that was
stopped after almost a whole visit leaves a file NAME.gave-up and counts as failed; remove the file
to retry. A command that failed with the fastest flags leaves NAME.without-flags and runs without
flags from then on.

All steps use one GPU, the first one, as each run of suite.py does.

Steps fail on a machine without a GPU, unless `--small` is set. `--only` selects steps and their
order.

Exit codes: 0 all done, 1 a step failed, 75 (EX_TEMPFAIL) steps remain. Steps that try XLA flags may
fail.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from common import ROOT, parser_of, write

BEGIN = time.monotonic()
SHARES = (0.1, 0.5, 0.97)  # fractions of the run's agent steps in the replay when profiling
ENDING = 90.0  # seconds for an interrupted step to exit; training saves a checkpoint
# Without the lock, a run with convolutions in CUDA graphs crashed (docs/gpu.md).
GRAPHS = "--xla_gpu_require_exclusive_lock=true --xla_gpu_enable_command_buffer="
FLAGS = {
  "graph-small": "--xla_gpu_graph_min_graph_size=1",
  "graph-loops": f"{GRAPHS}+WHILE",
  "graph-convolutions": f"{GRAPHS}+CONVOLUTION",
  "graph-all": f"{GRAPHS}+WHILE,+CONVOLUTION,+COLLECTIVES",
  "latency-hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
}
GAIN = 0.98  # flags are used if the time with them is less than this fraction of the time without


class Step(NamedTuple):
  """A command with an option `--out`."""

  command: list[str]
  flags: str | None = None  # XLA flags; None: the fastest
  resumes: bool = False


def steps(arguments: Any, folder: Path, env_steps: int) -> dict[str, Step]:
  """All steps, without `--out`, by name of the result; `env_steps` are those of a whole run."""
  small, (first, *_) = arguments.small, arguments.games
  both, game = ["--config", *arguments.preset], f"env.game={first}"
  check = ["benchmarks/plan_check.py", *both, "--set", game, *arguments.set]
  reference = ["--reference", str(folder / "check.json")]
  result = {"check": Step(check, "")}
  for name, flags in FLAGS.items():
    result[f"flags-{name}"] = Step([*check, *reference], flags)
  train = ["launch/suite.py", *both, *arguments.set, "--seeds", "1", "--dir", str(folder / "runs")]
  for each in arguments.games:
    result[f"train-{each}"] = Step([*train, "--games", each], resumes=True)
  roots = ["16"] if small else ["16", "64", "1024", "4096"]
  batches = ["64"] if small else ["256", "1024", "2048", "4096"]
  sizes = ["--roots", *roots, "--batch", *batches]
  replay = ["--slots", "100000", "--gather-slots", "2000"] if small else []
  effort = ["--quick"] if small else ["--repeat", "3", "--limit", "5"]
  parts = ["--only", "search", "train", "draw", "reanalyse", "--venv", str(folder / "venv")]
  if first not in ("Catch", "CartPole"):
    result["speed"] = Step(["benchmarks/speed.py", *both, "--set", game, *arguments.set, *sizes])
  result["replay"] = Step(["benchmarks/replay.py", *replay])
  for share in SHARES:
    fill = ["--fill", str(int(share * env_steps)), "profile.steps=20", game, *arguments.set]
    result[f"profile-{share:g}"] = Step(["launch/profile_run.py", *both, *fill])
  return result | {"peers": Step(["benchmarks/peers.py", *parts, *effort])}


def seconds_of_run(check: Path) -> float:
  """Seconds of a run's programs according to a result of plan_check.py; infinite if missing."""
  if not check.exists():
    return float("inf")
  return sum(row["calls"] * row["seconds"] for row in json.loads(check.read_text())["rows"])


def fastest(folder: Path) -> str:
  """The flags with which a run is fastest; empty if none gains enough."""
  times = {flags: seconds_of_run(folder / f"flags-{name}.json") for name, flags in FLAGS.items()}
  best = min(times, key=times.__getitem__)
  return best if times[best] < GAIN * seconds_of_run(folder / "check.json") else ""


def projected(folder: Path, learner_steps: int) -> float | None:
  """Seconds of a run's learner steps, interpolated from the profiles; None if one is missing.

  Each profile stands for the part of the run in which the replay is about as full.
  """
  paths = [folder / f"profile-{share:g}" / "profile.json" for share in SHARES]
  if not all(path.exists() for path in paths):
    return None
  profiles = [json.loads(path.read_text())["seconds_per_step"] for path in paths]
  inner = [(a + b) / 2 for a, b in itertools.pairwise(SHARES)]
  parts = zip(profiles, [0.0, *inner], [*inner, 1.0], strict=True)
  return learner_steps * sum(seconds * (end - begin) for seconds, begin, end in parts)


def visit(command: list[str], flags: str, log: Path, seconds: float) -> int | None:
  """Runs a command; after `seconds` interrupts it and gives it `ENDING` seconds to exit.

  Returns:
    The command's exit code, or None if it was interrupted.
  """
  environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
  print(shlex.join([*([f"XLA_FLAGS={flags}"] if flags else []), *command]), flush=True)
  with log.open("a") as out:
    process = subprocess.Popen(
      [sys.executable, *command], cwd=ROOT, env=environment, stdout=out, stderr=out,
      start_new_session=True,
    )  # fmt: skip
    try:
      return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
      return None
    finally:  # also if this script is interrupted
      if process.poll() is None:
        end(process)


def end(process: subprocess.Popen) -> None:
  """Interrupts a process and its children, and kills them after `ENDING` seconds."""
  os.killpg(process.pid, signal.SIGINT)
  try:
    process.wait(timeout=ENDING)
  except subprocess.TimeoutExpired:
    # Training runs are in sessions of their own.
    for each in psutil.Process(process.pid).children(recursive=True):
      with contextlib.suppress(psutil.NoSuchProcess):
        each.kill()
    process.kill()
    process.wait()


def take(steps: dict[str, Step], folder: Path, minutes: float, until: float) -> list[str] | None:
  """Runs all steps without results. Returns the failed ones, or None if the visit is over."""
  failed = []
  for name, step in steps.items():
    profile = name.startswith("profile")
    result = folder / (name if profile else f"{name}.json")
    part, note = folder / f"{name}.part", folder / f"{name}.gave-up"
    if result.exists():
      continue
    unchecked = name.startswith("flags-") and not (folder / "check.json").exists()
    if note.exists() or unchecked:  # without outputs to compare with
      failed.append(name)
      continue
    plain = folder / f"{name}.without-flags"  # exists if it failed with the fastest flags
    flags = step.flags
    if flags is None:
      flags = "" if plain.exists() else fastest(folder)
    command = [*step.command, "--out", str(part)]
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted profile
    left = until - time.monotonic()
    code = visit(command, flags, folder / f"{name}.log", max(left, 1.0))
    if code and flags and step.flags is None:
      plain.touch()
      shutil.rmtree(part, ignore_errors=True)
      left = until - time.monotonic()
      code = visit(command, "", folder / f"{name}.log", max(left, 1.0))
    if code is None:
      if left > 0.9 * 60 * minutes and not step.resumes:
        note.write_text(f"{name} was stopped after {left / 60:.1f} minutes\n")
        print(f"{name} takes more than a visit: giving up")
      return None
    if code == 0:
      part.rename(result)
    else:
      failed.append(name)
      if name.startswith("flags-"):  # retrying would fail again
        note.write_text(f"{name} failed with exit code {code}\n")
  return failed


def main() -> int:
  parser = parser_of(__doc__, "folder of results, logs and runs (default: runs/gpu)")
  parser.set_defaults(out=Path("runs/gpu"))
  parser.add_argument("--preset", nargs="+", default=["atari300k", "sweep", "gpu"])
  parser.add_argument("--games", nargs="+", default=["Pong", "Breakout"], metavar="GAME")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
  parser.add_argument("--small", action="store_true", help="small sizes")
  parser.add_argument(
    "--minutes", type=float, default=6.5, help="minutes of a visit, before saving"
  )
  parser.add_argument("--only", nargs="+", metavar="STEP", help="steps to take, in this order")
  arguments = parser.parse_args()
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the current step
  import pieces  # imports jax and the package: not needed for --help

  settings = [f"env.game={arguments.games[0]}", *arguments.set]
  config = pieces.load(parser, arguments.preset, settings)
  folder, until = arguments.out.resolve(), BEGIN + 60 * arguments.minutes
  folder.mkdir(parents=True, exist_ok=True)
  all_steps = steps(arguments, folder, config.run.env_steps)
  wanted = arguments.only or list(all_steps)
  if unknown := set(wanted) - set(all_steps):
    parser.error(f"--only: unknown {', '.join(sorted(unknown))}; known: {', '.join(all_steps)}")
  if not arguments.small:
    os.environ.setdefault("JAX_PLATFORMS", "cuda")  # jax would use the CPU without a warning
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
  chosen = {name: all_steps[name] for name in wanted}
  failed = take(chosen, folder, arguments.minutes, until)
  if failed is None:
    return 75
  seconds = projected(folder, config.learner.steps)
  if seconds is not None:
    print(f"projected: {config.learner.steps} learner steps in {seconds / 60:.1f} minutes")
    result = {"preset": arguments.preset, "set": settings, "seconds": seconds}
    write(folder / "projected.json", result)
  for name in failed:
    print(f"{name} failed: {folder / name}.log")
  return int(any(not name.startswith("flags-") for name in failed))


if __name__ == "__main__":
  sys.exit(main())
