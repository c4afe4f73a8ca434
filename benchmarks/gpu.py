"""All that is to be measured on a machine with a GPU, one after another: pieces, profiles, other programs, a run.

    python benchmarks/gpu.py --out benchmarks/results/h200 --minutes 8    # again and again, while it exits with 75
    python benchmarks/gpu.py --out /tmp/gpu --preset atari_small --small  # on a CPU: does it run?

Each measurement is one of the commands that it prints, with a JSON file of its own in the folder, or a folder for a
profile. What is there is not done again. When the minutes are over what goes on is stopped: a measurement begins anew
in the next visit, the run at the end goes on from its checkpoint, so that everything can be done in short visits to a
machine that is lent. A measurement that was stopped though it had (nearly) a whole visit leaves a note, NAME.gave-up
beside its log, and counts as failed; it is done again when the note is removed. From profiles of the replay at three
sizes comes the time that a whole run would take.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT, load, write

SHARES = (0.1, 0.5, 0.97)  # of the run's agent steps, in the replay when it is profiled
ENDING, SAVING = (
  30.0,
  90.0,
)  # seconds that a measurement, or the run, may take to end when it is stopped


def measurements(
  presets: list[str], settings: list[str], folder: Path, steps: int, small: bool
) -> dict[str, list[str]]:
  """Commands by the name of their result, without where that goes; `steps`: agent steps of the run."""
  both = ["--config", *presets]
  told = [*both, "--set", *settings]
  roots, batches = (
    (["16"], ["64"]) if small else (["64", "1024", "4096"], ["256", "1024", "2048", "4096"])
  )
  lanes = ["8"] if small else ["16", "64"]
  found = {
    "speed": ["benchmarks/speed.py", *told, "--roots", *roots, "--batch", *batches],
    "replay": [
      "benchmarks/replay.py",
      *(["--slots", "100000", "--gather-slots", "2000"] if small else []),
    ],
    "collecting": ["benchmarks/collecting.py", *told, "--lanes", *lanes],
  }
  for share in SHARES:
    fill = str(int(share * steps))
    found[f"profile-{share:g}"] = [
      "launch/profile.py",
      *both,
      "--fill",
      fill,
      "profile.steps=20",
      *settings,
    ]
  found["mesh"] = [
    "benchmarks/mesh.py",
    *told,
    "--batch",
    *batches,
    "--rounds",
    "1" if small else "10",
  ]
  found["environments"] = ["benchmarks/environments.py", *(["--rounds", "1"] if small else [])]
  pieces = ["--only", "search", "train", "draw", "job", "--venv", str(folder / "venv")]
  found["peers"] = [
    "benchmarks/peers.py",
    *pieces,
    *(["--quick"] if small else ["--repeat", "3", "--limit", "5"]),
  ]
  return found


def projected(folder: Path, steps: int) -> float | None:
  """Seconds of a whole run's learner steps, from the profiles; None if one is missing."""
  paths = [folder / f"profile-{share:g}" / "profile.json" for share in SHARES]
  if not all(path.exists() for path in paths):
    return None
  found = [json.loads(path.read_text())["seconds_per_step"] for path in paths]
  bounds = [
    0.0,
    (SHARES[0] + SHARES[1]) / 2,
    (SHARES[1] + SHARES[2]) / 2,
    1.0,
  ]  # each profile stands for its part
  return steps * sum(
    each * (b - a) for each, a, b in zip(found, bounds[:-1], bounds[1:], strict=True)
  )


def visit(command: list[str], log: Path, seconds: float, grace: float) -> int | None:
  """Runs it for as long at most, then lets it end or save, for `grace` seconds.

  Returns its exit code; None if it had to be stopped.
  """
  print(shlex.join(command), flush=True)
  with log.open("a") as out:
    process = subprocess.Popen(
      [sys.executable, *command], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
    )
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


def main() -> int:
  """Returns the exit code: 0 all is done, 1 something failed, 75 (as EX_TEMPFAIL) there is more to do."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--out", type=Path, required=True, help="folder of the results, the logs and the run"
  )
  parser.add_argument("--preset", nargs="+", default=["atari300k", "sweep", "gpu"])
  parser.add_argument("--set", nargs="*", default=["env.game=Pong"], metavar="key=value")
  parser.add_argument("--small", action="store_true", help="small sizes")
  parser.add_argument(
    "--minutes", type=float, default=8.0, help="of this visit; to save may take 1.5 more"
  )
  arguments = parser.parse_args()
  config = load(parser, arguments.preset, arguments.set)
  whole, folder = 60 * arguments.minutes, arguments.out.resolve()
  until = time.monotonic() + whole
  folder.mkdir(parents=True, exist_ok=True)
  failed = []
  steps = config.run.env_steps
  for name, command in measurements(
    arguments.preset, arguments.set, folder, steps, arguments.small
  ).items():
    result, part = (
      folder / (name if name.startswith("profile") else f"{name}.json"),
      folder / f"{name}.part",
    )
    note = folder / f"{name}.gave-up"
    if result.exists():
      continue
    if note.exists():
      failed.append(name)
      continue
    shutil.rmtree(part, ignore_errors=True)  # of a profile that was stopped
    left = until - time.monotonic()
    code = visit([*command, "--out", str(part)], folder / f"{name}.log", left, ENDING)
    if code is None:
      if left > 0.9 * whole:
        note.write_text(
          f"{name} was stopped after {left / 60:.1f} minutes, of a visit of {arguments.minutes:g}\n"
        )
        print(f"{name} takes more than a visit: given up")
      return 75
    if code:
      failed.append(name)
    else:
      part.rename(result)
  seconds = projected(folder, config.learner.steps)
  if seconds is not None:
    print(
      f"a run of {config.learner.steps} learner steps would take {seconds / 60:.1f} minutes of learning"
    )
    write(
      folder / "projected.json",
      {"preset": arguments.preset, "set": arguments.set, "seconds": seconds},
    )
  run = folder / "run"
  start = (
    ["--resume", str(run)]
    if run.exists()
    else ["--config", *arguments.preset, f"run.dir={run}", *arguments.set]
  )
  code = visit(
    ["launch/multihost.py", *start], folder / "run.log", max(until - time.monotonic(), 1.0), SAVING
  )
  for name in failed:
    print(f"{name} failed: {folder / name}.log")
  return 75 if code is None else int(bool(failed) or code != 0)


if __name__ == "__main__":
  sys.exit(main())
