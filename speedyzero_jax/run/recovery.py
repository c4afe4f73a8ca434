"""Recovery of a run from its checkpoints and its journal.

The journal records steps as they are collected; a checkpoint holds all state that changes later,
such as parameters and priorities. Together they restore a run. All units of a run continue from the
same learner step. See also `checkpoint.py` for the format and `snapshot.py` for the loading.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints, Snapshot
from speedyzero_jax.types import Params, Slots


class RecoveryManager:
  """Saves and restores a run, or one unit of it. Only `append` may be called from any thread.

  With `durable`, experience is on disk as soon as it is appended; otherwise with the next
  checkpoint. With `exact`, a resumed run discards experience newer than the checkpoint and collects
  it again; otherwise it is replayed from the journal. `all_gather` all-gathers one integer over the
  units.
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
    self.newest: int | None = None  # learner step of the newest complete checkpoint
    self._common = -1  # newest step of which all units are known to have a checkpoint; -1: none
    self._writer = ThreadPoolExecutor(1, "checkpoint")
    self._saving: Future[None] | None = None

  # --- Restoring ---

  def restore(self, templates: Mapping[str, Params]) -> Snapshot | None:
    """Returns the newest usable checkpoint that every unit has; see `Checkpoints.restore`.

    Returns None if a unit has none: all units then start over, and this unit's checkpoints are
    moved aside. Afterwards the journal continues from the heads of the checkpoint, or from
    0. Raises CheckpointError if none is usable, or if all are newer than another unit's newest.
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
    self.newest = None if snapshot is None else snapshot.step
    if snapshot is None and self.checkpoints.steps():
      self._report(
        "warning: another learner has no checkpoint; all learners start again from learner step 0"
        f"{'' if self._exact else ' with the experience in their journals'}, and existing "
        "checkpoints move to checkpoints/damaged/"
      )
      self.checkpoints.set_aside()
    heads = np.zeros_like(self.journal.heads) if snapshot is None else snapshot.heads
    lost = self.journal.continue_from(heads, drop=self._exact)
    if not self._exact and lost.any():
      self._report(
        f"warning: the journal has a gap after this checkpoint: {lost.sum()} later frames in "
        f"{np.count_nonzero(lost)} lanes are lost and will be collected again"
      )
    return snapshot

  # --- Saving ---

  def append(self, slots: Slots) -> None:
    """Appends experience to the journal and, if `durable`, flushes it to disk."""
    self.journal.append(slots)
    if self._durable:
      self.journal.flush()

  def wait(self) -> None:
    """Waits for the save in progress and reports its failure."""
    try:
      self._join()
    except (CheckpointError, JournalError) as error:
      self._report(f"{error}; earlier checkpoints are intact")

  def save(self, snapshot: Snapshot, *, required: bool) -> None:
    """Starts writing a checkpoint in the background, once the previous one is written.

    A checkpoint is kept while another unit may still have to roll back to it, and the journal keeps
    the slots that it references. With `required`, the call blocks until it is written, raises
    CheckpointError or JournalError, and does not synchronize with other units. Without it, all
    units must call `save`.
    """
    self.wait()
    if self._units > 1 and not required:
      newest_of_all = set(self._all_gather(-1 if self.newest is None else self.newest))
      if len(newest_of_all) == 1:
        self._common = newest_of_all.pop()
    needed = self._common if self._units > 1 else None
    self._saving = self._writer.submit(self._save, snapshot, needed)
    if required:
      self._join()

  def _save(self, snapshot: Snapshot, needed: int | None) -> None:
    self.journal.flush()  # a checkpoint must only reference slots on disk
    self.checkpoints.save(snapshot, needed=needed)
    self.newest = snapshot.step
    tails = self.checkpoints.tails()
    if tails is not None:
      self.journal.evict(tails)

  def _join(self) -> None:
    saving, self._saving = self._saving, None
    if saving is not None:
      saving.result()

  def close(self) -> None:
    """Waits for the last save, reports its failure, and closes the journal."""
    self.wait()
    self._writer.shutdown()
    self.journal.close()
