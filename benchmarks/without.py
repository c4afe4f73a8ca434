"""What was done for speed and kept, each switched off: how much slower is it without?

    python benchmarks/without.py --out benchmarks/results/without-2cores.json           # 20 minutes on two cores
    python benchmarks/without.py --only runs --config atari100k --set env.game=Pong --steps 300    # on a GPU

Pieces, in which both ways take turns, medians compared:

  memory    a training step at full size on a CPU; without: memory that is freed goes back to the system. What keeping
            it costs: the most host memory that each had
  devices   the same; without: all of a machine's cores are one device of jax
  pieces    the same on one device; without: kernel gradients of convolutions over the whole batch at once
  message   a training step of two learner processes; without: each gradient, statistic and metric a message of its own
  cache     from nothing to the first training step, in a process of its own; without: an empty compilation cache

And whole runs, one after another, learner steps a second in their later half: roles that overlap (without:
run.mode=lockstep), sweeps (without: every batch reanalysed), frames on the device (without: gathered on the host).
"""

import argparse
import contextlib
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import grid
import jax
from common import ROOT, load, positive, write
from mesh import Stepper, StepperProcess

from speedyzero_jax.agents.efficientzero import networks
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.system import memory
from speedyzero_jax.workers.learner import AXIS, Learner

PARTS = ("memory", "devices", "pieces", "message", "cache", "runs")
FULL_FRAME, VECTOR, ACTIONS = (96, 96, 3), (1, 1, 50), 6
Row = dict[str, Any]


def turns(
  first: Callable[[], float], second: Callable[[], float], rounds: int
) -> tuple[float, float]:
  """The medians of both, which take turns."""
  times: tuple[list[float], list[float]] = ([], [])
  for _, (call, kept) in itertools.product(range(rounds), zip((first, second), times, strict=True)):
    kept.append(call())
  return statistics.median(times[0]), statistics.median(times[1])


def apart(
  batch: int, rounds: int, kept: dict[str, str], without: dict[str, str]
) -> tuple[float, float, list[int]]:
  """Seconds of a training step in two processes that have these variables, and the most host memory of each, bytes."""
  with contextlib.ExitStack() as stack:

    def start(changes: dict[str, str]) -> StepperProcess:
      empty = stack.enter_context(
        tempfile.TemporaryDirectory()
      )  # both compile, which takes memory too
      settings = [f"learner.batch_size={batch}", f"run.compile_cache={empty}"]
      return stack.enter_context(
        StepperProcess(["atari100k"], settings, FULL_FRAME, ACTIONS, changes)
      )

    both = first, second = start(kept), start(without)
    for process, _ in itertools.product(
      both, range(6)
    ):  # compiles, and lets the heap grow to what is needed
      process.ask("take", 1)
    medians = turns(lambda: first.ask("take", 1), lambda: second.ask("take", 1), rounds)
    return *medians, [process.ask("peak") for process in both]


def pieces(batch: int, rounds: int) -> tuple[float, float]:
  """Seconds of a training step with and without."""
  config = loader.load(["atari100k"], [f"learner.batch_size={batch}"])
  kept = Stepper(config, FULL_FRAME, ACTIONS, jax.local_devices()[:1])
  kept.take(1)
  with mock.patch.object(networks, "_CHUNK", 2**31):
    without = Stepper(config, FULL_FRAME, ACTIONS, jax.local_devices()[:1])
    without.take(1)  # traced here
  return turns(lambda: kept.take(1), lambda: without.take(1), rounds)


def one_by_one(self: Learner, tree: Any) -> Any:
  """`Learner._mean` as it would be without packing."""
  return jax.tree.map(lambda x: jax.lax.pmean(x, AXIS), tree)


def member(address: str, process_id: int, rounds: int) -> None:
  """One of the two learners of `message`; the first prints the medians."""
  jax.distributed.initialize(address, 2, process_id)
  config = loader.load(["quickstart"], ["learner.batch_size=32"])
  kept = Stepper(config, VECTOR, 3, jax.devices())
  kept.take(1)
  with mock.patch.object(Learner, "_mean", one_by_one):
    without = Stepper(config, VECTOR, 3, jax.devices())
    without.take(1)
  medians = turns(lambda: kept.take(5), lambda: without.take(5), rounds)
  if process_id == 0:
    print("medians", *medians, flush=True)


def message(rounds: int) -> tuple[float, float]:
  """Seconds of a training step with and without."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  command = [sys.executable, __file__, "--member", address, "--rounds", str(rounds), "--process-id"]
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
  learners = [
    subprocess.Popen([*command, str(i)], env=environment, stdout=subprocess.PIPE, text=True)
    for i in range(2)
  ]
  said = [learner.communicate()[0] for learner in learners]
  if any(learner.returncode for learner in learners):
    raise RuntimeError("a learner of 'message' failed; what it said is above")
  line = next(line for line in said[0].splitlines() if line.startswith("medians "))
  kept, without = map(float, line.split()[1:])
  return kept, without


def first_step(cache: str) -> float:
  """Seconds from a new process to its first training step of atari_small."""
  script = (
    f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'benchmarks')!r}]\n"
    "from mesh import Stepper\n"
    "import jax\n"
    "from speedyzero_jax.config import loader\nfrom speedyzero_jax.run import builders\n"
    f"config = loader.load(['atari_small'], ['run.compile_cache={cache}'])\n"
    "builders.enable_compilation_cache(config)\n"
    f"Stepper(config, (48, 48, 1), {ACTIONS}, jax.local_devices()[:1]).take(1)\n"
  )
  begin = time.perf_counter()
  subprocess.run([sys.executable, "-c", script], check=True)
  return time.perf_counter() - begin


def cache(rounds: int) -> tuple[float, float]:
  """Seconds to the first training step with and without."""

  def cold() -> float:
    with tempfile.TemporaryDirectory() as empty:
      return first_step(empty)

  with tempfile.TemporaryDirectory() as filled:
    first_step(filled)
    return turns(lambda: first_step(filled), cold, rounds)


WITHOUT = {
  "overlapping roles": ["run.mode=lockstep"],
  "sweeps": ["reanalyse.schedule=batch"],
  "frames on the device": ["replay.frames=host"],
}


def of_runs(steps: int, filled: int, settings: list[str]) -> list[str]:
  """What all whole runs have in common: so many learner steps, on a replay that is full from the start."""
  return [
    f"replay.capacity={filled}", f"actor.random_steps={filled}", f"run.env_steps={filled + 4 * steps}",
    f"learner.steps={steps}", f"run.log_interval={min(10, steps // 4)}",
    "evaluation.episodes=1", "evaluation.max_episode_steps=10", "run.checkpoint_interval=100000",
    "replay.frames=device", "reanalyse.schedule=sweep", *settings,
  ]  # fmt: skip


def runs(presets: list[str], base: list[str], steps: int, work: Path) -> list[Row]:
  """Whole runs, each in the folder that says what it is without."""

  def rate(rows: list[grid.Row]) -> dict[str, float]:
    late = [row for row in rows if row[names.STEP] >= steps // 2]
    steps_taken, took = (late[-1][name] - late[0][name] for name in (names.STEP, names.TIME))
    searched = statistics.fmean(row.get(names.REANALYSED_PER_STEP, 0.0) for row in late[1:])
    return {"steps_per_second": steps_taken / took, "searches_per_step": searched}

  found = grid.run_all(
    {name: [*base, *changes] for name, changes in {"nothing": [], **WITHOUT}.items()},
    work,
    rate,
    lambda name: f"without-{name.replace(' ', '-')}",
    presets=presets,
    parallel=False,
  )
  kept = found["nothing"]
  return [
    row(name, 1 / kept["steps_per_second"], 1 / found[name]["steps_per_second"])
    | {
      "searches_per_step": {
        "with": kept["searches_per_step"],
        "without": found[name]["searches_per_step"],
      }
    }
    for name in WITHOUT
  ]


def row(name: str, kept: float, without: float) -> Row:
  """A row of the table, printed."""
  print(f"{name:24}{kept:>12.3f}{without:>14.3f}{without / kept:>10.2f}", flush=True)
  return {"what": name, "with_s": kept, "without_s": without, "gain": without / kept}


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument("--rounds", type=positive, default=5)
  parser.add_argument(
    "--batch", type=positive, default=256, help="of `memory`, `devices` and `pieces`"
  )
  parser.add_argument("--config", nargs="+", default=["atari_small"], help="of the whole runs")
  parser.add_argument(
    "--set", nargs="*", default=[], metavar="key=value", help="overrides of the whole runs"
  )
  parser.add_argument(
    "--steps",
    type=int,
    default=240,
    help="learner steps of the whole runs: over twice the sweep's S",
  )
  parser.add_argument(
    "--filled", type=int, default=16_000, help="frames that the whole runs' replays hold"
  )
  parser.add_argument(
    "--work", type=Path, default=ROOT / "runs" / "without", help="where the whole runs go"
  )
  parser.add_argument("--out", type=Path)
  parser.add_argument("--member", help=argparse.SUPPRESS)
  parser.add_argument("--process-id", type=int, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.member:
    member(arguments.member, arguments.process_id, arguments.rounds)
    return
  base = of_runs(arguments.steps, arguments.filled, arguments.set)
  load(parser, arguments.config, base)
  print(f"{'':24}{'with, s':>12}{'without, s':>14}{'gain':>10}")
  rows = []
  cores = {"JAX_NUM_CPU_DEVICES": str(len(os.sched_getaffinity(0)))}
  if (
    "memory" in arguments.only
  ):  # a setting in the environment is left alone: this one changes nothing
    *times, (kept, without) = apart(
      arguments.batch, arguments.rounds, cores, cores | {"MALLOC_PERTURB_": "0"}
    )
    rows.append(row("memory", *times) | {"with_bytes": kept, "without_bytes": without})
    print(f"{'  at most':24}{memory.size(kept):>12}{memory.size(without):>14}", flush=True)
  if "devices" in arguments.only:
    *times, _ = apart(arguments.batch, arguments.rounds, cores, {"JAX_NUM_CPU_DEVICES": "1"})
    rows.append(row("devices", *times))
  if "pieces" in arguments.only:
    rows.append(row("pieces", *pieces(arguments.batch, arguments.rounds)))
  if "message" in arguments.only:
    rows.append(row("message", *message(arguments.rounds)))
  if "cache" in arguments.only:
    rows.append(row("cache", *cache(arguments.rounds)))
  if "runs" in arguments.only:
    rows += runs(arguments.config, base, arguments.steps, arguments.work)
  write(
    arguments.out,
    {
      "preset": arguments.config,
      "set": arguments.set,
      "steps": arguments.steps,
      "filled": arguments.filled,
      "batch": arguments.batch,
      "rows": rows,
    },
  )


if __name__ == "__main__":
  main()
