"""Kills processes of a run at random while it trains Catch, and counts what that cost.

python benchmarks/chaos.py --minutes 10 --every 5 --out benchmarks/results/chaos.json

What actors are told is safe, a witness in their process writes down, outside of the run (`witness/`): all of it must be
in the journals at the end. What the journals hold is also looked at after each kill: what was on disk once must be
there for good, unchanged. Lost is what is gone or other later, of either kind; repeated what is stored twice. After
the time is up nothing is killed any more, and the run must finish by itself with all agent steps.

What a learner without actors collects itself has no witness, only those looks. All checkpoints are kept: with the older
ones the journal forgets what they hold, which could not be told from what is lost.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from common import ROOT, write

Place = tuple[int, int, int]  # unit, lane, first slot of a segment
Slots = dict[Place, tuple[int, int]]  # its size and CRC


@contextlib.contextmanager
def frozen(learners: list[int]) -> Iterator[None]:
  """Inside this context the disk is as these processes would leave it if they were killed."""

  def send(number: signal.Signals) -> None:
    for pid in learners:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

  send(signal.SIGSTOP)
  try:
    yield
  finally:
    send(signal.SIGCONT)


def places(folder: Path, learners: int) -> list[Path]:
  """Where each unit keeps what is its own."""
  return [folder, *(folder / f"units/{unit}" for unit in range(1, learners))]


def look(folder: Path, learners: int) -> tuple[Slots, int, int]:
  """What is stored: segments, agent steps in them, slots that are there twice. Of copies: the run has a lock on it."""
  found: Slots = {}
  steps = repeated = 0
  for unit, place in enumerate(places(folder, learners)):
    with tempfile.TemporaryDirectory() as copy:
      for name in ("journal.sqlite", "journal.sqlite-wal"):
        if (place / name).exists():
          (Path(copy) / name).write_bytes((place / name).read_bytes())
      database = sqlite3.connect(Path(copy) / "journal.sqlite")
      heads: dict[int, int] = {}
      rows = database.execute(
        "SELECT lane, start, size, crc, slots FROM segment ORDER BY lane, start"
      )
      for lane, start, size, crc, slots in rows:
        repeated += max(heads.get(lane, 0) - start, 0)
        heads[lane] = start + size
        found[unit, lane, start] = size, crc
        actions = memoryview(slots)[3 * size : 7 * size].cast("i")
        steps += sum(action >= 0 for action in actions)
      database.close()
  return found, steps, repeated


def witnessed(path: Path, learners: int) -> dict[Place, int]:
  """Sizes of the segments that were acknowledged."""
  lines = (
    map(int, line.split()) for line in (path.read_text().splitlines() if path.exists() else [])
  )
  return {
    ((process - learners) % learners, lane, start): size for process, lane, start, size in lines
  }


def main() -> int:
  """Returns 0 if the run finished and nothing was lost or repeated."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--processes",
    default="learner=2,actor=2,reanalyser=2",
    metavar="KIND=N,...",
    help="as for launch/multihost.py",
  )
  parser.add_argument("--minutes", type=float, default=10.0, help="for which processes are killed")
  parser.add_argument(
    "--every", type=float, default=5.0, metavar="SECONDS", help="between kills, on average"
  )
  parser.add_argument("--env-steps", type=int, default=20_000, help="of the run")
  parser.add_argument("--learner-share", type=float, default=0.1, help="of the kills")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--out", type=Path, help="JSON file")
  arguments = parser.parse_args()
  rng = random.Random(arguments.seed)
  if not (said := re.search(r"learner=(\d+)", arguments.processes)):
    parser.error("--processes: at least one learner is needed")
  learners = int(said[1])
  with tempfile.TemporaryDirectory(prefix="chaos-") as name:
    folder = Path(name) / "run"
    command = [sys.executable, str(ROOT / "launch/multihost.py"), "--config", "quickstart"]
    command += [
      "--processes",
      arguments.processes,
      f"run.dir={folder}",
      f"run.env_steps={arguments.env_steps}",
      f"learner.steps={arguments.env_steps // 4}",
    ]
    command += [
      "evaluation.at_end=false",
      "run.checkpoint_interval=200",
      "run.keep_checkpoints=1000",
    ]
    log, witness = Path(name) / "log", Path(name) / "witness"
    paths = [str(ROOT / "benchmarks/witness"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"WITNESS": str(witness), "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as out:
      run = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
      result = torment(run, folder, witness, learners, rng, arguments)
    finally:
      run.terminate()
      run.wait()
    output = log.read_text()
  result["finished"] = run.returncode == 0
  hashes = re.findall(r"trained: (\d+) agent steps", output)
  result["agent_steps_of_unit_0"] = int(hashes[-1]) if hashes else None
  for key, value in result.items():
    print(f"{key:<28}{value}")
  if not result["finished"]:
    print(output[-3000:])
  write(arguments.out, result)
  return int(not result["finished"] or result["lost"] > 0 or result["repeated"] > 0)


def torment(
  run: subprocess.Popen,
  folder: Path,
  witness: Path,
  learners: int,
  rng: random.Random,
  arguments: argparse.Namespace,
) -> dict[str, object]:
  """Kills for the time given, then waits for the end."""
  kills: collections.Counter[str] = collections.Counter()
  seen: Slots = {}
  lost = repeated = steps = 0
  state = folder / "logs/supervisor.json"

  def children() -> list[dict]:
    return json.loads(state.read_text())["children"]

  def compare() -> None:
    nonlocal lost, repeated, steps
    with frozen(
      [child["pid"] for child in children() if child["pid"] and child["name"].startswith("learner")]
    ):
      now, steps, twice = look(folder, learners)
    lost += sum(now.get(place) != what for place, what in seen.items())
    repeated = max(repeated, twice)
    seen.update(now)

  while not (places(folder, learners)[-1] / "journal.sqlite").exists() and run.poll() is None:
    time.sleep(0.2)
  begin = time.monotonic()
  while time.monotonic() - begin < 60 * arguments.minutes and run.poll() is None:
    time.sleep(rng.uniform(0.5, 1.5) * arguments.every)
    alive = [child for child in children() if child["pid"]]
    learner = rng.random() < arguments.learner_share
    victims = [child for child in alive if child["name"].startswith("learner") == learner]
    if not victims or run.poll() is not None:
      continue
    victim = rng.choice(victims)
    os.kill(victim["pid"], signal.SIGKILL)
    kills[victim["name"].partition("-")[0]] += 1
    compare()
  run.wait()
  compare()
  told = witnessed(witness, learners)
  lost += sum(seen.get(place, (0, 0))[0] != size for place, size in told.items())
  restarts = {child["name"]: child["restarts"] for child in children()}
  return {
    "processes": arguments.processes,
    "minutes": round((time.monotonic() - begin) / 60, 2),
    "kills": dict(kills),
    "restarts": restarts,
    "agent_steps_stored": steps,
    "agent_steps_wanted": arguments.env_steps,
    "segments_acknowledged": len(told),
    "segments_stored": len(seen),
    "lost": lost,
    "repeated": repeated,
  }


if __name__ == "__main__":
  sys.exit(main())
