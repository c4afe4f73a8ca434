"""What stays of a run on disk: its checkpoints, and the journal of what came after the oldest of them.

Knows files, and that all units must go on from the same step; nothing of roles, or of what the arrays mean.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints, Snapshot
from speedyzero_jax.types import Params, Segment


class Keeper:
  """Keeps a run, or a unit's part of one, and finds it again. Not thread-safe, but for `record`.

  Args:
    checkpoints: of the unit.
    journal: where experience is made durable before it counts; None: it stands in checkpoints alone.
    agree: tells all units a number, waits for all to do so, and returns all of theirs.
    report: takes a line that people should read.
    units: that agree.
  """

  def __init__(
    self,
    checkpoints: Checkpoints,
    journal: Journal | None,
    agree: Callable[[int], Sequence[int]],
    report: Callable[[str], None],
    *,
    units: int = 1,
  ):
    self.checkpoints = checkpoints
    self._journal, self._agree, self._report, self._units = journal, agree, report, units
    self._common = -1  # step of the newest checkpoint that every unit is known to have; none: -1
    self._saved: list[
      tuple[int, np.ndarray]
    ] = []  # steps and heads of the last ones; the journal is kept from there

  def restore(
    self, abstract: Mapping[str, Params]
  ) -> tuple[Snapshot | None, Iterator[dict[str, np.ndarray]]]:
    """The newest checkpoint that every unit has, as `Checkpoints.restore`.

    None if a unit has none: then all begin anew, and what checkpoints there are here are moved out of the way.

    Raises:
      CheckpointError: there are checkpoints here, but none can be read, or all are newer than what another unit has.
    """
    newest = None
    while True:
      snapshot: Snapshot | None = None
      frames: Iterator[dict[str, np.ndarray]] = iter(())
      if self.checkpoints.steps() and newest != -1:
        snapshot, frames = self.checkpoints.restore(abstract, self._report, newest=newest)
      steps = self._agree(-1 if snapshot is None else snapshot.step)
      if len(set(steps)) == 1:
        break
      newest = min(steps)
    self._common = steps[0]
    if snapshot is None and self.checkpoints.steps():
      self._report(
        "warning: another learner has no checkpoint: all begin anew, with what their journals hold"
      )
      self.checkpoints.begin_anew()
    return snapshot, frames

  def settle(self) -> np.ndarray | None:
    """Waits for the save before and tells if it failed.

    Returns:
      [L], the heads of the newest checkpoint, where the next snapshot's slots must begin; None if there is none.
    """
    try:
      self.checkpoints.wait()
    except CheckpointError as error:
      self._report(f"{error}; training goes on, earlier checkpoints are intact")
    return self.checkpoints.heads

  def save(self, snapshot: Snapshot, *, required: bool) -> None:
    """Starts a checkpoint in the background. Call `settle` before.

    An older one that other units may have to go back to stays, however many there are.

    Args:
      snapshot: what to save.
      required: wait for it, but for no other unit. If not, all units must save one of this step.

    Raises:
      CheckpointError: it is required and failed.
      JournalError: the journal can't forget what the oldest checkpoint holds.
    """
    newest, heads = (
      self.checkpoints.newest,
      self.checkpoints.heads,
    )  # of the one before this, which is there
    if self._units == 1:
      self._common = snapshot.step
    elif not required:
      newest_of_all = self._agree(-1 if newest is None else newest)
      if len(set(newest_of_all)) == 1:
        self._common = newest_of_all[0]
    self.checkpoints.save(snapshot, needed=self._common)
    if required:
      self.checkpoints.wait()
    if self._journal is not None and newest is not None and heads is not None:
      # What the oldest checkpoint kept holds need not be read again.
      kept = self.checkpoints.keep + 1
      self._saved = [*self._saved, (newest, heads)][-kept:]
      oldest, begin = self._saved[0]
      if len(self._saved) == kept and oldest <= self._common:
        self._journal.evict(begin)

  def record(self, segments: Sequence[Segment]) -> None:
    """Makes experience durable; when it returns, it is. Raises as `Journal.append`, and has changed nothing then."""
    if self._journal is not None:
      self._journal.append(segments)

  def recorded(self, heads: np.ndarray) -> Iterator[list[Segment]]:
    """What was recorded from these heads [L] on, a checkpoint's, as `Journal.read`; what is lost of it is told."""
    if self._journal is None:
      return iter(())
    lost = self._journal.begin_at(heads)
    if lost.any():
      self._report(
        f"warning: the journal has forgotten what came right after this checkpoint: {lost.sum()} later frames of "
        f"{np.count_nonzero(lost)} lanes are lost, and collected anew"
      )
    return self._journal.read(heads)

  def close(self) -> None:
    """Waits for the last save and tells if it failed. The journal is its owner's to close."""
    try:
      self.checkpoints.close()
    except CheckpointError as error:  # of a save that nobody waited for
      self._report(f"{error}; earlier checkpoints are intact")
