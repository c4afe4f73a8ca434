"""All that is to be done on a machine with a GPU, in visits of limited length.

    python benchmarks/gpu.py --out benchmarks/results/h200   # again while it exits with 75
    python benchmarks/gpu.py --out /tmp/gpu --preset quickstart --games Catch --small  # on a CPU

In this order: the plan against reality; XLA flags, each with a check of all outputs; training of
each game with the fastest flags; rates of the parts, profiles with the replay at three sizes, from
which a run's time is projected, and the peers.

Each step is a command, printed before it starts, whose result is a JSON file (profiles: a folder)
in `--out`; what exists is not repeated. When the minutes are over the current command is stopped:
training resumes in the next visit, others start again. One that was stopped after almost a whole
visit leaves a file NAME.gave-up and counts as failed; to try again, remove the file.

Exit codes: 0 all done, 1 a step failed, 75 (EX_TEMPFAIL) more to do. Flags may fail.
"""

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

from common import ROOT, parser_of, write

SHARES = (0.1, 0.5, 0.97)  # of the run's agent steps held by the replay in each profile
ENDING = 90.0  # seconds that a step has to exit, training with a checkpoint
GRAPHS = "--xla_gpu_enable_command_buffer="
FLAGS = {
  "graph-loops": f"{GRAPHS}+WHILE",
  "graph-convolutions": f"{GRAPHS}+CONVOLUTION",
  "graph-all": f"{GRAPHS}+WHILE,+CONVOLUTION,+COLLECTIVES",
  "latency-hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
}
GAIN = 0.98  # of the time without, at most, for flags that are kept


class Step(NamedTuple):
  """A command that takes `--out`."""

  command: list[str]
  flags: str | None = None  # of XLA; None: the fastest ones
  resumes: bool = False


def steps(arguments: Any, folder: Path, env_steps: int) -> dict[str, Step]:
  """All steps by result name, without `--out`; a run has so many agent steps."""
  small, (first, *_) = arguments.small, arguments.games
  both, game = ["--config", *arguments.preset], f"env.game={first}"
  check = ["benchmarks/plan_check.py", *both, "--set", game, *arguments.set]
  reference = ["--reference", str(folder / "check.json")]
  found = {"check": Step(check, "")}
  for name, flags in FLAGS.items():
    found[f"flags-{name}"] = Step([*check, *reference], flags)
  train = ["launch/suite.py", *both, *arguments.set, "--seeds", "1", "--dir", str(folder / "runs")]
  for each in arguments.games:
    found[f"train-{each}"] = Step([*train, "--games", each], resumes=True)
  roots = ["16"] if small else ["16", "64", "1024", "4096"]
  batches = ["64"] if small else ["256", "1024", "2048", "4096"]
  sizes = ["--roots", *roots, "--batch", *batches]
  replay = ["--slots", "100000", "--gather-slots", "2000"] if small else []
  effort = ["--quick"] if small else ["--repeat", "3", "--limit", "5"]
  parts = ["--only", "search", "train", "draw", "reanalyse", "--venv", str(folder / "venv")]
  if first not in ("Catch", "CartPole"):
    found["speed"] = Step(["benchmarks/speed.py", *both, "--set", game, *arguments.set, *sizes])
  found["replay"] = Step(["benchmarks/replay.py", *replay])
  for share in SHARES:
    fill = ["--fill", str(int(share * env_steps)), "profile.steps=20", game, *arguments.set]
    found[f"profile-{share:g}"] = Step(["launch/profile.py", *both, *fill])
  return found | {"peers": Step(["benchmarks/peers.py", *parts, *effort])}


def seconds_of_run(check: Path) -> float:
  """What a run's programs take by a result of plan_check.py; infinite without one."""
  if not check.exists():
    return float("inf")
  return sum(row["calls"] * row["seconds"] for row in json.loads(check.read_text())["rows"])


def fastest(folder: Path) -> str:
  """The flags that make a run fastest; none if all gain too little."""
  times = {flags: seconds_of_run(folder / f"flags-{name}.json") for name, flags in FLAGS.items()}
  best = min(times, key=times.__getitem__)
  return best if times[best] < GAIN * seconds_of_run(folder / "check.json") else ""


def projected(folder: Path, learner_steps: int) -> float | None:
  """Seconds of a run's learner steps, by parts, each with its profile; None if one is missing."""
  paths = [folder / f"profile-{share:g}" / "profile.json" for share in SHARES]
  if not all(path.exists() for path in paths):
    return None
  found = [json.loads(path.read_text())["seconds_per_step"] for path in paths]
  inner = [(a + b) / 2 for a, b in itertools.pairwise(SHARES)]
  parts = zip(found, [0.0, *inner], [*inner, 1.0], strict=True)
  return learner_steps * sum(seconds * (end - begin) for seconds, begin, end in parts)


def visit(command: list[str], flags: str, log: Path, seconds: float) -> int | None:
  """Runs a command; after `seconds` it is interrupted and has `ENDING` seconds to exit.

  Returns its exit code, or None if it was stopped.
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
      os.killpg(process.pid, signal.SIGINT)  # with the processes that it has started
    try:
      process.wait(timeout=ENDING)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    return None


def take(found: dict[str, Step], folder: Path, minutes: float, until: float) -> list[str] | None:
  """Takes the missing steps. Returns those that failed; None if the visit is over."""
  failed = []
  for name, step in found.items():
    profile = name.startswith("profile")
    result = folder / (name if profile else f"{name}.json")
    part, note = folder / f"{name}.part", folder / f"{name}.gave-up"
    if result.exists():
      continue
    if note.exists():
      failed.append(name)
      continue
    shutil.rmtree(part, ignore_errors=True)  # of a profile that was stopped
    flags = fastest(folder) if step.flags is None else step.flags
    left = until - time.monotonic()
    command = [*step.command, "--out", str(part)]
    code = visit(command, flags, folder / f"{name}.log", max(left, 1.0))
    if code is None:
      if left > 0.9 * 60 * minutes and not step.resumes:
        note.write_text(f"{name} was stopped after {left / 60:.1f} minutes\n")
        print(f"{name} takes more than a visit: given up")
      return None
    if code == 0:
      part.rename(result)
    else:
      failed.append(name)
      if name.startswith("flags-"):  # a fact that does not change
        note.write_text(f"{name} ended with {code}\n")
  return failed


def main() -> int:
  parser = parser_of(__doc__, "folder of results, logs and runs (default: runs/gpu)")
  parser.set_defaults(out=Path("runs/gpu"))
  parser.add_argument("--preset", nargs="+", default=["atari300k", "sweep", "gpu"])
  parser.add_argument("--games", nargs="+", default=["Pong", "Breakout"], metavar="GAME")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value")
  parser.add_argument("--small", action="store_true", help="small sizes")
  parser.add_argument("--minutes", type=float, default=8.0, help="of a visit, saving not included")
  arguments = parser.parse_args()
  import pieces  # imports jax and the package: not needed for --help

  settings = [f"env.game={arguments.games[0]}", *arguments.set]
  config = pieces.load(parser, arguments.preset, settings)
  folder, until = arguments.out.resolve(), time.monotonic() + 60 * arguments.minutes
  folder.mkdir(parents=True, exist_ok=True)
  found = steps(arguments, folder, config.run.env_steps)
  failed = take(found, folder, arguments.minutes, until)
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
