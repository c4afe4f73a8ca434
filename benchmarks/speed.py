"""Rates of the training step, search, value, reanalysis and environments; FLOPs and share of peak.

    python benchmarks/speed.py --config atari100k --roots 256 1024 4096 --batch 256 2048
    python benchmarks/speed.py --config atari_small --roots 8 64 --batch 64          # on a CPU

All local devices share each piece, or the first `--devices` of them. Frames come from host memory
and results go there, except for the training step, whose batch stays on the devices. `reanalysed
batch` searches and evaluates the K+1 states of every sample. `environment` is random play in as
many lanes as the configuration has; an actor step is a search of that many roots and one such step.
The peak is a large matrix product in the network's dtype, measured in the same run; FLOPs are of
one device. First calls include compilation, unless the compilation cache has the program.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from common import parser_of, positive, seconds, write

PLAYED = 20  # agent steps per lane in a call


class Table:
  """Measured rows; prints each."""

  def __init__(self, repeat: int, peak: float):
    self._repeat, self._peak = repeat, peak
    self.rows: list[dict[str, Any]] = []

  def add(
    self, piece: str, size: int, call: Callable[[], Any], flops: float | None = None, **more: int
  ) -> None:
    """Times a call that handles `size` samples, roots, states or agent steps."""
    first, median = seconds(call, self._repeat)
    row = {"piece": piece, "size": size, **more, "first_s": first, "median_s": median}
    row |= {"per_second": size / median}
    text = ", ".join([f"{piece}, {size}", *(f"{key} {value}" for key, value in more.items())])
    text += f": {median * 1e3:.1f} ms, {size / median:.0f}/s, first call {first:.1f} s"
    if flops is not None:
      row |= {"tflop": flops / 1e12, "mfu": flops / median / self._peak}
      text += f", {flops / 1e12:.3f} TFLOP, {100 * row['mfu']:.1f}% of peak"
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
    parser.error(f"--batch: must be multiples of the {len(devices)} devices")
  peak = pieces.peak_flops(pieces.dtype_of(base))
  kind = f"{len(devices)} x {devices[0].device_kind}"
  print(f"{kind}, {pieces.dtype_of(base)} matrix product: {peak / 1e12:.2f} TFLOP/s each")
  rng, table = np.random.default_rng(0), Table(arguments.repeat, peak)

  def noise(windows: int, states: int) -> np.ndarray:
    shape = (windows, base.env.frame_stack - 1 + states, *frame)
    return rng.integers(0, 256, shape, dtype=np.uint8)

  def configured(setting: str) -> Any:
    return pieces.load(parser, arguments.config, [*arguments.set, setting])

  for size in arguments.batch:
    config = configured(f"learner.batch_size={size}")
    training = pieces.Training(config, frame, arguments.actions, devices)
    table.add("train step", size, training.step, training.flops())
    del training
  for simulations in arguments.simulations:
    config = configured(f"search.simulations={simulations}")
    model = pieces.Model(config, frame, arguments.actions, devices)
    for roots in arguments.roots:
      one = noise(roots, 1)
      flops = model.search_flops(one)
      call = functools.partial(model.search, one)
      table.add("search", roots, call, flops, simulations=simulations)
    for size in arguments.batch:
      states = pieces.unroll_steps(base) + 1
      many = noise(size, states)

      def reanalyse(model: Any = model, many: np.ndarray = many) -> None:
        model.search(many)
        model.value(many)

      table.add("reanalysed batch", size * states, reanalyse, batch=size, simulations=simulations)
  for roots in arguments.roots:
    one = noise(roots, 1)
    table.add("value", roots, functools.partial(model.value, one))
  lanes = base.actor.lanes
  play = pieces.environment(base, lanes, PLAYED)
  table.add("environment", PLAYED * lanes, play, lanes=lanes)
  result = {
    "devices": kind,
    "preset": arguments.config,
    "set": arguments.set,
    "dtype": pieces.dtype_of(base),
    "peak_flops": peak,
    "rows": table.rows,
  }
  write(arguments.out, result)


if __name__ == "__main__":
  main()
