"""V-trace targets and advantages of a trajectory (Espeholt et al. 2018, section 4.1).

With all ratios 1 they are those of GAE(lambda) (Schulman et al. 2016).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class VTrace(NamedTuple):
  """Results, [T] each. No gradient passes through them."""

  targets: jax.Array  # v_t, for the value
  advantages: jax.Array  # of the actions, weighted with the clipped ratios


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
  """V-trace of one trajectory, which may contain the ends of episodes; `jax.vmap` it over a batch.

  A ratio of 0 means that no action was taken in a slot, the last one of its episode: its advantage
  is 0, its target its own value, and nothing passes back over it. So an episode that was truncated
  is bootstrapped from the value of its last slot.

  Args:
    reward: [T], of the action taken in slot t.
    discount: [T], 0 if slot t+1 is terminal.
    value: [T+1], V(x_t).
    ratio: [T], pi(a_t|x_t) / mu(a_t|x_t) of target and behavior policy.
    lambda_: [T] or [], mixes multi-step with one-step returns.
    rho_bar: largest weight of a temporal difference, which decides what value is estimated.
    c_bar: largest weight of later ones, which decides the speed of contraction.
    rho_bar_pg: largest weight of an advantage.
  """
  weight, trace = jnp.minimum(rho_bar, ratio), discount * lambda_ * jnp.minimum(c_bar, ratio)
  error = weight * (reward + discount * value[1:] - value[:-1])

  def back(later: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    here = slot[0] + slot[1] * later
    return here, here

  _, correction = jax.lax.scan(back, jnp.zeros((), error.dtype), (error, trace), reverse=True)
  following = jnp.append(correction[1:], 0)  # v_{t+1} - V(x_{t+1})
  q = reward + discount * (value[1:] + lambda_ * following)
  advantage = jnp.minimum(rho_bar_pg, ratio) * (q - value[:-1])
  return VTrace(*jax.lax.stop_gradient((value[:-1] + correction, advantage)))
