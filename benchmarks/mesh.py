"""The learner step on 1, 2 and 4 devices with the same global batch, and what it costs to publish weights.

    python benchmarks/mesh.py --out benchmarks/results/mesh.json         # small, fake CPU devices: a minute or two
    python benchmarks/mesh.py --config atari100k --set network.dtype=bfloat16 --batch 256 1024 2048 4096 --rounds 10

On a machine with GPUs these are the devices, as far as there are so many. Otherwise CPU devices are made up: they share
the cores, so that all they can show is what sharing a batch costs, not what it gains. The meshes take turns.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from common import write
from speed import random_batch

from speedyzero_jax import config_io
from speedyzero_jax.config import Config
from speedyzero_jax.learner import Learner, LearnerState, make_mesh
from speedyzero_jax.parts import enable_compilation_cache
from speedyzero_jax.weights import ACTOR, REANALYSER, REFRESHER, WeightsStore


class Stepper:
  """A learner on some devices with a batch on them, ready to take steps."""

  def __init__(self, config: Config, frame_shape: tuple[int, int, int], actions: int, devices: list[jax.Device]):
    height, width, channels = frame_shape
    observation = (height, width, channels * config.env.frame_stack)
    self._learner = Learner(config, observation, actions, make_mesh(devices))
    self.state: LearnerState = self._learner.init(jax.random.key(0))
    self._batch = self._learner.put(random_batch(config, frame_shape, actions, config.learner.batch_size))
    self._key = jax.random.key(1)

  def take(self, steps: int) -> float:
    """Seconds per step."""
    begin = time.perf_counter()
    for _ in range(steps):
      self.state, _ = self._learner.step(self.state, self._batch, self._key)
    jax.block_until_ready(self.state)
    return (time.perf_counter() - begin) / steps


def meshes(
  config: Config, shape: tuple[int, int, int], actions: int, counts: list[int], rounds: int, steps: int
) -> tuple[list[dict[str, Any]], LearnerState]:
  """A row for each number of devices, and a state that lies on the most of them."""
  batch, rows = config.learner.batch_size, []
  steppers = {n: Stepper(config, shape, actions, jax.local_devices()[:n]) for n in counts}
  first = {n: stepper.take(1) for n, stepper in steppers.items()}
  times: dict[int, list[float]] = {n: [] for n in counts}
  for _, (n, stepper) in itertools.product(range(rounds), steppers.items()):
    times[n].append(stepper.take(steps))
  alone = statistics.median(times[counts[0]])
  for n in counts:
    step = statistics.median(times[n])
    rows.append({
      "batch": batch, "devices": n, "first_s": first[n], "step_s": step, "samples_per_second": batch / step,
      "speed_up": alone / step,
    })  # fmt: skip
    print(f"{batch:6} {n:8} {first[n]:13.1f} {1e3 * step:9.1f} {batch / step:11.0f} {alone / step:9.2f}")
  return rows, steppers[counts[-1]].state


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
    REANALYSER: config.reanalyse.weights_interval,
    REFRESHER: config.refresh.weights_interval,
  }
  store = WeightsStore(intervals, jax.local_devices()[0], state.variables)
  due = next(step for step in itertools.count(1) if any(step % interval == 0 for interval in intervals.values()))

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
  total = sum(any(step % interval == 0 for interval in intervals.values()) for step in period) * result["copied_s"]
  result["of_a_step"] = total / len(period) / step_s
  print(
    f"weights, {result['megabytes']:.1f} MB: publishing returns after {1e3 * result['due_s']:.2f} ms if somebody is "
    f"due, the copy is there after {1e3 * result['copied_s']:.2f} ms; latest {1e6 * result['latest_s']:.1f} us; all "
    f"versions to the host for a checkpoint {1e3 * result['snapshot_to_host_s']:.1f} ms. All publications cost "
    f"{100 * result['of_a_step']:.2f}% of the learner's time at most"
  )
  return result


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", nargs="+", default=["atari_small"])
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
  parser.add_argument("--batch", type=int, nargs="+", default=[64])
  parser.add_argument("--actions", type=int, default=6)
  parser.add_argument("--rounds", type=int, default=3)
  parser.add_argument("--steps", type=int, default=2, help="in a row")
  parser.add_argument("--publications", type=int, default=20, help="to time")
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", max(arguments.devices))  # says nothing about others
  base = config_io.load(arguments.config, arguments.set)
  enable_compilation_cache(base)
  side, channels = base.env.frame_size, 1 if base.env.grayscale else 3
  there = jax.local_devices()
  counts = [n for n in arguments.devices if n <= len(there)]
  fake = there[0].platform == "cpu"
  print(f"{len(there)} x {there[0].device_kind}{', made up: they share the cores' if fake else ''}")
  print(" batch  devices  first step, s  ms/step   samples/s  speed-up")
  rows = []
  for batch in arguments.batch:
    config = config_io.override(base, [f"learner.batch_size={batch}"])
    more, state = meshes(config, (side, side, channels), arguments.actions, counts, arguments.rounds, arguments.steps)
    rows += more
    published = publication(config, state, more[-1]["step_s"], arguments.publications)
    result = {
      "devices": f"{len(there)} x {there[0].device_kind}",
      "fake": fake,
      "preset": arguments.config,
      "set": arguments.set,
      "dtype": base.network.dtype,
      "rows": rows,
      "weights": published,
    }
    write(arguments.out, result)  # the next batch may be too much for this machine


if __name__ == "__main__":
  main()
