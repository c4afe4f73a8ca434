"""All measurements meant for a machine with a GPU, in visits of limited length, and a training run.

    python benchmarks/gpu.py --out benchmarks/results/h200   # again while it exits with 75
    python benchmarks/gpu.py --out /tmp/gpu --preset atari_small --small  # on a CPU: a test

Each measurement is a command, printed before it starts, with a JSON file (profiles: a folder) in
`--out`; what exists is not repeated. When the minutes are over the current command is stopped: a
measurement starts again in the next visit, the run at the end resumes from its checkpoint. A
measurement stopped after almost a whole visit leaves a file NAME.gave-up and counts as failed; to
try again, remove the file. Profiles with the replay at three sizes give the projected run time.

Exit codes: 0 all done, 1 a measurement failed, 75 (EX_TEMPFAIL) more to do.
"""

import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, parser_of, write

SHARES = (0.1, 0.5, 0.97)  # of the run's agent steps held by the replay in each profile
ENDING, SAVING = 30.0, 90.0  # seconds that a measurement, or the run, has to exit after SIGTERM


def measurements(
  presets: list[str], settings: list[str], folder: Path, steps: int, small: bool
) -> dict[str, list[str]]:
  """Commands by result name, without `--out`; `steps` are the agent steps of the run."""
  both = ["--config", *presets]
  roots = ["16"] if small else ["16", "64", "1024", "4096"]
  batches = ["64"] if small else ["256", "1024", "2048", "4096"]
  sizes = ["--roots", *roots, "--batch", *batches]
  replay = ["--slots", "100000", "--gather-slots", "2000"] if small else []
  effort = ["--quick"] if small else ["--repeat", "3", "--limit", "5"]
  parts = ["--only", "search", "train", "draw", "reanalyse", "--venv", str(folder / "venv")]
  found = {
    "speed": ["benchmarks/speed.py", *both, "--set", *settings, *sizes],
    "replay": ["benchmarks/replay.py", *replay],
  }
  for share in SHARES:
    fill = ["--fill", str(int(share * steps)), "profile.steps=20", *settings]
    found[f"profile-{share:g}"] = ["launch/profile.py", *both, *fill]
  return found | {"peers": ["benchmarks/peers.py", *parts, *effort]}


def projected(folder: Path, steps: int) -> float | None:
  """Seconds of a run's learner steps, by parts, each with its profile; None if one is missing."""
  paths = [folder / f"profile-{share:g}" / "profile.json" for share in SHARES]
  if not all(path.exists() for path in paths):
    return None
  found = [json.loads(path.read_text())["seconds_per_step"] for path in paths]
  inner = [(a + b) / 2 for a, b in itertools.pairwise(SHARES)]
  parts = zip(found, [0.0, *inner], [*inner, 1.0], strict=True)
  return steps * sum(seconds * (end - begin) for seconds, begin, end in parts)


def visit(command: list[str], log: Path, seconds: float, grace: float) -> int | None:
  """Runs a command; after `seconds` it gets SIGTERM and `grace` seconds to exit.

  Returns its exit code, or None if it was stopped.
  """
  print(shlex.join(command), flush=True)
  with log.open("a") as out:
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=out, stderr=out)
    try:
      return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
      process.terminate()
    try:
      process.wait(timeout=grace)
    except subprocess.TimeoutExpired:
      process.kill()
      process.wait()
    return None


def measure(
  commands: dict[str, list[str]], folder: Path, minutes: float, until: float
) -> list[str] | None:
  """Takes the missing measurements. Returns those that failed; None if the visit is over."""
  failed = []
  for name, command in commands.items():
    result = folder / (name if name.startswith("profile") else f"{name}.json")
    part, note = folder / f"{name}.part", folder / f"{name}.gave-up"
    if result.exists():
      continue
    if note.exists():
      failed.append(name)
      continue
    shutil.rmtree(part, ignore_errors=True)  # of a profile that was stopped
    left = until - time.monotonic()
    code = visit([*command, "--out", str(part)], folder / f"{name}.log", left, ENDING)
    if code is None:
      if left > 0.9 * 60 * minutes:
        note.write_text(f"{name} was stopped after {left / 60:.1f} minutes\n")
        print(f"{name} takes more than a visit: given up")
      return None
    if code:
      failed.append(name)
    else:
      part.rename(result)
  return failed


def main() -> int:
  parser = parser_of(__doc__, "folder of results, logs and the run (default: runs/gpu)")
  parser.set_defaults(out=Path("runs/gpu"))
  parser.add_argument("--preset", nargs="+", default=["atari300k", "sweep", "gpu"])
  parser.add_argument("--set", nargs="*", default=["env.game=Pong"], metavar="key=value")
  parser.add_argument("--small", action="store_true", help="small sizes")
  parser.add_argument("--minutes", type=float, default=8.0, help="of a visit, saving not included")
  arguments = parser.parse_args()
  presets, settings = arguments.preset, arguments.set
  import pieces  # imports jax and the package: not needed for --help

  config = pieces.load(parser, presets, settings)
  folder, until = arguments.out.resolve(), time.monotonic() + 60 * arguments.minutes
  folder.mkdir(parents=True, exist_ok=True)
  commands = measurements(presets, settings, folder, config.run.env_steps, arguments.small)
  failed = measure(commands, folder, arguments.minutes, until)
  if failed is None:
    return 75
  seconds = projected(folder, config.learner.steps)
  if seconds is not None:
    print(f"projected: {config.learner.steps} learner steps in {seconds / 60:.1f} minutes")
    result = {"preset": presets, "set": settings, "seconds": seconds}
    write(folder / "projected.json", result)
  run = folder / "run"
  start = ["--config", *presets, f"run.dir={run}", *settings]
  if run.exists():
    start = ["--resume", str(run)]
  left = max(until - time.monotonic(), 1.0)
  code = visit(["launch/multihost.py", *start], folder / "run.log", left, SAVING)
  for name in failed:
    print(f"{name} failed: {folder / name}.log")
  return 75 if code is None else int(bool(failed) or code != 0)


if __name__ == "__main__":
  sys.exit(main())
