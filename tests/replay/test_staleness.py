"""Stamps against a look at all cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speedyzero_jax.replay.staleness import NEVER, Stamps

CELLS = 12
steps = st.sampled_from([0, 1, 2, 3, 900, NEVER])
changes = st.lists(st.lists(st.tuples(st.integers(0, CELLS - 1), steps), max_size=20), max_size=12)


@given(changes, st.booleans())
def test_the_oldest_and_the_ages_are_those_of_a_look_at_all_cells(changes, one_for_all):
  """Cells are named twice in one call, stamped again, emptied and filled again."""
  stamps, truth = Stamps((3, CELLS // 3)), np.full(CELLS, NEVER)
  for change in changes:
    cell, step = np.array(change, np.int64).reshape(-1, 2).T
    if one_for_all and len(step):
      step[:] = step[0]
      stamps.set(cell, int(step[0]))
    else:
      stamps.set(cell, step)
    for c, s in zip(cell, step, strict=True):
      truth[c] = s
    np.testing.assert_array_equal(stamps.step.reshape(-1), truth)
    held = truth[truth != NEVER]
    if held.size:
      assert stamps.oldest() == held.min()
      mean, longest = stamps.ages(1000)
      assert mean == pytest.approx((1000 - held).mean()) and longest == 1000 - held.min()
    else:
      assert stamps.ages(1000) == (0.0, 0.0)
      with pytest.raises(ValueError):
        stamps.oldest()
