"""Costs of programs in FLOPs and seconds, and the FLOP/s that devices reach."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax


def matmul_flops(function: Callable, *args: Any, **kwargs: Any) -> Counter[str]:
  """FLOPs of the matrix products and convolutions of a call, on one device if devices share it.

  The body of a loop counts as often as it runs if that is fixed when the function is traced, else
  once; of branches the most expensive one counts.

  Returns:
    FLOPs by the dtype of the operands.
  """
  return _flops(jax.make_jaxpr(partial(function, **kwargs))(*args).jaxpr)


def _flops(jaxpr: Any) -> Counter[str]:
  total: Counter[str] = Counter()
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name in ("dot_general", "conv_general_dilated"):
      left, right = (x.aval for x in equation.invars)
      if name == "dot_general":
        terms = math.prod(left.shape[axis] for axis in params["dimension_numbers"][0][0])
      else:  # inputs that dilation leaves at zero do not count
        outputs = right.shape[params["dimension_numbers"].rhs_spec[0]]
        terms = right.size / outputs / math.prod(params["lhs_dilation"])
      total[left.dtype.name] += round(2 * equation.outvars[0].aval.size * terms)
      continue
    inner = [_flops(body) for body in _bodies(params)]
    if name == "cond":
      inner = [max(inner, key=Counter.total)]
    for counts in inner:
      for dtype, flops in counts.items():
        total[dtype] += flops * (params["length"] if name == "scan" else 1)
  return total


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for x in value if isinstance(value, list | tuple) else [value]:
      x = getattr(x, "jaxpr", x)
      if hasattr(x, "eqns"):
        yield x


def median_seconds(call: Callable[[], Any], repeat: int = 5, patience: float = 3.0) -> float:
  """Median time of calls that wait for their results, after one that is not counted.

  There are `repeat` of them, or fewer once `patience` seconds have passed.
  """
  times: list[float] = []
  begin = time.perf_counter()
  call()
  while not times or (len(times) < repeat and time.perf_counter() - begin < patience):
    start = time.perf_counter()
    call()
    times.append(time.perf_counter() - start)
  return statistics.median(times)


def peak_flops(dtype: str, devices: Sequence[jax.Device]) -> float:
  """FLOP/s of a large matrix product on each of these devices while all are busy."""
  size, repeat = (1024, 1) if devices[0].platform == "cpu" else (4096, 16)
  # Random numbers: a GPU is faster with constants, which take less power.
  matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
  matrices = [jax.device_put(matrix, device) for device in devices]
  product = jax.jit(lambda a: a @ a)

  def call() -> None:
    jax.block_until_ready([product(x) for _ in range(repeat) for x in matrices])

  return repeat * 2 * size**3 / median_seconds(call)
