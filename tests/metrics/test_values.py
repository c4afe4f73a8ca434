"""`ValueStats` against returns computed backward from whole episodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.values import ValueStats
from speedyzero_jax.types import Slots

LANES, DISCOUNT = 3, 0.9
COLUMNS = "first", "terminated", "truncated", "action", "step", "reward", "value"
SCALE = 0.5


class Stream:
  """A lane's random slots, with the values of `COLUMNS`."""

  def __init__(self, rng):
    self.rng, self.new, self.episode = rng, True, []
    self.closed = None  # sums of values, returns and states of the episode that just ended

  def next(self):
    lost = self.rng.random() < 0.05
    first = self.new or lost
    self.episode = [] if first else self.episode
    end = self.rng.random() < 0.3 and not first
    terminated = end and self.rng.random() < 0.5
    reward, value = self.rng.normal(size=2).astype(np.float32)
    step = int(self.rng.random() < 0.9)  # 0: untrained weights
    self.new, self.closed = end, None
    if end:
      total = 0.0 if terminated else float(value) / SCALE
      returns = []
      for r, _, step_of_weights in reversed(self.episode):
        total = r + DISCOUNT * total
        returns += [total] * step_of_weights
      values = [v / SCALE for _, v, step_of_weights in self.episode if step_of_weights]
      self.closed = sum(values), sum(returns), len(returns)
      return first, terminated, not terminated, -1, step, 0.0, value
    self.episode.append((float(reward), float(value), step))
    return first, False, False, 1, step, reward, value


@given(st.integers(0, 2**32 - 1))
def test_returns_are_those_of_whole_episodes(seed):
  streams = [Stream(np.random.default_rng([seed, lane])) for lane in range(LANES)]
  stats = ValueStats(LANES, DISCOUNT, SCALE)
  for time in range(30):
    rows = [np.array(x) for x in zip(*(stream.next() for stream in streams), strict=True)]
    columns = dict(zip(COLUMNS, rows, strict=True))
    metrics = stats.add(Slots(np.arange(LANES), np.full(LANES, time), columns))
    closed = [stream.closed for stream in streams if stream.closed]
    if not sum(states for _, _, states in closed):
      assert metrics == {}
      continue
    value, returns, states = np.sum(closed, axis=0)
    assert metrics[names.VALUE] == pytest.approx(value / states, abs=1e-5)
    assert metrics[names.DISCOUNTED_RETURN] == pytest.approx(returns / states, abs=1e-5)


def test_an_episode_that_acts_and_ends_in_one_call():
  columns = {
    "first": np.array([True, False]), "terminated": np.array([False, False]),
    "truncated": np.array([False, True]), "action": np.array([0, -1]),
    "step": np.array([7, 7]), "reward": np.array([1.0, 0.0]), "value": np.array([3.0, 2.0]),
  }  # fmt: skip
  metrics = ValueStats(1, 0.5, 1).add(Slots(np.zeros(2, int), np.arange(2), columns))
  assert metrics == {names.VALUE: 3.0, names.DISCOUNTED_RETURN: 2.0}  # 1 + 0.5 * 2


def test_agents_without_values_have_no_metrics():
  columns = {"first": np.array([True]), "action": np.array([0])}
  assert ValueStats(1, 0.5, 0).add(Slots(np.zeros(1, int), np.zeros(1, int), columns)) == {}
