"""Temporal-difference targets: n-step returns, TD errors, projected distributions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.ops.value_encoding import inverse_transform, transform
from speedyzero_jax.replay.storage import LaneStore, take

Array = Any  # numpy or jax


class NStep(NamedTuple):
  """n-step returns reward + discount * V, where V is the value of the bootstrap state."""

  reward: np.ndarray  # [...] float32, sum of discount^i reward[t+i] for i < steps
  discount: np.ndarray  # [...] float32, discount^steps; 0 if the bootstrap state is terminal
  steps: np.ndarray  # [...] int32, steps to the bootstrap state: n, or less at an episode's end


def n_step(store: LaneStore, lane: np.ndarray, time: np.ndarray, n: int, discount: float) -> NStep:
  """Computes n-step returns [...] of live slots (lane, time [...]) in which an action was taken.

  The last frame of a truncated episode has its own slot, from which returns bootstrap.
  """
  last = store.last(lane, time)
  steps = np.minimum(n, last - time)
  flat = store.flat(lane[..., None], np.minimum(time[..., None] + np.arange(n), last[..., None]))
  powers = discount ** np.arange(n + 1)
  counted = np.arange(n) < steps[..., None]
  reward = np.where(counted, powers[:n] * take(store.reward, flat), 0.0).sum(-1)
  terminated = take(store.terminated, store.flat(lane, time + steps))
  return NStep(
    reward.astype(np.float32),
    np.where(terminated, 0.0, powers[steps]).astype(np.float32),
    steps.astype(np.int32),
  )


def bootstrapped(reward: Array, discount: Array, value: Array, *, rescaled: bool = False) -> Array:
  """reward + discount * value, see `NStep`; if `rescaled`, input and output values are h(x)."""
  if not rescaled:
    return reward + discount * value
  return transform(reward + discount * inverse_transform(value))


def mixed_priority(error: Array, mask: Array, eta: float) -> Array:
  """eta * max + (1 - eta) * mean of |error| [B, T], over entries where `mask` is 1; [B]."""
  size = abs(error) * mask
  return eta * size.max(axis=1) + (1 - eta) * size.sum(axis=1) / mask.sum(axis=1).clip(min=1)


def chosen(values: jax.Array, action: jax.Array) -> jax.Array:
  """Selects values [...] of actions [...] from values [..., A] of all actions."""
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
  """Computes target minus Q(s, a), [B]; the target has no gradient.

  `reward` and `discount` [B] are from `n_step`; `next_q` [B, A] is the target network's Q of the
  bootstrap states. The action there is the argmax of `selector` [B, A]: `next_q` (Mnih et al.
  2015), or the online network's Q for double Q-learning (van Hasselt et al. 2016). With `rescaled`,
  all Q are h(Q), see `transform` (Kapturowski et al. 2019, section 2.3). All arguments may have
  further leading axes.
  """
  value = chosen(next_q, jnp.argmax(selector, axis=-1))
  target = bootstrapped(reward, discount, value, rescaled=rescaled)
  return jax.lax.stop_gradient(target) - chosen(q, action)


def project(logits: jax.Array, reward: jax.Array, discount: jax.Array, atoms: Array) -> jax.Array:
  """Projects distributions of reward + discount * return onto the atoms; probabilities [B, K].

  The mass of a shifted atom is split between the two nearest atoms, which preserves the mean. Mass
  beyond the first or last atom goes to that atom (Bellemare et al. 2017, algorithm 1).

  `logits` [B, K] are those of the distributions, `reward` and `discount` [B] are from `n_step`, and
  `atoms` [K] are increasing and equally spaced.
  """
  moved = jnp.clip(reward[:, None] + discount[:, None] * atoms, atoms[0], atoms[-1])  # [B, K]
  distance = jnp.abs(moved[:, None] - atoms[:, None]) / (atoms[1] - atoms[0])  # [B, to, from]
  mass = jax.nn.softmax(logits)
  return jnp.sum(jnp.clip(1 - distance, 0, 1) * mass[:, None], axis=-1)
