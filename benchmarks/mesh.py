"""The learner step on 1, 2 and 4 devices with the same global batch, and what it costs to publish weights.

    python benchmarks/mesh.py --out benchmarks/results/mesh.json         # small, fake CPU devices: a minute or two
    python benchmarks/mesh.py --config atari100k --set network.dtype=bfloat16 --batch 256 1024 2048 4096 --rounds 10

On a machine with GPUs these are the devices, as far as there are so many. Otherwise CPU devices are made up: they share
the cores, so that all they can show is what sharing a batch costs, not what it gains. Every mesh has a process of its
own, and they take turns, each giving back what it has freed when its turn is over: two steps that are not counted get
it again. One that dies, of too little memory mostly, leaves a row that says so.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from common import frame_shape, load, positive, write
from speed import random_batch

from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.builders import enable_compilation_cache
from speedyzero_jax.system import memory
from speedyzero_jax.workers.learner import Learner, LearnerState, make_mesh
from speedyzero_jax.workers.weights import ACTOR, REANALYSER, REFRESHER, WeightsStore

DEVICES = (1, 2, 4)


class Stepper:
  """A learner on some devices with a batch on them, ready to take steps."""

  def __init__(
    self, config: Config, frame_shape: tuple[int, int, int], actions: int, devices: list[jax.Device]
  ):
    height, width, channels = frame_shape
    observation = (height, width, channels * config.env.frame_stack)
    self._learner = Learner(config, observation, actions, make_mesh(devices))
    self.state: LearnerState = self._learner.init(jax.random.key(0))
    self._batch = self._learner.put(
      random_batch(config, frame_shape, actions, config.learner.batch_size)
    )
    self._key = jax.random.key(1)

  def take(self, steps: int) -> float:
    """Seconds per step."""
    begin = time.perf_counter()
    for _ in range(steps):
      self.state, _ = self._learner.step(self.state, self._batch, self._key)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - begin) / steps


class EndedError(RuntimeError):
  """A process died; the message says how."""


class StepperProcess:
  """A `Stepper` in a process of its own, with which all memory goes that it took. A context manager.

  Args:
    presets: of its configuration.
    settings: that override them.
    frame_shape: of the game.
    actions: of the game.
    environment: variables that it has besides this process' own.
    devices: how many of its local ones it uses; None: all.
  """

  def __init__(
    self,
    presets: Sequence[str],
    settings: Sequence[str],
    frame_shape: tuple[int, int, int],
    actions: int,
    environment: Mapping[str, str],
    devices: int | None = None,
  ):
    command = [
      sys.executable,
      __file__,
      "--serve",
      json.dumps([presets, settings, frame_shape, actions, devices]),
    ]
    pipe = subprocess.PIPE
    self._process = subprocess.Popen(
      command, env=os.environ | environment, stdin=pipe, stdout=pipe, text=True
    )

  def __enter__(self) -> "StepperProcess":
    return self

  def __exit__(self, *_: object) -> None:
    self._process.kill()
    self._process.wait()

  def ask(self, what: str, *arguments: Any) -> Any:
    """The answer to a request, see `serve`. Raises EndedError if there is none."""
    assert self._process.stdin and self._process.stdout
    with contextlib.suppress(BrokenPipeError):
      self._process.stdin.write(json.dumps([what, *arguments]) + "\n")
      self._process.stdin.flush()
    answer = self._process.stdout.readline()
    if answer:
      return json.loads(answer)
    code = self._process.wait()
    raise EndedError(
      f"exit code {code}" if code >= 0 else f"killed by signal {-code}: too little memory?"
    )


def serve(
  presets: list[str],
  settings: list[str],
  frame_shape: tuple[int, int, int],
  actions: int,
  devices: int | None,
) -> None:
  """What a StepperProcess does: answers requests until there are no more."""
  out = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)  # whatever libraries print is no answer
  config = loader.load(presets, settings)
  enable_compilation_cache(config)
  stepper = Stepper(config, frame_shape, actions, jax.local_devices()[:devices])
  answers: dict[str, Callable[..., Any]] = {
    "take": stepper.take,
    "trim": lambda: ctypes.CDLL(None).malloc_trim(0),  # gives freed memory back
    "peak": lambda: memory.resident(peak=True),
    "publish": lambda step_s, repeat: publication(config, stepper.state, step_s, repeat),
  }
  for line in sys.stdin:
    what, *arguments = json.loads(line)
    out.write(json.dumps(answers[what](*arguments)) + "\n")
    out.flush()


def meshes(
  start: Callable[[int], StepperProcess],
  batch: int,
  counts: list[int],
  rounds: int,
  steps: int,
  publications: int,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
  """A row for each number of devices, and what publishing weights costs the most of them; None if none lives."""
  processes: dict[int, StepperProcess] = {}
  first: dict[int, float] = {}
  times: dict[int, list[float]] = {n: [] for n in counts}
  ended: dict[int, str] = {}
  with contextlib.ExitStack() as stack:
    for done, n in itertools.product(range(1 + rounds), counts):
      if n in ended:
        continue
      try:
        if done == 0:
          processes[n] = stack.enter_context(start(n))
          first[n] = processes[n].ask("take", 1)
        else:
          processes[n].ask("take", 2)  # gets its memory again
          times[n].append(processes[n].ask("take", steps))
        processes[n].ask("trim")
      except EndedError as error:
        ended[n] = str(error)
    medians = {n: statistics.median(times[n]) for n in counts if n not in ended}
    rows: list[dict[str, Any]] = []
    for n in counts:
      if n in ended:
        rows.append({"batch": batch, "devices": n, "ended": ended[n]})
        print(f"{batch:6} {n:8}  {ended[n]}", flush=True)
        continue
      step, gain = medians[n], medians.get(counts[0], math.nan) / medians[n]
      rows.append({
        "batch": batch, "devices": n, "first_s": first[n], "step_s": step, "samples_per_second": batch / step,
        "speed_up": gain,
      })  # fmt: skip
      print(
        f"{batch:6} {n:8} {first[n]:13.1f} {1e3 * step:9.1f} {batch / step:11.0f} {gain:9.2f}",
        flush=True,
      )
    if not medians:
      return rows, None
    most = list(medians)[-1]
    return rows, processes[most].ask("publish", medians[most], publications)


def median_of(call: Callable[[], Any], repeat: int) -> float:
  """Seconds."""
  times = []
  for _ in range(repeat):
    begin = time.perf_counter()
    call()
    times.append(time.perf_counter() - begin)
  return statistics.median(times)


def publication(config: Config, state: LearnerState, step_s: float, repeat: int) -> dict[str, Any]:
  """What the weights' way to their users costs the learner, who publishes after every step, and them."""
  intervals = {
    ACTOR: config.actor.weights_interval,
    REANALYSER: config.agent.reanalyse.weights_interval,
    REFRESHER: config.agent.refresh.weights_interval,
  }
  store = WeightsStore(intervals, jax.local_devices()[0], state.variables)
  due = next(
    step
    for step in itertools.count(1)
    if any(step % interval == 0 for interval in intervals.values())
  )

  def copied() -> None:
    store.publish(due, state.variables)
    jax.block_until_ready(store.snapshot())

  copied()  # compiles
  result = {
    "megabytes": sum(x.nbytes for x in jax.tree.leaves(state.variables)) / 1e6,
    "due_s": median_of(lambda: store.publish(due, state.variables), repeat),
    "copied_s": median_of(copied, repeat),
    "not_due_s": median_of(lambda: store.publish(1, state.variables), repeat) if due > 1 else None,
    "latest_s": median_of(lambda: store.latest(ACTOR), repeat),
    "snapshot_to_host_s": median_of(lambda: jax.device_get(store.snapshot()), repeat),
  }
  period = range(math.lcm(*intervals.values()))
  total = (
    sum(any(step % interval == 0 for interval in intervals.values()) for step in period)
    * result["copied_s"]
  )
  result["of_a_step"] = total / len(period) / step_s
  return result


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", default=["atari_small"])
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument(
    "--devices",
    type=positive,
    nargs="+",
    help="how many (default: 1, 2 and 4, as far as there are so many)",
  )
  parser.add_argument("--batch", type=positive, nargs="+", default=[64])
  parser.add_argument("--actions", type=int, default=6)
  parser.add_argument("--rounds", type=positive, default=3)
  parser.add_argument("--steps", type=positive, default=2, help="in a row")
  parser.add_argument("--publications", type=positive, default=20, help="to time")
  parser.add_argument("--out", type=Path)
  parser.add_argument("--serve", help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.serve:
    serve(*json.loads(arguments.serve))
    return
  base = load(parser, arguments.config, arguments.set)
  shape = frame_shape(parser, base)
  os.environ.setdefault(
    "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
  )  # GPUs are shared by the processes
  jax.config.update(
    "jax_num_cpu_devices", max(arguments.devices or DEVICES)
  )  # says nothing about others
  there = jax.local_devices()
  counts = arguments.devices or [n for n in DEVICES if n <= len(there)]
  if max(counts) > len(there):
    parser.error(f"--devices: there are {len(there)} here, got {max(counts)}")
  settings = {batch: [*arguments.set, f"learner.batch_size={batch}"] for batch in arguments.batch}
  for batch, n in itertools.product(settings, counts):
    load(parser, arguments.config, settings[batch])
    if batch % n:
      parser.error(f"--batch: {batch} can't be shared equally among {n} devices")
  fake = there[0].platform == "cpu"
  print(f"{len(there)} x {there[0].device_kind}{', made up: they share the cores' if fake else ''}")
  print(" batch  devices  first step, s  ms/step   samples/s  speed-up", flush=True)
  rows, weights = [], None
  for batch in settings:

    def start(n: int, batch: int = batch) -> StepperProcess:
      environment = {"JAX_NUM_CPU_DEVICES": str(n)}
      return StepperProcess(
        arguments.config, settings[batch], shape, arguments.actions, environment, n
      )

    more, published = meshes(
      start, batch, counts, arguments.rounds, arguments.steps, arguments.publications
    )
    rows += more
    if published is not None:
      weights = published
      print(
        f"weights, {weights['megabytes']:.1f} MB: publishing returns after {1e3 * weights['due_s']:.2f} ms if somebody "
        f"is due, the copy is there after {1e3 * weights['copied_s']:.2f} ms; latest {1e6 * weights['latest_s']:.1f} "
        f"us; all versions to the host for a checkpoint {1e3 * weights['snapshot_to_host_s']:.1f} ms. All publications "
        f"cost {100 * weights['of_a_step']:.2f}% of the learner's time at most",
        flush=True,
      )
    result = {
      "devices": f"{len(there)} x {there[0].device_kind}",
      "fake": fake,
      "preset": arguments.config,
      "set": arguments.set,
      "dtype": base.network.dtype,
      "rows": rows,
      "weights": weights,
    }
    write(arguments.out, result)  # the next batch may be too much for this machine


if __name__ == "__main__":
  main()
