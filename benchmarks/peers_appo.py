"""APPO compared with Sample Factory's: agent steps per second, and minutes to a score.

    python benchmarks/peers_appo.py --out benchmarks/results/peers-appo.json   # half an hour
    python benchmarks/peers_appo.py --games Pong42                             # hours
    python benchmarks/peers_appo.py --quick                                    # a test, two minutes

Runs are new processes, in turns, with the same cores (`--cores`) and otherwise as their users start
them. Sample Factory has the settings of its examples: on CartPole-v1 those of the command in
train_gym_env.py (40 lanes), on Pong the defaults of envpool/atari (84x84, 4 frames, 64 lanes in
each of 4 processes, DQN's network, 4 epochs). Ours has those of the preset `appo`, on CartPole with
32 lanes, batches of 640 agent steps and 480,000 agent steps, on Pong with the frames and layers of
Sample Factory; it uses every trajectory twice (2 epochs), and in a further run on Pong four times.
`Pong42` is Pong with frames of 42x42 for both sides, for which ours has the preset's own layers.

A run's curve has a point per line of its metrics: [seconds, agent steps, mean return of the last
100 training episodes]. Seconds are since the start of the process, so they include imports and
compilation (with an empty cache). A run ends when that mean is 475 on CartPole or 18 on Pong42, or
a time after its first point: by default 8, 3 and 60 minutes on CartPole, Pong and Pong42. Agent
steps of Sample Factory have been trained on; ours have been collected, at most two learner steps'
worth ahead of the pace. `steps/s` is their rate in the last two thirds of a run, from the first
point on; `with start` is that of all seconds.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, parser_of, positive, write
from peers import HERE, NAN, Missing, peer_python, table

START = 600  # seconds in which a run must begin to learn


class Task(NamedTuple):
  """A game as both sides train on it."""

  game: str
  threshold: float  # mean return at which a run ends
  minutes: float  # after which it ends in any case
  ours: list[str]  # settings beside those of the preset


TASKS = {
  "CartPole": Task("CartPole", 475, 8, [
    "run.env_steps=480000", "actor.lanes=32", "learner.batch_size=32", "learner.steps=1850",
    "run.log_interval=5",
  ]),
  "Pong": Task("Pong", math.inf, 3, [
    "env.frame_size=84", "network.torso=nature", "network.channels=32", "network.hidden=512",
    "run.log_interval=1",
  ]),
  "Pong42": Task("Pong", 18, 60, ["run.log_interval=10"]),
}  # fmt: skip
VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({package: importlib.metadata.version(package) for package in sys.argv[1:]}))
"""
PACKAGES = ["sample-factory", "torch", "envpool", "gymnasium", "numpy"]


class Run(NamedTuple):
  """A program on a task."""

  side: str
  task: str
  seed: int
  changes: tuple[str, ...] = ()  # to the configuration of ours


def command(
  run: Run, python: Path | None, folder: Path, arguments: argparse.Namespace
) -> list[str]:
  if run.side != "ours":
    side = str(HERE / "sides/appo.py")
    return [str(python), side, run.task, str(folder), str(run.seed), str(arguments.cores)]
  task = TASKS[run.task]
  settings = [
    f"env.game={task.game}", *task.ours, *run.changes, f"run.seed={run.seed}",
    f"run.dir={folder}/run", f"run.compile_cache={folder}/cache",
    "evaluation.at_end=false", *arguments.set,
  ]  # fmt: skip
  return [sys.executable, str(ROOT / "launch/multihost.py"), "--config", "appo", *settings]


def watch(words: list[str], folder: Path, seconds: float, threshold: float) -> list[list[float]]:
  """Runs a program until so many seconds after its first point or the threshold.

  Returns its curve. Raises Missing if it has no points.
  """
  curve: list[list[float]] = []
  metrics, log = folder / "run/metrics.jsonl", folder / "log"
  begin = time.monotonic()
  with log.open("w") as output:
    process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
  try:
    read, end = 0, START
    while process.poll() is None and (now := time.monotonic() - begin) < end:
      time.sleep(0.1)
      lines = metrics.read_bytes()[read:].splitlines(keepends=True) if metrics.exists() else []
      for line in lines:
        if line.endswith(b"\n"):
          row, read = json.loads(line), read + len(line)
          curve.append([round(now, 2), row["env_steps"], row.get("charts/episode_return", NAN)])
          end = curve[0][0] + seconds
      if curve and curve[-1][-1] >= threshold:
        break
  finally:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  if not curve:
    raise Missing(log.read_text(errors="replace")[-500:] or "no progress")
  return curve


def summary(curve: list[list[float]], threshold: float) -> dict[str, float]:
  """Minutes and agent steps of the first point at the threshold, rates, and the last return."""
  (first, *_), (last, steps, score) = curve[0], curve[-1]
  hit = next((point for point in curve if point[-1] >= threshold), [NAN, NAN])
  later = next(point for point in curve if point[0] >= first + (last - first) / 3)
  reached = {"minutes": hit[0] / 60, "agent steps": hit[1]} if math.isfinite(threshold) else {}
  return reached | {
    "steps/s": (steps - later[1]) / (last - later[0]) if last > later[0] else NAN,
    "with start": steps / last, "last return": score,
  }  # fmt: skip


def plan(arguments: argparse.Namespace) -> list[Run]:
  runs = []
  for seed in range(arguments.seeds):
    runs += [Run(side, "CartPole", seed) for side in ("ours", "Sample Factory")]
  for seed in range(arguments.rounds):
    runs += [Run("ours", "Pong", seed), Run("Sample Factory", "Pong", seed)]
    runs.append(Run("ours", "Pong", seed, ("loss.epochs=4", "learner.steps=15400")))
    runs += [Run("ours", "Pong42", seed), Run("Sample Factory", "Pong42", seed)]
  return [run for run in runs if run.task in arguments.games]


def parse() -> argparse.Namespace:
  parser = parser_of(__doc__)
  add = parser.add_argument
  add("--games", nargs="+", choices=TASKS, default=["CartPole", "Pong"])
  add("--seeds", type=positive, default=3, help="runs of each side on CartPole")
  add("--rounds", type=positive, default=1, help="runs of each side on Pong and Pong42")
  add("--minutes", type=float, help="maximum minutes of a run")
  add("--cores", type=positive, default=2, help="cores for each run")
  add("--quick", action="store_true", help="one seed, 15 seconds of each run")
  add("--venv", type=Path, default=ROOT / ".venv-sample-factory", help="Sample Factory's")
  add("--set", nargs="*", default=[], metavar="key=value", help="overrides for our side")
  arguments = parser.parse_args()
  if arguments.quick:
    arguments.seeds, arguments.minutes = 1, 0.25
  return arguments


def measure(run: Run, python: Path | None, arguments: argparse.Namespace) -> dict[str, Any]:
  """Returns a summary and up to 101 points of a curve, or the reason under `missing`."""
  task = TASKS[run.task]
  seconds = 60 * (arguments.minutes or task.minutes)
  try:
    if python is None and run.side != "ours":
      raise Missing("not installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
      words = command(run, python, Path(folder), arguments)
      curve = watch(words, Path(folder), seconds, task.threshold)
  except Missing as why:
    return {"missing": str(why)}
  points = [*curve[: -1 : len(curve) // 100 + 1], *curve[-1:]]
  return {"summary": summary(curve, task.threshold), "curve": points}


def main() -> None:
  arguments = parse()
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the current run
  os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
  python, peer = None, {}
  try:
    python = peer_python(arguments.venv, "Sample-Factory")
    peer = json.loads(subprocess.check_output([str(python), "-c", VERSIONS, *PACKAGES]))
  except Missing as why:
    print(why)
  measured = []
  tables: dict[str, dict[str, dict[str, float]]] = {task: {} for task in arguments.games}
  for run in plan(arguments):
    row = run._asdict() | measure(run, python, arguments)
    measured.append(row)
    name = f"{', '.join([run.side, *run.changes[:1]])}, seed {run.seed}"
    print(f"{run.task}, {name}: {row.get('missing', row.get('summary'))}", flush=True)
    if "summary" in row:
      tables[run.task][name] = row["summary"]
    write(arguments.out, {"peer": peer, "measured": measured})
  for task, rows in tables.items():
    columns = list(next(iter(rows.values()), {}))
    table(task, columns, {name: list(values.values()) for name, values in rows.items()})


if __name__ == "__main__":
  main()
