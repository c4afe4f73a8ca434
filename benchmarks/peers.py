"""This project beside LightZero (PyPI) and beside mctx driven naively: same sizes, same machine, one run.

    python benchmarks/peers.py --out benchmarks/results/peers-2cores.json     # half an hour on two cores
    python benchmarks/peers.py --quick                                        # a few minutes: does it run?
    python benchmarks/peers.py --only search train

Sizes are EfficientZero's (configs/efficientzero.yaml: 12x96x96, 6 actions, float32). Each side is a process of its own,
with the same allocator settings (without them both lose half their speed to page faults) and all cores: threads of
PyTorch, CPU devices of jax, which computes a convolution on one core (so mctx, driven naively, has one). The sides take
turns, and medians are compared. LightZero lives in an environment made on first use (`--venv`); where that is
impossible its columns are empty, with the reason. Rows of `job` are put together from measured pieces, by the
arithmetic in `job`; `small` and `full` run both programs whole on a real game, with a small network and at full size.
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

from common import ROOT, positive, write

HERE = Path(__file__).resolve().parent
ALLOCATOR = {
  "MALLOC_ARENA_MAX": "1",
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}
CORES = len(os.sched_getaffinity(0))
LIGHTZERO = ("LightZero==0.2.0", "DI-engine==0.5.3")
PARTS = ("search", "train", "draw", "job", "small", "full")
SAMPLES_PER_INSERT = 102.4  # SpeedyZero's: 15,000 steps of 2,048 for 300,000 agent steps
ACTOR_LANES = 16
WARM = {
  "train": 6
}  # calls before a piece is timed, of some: until the heap has grown to what is needed
WHOLE = ("whole", "versions", "quota")  # pieces that are done once and need no warming up
NAN = float("nan")


class Missing(Exception):
  """A side is not there, or can't do this; the message says why."""


class Task(NamedTuple):
  """A piece of work for a side; see `peers_ours.py` and `peers_lightzero.py`."""

  side: str
  piece: str
  arguments: dict[str, Any]


class Side:
  """A process that prepares work and does it when asked. What it prints goes to a log."""

  def __init__(self, python: Path, script: str):
    self._log = tempfile.NamedTemporaryFile(prefix=f"{Path(script).stem}-", suffix=".log")  # noqa: SIM115 (see close)
    self._process = subprocess.Popen(
      [str(python), str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
      env=os.environ | ALLOCATOR | {"WANDB_MODE": "disabled", "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                                      "JAX_NUM_CPU_DEVICES": str(CORES)},
    )  # fmt: skip

  def ask(self, request: str, **arguments: Any) -> dict[str, Any]:
    """The answer to a request. Raises Missing if there is none."""
    assert self._process.stdin and self._process.stdout
    try:
      self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
      self._process.stdin.flush()
      answer = json.loads(self._process.stdout.readline())
    except (BrokenPipeError, json.JSONDecodeError):
      code = self._process.wait()
      said = Path(self._log.name).read_text().strip().splitlines()[-1:]
      raise Missing(f"its process ended with exit code {code}: {''.join(said)[:200]}") from None
    if "error" in answer:
      raise Missing(answer["error"])
    return answer

  def close(self) -> None:
    """Ends the process."""
    self._process.kill()
    self._process.wait()
    self._log.close()


def lightzero_python(venv: Path) -> Path:
  """The Python of LightZero's environment, made if it is not there. Raises Missing if that is impossible."""
  python, ready = venv / "bin" / "python", venv / "ready"
  if ready.exists():
    return python
  print(f"making {venv} for LightZero: 1 GB to download and more, some minutes", flush=True)
  pip = [str(python), "-m", "pip", "install", "--quiet", "--retries", "1"]
  for command in (
    [sys.executable, "-m", "venv", "--clear", str(venv)],
    [*pip, "-r", str(HERE / "requirements-peers.txt")],
    [*pip, "--no-deps", *LIGHTZERO],
  ):
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
      errors = [
        line for line in done.stderr.splitlines() if line.startswith("ERROR")
      ] or done.stderr.splitlines()
      raise Missing(f"LightZero could not be installed: {''.join(errors[-1:])[:200]}")
  ready.touch()
  return python


class Bench:
  """Measures tasks, the sides taking turns; what was measured once is remembered.

  Every comparison gets fresh processes: allocators keep what they have, and two full replays must fit beside them.
  """

  def __init__(
    self, sides: dict[str, tuple[Path, str]], missing: dict[str, str], repeat: int, limit: float
  ):
    self._sides, self._missing, self._repeat, self._limit = sides, missing, repeat, limit
    self._known: dict[str, dict[str, Any]] = {}

  def measure(self, *tasks: Task) -> list[dict[str, Any]]:
    """For each task `median_s` and facts, or `missing`: why not. Tasks not measured yet are done in turns."""
    new = {json.dumps(task): task for task in tasks if json.dumps(task) not in self._known}
    with contextlib.ExitStack() as stack:
      sides: dict[str, Side] = {}
      for name, task in new.items():
        known = self._known[name] = {"task": task._asdict(), "seconds": []}
        if task.side in self._missing:
          known["missing"] = self._missing[task.side]
          continue
        if task.side not in sides:
          sides[task.side] = stack.enter_context(contextlib.closing(Side(*self._sides[task.side])))
        self._attempt(sides, name, "prepare", piece=task.piece, arguments=task.arguments)
        if task.piece not in WHOLE:
          for _ in range(WARM.get(task.piece, 1)):  # compiles, warms up
            self._attempt(sides, name, "do")
          known["first_s"], known["seconds"] = next(iter(known["seconds"]), None), []
      begin = time.monotonic()
      for done in range(self._repeat):
        if done >= 2 and time.monotonic() - begin > self._limit:
          break
        for name, task in new.items():
          if not (done and task.piece in WHOLE):
            self._attempt(sides, name, "do")
    for name in new:
      known = self._known[name]
      if "missing" not in known:
        known["median_s"] = statistics.median(known["seconds"])
    return [self._known[json.dumps(task)] for task in tasks]

  def _attempt(self, sides: dict[str, Side], name: str, request: str, **arguments: Any) -> None:
    known = self._known[name]
    if "missing" in known:
      return
    try:
      answer = sides[known["task"]["side"]].ask(request, name=name, **arguments)
    except Missing as why:
      known["missing"] = str(why)
      return
    if request == "do":
      known["seconds"].append(answer.pop("seconds"))
    known.update(answer)

  def seconds(self, *tasks: Task) -> list[float]:
    """Their medians; not a number for what is missing."""
    return [measured.get("median_s", NAN) for measured in self.measure(*tasks)]

  @property
  def rows(self) -> list[dict[str, Any]]:
    """All that was measured."""
    return list(self._known.values())


def ours(piece: str, **arguments: Any) -> Task:
  """A task for us."""
  return Task("ours", piece, arguments)


def lightzero(piece: str, **arguments: Any) -> Task:
  """A task for LightZero."""
  return Task("lightzero", piece, arguments)


def table(
  title: str, first: str, columns: list[str], rows: dict[str, list[float]], form: str = ",.1f"
) -> None:
  """Prints numbers under a title; what is not a number is left empty."""
  print(f"\n{title}\n{first:32}" + "".join(f"{column:>20}" for column in columns))
  for name, values in rows.items():
    cells = ["" if math.isnan(value) else format(value, form) for value in values]
    print(f"{name:32}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


class Sizes(NamedTuple):
  """How much of it is measured."""

  roots: tuple[int, ...] = (64, 256)
  simulations: tuple[int, ...] = (16, 50)
  batch: int = 256
  block: int = 256  # of a sweep
  transitions: tuple[int, ...] = (20_000, 100_000)
  stored: int = 4_000  # transitions behind a reanalysed batch, whose cost does not depend on them
  steps: int = 240  # learner steps of `small`: the later half begins when the sweep's bound of 100 has begun to bind
  full_steps: tuple[int, int] = (
    160,
    16,
  )  # of `full`, ours and LightZero's, which does the same from its first step on


QUICK = Sizes((64,), (16,), 32, 64, (4_000,), 2_000, 12, (6, 4))


def search(bench: Bench, sizes: Sizes) -> None:
  """Roots a second, from frames in host memory to policies and values there."""
  rows = {}
  for roots in sizes.roots:
    for simulations in sizes.simulations:
      work = {"roots": roots, "simulations": simulations}
      times = bench.seconds(
        ours("search", **work, algorithm="gumbel"), ours("search", **work, algorithm="puct"),
        lightzero("search", **work), Task("mctx", "naive", work),
      )  # fmt: skip
      rows[f"{roots} roots x {simulations}"] = [
        *(roots / t for t in times),
        times[2] / times[0],
        times[2] / times[1],
      ]
  columns = ["ours, Gumbel", "ours, PUCT", "LightZero, PUCT", "mctx, naive"]
  table("Search, roots/s", "", [*columns, "Gumbel/LightZero", "PUCT/LightZero"], rows, ",.2f")
  times = bench.seconds(ours("value", states=sizes.block), lightzero("value", states=sizes.block))
  rows = {f"{sizes.block} states": [*(sizes.block / t for t in times), times[1] / times[0]]}
  table("h and f, states/s", "", ["ours", "LightZero", "ours/LightZero"], rows, ",.2f")


def train(bench: Bench, sizes: Sizes) -> None:
  """Samples a second of the learner step alone."""
  times = bench.seconds(ours("train", batch=sizes.batch), lightzero("train", batch=sizes.batch))
  rows = {f"batch {sizes.batch}": [*(1e3 * t for t in times), times[1] / times[0]]}
  table(
    "Train step (K=5, consistency, augmentation), ms",
    "",
    ["ours", "LightZero", "ours faster by"],
    rows,
    ",.2f",
  )


def draw(bench: Bench, sizes: Sizes) -> None:
  """A batch without reanalysis, and what a transition takes in memory."""
  rows = {}
  for transitions in sizes.transitions:
    work = {"batch": sizes.batch, "transitions": transitions}
    of_ours, theirs = bench.measure(ours("draw", **work), lightzero("draw", **work))
    times = [side.get("median_s", NAN) for side in (of_ours, theirs)]
    held = [side.get("bytes_per_transition", NAN) for side in (of_ours, theirs)]
    rows[f"{sizes.batch} of {transitions:,}"] = [
      *(1e3 * t for t in times),
      times[1] / times[0],
      *held,
    ]
  columns = ["ours, ms", "LightZero, ms", "ours faster by", "ours, B/transition", "LightZero, B"]
  table("Drawing and assembling a batch", "", columns, rows, ",.2f")


def job(bench: Bench, sizes: Sizes) -> list[dict[str, Any]]:
  """Learner samples a second with all targets fresh, from measured pieces.

  Per learner step of B samples, in seconds, each piece measured alone (none overlaps another on a busy CPU):

    acting    B / samples per insert agent steps, in 16 lanes: (search of 16 roots + environment) / 16 each
    learning  B / b times the train step at b = `Sizes.batch`
    targets   batch schedule: B / b times a reanalysed batch of b (all K+1 policies searched, all bootstraps evaluated)
              sweep: quota(N, S) / block searches of a block, and B / b times drawing a batch from N

  LightZero reanalyses each batch with a target network renewed every 100 steps (its default): targets at most 100 steps
  old. Ours renews weights every 10 steps; S bounds the age of every stored target.
  """
  b, results = sizes.batch, []
  pairs = [(f"{s} simulations", s, s) for s in sizes.simulations]
  if len(pairs) > 1:
    pairs.append(
      ("each its default", sizes.simulations[0], sizes.simulations[-1])
    )  # Gumbel 16, PUCT 50
  environment = bench.measure(ours("environment", lanes=ACTOR_LANES))[0]
  per_step = environment["median_s"] / environment["steps"]
  learn = bench.seconds(ours("train", batch=b), lightzero("train", batch=b))
  sweeps = [(n, age) for n in sizes.transitions for age in (100, 50)]
  columns = [
    "LightZero, batch",
    "ours, batch",
    *(f"sweep {n // 1000}k, S={age}" for n, age in sweeps),
  ]
  rows, reanalysed = {}, {}
  for label, simulations, theirs in pairs:
    gumbel = {"simulations": simulations, "algorithm": "gumbel"}
    act = bench.seconds(ours("search", roots=ACTOR_LANES, **gumbel),
                        lightzero("search", roots=ACTOR_LANES, simulations=theirs))  # fmt: skip
    fresh = bench.seconds(ours("fresh", batch=b, transitions=sizes.stored, **gumbel),
                          lightzero("fresh", batch=b, transitions=sizes.stored, simulations=theirs))  # fmt: skip
    reanalysed[label] = [*(1e3 * t for t in fresh), fresh[1] / fresh[0]]
    block = bench.seconds(ours("search", roots=sizes.block, **gumbel))[0]
    for size in (b, 8 * b):
      samples = []
      steps = size / SAMPLES_PER_INSERT
      base = [
        steps / ACTOR_LANES * (a + per_step) + size / b * t for a, t in zip(act, learn, strict=True)
      ]
      samples += [size / (base[1] + size / b * fresh[1]), size / (base[0] + size / b * fresh[0])]
      for n, age in sweeps:
        drawn = bench.seconds(ours("draw", batch=b, transitions=n))[0]
        states = bench.measure(ours("quota", transitions=n, max_age=age, block=sizes.block))[0][
          "states"
        ]
        samples.append(size / (base[0] + size / b * drawn + states / sizes.block * block))
      rows[f"{label}, batch {size}"] = samples
      results.append(
        {"simulations": label, "batch": size, **dict(zip(columns, samples, strict=True))}
      )
  table(
    f"Reanalysing a batch of {b}, ms",
    "",
    ["ours", "LightZero", "ours faster by"],
    reanalysed,
    ",.2f",
  )
  table("The whole job with fresh targets, learner samples/s (composed)", "", columns, rows)
  return results


def whole(bench: Bench, title: str, of_ours: Task, *theirs: Task) -> None:
  """Both programs whole, every target fresh."""
  measured = bench.measure(of_ours, *theirs)
  rates = [m.get("samples_per_second", NAN) for m in measured]
  rows = {
    f"LightZero with {task.arguments['simulations']} simulations": [rates[0], rate, rates[0] / rate]
    for task, rate in zip(theirs, rates[1:], strict=True)
  }
  columns = ["ours, sweep S=100", "LightZero, batch", "ours/LightZero"]
  table(f"{title}, learner samples/s (measured)", "", columns, rows, ",.2f")
  if "target_age_max" in measured[0]:
    searches, oldest = measured[0]["searches_per_step"], measured[0]["target_age_max"]
    print(
      f"ours searched {searches:.0f} states a learner step; the oldest target used was {oldest:.0f} steps old"
    )


def small(bench: Bench, sizes: Sizes) -> None:
  """64x64 grey Breakout, small network, batch 64, 16 simulations, 16,000 transitions held."""
  tasks = (
    side("whole", size="small", steps=sizes.steps, simulations=16) for side in (ours, lightzero)
  )
  whole(bench, "Whole programs, small network, batch 64", *tasks)


def full(bench: Bench, sizes: Sizes) -> None:
  """96x96 RGB Breakout, EfficientZero's network, batch 256, 20,000 transitions held; ours with 16 simulations."""
  of_ours, of_theirs = sizes.full_steps
  theirs = (
    lightzero("whole", size="full", steps=of_theirs, simulations=s) for s in sizes.simulations
  )
  task = ours("whole", size="full", steps=of_ours, simulations=sizes.simulations[0])
  whole(bench, "Whole programs, full size, batch 256", task, *theirs)


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
  parser.add_argument(
    "--quick", action="store_true", help="small sizes, two rounds: to see that it runs"
  )
  parser.add_argument(
    "--repeat", type=positive, default=7, help="rounds, of which the median is taken"
  )
  parser.add_argument(
    "--limit", type=float, default=60.0, help="seconds after which a row gets no third round"
  )
  parser.add_argument(
    "--venv", type=Path, default=ROOT / ".venv-peers", help="LightZero's environment"
  )
  parser.add_argument(
    "--set", nargs="*", default=[], metavar="key=value", help="overrides of ours, such as bfloat16"
  )
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  os.environ["PEERS_SET"] = " ".join(arguments.set)
  sizes = QUICK if arguments.quick else Sizes()
  result: dict[str, Any] = {
    "sizes": sizes._asdict(),
    "environment": ALLOCATOR,
    "set": arguments.set,
  }
  sides = dict.fromkeys(("ours", "mctx"), (Path(sys.executable), "peers_ours.py"))
  missing: dict[str, str] = {}
  try:
    sides["lightzero"] = lightzero_python(arguments.venv), "peers_lightzero.py"
  except Missing as why:
    missing["lightzero"] = str(why)
    print(f"LightZero's columns stay empty: {why}")
  bench = Bench(sides, missing, 2 if arguments.quick else arguments.repeat, arguments.limit)
  result["lightzero"] = bench.measure(lightzero("versions"))[0]
  for part, run in (
    ("search", search),
    ("train", train),
    ("draw", draw),
    ("job", job),
    ("small", small),
    ("full", full),
  ):
    if part in arguments.only:
      composed = run(bench, sizes)
      if composed:
        result[part] = composed
  result |= {"load_average": os.getloadavg()[0], "measured": bench.rows}
  for row in bench.rows:
    if row["task"]["side"] in sides and "missing" in row:
      print(
        f"{row['task']['side']} {row['task']['piece']} {row['task']['arguments']}: {row['missing']}"
      )
  write(arguments.out, result)


if __name__ == "__main__":
  main()
