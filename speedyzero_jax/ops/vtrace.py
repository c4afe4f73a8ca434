"""V-trace targets and advantages of a trajectory (Espeholt et al. 2018, section 4.1).

With all ratios 1 they equal those of GAE(lambda) (Schulman et al. 2016).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class VTrace(NamedTuple):
  """V-trace results, [T] each, without gradients."""

  targets: jax.Array  # v_t, targets of the value
  advantages: jax.Array  # of the actions, weighted by the clipped ratios


def vtrace(
  reward: jax.Array,
  discount: jax.Array,
  value: jax.Array,
  ratio: jax.Array,
  *,
  lambda_: Any = 1.0,
  rho_bar: float = 1.0,
  c_bar: float = 1.0,
  rho_bar_pg: float = 1.0,
) -> VTrace:
  """Computes V-trace of one trajectory, which may span several episodes; use `vmap` for batches.

  A ratio of 0 marks the last slot of an episode, in which no action was taken. Its advantage is 0,
  its target is its own value, and no correction propagates backwards through it. So the returns of
  a truncated episode bootstrap from the value of its last slot.

  Args:
    reward: [T], of the action taken in slot t.
    discount: [T], 0 if slot t+1 is terminal.
    value: [T+1], V(x_t).
    ratio: [T], pi(a_t|x_t) / mu(a_t|x_t) of target and behavior policy.
    lambda_: [T] or [], 0: one-step returns.
    rho_bar: clips the ratios of temporal differences; determines the fixed point.
    c_bar: clips the ratios of traces; determines the speed of contraction.
    rho_bar_pg: clips the ratios of advantages.
  """
  weight, trace = jnp.minimum(rho_bar, ratio), discount * lambda_ * jnp.minimum(c_bar, ratio)
  error = weight * (reward + discount * value[1:] - value[:-1])

  def back(later: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    total = slot[0] + slot[1] * later
    return total, total

  _, correction = jax.lax.scan(back, jnp.zeros((), error.dtype), (error, trace), reverse=True)
  next_correction = jnp.append(correction[1:], 0)  # v_{t+1} - V(x_{t+1})
  q = reward + discount * (value[1:] + lambda_ * next_correction)
  advantage = jnp.minimum(rho_bar_pg, ratio) * (q - value[:-1])
  return VTrace(*jax.lax.stop_gradient((value[:-1] + correction, advantage)))
