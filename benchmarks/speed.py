"""How fast the pieces are: search, evaluation of values, a batch reanalysed, the training step; with FLOPs and shares.

    python benchmarks/speed.py --config atari100k --roots 256 1024 4096 --batch 256 2048 --out benchmarks/results/x.json
    python benchmarks/speed.py --config atari_small --roots 8 64 --batch 64          # on a CPU

One command, a table and a JSON file. All local devices share each piece; frames come from host memory, but for the
training step, whose batch is on the devices. `reanalysed batch` searches the K+1 states of every sample and evaluates
as many that end n-step returns, as reanalysis of each batch does: `search` and `value` on [B, S-1+K+1, H, W, C]. The
peak is measured in the same run: a large matrix product in the network's type on every device. FLOPs are of one device.
First calls compile, or find what an earlier run compiled in the cache.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from common import frame_shape, load, positive, seconds, write

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.run.builders import enable_compilation_cache
from speedyzero_jax.run.profiler import search_cost
from speedyzero_jax.system.costs import cost_of, peak_flops
from speedyzero_jax.types import LearnerBatch, SearchResult
from speedyzero_jax.workers.learner import Learner, make_mesh


def random_batch(config, frame_shape, num_actions: int, size: int) -> LearnerBatch:
  """Noise of the right shapes."""
  rng, steps, stack = (
    np.random.default_rng(0),
    config.agent.loss.unroll_steps,
    config.env.frame_stack,
  )
  states, ones = (size, steps + 1), np.ones((size, steps), np.float32)
  return LearnerBatch(
    frames=rng.integers(0, 256, (size, stack + steps, *frame_shape), dtype=np.uint8),
    action=rng.integers(0, num_actions, (size, steps)).astype(np.int32),
    weight=rng.random(size).astype(np.float32),
    value=rng.normal(size=states).astype(np.float32),
    value_prefix=rng.normal(size=(size, steps)).astype(np.float32),
    policy=rng.dirichlet(np.ones(num_actions), states).astype(np.float32),
    value_mask=np.ones(states, np.float32),
    prefix_mask=ones,
    policy_mask=np.ones(states, np.float32),
    consistency_mask=ones,
  )


def main() -> None:
  """Measures and reports."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--config", nargs="+", default=["atari100k"])
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--roots", type=positive, nargs="+", default=[64, 256])
  parser.add_argument("--simulations", type=positive, nargs="+", default=[16, 50])
  parser.add_argument("--batch", type=positive, nargs="+", default=[256])
  parser.add_argument("--actions", type=int, default=6)
  parser.add_argument("--repeat", type=positive, default=5)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  base = load(parser, arguments.config, arguments.set)
  shape = frame_shape(parser, base)
  enable_compilation_cache(base)
  devices = jax.local_devices()
  for size in arguments.batch:
    if size % len(devices):
      parser.error(f"--batch: must be multiples of the {len(devices)} devices, got {size}")
  stack, states = base.env.frame_stack, base.learner.unroll_steps + 1
  observation = (*shape[:2], shape[2] * stack)
  peak = peak_flops(base.network.dtype)
  print(
    f"{len(devices)} x {devices[0].device_kind}, {base.network.dtype} matrix product: {peak / 1e12:.2f} TFLOP/s each"
  )
  rows = []
  rng = np.random.default_rng(0)

  def noise(windows: int, states: int) -> np.ndarray:
    """Frames of so many states in a row, in each of so many windows."""
    return rng.integers(0, 256, (windows, stack - 1 + states, *shape), dtype=np.uint8)

  for size in arguments.batch:
    config = load(parser, arguments.config, [*arguments.set, f"learner.batch_size={size}"])
    learner = Learner(config, observation, arguments.actions, make_mesh(devices))
    state = learner.init(jax.random.key(0))
    batch = learner.put(random_batch(config, shape, arguments.actions, size))
    key = jax.random.key(1)
    work = cost_of(learner.lower(state, batch, key)).flops

    def step(learner=learner, batch=batch, key=key) -> None:
      nonlocal state
      state, _ = learner.step(state, batch, key)
      jax.block_until_ready(state)

    first, time = seconds(step, arguments.repeat)
    rows.append({
      "piece": "train step", "size": size, "first_s": first, "median_s": time, "per_second": size / time,
      "tflop": work / 1e12, "mfu": work / time / peak,
    })  # fmt: skip
    print(
      f"train step, batch {size}: {time * 1e3:.1f} ms, {size / time:.0f} samples/s, first call {first:.1f} s, "
      f"{work / 1e12:.3f} TFLOP by XLA's count, {100 * rows[-1]['mfu']:.1f}% of peak"
    )

  variables = state.variables

  def search(inference: Inference, frames: np.ndarray) -> SearchResult:
    return inference.search(variables, frames, jax.random.key(0), 1.0, explore=True)

  for simulations in arguments.simulations:
    config = load(parser, arguments.config, [*arguments.set, f"search.simulations={simulations}"])
    inference = Inference(config, learner.blueprint, learner.mesh)
    for roots in arguments.roots:
      frames = noise(roots, 1)
      first, time = seconds(
        lambda inference=inference, frames=frames: jax.block_until_ready(search(inference, frames)),
        arguments.repeat,
      )
      lowered = inference.search.lower(variables, frames, jax.random.key(0), 1.0, explore=True)
      of_one = -(-roots // len(devices))
      work = search_cost(lowered, config, learner.blueprint, variables, of_one).flops
      rows.append({
        "piece": "search", "size": roots, "simulations": simulations, "first_s": first, "median_s": time,
        "per_second": roots / time, "tflop": work / 1e12, "mfu": work / time / peak,
      })  # fmt: skip
      print(
        f"search, {roots} roots x {simulations}: {time * 1e3:.1f} ms, {roots / time:.0f} roots/s, "
        f"{roots * simulations / time:.0f} simulations/s, first call {first:.1f} s, "
        f"{work / 1e12:.3f} TFLOP by XLA's count, {100 * rows[-1]['mfu']:.1f}% of peak"
      )
    for size in arguments.batch:
      frames = noise(size, states)
      first, time = seconds(
        lambda inference=inference, frames=frames: jax.block_until_ready(
          (search(inference, frames), inference.value(variables, frames))
        ),
        arguments.repeat,
      )
      rows.append({
        "piece": "reanalysed batch", "size": size, "states": size * states, "simulations": simulations,
        "first_s": first, "median_s": time, "per_second": size * states / time,
      })  # fmt: skip
      print(
        f"reanalysed batch of {size} x {simulations}: {time * 1e3:.1f} ms, {size * states / time:.0f} states/s, "
        f"first call {first:.1f} s"
      )
  for roots in arguments.roots:
    frames = noise(roots, 1)
    first, time = seconds(
      lambda frames=frames: inference.value(variables, frames).block_until_ready(), arguments.repeat
    )
    rows.append(
      {
        "piece": "value",
        "size": roots,
        "first_s": first,
        "median_s": time,
        "per_second": roots / time,
      }
    )
    print(
      f"value, {roots} states: {time * 1e3:.1f} ms, {roots / time:.0f} states/s, first call {first:.1f} s"
    )
  write(
    arguments.out,
    {
      "devices": f"{len(devices)} x {devices[0].device_kind}",
      "preset": arguments.config,
      "set": arguments.set,
      "dtype": base.network.dtype,
      "peak_flops": peak,
      "rows": rows,
    },
  )


if __name__ == "__main__":
  main()
