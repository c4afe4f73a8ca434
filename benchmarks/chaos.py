"""Fault injection: kills random processes of a run and checks that no experience is lost.

    python benchmarks/chaos.py --minutes 10 --every 5 --out benchmarks/results/chaos.json

The run trains Catch while its processes get `kill -9`. A hook in the actor processes (`witness/`)
records every acknowledged slot in a file outside the run; at the end all of them must be in the
journals. The journals are also read after each kill: every row must still be there,
unchanged, at each later read. `lost` counts violations of either kind, `repeated` counts slots that
are stored twice. After the kills the run must finish by itself with all agent steps. Slots of a
learner without actor processes are checked by the journals only.

The replay is large enough to evict nothing, because journals drop evicted slots.
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
from typing import Any

from common import ROOT, parser_of, write

PROCESSES = "learner=2,actor=2,refresher=2"
Rows = dict[tuple[int, int, int], tuple[int, int]]  # (unit, lane, first slot): (slots, CRC)


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
  """Suspends processes, so that their files are in the state in which a kill would leave them."""

  def send(number: signal.Signals) -> None:
    for pid in pids:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

  send(signal.SIGSTOP)
  try:
    yield
  finally:
    send(signal.SIGCONT)


def journals(folder: Path, learners: int) -> list[Path]:
  """Paths of all units' journals."""
  folders = [folder, *(folder / f"units/{unit}" for unit in range(1, learners))]
  return [path / "journal.sqlite" for path in folders]


def stored(folder: Path, learners: int) -> tuple[Rows, int]:
  """Returns the rows of the journals, and the number of slots that are stored twice.

  Reads copies, since the run holds locks, including the write-ahead logs, which contain the newest
  rows. Slots that a learner has buffered but neither flushed nor acknowledged are not included.
  """
  result: Rows = {}
  repeated = 0
  for unit, journal in enumerate(journals(folder, learners)):
    with tempfile.TemporaryDirectory() as copy:
      for path in (journal, journal.with_name(f"{journal.name}-wal")):
        if path.exists():
          (Path(copy) / path.name).write_bytes(path.read_bytes())
      database = sqlite3.connect(Path(copy) / journal.name)
      heads: dict[int, int] = {}
      rows = database.execute("SELECT lane, start, size, crc FROM segment ORDER BY lane, start")
      for lane, start, size, crc in rows:
        repeated += max(heads.get(lane, 0) - start, 0)
        heads[lane] = start + size
        result[unit, lane, start] = size, crc
      database.close()
  return result, repeated


def acknowledged(path: Path, learners: int) -> set[tuple[int, int, int]]:
  """Unit, lane and time of each recorded slot. Actors' process ids follow the learners'."""
  lines = path.read_text().splitlines() if path.exists() else []
  rows = (map(int, line.split()) for line in lines)
  return {((process - learners) % learners, lane, time) for process, lane, time in rows}


def missing(slots: set[tuple[int, int, int]], rows: Rows) -> int:
  """Number of slots that no row contains."""
  available = {
    (unit, lane, start + i) for (unit, lane, start), (size, _) in rows.items() for i in range(size)
  }
  return len(slots - available)


class Chaos:
  """Kills processes of a supervised run and compares its journals after each kill."""

  def __init__(self, process: subprocess.Popen[bytes], folder: Path, learners: int):
    self._process, self._folder, self._learners = process, folder, learners
    self.kills: collections.Counter[str] = collections.Counter()
    self.seen: Rows = {}
    self.lost = self.repeated = 0

  def children(self) -> list[dict[str, Any]]:
    """The supervisor's status of its processes."""
    return json.loads((self._folder / "logs/supervisor.json").read_text())["children"]

  def run(self, rng: random.Random, minutes: float, every: float, learner_share: float) -> None:
    """Kills for the given time, then waits for the run to end."""
    last = journals(self._folder, self._learners)[-1]
    while not last.exists() and self._process.poll() is None:
      time.sleep(0.2)
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and self._process.poll() is None:
      time.sleep(rng.uniform(0.5, 1.5) * every)
      learner = rng.random() < learner_share
      victims = [c for c in self.children() if c["pid"] and (_kind(c) == "learner") == learner]
      if victims and self._process.poll() is None:
        victim = rng.choice(victims)
        with contextlib.suppress(ProcessLookupError):  # it has just ended
          os.kill(victim["pid"], signal.SIGKILL)
          self.kills[_kind(victim)] += 1
        self.compare()
    self._process.wait()
    self.compare()

  def compare(self) -> None:
    """Counts rows that have disappeared or changed since they were first seen."""
    learners = [c["pid"] for c in self.children() if c["pid"] and _kind(c) == "learner"]
    with stopped(learners):
      now, repeated = stored(self._folder, self._learners)
    self.lost += sum(now.get(key) != row for key, row in self.seen.items())
    self.repeated = max(self.repeated, repeated)
    self.seen.update(now)


def _kind(child: dict[str, Any]) -> str:
  return child["name"].partition("-")[0]


def parse() -> argparse.Namespace:
  parser = parser_of(__doc__)
  parser.add_argument("--processes", default=PROCESSES, help="as for launch/multihost.py")
  parser.add_argument("--minutes", type=float, default=10.0, help="minutes during which to kill")
  parser.add_argument("--every", type=float, default=5.0, help="mean seconds between kills")
  parser.add_argument("--env-steps", type=int, default=20_000, help="agent steps of the run")
  parser.add_argument(
    "--learner-share", type=float, default=0.1, help="fraction of kills that hit learners"
  )
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  if not re.search(r"learner=[1-9]", arguments.processes):
    parser.error("--processes: at least one learner is needed")
  return arguments


def trained(folder: Path) -> int:
  """Agent steps of the finished run, from the log of its first learner; 0 if it has not ended."""
  log = (folder / "logs/learner-0.log").read_text()
  return int([0, *re.findall(r"trained: (\d+) agent steps", log)][-1])


def main() -> int:
  """Returns 0 if the run finished and no slot was lost or repeated."""
  arguments = parse()
  match = re.search(r"learner=(\d+)", arguments.processes)
  assert match
  learners, begin = int(match[1]), time.monotonic()
  with tempfile.TemporaryDirectory(prefix="chaos-") as name:
    folder, log, witness = (Path(name) / part for part in ("run", "log", "witness"))
    command = [
      sys.executable, str(ROOT / "launch/multihost.py"), "--config", "quickstart",
      "--processes", arguments.processes, f"run.dir={folder}",
      f"run.env_steps={arguments.env_steps}", f"learner.steps={arguments.env_steps // 4}",
      "evaluation.at_end=false", "run.checkpoint_interval=200", "replay.capacity=0",
    ]  # fmt: skip
    paths = [str(ROOT / "benchmarks/witness"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"WITNESS": str(witness), "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as out:
      process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    chaos = Chaos(process, folder, learners)
    try:
      chaos.run(
        random.Random(arguments.seed), arguments.minutes, arguments.every, arguments.learner_share
      )
    finally:
      process.terminate()
      process.wait()
    confirmed = acknowledged(witness, learners)
    finished = process.returncode == 0
    result = {
      "processes": arguments.processes,
      "minutes": round((time.monotonic() - begin) / 60, 2),
      "finished": finished,
      "kills": dict(chaos.kills),
      "restarts": {child["name"]: child["restarts"] for child in chaos.children()},
      "agent_steps": trained(folder),
      "agent_steps_wanted": arguments.env_steps,
      "slots_acknowledged": len(confirmed),
      "rows_stored": len(chaos.seen),
      "lost": chaos.lost + missing(confirmed, chaos.seen),
      "repeated": chaos.repeated,
    }
    if not finished:
      print(log.read_text()[-3000:])
  for key, value in result.items():
    print(f"{key:<28}{value}")
  write(arguments.out, result)
  # Without acknowledged slots of actor processes the hook has failed.
  checked = confirmed or not re.search(r"actor=[1-9]", arguments.processes)
  complete = result["agent_steps"] == arguments.env_steps and checked
  return int(not (finished and complete) or result["lost"] > 0 or result["repeated"] > 0)


if __name__ == "__main__":
  sys.exit(main())
