"""What compiled programs cost by XLA's count, and what this machine can do: FLOPs, bytes and seconds.

Knows programs and devices, nothing of what is computed.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Cost(NamedTuple):
  """Of one execution on one device; nan where XLA does not say. Loops count once, whatever their length."""

  flops: float
  bytes: float  # read and written


def cost_of(lowered: jax.stages.Lowered) -> Cost:
  """The cost of a program, which is compiled for that unless it is already.

  FLOPs are the larger count of two, before and after optimisation: the latter can't look into a GPU's libraries.
  """
  compiled = _counts(lowered.compile())
  flops = [counts["flops"] for counts in (_counts(lowered), compiled) if counts.get("flops", 0) > 0]
  return Cost(max(flops, default=math.nan), compiled.get("bytes accessed", math.nan))


def _counts(stage: jax.stages.Lowered | jax.stages.Compiled) -> dict[str, float]:
  try:
    counts = stage.cost_analysis()
  except (NotImplementedError, RuntimeError):  # this backend does not count
    return {}
  return (counts[0] if isinstance(counts, list) and counts else counts) or {}


def memory_of(compiled: jax.stages.Compiled) -> int | None:
  """Bytes that a program needs on each device beside its arguments; None where XLA does not say."""
  try:
    found = compiled.memory_analysis()
  except (NotImplementedError, RuntimeError):
    found = None
  if found is None:
    return None
  return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def median_seconds(call: Callable[[], Any], repeat: int = 5, patience: float = 3.0) -> float:
  """Of calls that wait for their own results: so many after one that doesn't count, fewer once patience is spent."""
  times: list[float] = []
  begin = time.perf_counter()
  call()
  while not times or (len(times) < repeat and time.perf_counter() - begin < patience):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def peak_flops(dtype: str) -> float:
  """FLOP/s of a large square matrix product on one local device, all of them being busy: CPU devices share cores."""
  size = 8192 if jax.default_backend() != "cpu" else 2048
  everywhere = [
    jax.device_put(jnp.ones((size, size), dtype), device) for device in jax.local_devices()
  ]
  product = jax.jit(lambda a: a @ a)
  return (
    2 * size**3 / median_seconds(lambda: jax.block_until_ready([product(x) for x in everywhere]))
  )


def peak_bandwidth() -> float:
  """Bytes/s read and written by one local device that goes once over an array far larger than its caches, as all do."""
  x = jnp.ones(2**28 if jax.default_backend() != "cpu" else 2**26, jnp.float32)
  everywhere = [jax.device_put(x, device) for device in jax.local_devices()]
  follow = jax.jit(
    lambda a: a + 1, donate_argnums=0
  )  # into the same memory: new pages would cost more than the writing

  def call() -> None:
    everywhere[:] = jax.block_until_ready([follow(x) for x in everywhere])

  return 2 * x.nbytes / median_seconds(call)
