"""Tests of the optimizers against hand-worked numbers, NumPy, and optax's SGD and Adam."""

import math

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speedyzero_jax.config.schema import OptimConfig
from speedyzero_jax.ops import optimizers

f32 = np.float32


def scale_by_clipped_trust_ratio(*numbers, **named):
  return optimizers.on_matrix(
    lambda layout: optimizers.clipped_trust_ratio(layout, *numbers, **named)
  )


def _params():
  """A kernel of norm 5 (3-4-5), a bias, a norm scale and a scalar."""
  return {
    "kernel": np.array([[3, 0], [0, 4]], f32),
    "bias": np.array([1, -2], f32),
    "norm": {"scale": np.array([2], f32), "temperature": np.array(0.5, f32)},
  }


def _grads():
  """The kernel's gradient has norm 10 (6-8-10)."""
  return {
    "kernel": np.array([[0, 6], [8, 0]], f32),
    "bias": np.array([0.5, 0.25], f32),
    "norm": {"scale": np.array([-1], f32), "temperature": np.array(3, f32)},
  }


def _random_grads(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(f32), params)


def _config(name, **numbers):
  steady = {"warmup_steps": 0, "decay_steps": 0, "clip_norm": 0.0}
  return OptimConfig(name=name, **(steady | numbers))


def _step(tx, grads, params):
  return jax.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)


def _run(tx, steps, params):
  update, state = jax.jit(tx.update), jax.jit(tx.init)(params)
  for i in range(steps):
    updates, state = update(_random_grads(params, i), state, params)
    params = jax.tree.map(np.add, params, updates)
  return params, state


def _allclose(actual, expected, rtol=1e-6):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), actual, expected)


# --- one step, by hand


def test_ratio_between_the_bounds():
  # 0.44 * 5 / (10 + 0.2 * 5) = 0.2; decayed gradient [[0.6, 6], [8, 0.8]].
  tx = scale_by_clipped_trust_ratio(trust_coefficient=0.44, weight_decay=0.2)
  updates, state = _step(tx, _grads(), _params())
  _allclose(updates, _grads() | {"kernel": [[0.12, 1.2], [1.6, 0.16]]})
  _allclose(optimizers.trust_ratios(state, _params()), {"kernel": 0.2})


@pytest.mark.parametrize(("low", "high", "expected"), [(0.0, 1.0, 1.0), (2.0, 3.0, 2.0)])
def test_a_zero_gradient_has_ratio_one_before_clipping(low, high, expected):
  w, g = np.full((2, 2), 2.0, f32), np.zeros((2, 2), f32)
  tx = scale_by_clipped_trust_ratio(0.001, low, high, weight_decay=0.5)
  updates, state = _step(tx, g, w)
  np.testing.assert_allclose(updates, expected * (g + 0.5 * w), rtol=1e-6)
  (ratio,) = optimizers.trust_ratios(state, w).values()
  assert ratio == expected


def test_nan_gradients_stay_visible():
  w = np.ones((2, 2), f32)
  updates, state = _step(scale_by_clipped_trust_ratio(), np.nan * w, w)
  (ratio,) = optimizers.trust_ratios(state, w).values()
  assert np.isnan(updates).all() and np.isnan(ratio)


def test_norms_are_float32_for_bfloat16_params_and_the_product_is_rounded_once():
  # The squared norm of w is 257, which bfloat16 would round to 256.
  w = jnp.ones((1, 257), jnp.bfloat16)
  updates, state = _step(scale_by_clipped_trust_ratio(2.0**-5), w.at[0, 1:].set(0), w)
  assert updates.dtype == jnp.bfloat16
  (ratio,) = optimizers.trust_ratios(state, w).values()
  assert ratio.dtype == jnp.float32
  np.testing.assert_allclose(ratio, math.sqrt(257) / 32, rtol=1e-6)
  # 1.75 * (1 + 2**-8) is nearest to 1.75 + 2**-7; a sum rounded first, to 1, would give 1.75.
  small, one = jnp.full((1, 1), 2.0**-8, jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16)
  tx = scale_by_clipped_trust_ratio(0.0, 1.75, 1.75, weight_decay=1.0)
  assert _step(tx, one, small)[0][0, 0] == 1.75 + 2.0**-7


_magnitudes = st.floats(2.0**-10, 1024, width=32)
_matrices = hnp.arrays(
  f32, (2, 3), elements=st.just(0.0) | _magnitudes | _magnitudes.map(lambda x: -x)
)


def _up_to(most):
  return st.floats(0, most, width=32, allow_subnormal=False)  # XLA may flush subnormals to zero


@jax.jit
def _traced_step(g, w, *numbers):
  tx = scale_by_clipped_trust_ratio(*numbers)
  return tx.update(g, tx.init(w), w)


@hypothesis.given(
  g=_matrices,
  w=_matrices,
  eta=_up_to(8),
  bounds=st.tuples(_up_to(4), _up_to(4)).map(sorted),
  wd=_up_to(1),
)
def test_ratio_is_bounded_and_the_update_parallel(g, w, eta, bounds, wd):
  updates, state = _traced_step(g, w, f32(eta), f32(bounds[0]), f32(bounds[1]), f32(wd))
  (ratio,) = optimizers.trust_ratios(state, w).values()
  assert bounds[0] <= ratio <= bounds[1] or not np.any(w)
  g, w = np.float64(g), np.float64(w)
  g_norm, w_norm = np.linalg.norm(g), np.linalg.norm(w)
  expected = eta * w_norm / (g_norm + wd * w_norm) if g_norm and w_norm else 1.0
  if np.any(w):  # else zero at initialization: exempt
    expected = np.clip(expected, *bounds)
  np.testing.assert_allclose(ratio, expected, rtol=1e-5, atol=1e-30)
  scale = float(ratio)
  tiny = np.finfo(np.float32).tiny  # below it XLA may flush to zero
  atol = 1e-6 * scale * (g_norm + wd * w_norm) + tiny
  np.testing.assert_allclose(updates, scale * (g + wd * w), rtol=1e-5, atol=atol)


# --- whole optimizers


def test_clipped_lars_is_sgd_where_all_ratios_are_clipped_at_one():
  numbers = {
    "learning_rate": 0.3, "momentum": 0.8, "weight_decay": 0.1, "trust_coefficient": 1e6,
    "warmup_steps": 3, "decay_steps": 4, "decay_rate": 0.5,
  }  # fmt: skip
  lars, sgd = (optimizers.make_optimizer(_config(n, **numbers)) for n in ("clipped_lars", "sgd"))
  ours, state = _run(lars, 10, _params())
  assert optimizers.trust_ratios(state, ours) == {"kernel": 1}
  _allclose(ours, _run(sgd, 10, _params())[0])


@pytest.mark.parametrize("floor", [0.0, 2.0])
@pytest.mark.parametrize("name", ["clipped_lars", "lars"])
def test_lars_with_and_without_bounds_and_floor_against_numpy(name, floor):
  """In float64: buffer <- momentum * buffer + ratio * (g + wd * w), w <- w - rate * buffer."""
  kernel, bias = np.array([[3.0, 1.0], [-2.0, 4.0]]), np.array([1.0, -2.0])
  eta, wd, momentum, low, high = 0.4, 0.1, 0.7, 0.2, 0.7
  config = _config(
    name, learning_rate=0.5, momentum=momentum, weight_decay=wd, trust_coefficient=eta,
    trust_min=low, trust_max=high, min_weight_norm=floor,
    warmup_steps=2, decay_steps=3, decay_rate=0.5,
  )  # fmt: skip

  def bounded(ratio):
    return np.clip(ratio, low, high) if name == "clipped_lars" else ratio

  trained, state = _run(
    optimizers.make_optimizer(config), 7, {"bias": f32(bias), "kernel": f32(kernel)}
  )
  ratios, kernel_buffer, bias_buffer = [], np.zeros_like(kernel), np.zeros_like(bias)
  for i, rate in enumerate([0.0, 0.25, 0.5, 0.5, 0.5, 0.25, 0.25]):
    grads = _random_grads({"bias": bias, "kernel": kernel}, i)
    g, w_norm = np.float64(grads["kernel"]), np.linalg.norm(kernel)
    ratio = eta * w_norm / (np.linalg.norm(g) + wd * w_norm)
    ratios.append(bounded(ratio))
    kernel_buffer = momentum * kernel_buffer + ratios[-1] * (g + wd * kernel)
    g = np.float64(grads["bias"])
    least = max(np.linalg.norm(bias), floor * math.sqrt(2))
    ratio = bounded(eta * least / np.linalg.norm(g)) if floor else 1
    bias_buffer = momentum * bias_buffer + ratio * g
    kernel, bias = kernel - rate * kernel_buffer, bias - rate * bias_buffer
  _allclose(trained, {"bias": bias, "kernel": kernel}, rtol=1e-5)
  _allclose(optimizers.trust_ratios(state, trained), {"kernel": ratios[-1]}, rtol=1e-5)
  assert (max(ratios) > high) == (name == "lars")  # the data tell the two apart


@pytest.mark.parametrize(("clip_norm", "factor"), [(0.0, 1.0), (1.0, 0.1), (100.0, 1.0)])
def test_gradients_are_clipped_first(clip_norm, factor):
  config = _config("sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.1, clip_norm=clip_norm)
  g, w = _grads()["kernel"], _params()["kernel"]
  updates, _ = _step(optimizers.make_optimizer(config), g, w)
  np.testing.assert_allclose(updates, -(factor * g + 0.1 * w), rtol=1e-6)  # decay is not clipped


def test_adam_takes_momentum_as_b1_and_decays_kernels():
  config = _config("adam", learning_rate=0.1, momentum=0.5, weight_decay=0.25)
  ours, _ = _run(optimizers.make_optimizer(config), 3, _params())
  kernels = jax.tree.map(lambda x: x.ndim >= 2, _params())
  adamw = optax.adamw(0.1, b1=0.5, weight_decay=0.25, mask=kernels)
  _allclose(ours, _run(adamw, 3, _params())[0], rtol=1e-5)


def test_schedule_values():
  config = OptimConfig(learning_rate=0.2, warmup_steps=4, decay_steps=10, decay_rate=0.1)
  schedule = jax.jit(optimizers.learning_rate_schedule(config))
  rates = {0: 0, 1: 0.05, 4: 0.2, 13: 0.2, 14: 0.02, 23: 0.02, 24: 0.002}
  _allclose({step: schedule(step) for step in rates}, rates)
  config = OptimConfig(learning_rate=0.2, warmup_steps=4, decay="linear", decay_steps=10)
  schedule = jax.jit(optimizers.learning_rate_schedule(config))
  theirs = optax.join_schedules(
    [optax.linear_schedule(0, 0.2, 4), optax.linear_schedule(0.2, 0, 10)], [4]
  )
  _allclose([schedule(step) for step in range(20)], [theirs(step) for step in range(20)])


# --- layers that start at zero, such as the last layers of heads


def test_a_last_layer_that_starts_at_zero_grows_as_under_sgd():
  rng = np.random.default_rng(0)
  x, hidden = rng.normal(size=(64, 16)).astype(f32), rng.normal(size=(16, 32)).astype(f32) / 4
  y = np.sin(x @ rng.normal(size=(16, 4)))
  start = {"hidden": {"kernel": hidden}, "last": {"kernel": np.zeros((32, 4), f32)}}

  def loss(params):
    features = jax.nn.relu(x @ params["hidden"]["kernel"])
    return jnp.mean((features @ params["last"]["kernel"] - y) ** 2)

  def train(name):
    """Trains; returns the norm of the last kernel and the optimizer's state."""
    optimizer = optimizers.make_optimizer(_config(name, learning_rate=0.2, clip_norm=5.0))

    def step(carry, _):
      params, state = carry
      updates, state = optimizer.update(jax.grad(loss)(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    begin = start, optimizer.init(start)
    (params, state), _ = jax.jit(lambda: jax.lax.scan(step, begin, length=60))()
    return jnp.linalg.norm(params["last"]["kernel"]), state

  norm, state = train("clipped_lars")
  assert norm > 0.5 * train("sgd")[0]
  ratios = optimizers.trust_ratios(state, start)
  assert ratios["last/kernel"] == 1 and 0 < ratios["hidden/kernel"] < 1


def test_an_exempt_kernel_decays_and_follows_momentum():
  """Against the recursion in float64: ratio 1, weight decay inside, momentum after."""
  config = _config(
    "clipped_lars", learning_rate=0.5, trust_coefficient=1e6, trust_max=0.25, weight_decay=0.1,
    momentum=0.9,
  )  # fmt: skip
  params = {"kernel": np.zeros((2, 3), f32)}
  trained, _ = _run(optimizers.make_optimizer(config), 5, params)
  w, buffer = np.zeros((2, 3)), np.zeros((2, 3))
  for i in range(5):
    buffer = 0.9 * buffer + _random_grads(params, i)["kernel"] + 0.1 * w
    w = w - 0.5 * buffer
  np.testing.assert_allclose(trained["kernel"], w, rtol=1e-5, atol=1e-6)


def test_norms_of_leaves_that_start_small_have_a_floor():
  # Norms: 5 of the bias, which is above its floor of 0.5 * sqrt(2); at least 0.5 * sqrt(4) of the
  # kernel, 0.5 of the scalar; 1 of the other kernel, which has no floor. Gradients' norms are 2.
  params = {
    "bias": f32([3, 4]), "kernel": np.zeros((1, 4), f32), "other": f32([[0.6, 0.8]]),
    "scalar": f32(0),
  }  # fmt: skip
  grads = {
    "bias": f32([2, 0]), "kernel": np.ones((1, 4), f32), "other": f32([[0, 2]]), "scalar": f32(2),
  }  # fmt: skip
  tx = scale_by_clipped_trust_ratio(0.1, trust_max=0.2, weight_decay=0.5, floor=0.5)
  updates, state = _step(tx, grads, params)
  other = 0.1 * 1 / (2 + 0.5)
  expected = {
    "bias": [0.4, 0], "kernel": 0.1 * 1 / (2 + 0.5) * grads["kernel"],
    "other": other * (grads["other"] + 0.5 * params["other"]), "scalar": 0.1 * 0.5,
  }  # fmt: skip
  _allclose(updates, expected)
  _allclose(optimizers.trust_ratios(state, params), {"kernel": 0.04, "other": other})


def test_many_leaves_are_updated_as_one_by_one():
  """Leaves of sizes around that of a row, against the same arithmetic leaf by leaf."""
  rng = np.random.default_rng(3)
  shapes = {"a": (1023,), "b": (33, 32), "c": (), "d": (3, 700), "e": (1024,), "f": (2, 2, 256)}
  params = {name: np.asarray(rng.normal(size=shape), f32) for name, shape in shapes.items()}
  config = _config("clipped_lars", learning_rate=0.5, trust_coefficient=0.3, clip_norm=5.0)
  updates, _ = _step(optimizers.make_optimizer(config), params, params)
  total = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in params.values()))
  np.testing.assert_allclose(optimizers.norm(params), total, rtol=1e-6)
  for name, w in params.items():
    g, w = np.float64(w) * 5 / total, np.float64(w)
    if w.ndim >= 2:
      norms, decay = np.linalg.norm(g), config.weight_decay
      ratio = 0.3 * np.linalg.norm(w) / (norms + decay * np.linalg.norm(w))
      g = np.clip(ratio, config.trust_min, config.trust_max) * (g + decay * w)
    np.testing.assert_allclose(updates[name], -0.5 * g, rtol=2e-6)
