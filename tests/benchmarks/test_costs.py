"""Tests of FLOP counts against arithmetic and XLA's own counts, and of timing."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from benchmarks import costs


def shape(*sizes, dtype="float32"):
  return jax.ShapeDtypeStruct(sizes, dtype)


def test_matrix_products_of_any_dtype_count():
  def function(a, b, c):
    return a @ b, jnp.einsum("bij,bkj->bik", c, c)

  args = shape(64, 32), shape(32, 16), shape(5, 7, 9, dtype="bfloat16")
  assert costs.matmul_flops(function, *args) == 2 * 64 * 32 * 16 + 2 * 5 * 7 * 7 * 9


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4)])
def test_convolutions_and_their_gradients_count_as_xla_counts_them(stride, groups, padding):
  def convolution(x, kernel):
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      (stride, stride),
      padding,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
      feature_group_count=groups,
    )

  def input_gradient(x, kernel, y):
    return jax.vjp(convolution, x, kernel)[1](y)[0]

  def kernel_gradient(x, kernel, y):
    return jax.vjp(convolution, x, kernel)[1](y)[1]

  args = shape(8, 9, 9, 32), shape(3, 3, 32 // groups, 64)
  y = jax.eval_shape(convolution, *args)
  for function, operands in (
    (convolution, args),
    (input_gradient, (*args, y)),
    (kernel_gradient, (*args, y)),
  ):
    counted = jax.jit(function).lower(*operands).compile().cost_analysis()["flops"]
    assert costs.matmul_flops(function, *operands) == pytest.approx(counted, rel=1e-3)


def test_loops_count_as_often_as_they_run_and_branches_once():
  x, product = shape(64, 64), 2 * 64**3

  def repeated(x):
    return jax.lax.fori_loop(0, 9, lambda _, y: y @ x, x)

  def until_large(x):
    return jax.lax.while_loop(lambda y: y[0, 0] < 1, lambda y: y @ x, x)

  def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ x @ x, lambda: x @ x)

  assert costs.matmul_flops(repeated, x) == 9 * product
  assert costs.matmul_flops(until_large, x) == product
  assert costs.matmul_flops(branches, x) == 2 * product
  nested = jax.jit(jax.checkpoint(jax.vmap(lambda x: jax.nn.relu(repeated(x)))))
  assert costs.matmul_flops(nested, shape(3, 64, 64)) == 3 * 9 * product


def test_devices_that_share_a_call_count_their_part():
  mesh, part = Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data")
  divided = jax.shard_map(
    lambda x, y: x @ y, mesh=mesh, in_specs=(part, PartitionSpec()), out_specs=part
  )
  assert costs.matmul_flops(divided, shape(8, 16), shape(16, 4)) == 2 * 4 * 16 * 4


def test_the_first_of_several_calls_is_not_timed():
  seconds = iter([0.5, 0, 0.5, 0, 0.5, 0])  # the median of the first five, and of all, is higher
  assert costs.median_seconds(lambda: time.sleep(next(seconds))) < 0.2


def test_a_peak_is_measured_on_all_devices(monkeypatch):
  computed, devices = [], jax.devices()[:2]
  monkeypatch.setattr(jax, "block_until_ready", computed.extend)
  monkeypatch.setattr(costs, "median_seconds", lambda call: call() or 0.5)
  peak = costs.peak_flops("float32", devices)
  assert {device for product in computed for device in product.devices()} == set(devices)
  assert peak == len(computed) / len(devices) * 2 * len(computed[0]) ** 3 / 0.5
