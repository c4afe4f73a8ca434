"""Rate of collection with actors in threads, in processes, and with central inference.

    python benchmarks/actors.py --lanes 8 64 512 --out benchmarks/results/actors-2cores.json

Each row is a run of launch/multihost.py: DQN with a small network on Catch (or `--game CartPole`),
and so few learner steps that collection is the bottleneck. The rate is taken from the run's
metrics, between one fifth of its agent steps and the end. `lanes` are those of all actors together;
`actors` 0 is an actor in a thread of the learner. A frame is a step of one environment, including
resets, which are no agent steps. A message has a frame of each of its actor's lanes, and a round
trip lasts from one message of an actor to the next. For central inference, the mean latency of a
request, the mean number of lanes per batch, and their share of all lanes (`batch_fill`) are
recorded, too. The configurations take turns: once to find the number of agent steps for
`--seconds`, then `--repeat` times.
"""

import argparse
import contextlib
import json
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, parser_of, positive, write

LEARNER_STEPS = 50


class Case(NamedTuple):
  """One configuration."""

  lanes: int
  actors: int
  inference: str  # topology.inference


def parse() -> argparse.Namespace:
  parser = parser_of(__doc__)
  parser.add_argument("--game", default="Catch")
  parser.add_argument("--lanes", type=positive, nargs="+", default=[8, 64, 512])
  parser.add_argument("--actors", type=positive, nargs="+", default=[1, 2])
  parser.add_argument("--seconds", type=positive, default=10, help="approximate length of a run")
  parser.add_argument("--repeat", type=positive, default=3)
  return parser.parse_args()


def cases(lanes: list[int], actors: list[int]) -> list[Case]:
  processes = [(n, inference) for inference in ("actors", "central") for n in actors]
  return [Case(l, *how) for l in lanes for how in [(0, "actors"), *processes] if how[0] <= l]


def run(game: str, case: Case, agent_steps: int, folder: Path) -> dict[str, float]:
  """Trains and returns the measurements."""
  settings = (
    f"env.game={game}", f"run.env_steps={agent_steps}", f"actor.lanes={case.lanes}",
    f"run.dir={folder}",
    f"learner.steps={LEARNER_STEPS}", "learner.batch_size=8", "actor.random_steps=0",
    "run.log_interval=1", "evaluation.at_end=false", f"topology.inference={case.inference}",
  )  # fmt: skip
  command = [sys.executable, str(ROOT / "launch/multihost.py"), "--config", "dqn", *settings]
  if case.actors:
    command += ["--processes", f"learner=1,actor={case.actors}"]
  subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
  rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
  rows = [row for row in rows if row.get("env_steps", 0) >= agent_steps / 5]
  first, last = rows[0], rows[-1]
  rate = (last["env_steps"] - first["env_steps"]) / (last["time"] - first["time"])
  with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
    ((slots,),) = journal.execute("SELECT sum(head) FROM lane")
  frames, actors = rate * slots / agent_steps, max(case.actors, 1)
  result = {
    "agent_steps_per_second": rate,
    "frames_per_second": frames,
    "round_trips_per_second": frames * actors / case.lanes,
    "seconds_per_round_trip": case.lanes / frames,
  }
  for name in ("inference/lanes_mean", "inference/seconds_mean"):
    if values := [row[name] for row in rows if name in row]:
      result[name] = statistics.mean(values)
  if "inference/lanes_mean" in result:
    result["batch_fill"] = result["inference/lanes_mean"] / case.lanes
  return result


def main() -> None:
  arguments = parse()
  chosen = cases(arguments.lanes, arguments.actors)
  measured: dict[Case, list[dict[str, float]]] = {case: [] for case in chosen}
  rate = {case: 1000.0 + 10 * case.lanes for case in chosen}
  for repetition in range(-1, arguments.repeat):
    for case, results in measured.items():
      with tempfile.TemporaryDirectory() as folder:
        steps = int(rate[case] * arguments.seconds)
        result = run(arguments.game, case, steps, Path(folder) / "run")
      print(*case, result, flush=True)
      rate[case] = result["agent_steps_per_second"]
      if repetition >= 0:
        results.append(result)
  rows: list[dict[str, Any]] = []
  for case, results in measured.items():
    medians = {key: statistics.median(x[key] for x in results) for key in results[0]}
    each = case.lanes / max(case.actors, 1)
    rows.append({**case._asdict(), "lanes_per_message": each, **medians, "runs": results})
    print(*case, *(f"{key} {value:.4g}" for key, value in medians.items()))
  write(arguments.out, {"game": arguments.game, "seconds": arguments.seconds, "rows": rows})


if __name__ == "__main__":
  main()
