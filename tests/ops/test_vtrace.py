"""Tests of V-trace against published definitions: fixed vectors, and sums over each episode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.ops.vtrace import vtrace

REWARD, DISCOUNT = [1.0, 0, -1, 2], [0.9, 0.9, 0, 0.9]
VALUE, RATIO = [0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 2, 1, 3]


_compiled = jax.jit(vtrace)


# As rlax.vtrace_td_error_and_advantage gives them.
@pytest.mark.parametrize(
  ("ratio", "options", "targets", "advantages"),
  [
    (RATIO, {}, [0.145, -0.9, -1, 2.45], [0.045, -1.1, -1.3, 2.05]),
    (RATIO, {"rho_bar": 2.0}, [0.1765, -0.83, -1, 4.5], [0.0765, -1.1, -1.3, 2.05]),
    (np.ones(4), {"lambda_": 0.95}, [0.289518, -0.8415, -1, 2.45], [0.189518, -1.0415, -1.3, 2.05]),
  ],
)
def test_fixed_vectors(ratio, options, targets, advantages):
  found = _compiled(*map(jnp.array, (REWARD, DISCOUNT, VALUE, ratio)), **options)
  np.testing.assert_allclose(found.targets, targets, rtol=1e-5)
  np.testing.assert_allclose(found.advantages, advantages, rtol=1e-5)


def episode_reference(reward, discount, value, ratio, lambda_, rho_bar, c_bar, rho_bar_pg):
  """The sums of section 4.1 and remark 2, for one episode or a piece of it, in float64."""
  size = len(reward)
  rho, c = np.minimum(rho_bar, ratio), lambda_ * np.minimum(c_bar, ratio)
  delta = rho * (reward + discount * value[1:] - value[:-1])
  target = value.copy()
  for s in range(size):
    for t in range(s, size):
      target[s] += np.prod(discount[s:t] * c[s:t]) * delta[t]
  mixed = lambda_ * target[1:] + (1 - lambda_) * value[1:]
  advantage = np.minimum(rho_bar_pg, ratio) * (reward + discount * mixed - value[:-1])
  return target[:-1], advantage


def reference(x, lambda_, **clips):
  """Splits at the ends of episodes; each piece ends with a bootstrap value or with 0."""
  size = len(x["reward"])
  targets, advantages = x["value"][:-1].copy(), np.zeros(size)  # of slots without an action
  start = 0
  while start < size:
    if not x["acted"][start]:
      start += 1
      continue
    end = start
    while end < size and x["acted"][end]:
      end += 1
    piece = slice(start, end)
    value = x["value"][start : end + 1].copy()
    discount = x["discount"][piece].copy()
    if x["terminated"][end]:
      value[-1], discount[-1] = 0, 0.9  # as if bootstrapped from 0
    targets[piece], advantages[piece] = episode_reference(
      x["reward"][piece], discount, value, x["ratio"][piece], lambda_[piece], **clips
    )
    start = end
  return targets, advantages


@st.composite
def trajectories(draw):
  size = draw(st.sampled_from([1, 2, 7]))  # each compiles
  # Of each slot: an action is taken, or its episode is terminated or truncated there.
  kinds = draw(st.lists(st.sampled_from("aaaatx"), min_size=size + 1, max_size=size + 1))
  acted, terminated = np.array(kinds) == "a", np.array(kinds) == "t"
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  discount = np.where(terminated[1:], 0, rng.choice([0.9, 1.0], size))
  ratio = np.where(acted[:-1], np.exp(rng.normal(size=size)), 0)
  value, reward = rng.normal(size=size + 1), rng.normal(size=size) * acted[:-1]
  return {
    "acted": acted, "terminated": terminated, "discount": discount, "ratio": ratio, "value": value,
    "reward": reward, "lambda_": rng.uniform(size=size),
  }  # fmt: skip


@given(trajectories(), *[st.sampled_from([0.5, 1.0, 2.0, np.inf])] * 3)
def test_every_episode_of_a_trajectory_by_itself(x, rho_bar, c_bar, rho_bar_pg):
  clips = {"rho_bar": rho_bar, "c_bar": c_bar, "rho_bar_pg": rho_bar_pg}
  targets, advantages = reference(x, x["lambda_"], **clips)
  arrays = (np.float32(x[name]) for name in ("reward", "discount", "value", "ratio"))
  got = _compiled(*arrays, lambda_=np.float32(x["lambda_"]), **clips)
  np.testing.assert_allclose(got.targets, targets, rtol=2e-4, atol=2e-4)
  np.testing.assert_allclose(got.advantages, advantages, rtol=2e-4, atol=2e-4)


def test_no_gradient_passes():
  arrays = [jnp.array(x) for x in (REWARD, DISCOUNT, VALUE, RATIO)]
  gradient = jax.grad(lambda *a: sum(x.sum() for x in vtrace(*a)), range(4))
  assert not any(x.any() for x in jax.jit(gradient)(*arrays))
