"""The log of writes against a dictionary of each cell's latest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.replay.write_log import WriteLog

CELLS = 6
writes = st.lists(st.lists(st.integers(0, CELLS - 1), max_size=CELLS, unique=True), max_size=25)


@given(writes, st.integers(1, 9), st.data())
def test_a_follower_sees_the_latest_write_of_every_cell(appends, n, data):
  """Also of cells that were written long ago, while others are written over and over."""
  log, latest, count = WriteLog(CELLS), {}, 0
  for cells in appends:
    log.append(np.array(cells, np.int64))
    for cell in cells:
      latest[cell] = count
      count += 1
  assert log.count == count
  number = begin = data.draw(st.integers(0, count))
  seen, answers = [], 0
  while (answer := log.since(number, n))[1].size:
    following, cells = answer
    assert number < following <= count and 0 < len(cells) <= n
    number, answers = following, answers + 1
    seen += cells.tolist()
  assert number == count or not seen
  assert set(seen) >= {cell for cell, written in latest.items() if written >= begin}
  order = [
    cell for i, cell in enumerate(seen) if cell not in seen[i + 1 :] and latest[cell] >= begin
  ]
  assert order == sorted(order, key=latest.__getitem__)
  assert len(seen) <= 2 * CELLS and answers <= -(-2 * CELLS // n)  # old writes are forgotten
  assert log.since(count + 3, n)[0] == count + 3  # of a follower of another log


def test_what_was_given_is_not_written_over():
  log = WriteLog(2)
  log.append(np.array([0, 1]))
  _, cells = log.since(0, 9)
  for _ in range(5):
    log.append(np.array([1]))
  assert cells.tolist() == [0, 1]
