"""How fast the pieces are: search, evaluation of values, the training step with its FLOPs and share of the peak.

    python benchmarks/speed.py --config atari100k --roots 256 1024 4096 --batch 256 2048 --out benchmarks/results/x.json
    python benchmarks/speed.py --config atari_small --roots 8 64 --batch 64          # on a CPU

One command, a table and a JSON file. The peak is measured in the same run: a large matrix product in the network's
type.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import seconds, write

from speedyzero_jax import config_io
from speedyzero_jax.costs import cost_of, peak_flops
from speedyzero_jax.inference import Inference
from speedyzero_jax.learner import Learner, make_mesh
from speedyzero_jax.profiling import search_cost
from speedyzero_jax.types import LearnerBatch


def random_batch(config, frame_shape, num_actions: int, size: int) -> LearnerBatch:
  """Noise of the right shapes."""
  rng, steps, stack = np.random.default_rng(0), config.learner.unroll_steps, config.env.frame_stack
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
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--config", nargs="+", default=["atari100k"])
  parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides")
  parser.add_argument("--roots", type=int, nargs="+", default=[64, 256])
  parser.add_argument("--simulations", type=int, nargs="+", default=[16, 50])
  parser.add_argument("--batch", type=int, nargs="+", default=[256])
  parser.add_argument("--actions", type=int, default=6)
  parser.add_argument("--repeat", type=int, default=5)
  parser.add_argument("--out", type=Path)
  arguments = parser.parse_args()
  base = config_io.load(arguments.config, arguments.set)
  side, channels = base.env.frame_size, 1 if base.env.grayscale else 3
  frame_shape = (side, side, channels)
  observation = (side, side, channels * base.env.frame_stack)
  devices = jax.local_devices()
  peak = peak_flops(base.network.dtype)
  print(f"{len(devices)} x {devices[0].device_kind}, {base.network.dtype} matrix product: {peak / 1e12:.2f} TFLOP/s")
  rows = []
  rng = np.random.default_rng(0)

  for size in arguments.batch:
    config = config_io.override(base, [f"learner.batch_size={size}"])
    learner = Learner(config, observation, arguments.actions, make_mesh(devices))
    state = learner.init(jax.random.key(0))
    batch = learner.put(random_batch(config, frame_shape, arguments.actions, size))
    key = jax.random.key(1)
    work = cost_of(learner.lower(state, batch, key)).flops  # on each device

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

  variables = jax.device_put(state.variables, devices[0])
  for simulations in arguments.simulations:
    config = config_io.override(base, [f"search.simulations={simulations}"])
    inference = Inference(config, learner.blueprint)
    for roots in arguments.roots:
      frames = jnp.asarray(rng.integers(0, 256, (roots, base.env.frame_stack, *frame_shape), dtype=np.uint8))
      first, time = seconds(
        lambda inference=inference, frames=frames: jax.block_until_ready(
          inference.search(variables, frames, jax.random.key(0), 1.0, explore=True)
        ),
        arguments.repeat,
      )
      lowered = inference.search.lower(variables, frames, jax.random.key(0), 1.0, explore=True)
      work = search_cost(lowered, config, learner.blueprint, variables, roots).flops
      rows.append({
        "piece": "search", "size": roots, "simulations": simulations, "first_s": first, "median_s": time,
        "per_second": roots / time, "tflop": work / 1e12, "mfu": work / time / peak,
      })  # fmt: skip
      print(
        f"search, {roots} roots x {simulations}: {time * 1e3:.1f} ms, {roots / time:.0f} roots/s, "
        f"{roots * simulations / time:.0f} simulations/s, first call {first:.1f} s, "
        f"{work / 1e12:.3f} TFLOP by XLA's count, {100 * rows[-1]['mfu']:.1f}% of peak"
      )
  for roots in arguments.roots:
    frames = jnp.asarray(rng.integers(0, 256, (roots, base.env.frame_stack, *frame_shape), dtype=np.uint8))
    first, time = seconds(
      lambda frames=frames: inference.value(variables, frames).block_until_ready(), arguments.repeat
    )
    rows.append({"piece": "value", "size": roots, "first_s": first, "median_s": time, "per_second": roots / time})
    print(f"value, {roots} states: {time * 1e3:.1f} ms, {roots / time:.0f} states/s, first call {first:.1f} s")
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
