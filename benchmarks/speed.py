"""Throughput and FLOP utilization of training, search, values and reanalysis; environment steps/s.

    python benchmarks/speed.py --config atari100k --roots 256 1024 4096 --batch 256 2048
    python benchmarks/speed.py --config atari_small --roots 8 64 --batch 64          # on a CPU

Each piece is sharded over all local devices, or the first `--devices`. Frames come from host memory
and results return to it, except for the training step, whose batch stays on the devices.
`reanalysed batch` searches and evaluates the K+1 states of every sample. `environment` is random
play in the configured number of lanes; an actor step costs a search with that many roots plus one
such step. Utilization is relative to a large matrix product in the network's dtype, measured in the
same run. FLOPs are per device.
"""

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from common import parser_of, positive, write

PLAYED = 20  # agent steps per lane and call


class Table:
  """Measures and prints rows."""

  def __init__(self, repeat: int, median_seconds: Callable[..., float], peak: float):
    self._repeat, self._median, self._peak = repeat, median_seconds, peak
    self.rows: list[dict[str, Any]] = []

  def add(self, piece: str, size: int, call: Callable[[], Any], *costs: Any, **more: int) -> None:
    """Times a call that processes `size` samples, roots, states or agent steps."""
    seconds = self._median(call, self._repeat)
    row = {"piece": piece, "size": size, **more, "median_s": seconds, "per_second": size / seconds}
    text = ", ".join([f"{piece}, {size}", *(f"{key} {value}" for key, value in more.items())])
    text += f": {seconds * 1e3:.1f} ms, {size / seconds:.0f}/s"
    if costs:
      flops = sum(cost.flops for cost in costs)
      row["compile_s"] = sum(cost.compile_seconds for cost in costs)
      row |= {"tflop": flops / 1e12, "mfu": flops / seconds / self._peak}
      text += f", {flops / 1e12:.3f} TFLOP, {100 * row['mfu']:.1f}% of peak"
      text += f", compiled in {row['compile_s']:.1f} s"
    self.rows.append(row)
    print(text, flush=True)


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
  parser = parser_of(__doc__)
  parser.add_argument("--config", nargs="+", default=["atari100k"], metavar="PRESET")
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--roots", type=positive, nargs="+", default=[64, 256])
  parser.add_argument("--simulations", type=positive, nargs="+", default=[16, 50])
  parser.add_argument("--batch", type=positive, nargs="+", default=[256])
  parser.add_argument("--actions", type=positive, default=6)
  parser.add_argument("--devices", type=positive, metavar="N", help="default: all local devices")
  parser.add_argument("--repeat", type=positive, default=5)
  return parser, parser.parse_args()


def main() -> None:
  parser, arguments = parse()
  import jax  # not needed for --help

  import pieces

  base = pieces.load(parser, arguments.config, arguments.set)
  frame = pieces.atari_frame(parser, base)
  pieces.enable_compilation_cache(base)
  devices = jax.local_devices()[: arguments.devices]
  if any(size % len(devices) for size in arguments.batch):
    parser.error(f"--batch: must be multiples of the number of devices ({len(devices)})")
  dtype, stack = base.agent.network.dtype, base.env.frame_stack
  peak = pieces.peak_flops(dtype, devices)
  kind = f"{len(devices)} x {devices[0].device_kind}"
  print(f"{kind}, {dtype} matrix product: {peak / 1e12:.2f} TFLOP/s each")
  rng, table = np.random.default_rng(0), Table(arguments.repeat, pieces.median_seconds, peak)

  def configured(setting: str) -> tuple[Any, Any]:
    settings = [*arguments.set, "reanalyse.schedule=batch", "reanalyse.simulations=0", setting]
    config = pieces.load(parser, arguments.config, settings)
    return config, pieces.make_agent(config, frame, arguments.actions)

  def add(piece: str, model: Any, tasks: list[str], windows: int, states: int, **more: int) -> None:
    shape = (windows, stack - 1 + states, *frame)
    frames = rng.integers(0, 256, shape, dtype=np.uint8)
    costs = [model.cost(task, frames) for task in tasks]

    def call(tasks: Any = tasks, frames: Any = frames) -> Any:
      return [model.run(task, frames) for task in tasks]

    table.add(piece, windows * states, call, *costs, **more)

  for size in arguments.batch:
    training = pieces.Training(*configured(f"learner.batch_size={size}"), devices)
    table.add("train step", size, training.step, training.cost())
    del training
  for simulations in arguments.simulations:
    _, agent = configured(f"search.simulations={simulations}")
    model, states = pieces.Model(agent, devices), agent.window.after + 1
    for roots in arguments.roots:
      add("search", model, ["reanalyse"], roots, 1, simulations=simulations)
    for size in arguments.batch:
      tasks = [name for name in ("reanalyse", "bootstrap") if name in agent.tasks]
      add("reanalysed batch", model, tasks, size, states, batch=size, simulations=simulations)
  for roots in arguments.roots:
    add("value", model, ["bootstrap"], roots, 1)
  lanes = base.actor.lanes
  play = pieces.environment(base, lanes, PLAYED)
  table.add("environment", PLAYED * lanes, play, lanes=lanes)
  result = {
    "devices": kind,
    "preset": arguments.config,
    "set": arguments.set,
    "dtype": dtype,
    "peak_flops": peak,
    "rows": table.rows,
  }
  write(arguments.out, result)


if __name__ == "__main__":
  main()
