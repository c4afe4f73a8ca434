"""Temporal-difference targets for Q-learning: n-step returns of stored steps, and TD errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.ops.rescaling import inverse_transform, transform
from speedyzero_jax.replay.storage import LaneStore, take


class NStep(NamedTuple):
  """Returns of states up to a later state, whose value completes them: reward + discount * V."""

  reward: np.ndarray  # [B] float32, sum of discount^i reward[t+i] for i < steps
  discount: np.ndarray  # [B] float32, discount^steps; 0 if the episode terminated there
  steps: np.ndarray  # [B] int32, from the state to the later one: n, or less at an episode's end


def n_step(store: LaneStore, lane: np.ndarray, time: np.ndarray, n: int, discount: float) -> NStep:
  """n-step returns of live slots (lane [B], time [B]) in which an action was taken.

  A truncated episode's last frame has a slot of its own, whose value is used like any other's.
  """
  last = store.last(lane, time)
  steps = np.minimum(n, last - time)
  flat = store.flat(lane[:, None], np.minimum(time[:, None] + np.arange(n), last[:, None]))
  powers = discount ** np.arange(n + 1)
  counted = np.arange(n) < steps[:, None]
  reward = np.where(counted, powers[:n] * take(store.reward, flat), 0.0).sum(-1)
  terminated = take(store.terminated, store.flat(lane, time + steps))
  return NStep(
    reward.astype(np.float32),
    np.where(terminated, 0.0, powers[steps]).astype(np.float32),
    steps.astype(np.int32),
  )


def chosen(values: jax.Array, action: jax.Array) -> jax.Array:
  """Values [..., A] of all actions -> those of the actions [...]."""
  return jnp.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def q_learning_error(
  q: jax.Array,
  action: jax.Array,
  reward: jax.Array,
  discount: jax.Array,
  next_q: jax.Array,
  selector: jax.Array,
  *,
  rescaled: bool = False,
) -> jax.Array:
  """Target minus Q(s, a), [B]; the target has no gradient.

  Args:
    q: [B, A] of the states; more leading axes are fine, in all arguments.
    action: [B] taken in them.
    reward: [B] from `n_step`.
    discount: [B] likewise.
    next_q: [B, A] of the later states, by the target network.
    selector: [B, A] whose maximum chooses the later action: `next_q` (Mnih et al. 2015), or the
      online network's Q of the same states for double Q-learning (van Hasselt et al. 2016).
    rescaled: all Q are h(Q) of `ops.rescaling` (Kapturowski et al. 2019, section 2.3).
  """
  value = chosen(next_q, jnp.argmax(selector, axis=-1))
  if rescaled:
    target = transform(reward + discount * inverse_transform(value))
  else:
    target = reward + discount * value
  return jax.lax.stop_gradient(target) - chosen(q, action)
