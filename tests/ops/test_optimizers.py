"""The optimisers against numbers worked out by hand, numpy, and optax's own SGD."""

import dataclasses
import math
from typing import Any

import chex
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


def _params():
  """A kernel of norm 5 (3-4-5), a bias, a norm scale and a scalar."""
  return {
    "kernel": jnp.array([[3.0, 0.0], [0.0, 4.0]]),
    "bias": jnp.array([1.0, -2.0]),
    "norm": {"scale": jnp.array([2.0]), "temperature": jnp.array(0.5)},
  }


def _grads():
  """The kernel's gradient has norm 10 (6-8-10)."""
  return {
    "kernel": jnp.array([[0.0, 6.0], [8.0, 0.0]]),
    "bias": jnp.array([0.5, 0.25]),
    "norm": {"scale": jnp.array([-1.0]), "temperature": jnp.array(3.0)},
  }


def _random_grads(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)


def _step(tx, grads, params):
  return tx.update(grads, tx.init(params), params)


def _allclose(actual, expected, rtol=1e-6):
  chex.assert_trees_all_equal_structs(actual, expected)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), actual, expected)


# One step, by hand


def test_ratio_between_the_bounds():
  # 0.5 * 5 / (10 + 0.2 * 5 + 1.5) = 0.2; decayed gradient [[0.6, 6], [8, 0.8]].
  tx = optimizers.scale_by_clipped_trust_ratio(trust_coefficient=0.5, weight_decay=0.2, eps=1.5)
  updates, state = _step(tx, _grads(), _params())
  np.testing.assert_allclose(updates["kernel"], [[0.12, 1.2], [1.6, 0.16]], rtol=1e-6)
  np.testing.assert_allclose(optimizers.trust_ratios(state)["kernel"], 0.2, rtol=1e-6)
  assert optimizers.trust_ratio_summary(state)["fraction_clipped"] == 0


@pytest.mark.parametrize(
  "low, high, expected", [(0.0, 1.0, 1.0), (0.0, 0.25, 0.25), (2.0, 3.0, 2.0)]
)
def test_a_zero_gradient_has_ratio_one_before_clipping(low, high, expected):
  w, g = np.full((2, 2), 2.0, f32), np.zeros((2, 2), f32)
  tx = optimizers.scale_by_clipped_trust_ratio(0.001, low, high, weight_decay=0.5)
  updates, state = _step(tx, jnp.asarray(g), jnp.asarray(w))
  np.testing.assert_allclose(updates, expected * (g + 0.5 * w), rtol=1e-6)
  summary = optimizers.trust_ratio_summary(state)
  assert summary["max"] == expected
  assert summary["fraction_clipped"] == (expected != 1)


def test_nan_gradients_stay_visible():
  updates, state = _step(
    optimizers.scale_by_clipped_trust_ratio(), jnp.full((2, 2), jnp.nan), jnp.ones((2, 2))
  )
  assert np.isnan(updates).all()
  assert np.isnan(optimizers.trust_ratio_summary(state)["mean"])


# Masks


@pytest.mark.parametrize(
  "mask, adapted",
  [
    (None, ["kernel"]),
    (
      {"kernel": False, "bias": True, "norm": {"scale": True, "temperature": False}},
      ["bias", "norm/scale"],
    ),
    (
      {"kernel": True, "bias": False, "norm": True},
      ["kernel", "norm/scale", "norm/temperature"],
    ),  # a prefix
    (lambda tree: jax.tree.map(lambda leaf: leaf.shape == (2,), tree), ["bias"]),
    (lambda tree: jax.tree.map(lambda _: False, tree), []),
  ],
)
def test_mask_chooses_the_adapted_leaves(mask, adapted):
  params, grads = _params(), _grads()
  tx = optimizers.scale_by_clipped_trust_ratio(
    0.5, 0.125, 0.125, weight_decay=0.2, mask=mask
  )  # the ratio is always 1/8
  updates, state = _step(tx, grads, params)
  assert sorted(optimizers.trust_ratios(state)) == sorted(adapted)

  def expected(path, g, w):
    chosen = jax.tree_util.keystr(path, simple=True, separator="/") in adapted
    return 0.125 * (g + 0.2 * w) if chosen else g

  _allclose(updates, jax.tree_util.tree_map_with_path(expected, grads, params))


# Aliases: momentum, learning rate, equality with SGD


def _run(tx, steps, params):
  update, state = jax.jit(tx.update), tx.init(params)
  trajectory = []
  for i in range(steps):
    updates, state = update(_random_grads(params, i), state, params)
    params = optax.apply_updates(params, updates)
    trajectory.append(params)
  return trajectory, state


def test_clipped_lars_is_sgd_where_all_ratios_are_clipped_at_one():
  def rank_two(tree):
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)

  schedule = optimizers.learning_rate_schedule(
    OptimConfig(learning_rate=0.3, warmup_steps=3, decay_steps=4, decay_rate=0.5)
  )
  ours, state = _run(
    optimizers.clipped_lars(schedule, trust_coefficient=1e6, weight_decay=0.1, momentum=0.8),
    10,
    _params(),
  )
  sgd = optax.chain(
    optax.add_decayed_weights(0.1, mask=rank_two), optax.sgd(schedule, momentum=0.8)
  )
  theirs, _ = _run(sgd, 10, _params())
  assert optimizers.trust_ratio_summary(state)["fraction_clipped"] == 1
  _allclose(ours, theirs)


def _numpy_lars(kernel, bias, rates, *, trust_max):
  """Several steps in float64: buffer <- momentum * buffer + ratio * (g + wd * w), w <- w - rate
  * buffer."""
  eta, wd, momentum = 0.4, 0.1, 0.8
  kernel, bias = np.float64(kernel), np.float64(bias)
  kernel_buffer, bias_buffer = np.zeros_like(kernel), np.zeros_like(bias)
  for i, rate in enumerate(rates):
    grads = _random_grads({"bias": bias, "kernel": kernel}, i)
    g = np.float64(grads["kernel"])
    w_norm = math.sqrt((kernel**2).sum())
    ratio = min(eta * w_norm / (math.sqrt((g**2).sum()) + wd * w_norm), trust_max)
    kernel_buffer = momentum * kernel_buffer + ratio * (g + wd * kernel)
    bias_buffer = momentum * bias_buffer + np.float64(grads["bias"])
    kernel, bias = kernel - rate * kernel_buffer, bias - rate * bias_buffer
  return {"bias": bias, "kernel": kernel}


@pytest.mark.parametrize("name", ["clipped_lars", "lars"])
def test_lars_with_and_without_bounds_against_numpy(name):
  kernel, bias = np.array([[3.0, 1.0], [-2.0, 4.0]], f32), np.array([1.0, -2.0], f32)
  rates = [0.5, 0.25, 0.125, 0.0625]
  alias = {"clipped_lars": optimizers.clipped_lars, "lars": optimizers.lars}[name]
  tx = alias(
    lambda count: jnp.array(rates)[count], trust_coefficient=0.4, weight_decay=0.1, momentum=0.8
  )
  trajectory, state = _run(
    tx, len(rates), {"bias": jnp.asarray(bias), "kernel": jnp.asarray(kernel)}
  )
  expected = _numpy_lars(kernel, bias, rates, trust_max=1.0 if name == "clipped_lars" else math.inf)
  _allclose(trajectory[-1], expected, rtol=1e-5)
  # The data must tell the two apart.
  assert (optimizers.trust_ratio_summary(state)["max"] > 1) == (name == "lars")


# Types, and any numbers


def test_norms_are_float32_for_bfloat16_params():
  # The squared norm of w is 257, which bfloat16 would round to 256.
  w = jnp.ones((1, 257), jnp.bfloat16)
  g = jnp.zeros_like(w).at[0, 0].set(1)
  updates, state = _step(optimizers.scale_by_clipped_trust_ratio(2.0**-5), g, w)
  assert updates.dtype == jnp.bfloat16
  (ratio,) = optimizers.trust_ratios(state).values()
  assert ratio.dtype == jnp.float32
  np.testing.assert_allclose(ratio, math.sqrt(257) / 32, rtol=1e-6)


def test_bfloat16_product_is_rounded_once():
  # 1.75 * (1 + 2**-8) is nearest to 1.75 + 2**-7 in bfloat16; rounding the sum first, to 1, would
  # give 1.75.
  w, g = jnp.full((1, 1), 2.0**-8, jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16)
  updates, _ = _step(
    optimizers.scale_by_clipped_trust_ratio(0.0, 1.75, 1.75, weight_decay=1.0), g, w
  )
  assert updates[0, 0] == 1.75 + 2.0**-7


_magnitudes = st.floats(2.0**-10, 1024, width=32)
_matrices = hnp.arrays(
  f32, (2, 3), elements=st.just(0.0) | _magnitudes | _magnitudes.map(lambda x: -x)
)


def _up_to(most):
  return st.floats(0, most, width=32, allow_subnormal=False)  # XLA may flush subnormals to zero


@jax.jit
def _traced_step(g, w, eta, low, high, wd):
  return _step(optimizers.scale_by_clipped_trust_ratio(eta, low, high, wd), g, w)


@hypothesis.given(
  g=_matrices,
  w=_matrices,
  eta=_up_to(8),
  bounds=st.tuples(_up_to(4), _up_to(4)).map(sorted),
  wd=_up_to(1),
)
@hypothesis.settings(max_examples=100, deadline=None)
def test_ratio_is_bounded_and_the_update_parallel(g, w, eta, bounds, wd):
  updates, state = _traced_step(g, w, f32(eta), f32(bounds[0]), f32(bounds[1]), f32(wd))
  (ratio,) = optimizers.trust_ratios(state).values()
  assert bounds[0] <= ratio <= bounds[1] or not np.any(w)
  g, w = np.float64(g), np.float64(w)
  g_norm, w_norm = np.linalg.norm(g), np.linalg.norm(w)
  expected = eta * w_norm / (g_norm + wd * w_norm) if g_norm and w_norm else 1.0
  if np.any(w):  # else zero at initialization: exempt
    expected = np.clip(expected, *bounds)
  np.testing.assert_allclose(ratio, expected, rtol=1e-5, atol=1e-30)
  scale = float(ratio)
  np.testing.assert_allclose(
    updates, scale * (g + wd * w), rtol=1e-5, atol=1e-6 * scale * (g_norm + wd * w_norm)
  )


# Refusals


@pytest.mark.parametrize(
  "name", ["trust_coefficient", "trust_min", "trust_max", "weight_decay", "eps"]
)
@pytest.mark.parametrize("value", [-0.5, math.nan])
def test_refuses_negative_numbers(name, value):
  with pytest.raises(ValueError, match=f"{name} must be at least 0"):
    optimizers.scale_by_clipped_trust_ratio(**{name: value})


@pytest.mark.parametrize(
  "make", [optimizers.scale_by_clipped_trust_ratio, lambda **kw: optimizers.clipped_lars(0.1, **kw)]
)
def test_refuses_bounds_in_the_wrong_order(make):
  with pytest.raises(ValueError, match=r"trust_min must not exceed trust_max, got 0.5 > 0.25"):
    make(trust_min=0.5, trust_max=0.25)
  make(trust_min=0.5, trust_max=0.5)


# Metrics


def test_summary_counts_adapted_leaves_only():
  # Ratios before clipping, each |w| / |g|: 0.5, 2, 4, and an unadapted bias.
  params = {
    "a": jnp.ones((1, 1)),
    "b": jnp.full((2, 2), 2.0),
    "c": jnp.full((1, 3), 4.0),
    "bias": jnp.full((2,), 9.0),
  }
  grads = {
    "a": jnp.full((1, 1), 2.0),
    "b": jnp.ones((2, 2)),
    "c": jnp.ones((1, 3)),
    "bias": jnp.ones((2,)),
  }
  tx = optax.chain(
    optax.clip_by_global_norm(1e9),
    optimizers.clipped_lars(0.1, trust_coefficient=1.0, trust_max=3.0),
  )
  assert {k: float(v) for k, v in optimizers.trust_ratio_summary(tx.init(params)).items()} == {
    "min": 1, "mean": 1, "max": 1, "fraction_clipped": 0,
  }  # fmt: skip
  _, state = _step(tx, grads, params)
  assert {k: float(v) for k, v in optimizers.trust_ratios(state).items()} == pytest.approx(
    {"a": 0.5, "b": 2, "c": 3}
  )
  assert {k: float(v) for k, v in optimizers.trust_ratio_summary(state).items()} == pytest.approx(
    {"min": 0.5, "mean": 5.5 / 3, "max": 3, "fraction_clipped": 1 / 3}
  )


# Schedule


@pytest.mark.parametrize(
  "step, rate", [(0, 0.0), (1, 0.05), (4, 0.2), (13, 0.2), (14, 0.02), (23, 0.02), (24, 0.002)]
)
def test_schedule_values(step, rate):
  config = OptimConfig(learning_rate=0.2, warmup_steps=4, decay_steps=10, decay_rate=0.1)
  schedule = optimizers.learning_rate_schedule(config)
  np.testing.assert_allclose(schedule(step), rate, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(schedule)(jnp.array(step, jnp.int32)), rate, rtol=1e-6)


# make_optimizer

_steady: dict[str, Any] = {"warmup_steps": 0, "decay_steps": 0}


@pytest.mark.parametrize(
  "config",
  [
    OptimConfig(name="clipped_lars", learning_rate=0.2, trust_coefficient=0.1, **_steady),
    OptimConfig(name="lars", learning_rate=0.02, trust_coefficient=0.1, **_steady),
    OptimConfig(name="sgd", learning_rate=0.02, **_steady),
    OptimConfig(name="adam", learning_rate=0.05, **_steady),
  ],
  ids=lambda config: config.name,
)
def test_each_optimizer_converges_on_a_quadratic(config):
  target = {"kernel": jnp.array([[1.0, -1.0], [0.5, 2.0]]), "bias": jnp.array([0.3, -0.7])}
  tx = optimizers.make_optimizer(config)

  def loss(params):
    return sum(jnp.sum((params[k] - target[k]) ** 2) for k in target)

  @jax.jit
  def train(params):
    def body(carry, _):
      params, state = carry
      updates, state = tx.update(jax.grad(loss)(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, tx.init(params)), length=400)[0]

  start = {"kernel": jnp.full((2, 2), 0.1), "bias": jnp.zeros(2)}
  params, state = train(start)
  assert loss(params) < 0.01 * loss(start)
  assert bool(optimizers.trust_ratios(state)) == (config.name in ("clipped_lars", "lars"))


@pytest.mark.parametrize("name", ["clipped_lars", "lars", "sgd", "adam"])
def test_only_kernels_are_decayed(name):
  config = OptimConfig(name=name, learning_rate=1.0, weight_decay=0.25, clip_norm=0.0, **_steady)
  params = _params()
  updates, _ = _step(
    optimizers.make_optimizer(config), jax.tree.map(jnp.zeros_like, params), params
  )
  # A zero gradient has ratio 1, so all four take the same step.
  expected = jax.tree.map(jnp.zeros_like, params) | {"kernel": -0.25 * params["kernel"]}
  _allclose(updates, expected)


@pytest.mark.parametrize("name", ["clipped_lars", "lars"])
def test_make_optimizer_reads_every_number_of_lars(name):
  config = OptimConfig(
    name=name, learning_rate=0.5, momentum=0.5, weight_decay=0.2, trust_coefficient=0.5,
    trust_min=0.1, trust_max=0.3,
    trust_eps=0.7, clip_norm=0.0, warmup_steps=2, decay_steps=3, decay_rate=0.5,
  )  # fmt: skip
  numbers = {"trust_coefficient": 0.5, "eps": 0.7, "momentum": 0.5, "weight_decay": 0.2}
  numbers |= {"trust_min": 0.1, "trust_max": 0.3} if name == "clipped_lars" else {}
  ours, _ = _run(optimizers.make_optimizer(config), 6, _params())
  expected, _ = _run(
    getattr(optimizers, name)(optimizers.learning_rate_schedule(config), **numbers), 6, _params()
  )
  _allclose(ours, expected)


@pytest.mark.parametrize("alias", [optimizers.clipped_lars, optimizers.lars])
def test_eps_is_added_to_the_denominator_of_the_ratio(alias):
  g, w = jnp.array([[0.0, 6.0], [8.0, 0.0]]), jnp.array([[3.0, 0.0], [0.0, 4.0]])  # norms 10 and 5
  updates, _ = _step(alias(1.0, trust_coefficient=0.5, eps=2.5, momentum=0.0), g, w)
  np.testing.assert_allclose(updates, -0.5 * 5 / 12.5 * g, rtol=1e-6)


@pytest.mark.parametrize("clip_norm, factor", [(0.0, 1.0), (1.0, 0.1), (100.0, 1.0)])
def test_gradients_are_clipped_first(clip_norm, factor):
  config = OptimConfig(
    name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.1, clip_norm=clip_norm, **_steady
  )
  g, w = jnp.array([[0.0, 6.0], [8.0, 0.0]]), jnp.array([[3.0, 0.0], [0.0, 4.0]])  # norms 10 and 5
  updates, _ = _step(optimizers.make_optimizer(config), g, w)
  np.testing.assert_allclose(
    updates, -(factor * g + 0.1 * w), rtol=1e-6
  )  # the decay is not clipped


def test_adam_takes_momentum_as_b1():
  config = OptimConfig(
    name="adam", learning_rate=0.1, momentum=0.5, weight_decay=0.0, clip_norm=0.0, **_steady
  )
  ours, _ = _run(optimizers.make_optimizer(config), 3, _params())
  _allclose(ours, _run(optax.adam(0.1, b1=0.5), 3, _params())[0])


@pytest.mark.parametrize(
  "field",
  [
    "learning_rate",
    "warmup_steps",
    "decay_steps",
    "decay_rate",
    "momentum",
    "weight_decay",
    "clip_norm",
    "trust_min",
  ],
)
def test_make_optimizer_refuses_negative_settings(field):
  negative: dict[str, Any] = {field: -1}
  with pytest.raises(ValueError, match=f"{field} must be at least 0"):
    optimizers.make_optimizer(dataclasses.replace(OptimConfig(), **negative))


def test_make_optimizer_refuses_an_unknown_name():
  with pytest.raises(ValueError, match=r"optim\.name must be .*'lamb'"):
    optimizers.make_optimizer(OptimConfig(name="lamb"))  # type: ignore[arg-type]
