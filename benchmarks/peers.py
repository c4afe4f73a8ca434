"""Comparison with LightZero: search, training step, batches, memory and whole programs.

    python benchmarks/peers.py --out benchmarks/results/peers-2cores.json   # half an hour
    python benchmarks/peers.py --quick                                      # a test, minutes

Sizes are EfficientZero's (12x96x96, 6 actions, float32). Each side is a process (`sides/`) with the
same allocator settings and all cores: as threads of PyTorch, or as CPU devices of jax. The sides
take turns, and their medians are compared. LightZero's virtual environment is created on first use
(`--venv`, Python 3.11); if that fails, its columns stay empty and the reason is printed.
`reanalyse` prepares a batch with a search of every state and an evaluation of every bootstrap
value. `small` and `full` run both complete programs on Breakout.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, parser_of, positive, write

HERE = Path(__file__).resolve().parent
ALLOCATOR = {
  "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}  # fmt: skip
LIGHTZERO = ("LightZero==0.2.0", "DI-engine==0.5.3")
WARM = {"train": 6}  # warm-up calls, default 1; enough for the heap to reach its final size
WHOLE = ("whole", "learn", "versions")  # pieces that run once, without warm-up
NAN = math.nan


class Missing(Exception):
  """A side or one of its pieces is unavailable, for the reason in the message."""


class Task(NamedTuple):
  """A piece of work for a side."""

  side: str
  piece: str
  arguments: dict[str, Any]


class Side:
  """A subprocess that runs `serve`. Its stderr goes to a log file."""

  def __init__(self, python: Path, script: str):
    self._log = tempfile.NamedTemporaryFile(suffix=".log")  # noqa: SIM115 (see close)
    environment = os.environ | ALLOCATOR | {
      "PYTHONPATH": str(HERE), "WANDB_MODE": "disabled", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
      "JAX_NUM_CPU_DEVICES": str(len(os.sched_getaffinity(0))),
    }  # fmt: skip
    self._process = subprocess.Popen(
      [str(python), str(HERE / "sides" / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      stderr=self._log, text=True, env=environment,
    )  # fmt: skip

  def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
    """Sends a request and returns its answer. Raises Missing if it fails."""
    assert self._process.stdin and self._process.stdout
    try:
      self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
      self._process.stdin.flush()
      answer = json.loads(self._process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
      code = self._process.wait()
      last = Path(self._log.name).read_text().strip().splitlines()[-1:]
      raise Missing(f"the process exited with code {code}: {''.join(last)[:200]}") from None
    if "error" in answer:
      raise Missing(answer["error"])
    return answer

  def close(self) -> None:
    self._process.kill()
    self._process.wait()
    self._log.close()


def peer_python(venv: Path, peer: str, *without_dependencies: str) -> Path:
  """Path of Python in a peer's virtual environment, which is created if necessary.

  Raises Missing if that fails.
  """
  python, ready = venv / "bin/python", venv / "ready"
  if ready.exists():
    return python
  print(f"creating {venv} for {peer}: downloads over 1 GB, takes minutes", flush=True)
  pip = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1"]
  for command in (
    [sys.executable, "-m", "venv", "--clear", str(venv)],
    [*pip, "-r", str(HERE / f"sides/requirements-{peer.lower()}.txt")],
    *([*pip, "--no-deps", package] for package in without_dependencies),
  ):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
      lines = done.stderr.splitlines()
      errors = [line for line in lines if line.startswith("ERROR")] or lines
      raise Missing(f"{peer} could not be installed: {''.join(errors[-1:])[:200]}")
  ready.touch()
  return python


def parse_sides(parser: argparse.ArgumentParser) -> argparse.Namespace:
  """Adds the arguments about the sides, and parses all."""
  add = parser.add_argument
  add("--venv", type=Path, default=ROOT / ".venv-peers", help="LightZero's virtual environment")
  add("--set", nargs="*", default=[], metavar="key=value", help="overrides for our side")
  arguments = parser.parse_args()
  os.environ["PEERS_SET"] = " ".join(arguments.set)
  return arguments


class Bench:
  """Measures tasks of the sides in turn.

  Every comparison starts new processes, since allocators keep freed memory and two full replays
  must fit into memory.
  """

  def __init__(self, venv: Path, repeat: int, limit: float):
    self._repeat, self._limit = repeat, limit
    self._sides = {"ours": (Path(sys.executable), "ours.py")}
    self.missing: dict[str, str] = {}  # reasons by side
    try:
      self._sides["lightzero"] = peer_python(venv, "LightZero", *LIGHTZERO), "lightzero.py"
    except Missing as why:
      self.missing["lightzero"] = str(why)
      print(f"LightZero's columns stay empty: {why}")
    self.rows: list[dict[str, Any]] = []

  def measure(self, *tasks: Task) -> list[dict[str, Any]]:
    """Returns `median_s` and reported values for each task, or the reason under `missing`."""
    rows = [{"task": task._asdict(), "seconds": []} for task in tasks]
    with contextlib.ExitStack() as stack:
      sides: dict[str, Side] = {}
      for name, (row, task) in enumerate(zip(rows, tasks, strict=True)):
        if task.side in self.missing:
          row["missing"] = self.missing[task.side]
          continue
        if task.side not in sides:
          sides[task.side] = stack.enter_context(contextlib.closing(Side(*self._sides[task.side])))
        _attempt(sides, row, name, "prepare", piece=task.piece, arguments=task.arguments)
        if task.piece not in WHOLE:
          for _ in range(WARM.get(task.piece, 1)):
            _attempt(sides, row, name, "do")
          row["first_s"], row["seconds"] = next(iter(row["seconds"]), None), []
      begin = time.monotonic()
      for done in range(self._repeat):
        if done >= 2 and time.monotonic() - begin > self._limit:
          break
        for name, (row, task) in enumerate(zip(rows, tasks, strict=True)):
          if not (done and task.piece in WHOLE):
            _attempt(sides, row, name, "do")
    for row in rows:
      if "missing" not in row:
        row["median_s"] = statistics.median(row["seconds"])
    self.rows += rows
    return rows

  def seconds(self, *tasks: Task) -> list[float]:
    """Returns the tasks' median seconds, NaN for missing ones."""
    return [row.get("median_s", NAN) for row in self.measure(*tasks)]


def _attempt(
  sides: dict[str, Side], row: dict[str, Any], name: int, request: str, **arguments: Any
) -> None:
  if "missing" in row:
    return
  try:
    answer = sides[row["task"]["side"]].ask(request, name=name, **arguments)
  except Missing as why:
    row["missing"] = str(why)
    return
  if request == "do":
    row["seconds"].append(answer.pop("seconds"))
  row.update(answer)


def ours(piece: str, **arguments: Any) -> Task:
  return Task("ours", piece, arguments)


def lightzero(piece: str, **arguments: Any) -> Task:
  return Task("lightzero", piece, arguments)


def table(title: str, columns: list[str], rows: dict[str, list[float]]) -> None:
  """Prints a table of numbers with a title; NaN cells are empty."""
  print(f"\n{title:40}" + "".join(f"{column:>18}" for column in columns))
  for name, values in rows.items():
    cells = ["" if math.isnan(value) else f"{value:,.2f}" for value in values]
    print(f"{name:40}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


class Sizes(NamedTuple):
  """Problem sizes."""

  roots: tuple[int, ...] = (64, 256)
  simulations: tuple[int, ...] = (16, 50)
  batch: int = 256
  transitions: tuple[int, ...] = (20_000, 100_000)
  stored: int = 4_000  # replay size for reanalysed batches; does not affect their cost
  steps: int = 240  # learner steps of `small`; the age bound of 100 is active in the 2nd half
  full_steps: tuple[int, int] = (160, 16)  # learner steps of `full`: ours, LightZero's


QUICK = Sizes((64,), (16,), 32, (4_000,), 2_000, 12, (6, 4))
SIDES = ["ours", "LightZero", "ours faster by"]


def search(bench: Bench, sizes: Sizes) -> None:
  """Measures searches, from frames in host memory to policies and values in host memory."""
  rows = {}
  for roots in sizes.roots:
    for simulations in sizes.simulations:
      work = {"roots": roots, "simulations": simulations}
      gumbel, puct, theirs = bench.seconds(
        ours("search", **work, algorithm="gumbel"), ours("search", **work, algorithm="puct"),
        lightzero("search", **work),
      )  # fmt: skip
      rates = [roots / t for t in (gumbel, puct, theirs)]
      rows[f"{roots} roots x {simulations}"] = [*rates, theirs / gumbel, theirs / puct]
  columns = ["ours, Gumbel", "ours, PUCT", "LightZero, PUCT", "Gumbel faster by", "PUCT faster by"]
  table("Search, roots/s", columns, rows)


def train(bench: Bench, sizes: Sizes) -> None:
  """Measures the training step alone."""
  a, b = bench.seconds(*(side("train", batch=sizes.batch) for side in (ours, lightzero)))
  table("Training step, ms", SIDES, {f"batch {sizes.batch}": [1e3 * a, 1e3 * b, b / a]})


def draw(bench: Bench, sizes: Sizes) -> None:
  """Measures drawing a batch without reanalysis, and memory per transition."""
  rows = {}
  for transitions in sizes.transitions:
    work = {"batch": sizes.batch, "transitions": transitions}
    sides = bench.measure(ours("draw", **work), lightzero("draw", **work))
    a, b = (side.get("median_s", NAN) for side in sides)
    memory = [side.get("bytes_per_transition", NAN) for side in sides]
    rows[f"{sizes.batch} of {transitions:,}"] = [1e3 * a, 1e3 * b, b / a, *memory]
  table("Drawing a batch, ms", [*SIDES, "ours, B/trans.", "LightZero, B"], rows)


def reanalyse(bench: Bench, sizes: Sizes) -> None:
  """Measures a batch with a search of every state and an evaluation of every bootstrap value."""
  rows = {}
  for simulations in sizes.simulations:
    work = {"batch": sizes.batch, "transitions": sizes.stored, "simulations": simulations}
    a, b = bench.seconds(ours("fresh", **work), lightzero("fresh", **work))
    rows[f"{simulations} simulations"] = [1e3 * a, 1e3 * b, b / a]
  table(f"Reanalysing a batch of {sizes.batch}, ms", SIDES, rows)


def whole(bench: Bench, title: str, of_ours: Task, *theirs: Task) -> None:
  """Measures both complete programs, with every target at most 100 learner steps old."""
  measured = bench.measure(of_ours, *theirs)
  rates = [row.get("samples_per_second", NAN) for row in measured]
  rows = {
    f"LightZero, {task.arguments['simulations']} simulations": [rates[0], rate, rates[0] / rate]
    for task, rate in zip(theirs, rates[1:], strict=True)
  }
  table(f"{title}, samples/s", SIDES, rows)
  if "target_age_max" in measured[0]:
    print("ours: {searches_per_step:.0f} searches/step, oldest target {target_age_max:.0f} steps"
          .format(**measured[0]))  # fmt: skip


def small(bench: Bench, sizes: Sizes) -> None:
  """Complete programs on 64x64 gray Breakout, with a small network, batch 64, 16 simulations."""
  work = {"size": "small", "steps": sizes.steps, "simulations": 16}
  whole(bench, "Whole programs, small", ours("whole", **work), lightzero("whole", **work))


def full(bench: Bench, sizes: Sizes) -> None:
  """Complete programs on 96x96 RGB Breakout, with EfficientZero's network and batch size 256.

  Ours uses 16 simulations.
  """
  of_ours, of_theirs = sizes.full_steps
  task = ours("whole", size="full", steps=of_ours, simulations=sizes.simulations[0])
  theirs = (
    lightzero("whole", size="full", steps=of_theirs, simulations=s) for s in sizes.simulations
  )
  whole(bench, "Whole programs, full size", task, *theirs)


PARTS = {part.__name__: part for part in (search, train, draw, reanalyse, small, full)}


def main() -> None:
  parser = parser_of(__doc__)
  parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument("--quick", action="store_true", help="small sizes, two rounds")
  parser.add_argument("--repeat", type=positive, default=7, help="rounds; medians are reported")
  parser.add_argument(
    "--limit", type=float, default=60.0, help="seconds after which no third or later round starts"
  )
  arguments = parse_sides(parser)
  sizes = QUICK if arguments.quick else Sizes()
  repeat = 2 if arguments.quick else arguments.repeat
  bench = Bench(arguments.venv, repeat, arguments.limit)
  bench.measure(lightzero("versions"))
  for part in arguments.only:
    PARTS[part](bench, sizes)
  for row in bench.rows:
    if "missing" in row and row["task"]["side"] not in bench.missing:
      print(f"{row['task']}: {row['missing']}")
  result = {"sizes": sizes._asdict(), "environment": ALLOCATOR, "set": arguments.set}
  write(arguments.out, result | {"measured": bench.rows})


if __name__ == "__main__":
  main()
