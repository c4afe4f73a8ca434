"""Measurement of programs in FLOPs and seconds, and of the FLOP/s of devices."""

import math
import statistics
import timeit
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import partial_eval


def matmul_flops(function: Callable, *args: Any) -> int:
  """Counts FLOPs of matrix products and convolutions of a call, per device if it is sharded.

  Loop bodies count once per iteration if the length is known when tracing, else once. For
  conditionals only the most expensive branch counts.
  """
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  used, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  return _flops(used)


def _flops(jaxpr: Any) -> int:
  total = 0
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
      left, out = equation.invars[0].aval, equation.outvars[0].aval
      terms = math.prod(left.shape[axis] for axis in params["dimension_numbers"][0][0])
      total += 2 * out.size * terms
    elif name == "conv_general_dilated":
      total += _convolution_flops(equation)
    inner = [_flops(body) for body in _bodies(params)]
    times = params["length"] if name == "scan" else 1
    total += times * (max(inner) if name == "cond" else sum(inner))
  return total


def _convolution_flops(equation: Any) -> int:
  """FLOPs of a convolution, excluding products with zeros from padding and dilation."""
  params, out = equation.params, equation.outvars[0].aval
  left, right = (x.aval for x in equation.invars)
  numbers = params["dimension_numbers"]
  products = out.size * right.shape[numbers.rhs_spec[1]]
  for axis, stride in enumerate(params["window_strides"]):
    inputs = left.shape[numbers.lhs_spec[2 + axis]]
    outputs = out.shape[numbers.out_spec[2 + axis]]
    taps = right.shape[numbers.rhs_spec[2 + axis]]
    dilation = params["lhs_dilation"][axis]
    place = np.arange(outputs)[:, None] * stride - params["padding"][axis][0]
    place = place + np.arange(taps) * params["rhs_dilation"][axis]
    real = (place >= 0) & (place <= (inputs - 1) * dilation) & (place % dilation == 0)
    products = products * int(real.sum()) // outputs
  return int(2 * products)


def _bodies(params: dict[str, Any]) -> Iterator[Any]:
  for value in params.values():
    for x in value if isinstance(value, list | tuple) else [value]:
      x = getattr(x, "jaxpr", x)
      if hasattr(x, "eqns"):
        yield x


def median_seconds(call: Callable[[], Any], repeat: int = 5) -> float:
  """Median duration of `repeat` blocking calls, after one warm-up call."""
  return statistics.median(timeit.repeat(call, number=1, repeat=repeat + 1)[1:])


def peak_flops(dtype: str, devices: Sequence[jax.Device]) -> float:
  """FLOP/s per device of a large matrix product while all devices are busy."""
  size, repeat = (1024, 1) if devices[0].platform == "cpu" else (4096, 16)
  # Random numbers, since constants take less power and a GPU runs faster with them.
  matrix = jax.random.normal(jax.random.key(0), (size, size)).astype(dtype)
  matrices = [jax.device_put(matrix, device) for device in devices]
  product = jax.jit(lambda a: a @ a)

  def call() -> None:
    jax.block_until_ready([product(x) for _ in range(repeat) for x in matrices])

  return repeat * 2 * size**3 / median_seconds(call)
