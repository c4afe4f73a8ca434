"""Recovery of a run from its checkpoints and its journal.

The journal holds steps as they were collected, a checkpoint everything that changes later; together
they restore a run. All units of a run continue from the same learner step.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints, Snapshot
from speedyzero_jax.types import Params, Segment


class RecoveryManager:
  """Saves and restores a run, or one unit of it. Only `append` may be called from any thread.

  Args:
    checkpoints: of the unit.
    journal: of the unit; closed by `close`.
    report: called with a line for people.
    durable: experience is durable as soon as it is appended; if not, with the next checkpoint.
    exact: a resumed run drops experience from after the checkpoint and repeats what came after it;
      if not, that experience stays in the journal, to be replayed.
    all_gather: exchanges one integer with all units and returns theirs.
    units: that agree.
  """

  def __init__(
    self,
    checkpoints: Checkpoints,
    journal: Journal,
    report: Callable[[str], None],
    *,
    durable: bool,
    exact: bool,
    all_gather: Callable[[int], Sequence[int]] = lambda step: [step],
    units: int = 1,
  ):
    self.checkpoints, self.journal = checkpoints, journal
    self._report, self._durable, self._exact = report, durable, exact
    self._all_gather, self._units = all_gather, units
    self._common = -1  # newest step that every unit is known to have; -1: none
    self._writer = ThreadPoolExecutor(1, "checkpoint")
    self._saving: Future[None] | None = None

  # --- Restoring ---

  def restore(self, templates: Mapping[str, Params]) -> Snapshot | None:
    """The newest usable checkpoint that every unit has; see `Checkpoints.restore`.

    None if a unit has none: then all start from the beginning, and checkpoints of this unit are
    set aside. Afterwards the journal continues from the heads of the checkpoint, or from 0. Raises
    CheckpointError if none is usable, or all are newer than what another unit has.
    """
    newest = None
    while True:
      snapshot: Snapshot | None = None
      if self.checkpoints.steps() and newest != -1:
        snapshot = self.checkpoints.restore(
          templates, self._report, newest=newest, verify=self.journal.verify
        )
      steps = self._all_gather(-1 if snapshot is None else snapshot.step)
      if len(set(steps)) == 1:
        break
      newest = min(steps)
    self._common = steps[0]
    if snapshot is None and self.checkpoints.steps():
      self._report(
        "warning: another learner has no checkpoint: all start from the beginning, with the "
        "experience in their journals"
      )
      self.checkpoints.set_aside()
    heads = np.zeros_like(self.journal.heads) if snapshot is None else snapshot.heads
    lost = self.journal.continue_from(heads, drop=self._exact)
    if not self._exact and lost.any():
      self._report(
        f"warning: the journal does not hold what came right after this checkpoint: {lost.sum()} "
        f"later frames of {np.count_nonzero(lost)} lanes are lost and will be collected again"
      )
    return snapshot

  # --- Saving ---

  def append(self, segments: Sequence[Segment]) -> None:
    """Adds experience to the journal; if `durable`, it is on disk at the end."""
    self.journal.append(segments)
    if self._durable:
      self.journal.flush()

  def wait(self) -> None:
    """Waits for the save in progress and reports if it failed."""
    try:
      self._join()
    except (CheckpointError, JournalError) as error:
      self._report(f"{error}; training continues, earlier checkpoints are intact")

  def save(self, snapshot: Snapshot, *, required: bool) -> None:
    """Starts a checkpoint in the background, once the save before has ended.

    Checkpoints stay as long as another unit may have to go back to them, the experience that they
    refer to (the journal has it) as long as they do. A `required` one is waited for, and raises
    CheckpointError or JournalError; it waits for no other unit. Others must be saved by all units.
    """
    self.wait()
    if self._units == 1:
      self._common = snapshot.step
    elif not required:
      newest_of_all = set(self._all_gather(max(self.checkpoints.steps(), default=-1)))
      if len(newest_of_all) == 1:
        self._common = newest_of_all.pop()
    self._saving = self._writer.submit(self._save, snapshot, self._common)
    if required:
      self._join()

  def _save(self, snapshot: Snapshot, needed: int) -> None:
    self.journal.flush()  # a checkpoint refers to what is on disk
    self.checkpoints.save(snapshot, needed=needed)
    tails = self.checkpoints.tails()
    if tails is not None:
      self.journal.evict(tails)

  def _join(self) -> None:
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()

  def close(self) -> None:
    """Waits for the last save, reports if it failed, and closes the journal."""
    self.wait()
    self._writer.shutdown()
    self.journal.close()
