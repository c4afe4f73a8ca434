"""Comparison of predicted with measured time and memory of each program, on this machine.

    python benchmarks/plan_check.py --config atari300k sweep gpu --out check.json
    XLA_FLAGS=... python benchmarks/plan_check.py --config ... --reference check.json

"Predicted" costs are launch/plan.py's estimates for programs compiled, and autotuned, on this
machine. "Planned" costs are those of programs compiled without a GPU, if --plan has an entry for
this number of devices. Arguments are random. Times are averages over consecutive calls.

For every output the mean and the root mean square (RMS) are recorded. With --reference they are
compared with an earlier result with other XLA flags, and may differ by `TOLERANCE` times its RMS.

Exit codes: 0 done, 1 outputs differ from the reference.
"""

import argparse
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from common import parser_of, positive, write

TOLERANCE = 0.03  # bfloat16 has 8 bits of precision, and kernels sum in different orders
PLAN = Path(__file__).resolve().parent / "results" / "plan-h200.json"


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
  parser = parser_of(__doc__)
  parser.add_argument("--config", nargs="+", default=["atari300k", "sweep", "gpu"])
  parser.add_argument("--set", nargs="*", default=["env.game=Pong"], metavar="key=value")
  parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="default: all")
  parser.add_argument(
    "--target", help="GPU specifications for predictions (default: the GPU's, or h200)"
  )
  parser.add_argument("--plan", type=Path, default=PLAN, help="a result of launch/plan.py")
  parser.add_argument("--reference", type=Path, metavar="FILE", help="a result to compare with")
  parser.add_argument("--calls", type=positive, default=20, help="measured calls per program")
  return parser, parser.parse_args()


def measured(
  program: Any, compiled: Any, args: tuple, calls: int
) -> tuple[float, list[list[float]]]:
  """Returns seconds per call, and the mean and root mean square of the first call's outputs."""
  import jax
  import numpy as np

  def call(args: tuple) -> tuple[Any, tuple]:
    out = compiled(*args)
    return out, (out[0], *args[1:]) if program.state_bytes else args  # the state is donated

  out, args = call(args)
  outputs = [np.asarray(x, np.float64) for x in jax.tree.leaves(out) if x.dtype != object]
  digest = [[float(x.mean()), float(np.sqrt(np.mean(x**2)))] for x in outputs if x.size]
  out, args = jax.block_until_ready(call(args))
  begin = time.perf_counter()
  for _ in range(calls):
    out, args = call(args)
  jax.block_until_ready(out)
  return (time.perf_counter() - begin) / calls, digest


def arguments_of(program: Any, state: Any, published: Any) -> tuple:
  """Creates a program's arguments: copies of the state or variables, and random numbers."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  rng = np.random.default_rng(0)

  def leaf(x: Any) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return jax.device_put(jax.random.key(1), x.sharding)
    if x.dtype == np.uint8:
      value = rng.integers(0, 256, x.shape, np.uint8)
    elif np.issubdtype(x.dtype, np.floating):
      value = rng.random(x.shape, np.float32).astype(x.dtype)
    else:
      value = np.zeros(x.shape, x.dtype)
    return jax.device_put(value, x.sharding)

  first = {"train": state, "publish": state.variables}.get(program.name, published)
  return jax.tree.map(jnp.copy, first), *jax.tree.map(leaf, program.args[1:])


def with_no_zeros(state: Any) -> Any:
  """Replaces all-zero kernels by random numbers; zeros would hide errors in earlier layers."""
  import jax
  import jax.numpy as jnp

  def leaf(path: Any, x: jax.Array) -> jax.Array:
    if x.ndim < 2 or jnp.any(x != 0):
      return x
    key = jax.random.fold_in(jax.random.key(2), zlib.crc32(jax.tree_util.keystr(path).encode()))
    return jax.device_put(0.05 * jax.random.normal(key, x.shape, x.dtype), x.sharding)

  params = jax.tree_util.tree_map_with_path(leaf, state.variables.params)
  return state._replace(variables=state.variables._replace(params=params))


def differing(rows: list[dict[str, Any]], reference: dict[str, Any]) -> list[str]:
  """Names of programs whose outputs differ from those of an earlier result, if it has them."""
  earlier = {row["program"]: row["outputs"] for row in reference["rows"]}
  return [
    row["program"]
    for row in rows
    if row["program"] in earlier
    and not all(
      abs(a - b) <= TOLERANCE * before[1] + 1e-6
      for now, before in zip(row["outputs"], earlier[row["program"]], strict=True)
      for a, b in zip(now, before, strict=True)
    )
  ]


def main() -> int:
  parser, arguments = parse()
  import jax

  import pieces
  from speedyzero_jax.plan import plan, target
  from speedyzero_jax.plan.programs import ROLES, programs
  from speedyzero_jax.workers.learner import Learner, make_mesh
  from speedyzero_jax.workers.weights import publication

  config = pieces.load(parser, arguments.config, arguments.set)
  pieces.enable_compilation_cache(config)
  reference = json.loads(arguments.reference.read_text()) if arguments.reference else None
  mesh = make_mesh(jax.local_devices())
  kind = mesh.devices.flat[0].device_kind.lower()
  known = next((name for name in target.names() if name in kind), "h200")
  device = target.load(arguments.target or known)
  agent = pieces.factories.make_agent(config)
  learner = Learner(config, agent, mesh)
  state = with_no_zeros(learner.init(jax.random.key(0)))
  published = publication(agent)(state.variables)
  dtype = getattr(config.agent.network, "dtype", "float32")
  before = {}
  if arguments.plan.exists():
    planned = json.loads(arguments.plan.read_text())
    plans = planned["plans"] if planned["target"] == device.name else []
    tables = [each["programs"] for each in plans if each["devices"] == mesh.size]
    before = {(row["name"], row["batch"]): row for table in tables for row in table}
  rows = []
  for program in programs(config, config, agent, learner, mesh, ROLES):
    if arguments.only and program.name not in arguments.only:
      continue
    begin = time.perf_counter()
    compiled = program.compile()
    compile_seconds = time.perf_counter() - begin
    cost = plan.cost_of(program, compiled, device, dtype)
    seconds, outputs = measured(
      program, compiled, arguments_of(program, state, published), arguments.calls
    )
    planned = before.get((program.name, program.batch), {})
    rows.append({
      "program": program.name, "batch": program.batch, "calls": program.calls, "seconds": seconds,
      "predicted_seconds": cost.seconds, "planned_seconds": planned.get("seconds"),
      "temporary_bytes": cost.temporary_bytes, "planned_bytes": planned.get("temporary_bytes"),
      "launches": cost.launches, "round_trips": cost.round_trips, "gflop": cost.flops / 1e9,
      "gigabytes": cost.bytes / 1e9, "compile_seconds": compile_seconds, "outputs": outputs,
    })  # fmt: skip
    print(line(rows[-1]), flush=True)
  stats = mesh.devices.flat[0].memory_stats() or {}
  result = {
    "preset": arguments.config, "set": arguments.set, "devices": mesh.size,
    "device": mesh.devices.flat[0].device_kind, "xla_flags": os.environ.get("XLA_FLAGS", ""),
    "peak_bytes": stats.get("peak_bytes_in_use"), "rows": rows,
  }  # fmt: skip
  known = [row["program"] for row in reference["rows"]] if reference else []
  if missing := [row["program"] for row in rows if reference and row["program"] not in known]:
    print(f"not in {arguments.reference}, so not compared: {', '.join(missing)}")
  wrong = differing(rows, reference) if reference else []
  for name in wrong:
    print(f"{name}: outputs differ from {arguments.reference}")
  if not wrong:
    write(arguments.out, result)
  return int(bool(wrong))


def line(row: dict[str, Any]) -> str:
  """Formats a row as text."""
  planned = row["planned_seconds"]
  text = f"{row['program']}, {row['batch']}: {row['seconds'] * 1e3:.2f} ms measured, "
  text += f"{row['predicted_seconds'] * 1e3:.2f} predicted"
  if planned:
    text += f", {planned * 1e3:.2f} planned"
  text += f"; {row['temporary_bytes'] / 1e9:.2f} GB of memory"
  if row["planned_bytes"]:
    text += f", {row['planned_bytes'] / 1e9:.2f} planned"
  return text + f"; {row['launches']:.0f} launches, {row['round_trips']:.0f} round trips"


if __name__ == "__main__":
  raise SystemExit(main())
