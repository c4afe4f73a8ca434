"""Tests of n-step returns of stored steps, Q-learning errors and projections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import episodes
from speedyzero_jax.ops import td
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.replay.storage import LaneStore
from trained import h


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("capacity", [500, 61])  # the smaller one has lost the oldest
def test_n_step_returns_with_ends_at_every_position(n, capacity):
  rng = np.random.default_rng(n)
  schema = make_schema((1, 1, 2), "float32", 3)
  store, played = LaneStore(schema, 2, capacity), []
  for lane in range(store.lanes):
    mine = episodes.every_end(7, rng)
    played += [(lane, mine)]
    whole = episodes.recorded(schema, lane, mine, rng)
    for start in range(0, len(whole), 11):
      store.append(whole.select(slice(start, start + 11)))
  asked, expected = [], []
  for lane, mine in played:
    start = 0
    for episode in mine:
      for i in range(len(episode.rewards)):
        found = episodes.n_step_return(episode, i, n, 0.9)
        if found and start + i >= store.tail[lane]:
          asked.append((lane, start + i))
          expected.append(found)
      start += episode.slots
  assert len(asked) > 40
  lane, time = np.array(asked).T
  returns = td.n_step(store, lane, time, n, 0.9)
  for ours, theirs in zip(returns, zip(*expected, strict=True), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_the_q_learning_error():
  q = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
  next_q = jnp.array([[10.0, 20.0, 30.0], [7.0, 1.0, 9.0]])
  online = jnp.array([[0.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
  action, reward = jnp.array([1, 2]), jnp.array([0.5, -1.0])
  discount = jnp.array([0.9, 0.0])

  def error(q, next_q, selector):
    return td.q_learning_error(q, action, reward, discount, next_q, selector)

  np.testing.assert_allclose(error(q, next_q, next_q), [0.5 + 27 - 2, -1 - 6], rtol=1e-6)
  np.testing.assert_allclose(error(q, next_q, online), [0.5 + 18 - 2, -1 - 6], rtol=1e-6)
  slopes = jax.grad(lambda *args: error(*args).sum(), argnums=(0, 1, 2))(q, next_q, online)
  np.testing.assert_array_equal(slopes[0], [[0, -1, 0], [0, 0, -1]])
  assert not np.any(slopes[1]) and not np.any(slopes[2])


def test_the_q_learning_error_of_rescaled_values():
  q, action = jnp.array([[1.0, 2.0], [0.5, -3.0]]), jnp.array([1, 0])
  next_q, online = jnp.array(h(np.array([[10.0, -20.0], [7.0, 9.0]]))), jnp.array([[0, 1], [1, 0]])
  found = td.q_learning_error(
    q, action, jnp.array([0.5, -4.0]), jnp.array([0.9, 0.0]), next_q, online, rescaled=True
  )
  np.testing.assert_allclose(found, [h(0.5 - 18) - 2, h(-4.0) - 0.5], rtol=1e-5)


# As rlax.categorical_l2_project gives them.
@pytest.mark.parametrize(
  ("logits", "reward", "discount", "expected"),
  [
    ([0.1, 0.2, 0.3, 0.4, 0.5], 0.3, 0.9, [0.032424, 0.183447, 0.204625, 0.228228, 0.351275]),
    ([1, 0, -1, 2, 0.5], -2, 0.9, [1, 0, 0, 0, 0]),
    ([0, 1, 2, 3, 4], 0.25, 0, [0, 0, 0.5, 0.5, 0]),  # beyond a terminal: the reward alone
    ([0.3, 0.3, 0.3, -2, 1], 0.1, 0.5, [0, 0.215095, 0.338301, 0.367849, 0.078754]),
  ],
)
def test_projections(logits, reward, discount, expected):
  atoms, logits = jnp.linspace(-1, 1, 5), jnp.array([logits], jnp.float32)
  found = td.project(logits, jnp.array([reward]), jnp.array([discount]), atoms)[0]
  np.testing.assert_allclose(found, expected, atol=2e-6)
  moved = reward + discount * np.array(atoms)
  if np.abs(moved).max() <= 1:  # then the mean is kept
    mean = jax.nn.softmax(logits[0]) @ moved
    np.testing.assert_allclose(found @ atoms, mean, atol=1e-6)
