"""Comparison of values predicted while acting with the discounted returns that followed."""

import numpy as np

from speedyzero_jax.metrics import names
from speedyzero_jax.types import Slots


class ValueStats:
  """Means of values and returns over the states of ended episodes, for agents that store `value`.

  The return from t is sum_k discount^k reward[t+k], of training rewards, up to the episode's end. A
  truncated episode's return bootstraps from the value of its last frame. States that were stored
  before this object was created do not count.
  """

  def __init__(self, lanes: int, discount: float):
    self._discount = discount
    # Sums over the states t of a lane's open episode, at the newest state T:
    self._weight = np.zeros(lanes)  # of discount^(T-t)
    self._states, self._value, self._return = np.zeros((3, lanes))

  def add(self, slots: Slots) -> dict[str, float]:
    """Adds one step of some lanes and returns the metrics of episodes that it ends; {}: none.

    Each lane has at most two slots, a state with an action and an episode's last frame, in this
    order.
    """
    if "value" not in slots.columns:
      return {}
    self._clear(slots.lane[slots["first"]])  # an environment may have been lost
    acted, ended = slots["action"] >= 0, slots["terminated"] | slots["truncated"]
    lane = slots.lane[acted]
    self._weight[lane] = 1 + self._discount * self._weight[lane]
    self._states[lane] += 1
    self._value[lane] += slots["value"][acted]
    self._return[lane] += slots["reward"][acted] * self._weight[lane]
    lane = slots.lane[ended]
    last = np.where(slots["terminated"], 0, slots["value"])[ended]
    returns = self._return[lane] + last * self._discount * self._weight[lane]
    states, values = self._states[lane].sum(), self._value[lane].sum()
    self._clear(lane)
    if not states:
      return {}
    return {names.VALUE: values / states, names.DISCOUNTED_RETURN: returns.sum() / states}

  def _clear(self, lane: np.ndarray) -> None:
    for sums in (self._weight, self._states, self._value, self._return):
      sums[lane] = 0
