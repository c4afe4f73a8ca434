"""Tests of sweeps: the order of cells, and the quota that bounds ages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedyzero_jax.replay.sweep import Sweep


def test_a_pass_visits_every_cell_once_in_neighboring_chunks():
  sweep = Sweep(lanes=3, capacity=10, chunk=4)
  sweep.grow(np.array([10, 2, 0]))
  sweep.grow(np.array([10, 5, 0]))
  assert len(sweep.state()) == 5  # 4 + 4 + 2 cells, and 4 + 1
  visits = np.zeros((3, 10), int)
  for _ in range(5):
    lane, cell = sweep.next_block(4)
    assert np.unique(lane).size == 1
    assert cell.max() - cell.min() < 4
    distinct = np.unique(cell)
    visits[lane[0], distinct] += 1
  assert visits[0].tolist() == [1] * 10
  assert visits[1].tolist() == [1] * 5 + [0] * 5
  assert not visits[2].any()


def test_blocks_are_filled_by_repetition():
  sweep = Sweep(lanes=2, capacity=10, chunk=4)
  sweep.grow(np.array([0, 3]))
  lane, cell = sweep.next_block(11)
  assert lane.tolist() == [1] * 11
  assert cell.tolist() == [0, 1, 2, 2] * 2 + [0, 1, 2]


def test_an_empty_sweep_has_no_block():
  with pytest.raises(ValueError, match="empty"):
    Sweep(lanes=1, capacity=10, chunk=4).next_block(4)


def test_a_backward_pass_visits_most_cells_in_the_block_after_their_successors():
  sweep, block_of = Sweep(lanes=2, capacity=32, chunk=8, phases=4), np.full((2, 32), -1)
  sweep.grow(np.array([32, 32]))
  for block in range(8):  # 4 per half of the chunks
    lane, cell = sweep.next_block(8)
    assert (block_of[lane, cell] == -1).all()  # each cell once
    block_of[lane, cell] = block
  delay = block_of[:, :-1] - block_of[:, 1:]
  assert (block_of >= 0).all() and (delay == 1).sum() == 3 / 4 * 64


@pytest.mark.parametrize("phases", [1, 2, 4])
def test_state_roundtrip(phases):
  sweep, other = (Sweep(lanes=2, capacity=20, chunk=4, phases=phases) for _ in range(2))
  other.load(sweep.state(), np.zeros(2, np.int64))  # of an empty replay
  used = np.array([20, 9])
  sweep.grow(used)
  sweep.next_block(9)
  other.load(sweep.state(), used)
  for _ in range(6):
    for mine, theirs in zip(sweep.next_block(8), other.next_block(8), strict=True):
      np.testing.assert_array_equal(mine, theirs)


@settings(max_examples=40)
@given(
  lanes=st.integers(1, 4),
  capacity=st.integers(1, 40),
  cells=st.integers(1, 5),
  phases=st.sampled_from([1, 1, 2, 3, 4]),
  n_extra=st.integers(0, 20),
  staleness=st.integers(0, 4),
  flight=st.integers(0, 4),
  slack=st.integers(2, 25),
  seed=st.integers(0, 2**32 - 1),
)
def test_no_stamp_gets_older_than_the_bound(
  lanes, capacity, cells, phases, n_extra, staleness, flight, slack, seed
):
  """Random appends, staleness of weights and delays of blocks; the caller observes the quota."""
  rng = np.random.default_rng(seed)
  delay = staleness + flight
  max_age = delay + slack
  chunk = cells * phases
  n = chunk + n_extra
  sweep = Sweep(lanes, capacity, chunk, phases)
  stamps = np.full((lanes, capacity), np.iinfo(np.int32).max)
  heads = np.zeros(lanes, int)
  in_flight: list[tuple[int, int, np.ndarray, np.ndarray]] = []
  credit = 0
  append_rate = rng.choice([0.1, 1.0, 5.0])
  stop_growing = rng.integers(20, 120)

  def land(step):
    for block in [b for b in in_flight if b[0] <= step]:
      _, weights, lane, cell = block
      stamps[lane, cell] = np.maximum(weights, stamps[lane, cell])
      in_flight.remove(block)

  for step in range(120):
    land(step)
    if len(sweep.state()):
      credit += sweep.quota(n, max_age, delay)
      while credit >= n:
        credit -= n
        lane, cell = sweep.next_block(n)
        weights = max(step - int(rng.integers(0, staleness + 1)), 0)
        in_flight.append((step + int(rng.integers(0, flight + 1)), weights, lane, cell))
      land(step)
    if step < stop_growing:
      for lane in range(lanes):
        for _ in range(rng.poisson(append_rate)):
          stamps[lane, heads[lane] % capacity] = max(step - rng.integers(0, staleness + 1), 0)
          heads[lane] += 1
          sweep.grow(np.minimum(heads, capacity))
    assert stamps.min() >= step - max_age


def test_the_quota_is_close_to_the_least_that_could_do():
  """Each of N slots once per max_age steps, plus the documented losses: one block, one step."""
  sweep = Sweep(lanes=16, capacity=1600, chunk=16)
  sweep.grow(np.full(16, 1600))
  assert sweep.quota(256, max_age=101) == -(-(25_600 + 256) // 100)
