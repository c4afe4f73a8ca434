"""Comparison of values predicted while acting with the discounted returns that followed."""

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.types import Slots


class ValueStats:
  """Means of values and returns over the states of ended episodes.

  The return from t is sum_k discount^k reward[t+k], of training rewards, up to the episode's end. A
  truncated episode's return bootstraps from the value of its last frame. States that were stored
  before this object was created, or acted on with untrained weights, do not count.

  `scale` is `Agent.value_scale`.
  """

  def __init__(self, lanes: int, discount: float, scale: float):
    self._discount, self._scale = discount, scale
    # Sums over the states t of each lane's open episode, at its newest state T: of
    # discount^(T-t), 1, values and returns.
    self._sums = np.zeros((4, lanes))

  def add(self, slots: Slots) -> dict[str, float]:
    """Adds one step of some lanes and returns the metrics of episodes that it ends; {}: none.

    Each lane has at most two slots, a state with an action and an episode's last frame, in this
    order.
    """
    if not self._scale:
      return {}
    value = slots["value"] / self._scale
    self._sums[:, slots.lane[slots["first"]]] = 0  # an environment may have been lost
    acted, ended = slots["action"] >= 0, slots["terminated"] | slots["truncated"]
    lane, trained = slots.lane[acted], slots["step"][acted] > 0
    powers, states, values, returns = self._sums[:, lane]
    powers = trained + self._discount * powers
    returns = returns + slots["reward"][acted] * powers
    self._sums[:, lane] = powers, states + trained, values + trained * value[acted], returns
    if not ended.any():
      return {}
    lane = slots.lane[ended]
    powers, states, values, returns = self._sums[:, lane]
    last = np.where(slots["terminated"], 0, value)[ended]
    returns = returns + last * self._discount * powers
    self._sums[:, lane] = 0
    count = states.sum()
    if not count:
      return {}
    return {names.VALUE: values.sum() / count, names.DISCOUNTED_RETURN: returns.sum() / count}
