"""Sweeps over the whole replay: order of recomputation, and the rate that bounds the age.

See also `workers/sweeper.py`, which schedules the blocks.
"""

from collections import deque

import numpy as np

CHUNK = 16  # adjacent cells visited together; a partly filled chunk costs as much as a full one


class Sweep:
  """Visits all cells in use cyclically, in chunks of adjacent cells, least recent first.

  The chunks in use form a queue. A visited chunk moves to the back, and a new one enters at
  the back, since its values were just computed by the actor. So between two visits of a chunk,
  every other chunk is visited at most once, regardless of appends. A block whose results are lost
  is visited again one pass later, unless its refresher restarts. A slot keeps its old stamp until
  its result is written, so ages are never underestimated.

  With several `phases`, which must divide the chunk, a sweep goes backward in time: a block takes
  only every phases-th cell of its chunks, and the next block the cells before those. Each phase
  has its own queue of all chunks, so that the bound on ages holds for each. The queues' orders
  differ a little, since a new chunk enters some of them between two blocks.
  """

  def __init__(self, lanes: int, capacity: int, chunk: int = CHUNK, phases: int = 1):
    self._chunk, self._phases = chunk, phases
    self._cells = np.arange(0, chunk, phases)  # of a chunk in one block, plus the phase
    self._per_lane = -(-capacity // chunk)
    self._used = np.zeros(lanes, np.int64)  # cells in use
    # By phase: lane * chunks per lane + index in the lane.
    self._queues: list[deque[int]] = [deque() for _ in range(phases)]
    self._turns = deque(reversed(range(phases)))  # phases of the next blocks

  def grow(self, used: np.ndarray) -> None:
    """Updates the number of cells in use in each lane, [lanes]."""
    before, after = -(-self._used // self._chunk), -(-used // self._chunk)
    for lane in np.flatnonzero(after > before).tolist():
      for queue in self._queues:
        queue.extend(lane * self._per_lane + np.arange(before[lane], after[lane]))
    self._used = used

  def next_block(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next n cells to recompute: lane [n] int64, cell [n] int64.

    Whole chunks are taken, so n must be at least one chunk; cells are repeated to fill n.
    Raises ValueError if no cell is in use.
    """
    phase = self._turns[0]
    queue = self._queues[phase]
    if not queue:
      raise ValueError("next_block: the replay is empty")
    count = min(n // len(self._cells), len(queue))
    chunks = np.array([queue[i] for i in range(count)])
    queue.rotate(-count)
    self._turns.rotate(-1)
    lane, position = chunks // self._per_lane, chunks % self._per_lane
    cell = position[:, None] * self._chunk + self._cells + phase
    cell = np.minimum(cell, self._used[lane, None] - 1)
    return np.resize(np.repeat(lane, len(self._cells)), n), np.resize(cell, n)

  def quota(self, n: int, max_age: int, delay: int = 0) -> int:
    """Number of states to recompute per learner step so that no stamp exceeds `max_age`.

    The caller adds this number to a credit in every learner step, and visits a block of n states
    whenever the credit reaches n. `delay` is the maximum age of the weights when a block is started
    (or a slot appended), plus the maximum duration of a block, in learner steps. A pass and one
    extra block must fit into max_age - delay - 1 steps, so `max_age` must be at least delay + 2.
    """
    blocks_in_pass = self._phases * -(-len(self._queues[0]) // (n // len(self._cells)))
    return -(-(blocks_in_pass + 1) * n // (max_age - delay - 1))

  def state(self) -> np.ndarray:
    """Returns the queues in turn for a checkpoint, as chunk * phases + phase, int64."""
    queues = (np.array(self._queues[i], np.int64) * self._phases + i for i in self._turns)
    return np.concatenate(list(queues))

  def load(self, state: np.ndarray, used: np.ndarray) -> None:
    """Restores the result of `state`, with the number of cells in use [lanes]."""
    chunks, phases = np.divmod(state.reshape(self._phases, -1), self._phases)
    if state.size:
      self._turns = deque(phases[:, 0].tolist())
    for phase, queue in zip(self._turns, chunks.tolist(), strict=True):
      self._queues[phase] = deque(queue)
    self._used = used
