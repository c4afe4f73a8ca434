"""Layers that start at zero, such as the last layers of heads, learn under (Clipped) LARS as
fast as under SGD."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from speedyzero_jax.config.schema import OptimConfig
from speedyzero_jax.ops import optimizers

STEPS = 60


def train(name, learning_rate):
  """Norms of a hidden and a zero-started last kernel after regression on a fixed data set."""
  keys = jax.random.split(jax.random.key(0), 3)
  x = jax.random.normal(keys[0], (64, 16))
  y = jnp.sin(x @ jax.random.normal(keys[1], (16, 4)))
  params = {
    "hidden": {"kernel": jax.random.normal(keys[2], (16, 32)) / 4, "bias": jnp.zeros(32)},
    "last": {"kernel": jnp.zeros((32, 4)), "bias": jnp.zeros(4)},
  }
  config = OptimConfig(name=name, learning_rate=learning_rate, warmup_steps=0, decay_steps=0)
  optimizer = optimizers.make_optimizer(config)

  def loss(params):
    hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((hidden @ params["last"]["kernel"] + params["last"]["bias"] - y) ** 2)

  @jax.jit
  def step(params, state):
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  state = optimizer.init(params)
  for _ in range(STEPS):
    params, state = step(params, state)
  return {k: float(jnp.linalg.norm(v["kernel"])) for k, v in params.items()}, state


@pytest.mark.parametrize("name", ["clipped_lars", "lars"])
def test_the_last_layer_grows_as_under_sgd(name):
  norms, state = train(name, 0.2)
  assert norms["last"] > 0.5 * train("sgd", 0.2)[0]["last"]
  ratios = {k: float(v) for k, v in optimizers.trust_ratios(state).items()}
  assert ratios["last/kernel"] == 1
  assert 0 < ratios["hidden/kernel"] < 1


def test_an_exempt_kernel_decays_and_follows_momentum():
  """Against the recursion in float64: ratio 1, weight decay inside, momentum after."""
  transform = optimizers.clipped_lars(0.5, trust_max=0.25, weight_decay=0.1, momentum=0.9)
  w, buffer = np.zeros((2, 3)), np.zeros((2, 3))
  params = {"kernel": jnp.zeros((2, 3), jnp.float32)}
  state = transform.init(params)
  rng = np.random.default_rng(0)
  for _ in range(5):
    g = rng.normal(size=(2, 3))
    updates, state = transform.update({"kernel": jnp.asarray(g, jnp.float32)}, state, params)
    params = optax.apply_updates(params, updates)
    buffer = 0.9 * buffer + g + 0.1 * w
    w = w - 0.5 * buffer
    np.testing.assert_allclose(params["kernel"], w, rtol=1e-5, atol=1e-6)
  assert not any(jax.tree.leaves(optimizers.trust_ratio_summary(state)["fraction_clipped"]))
