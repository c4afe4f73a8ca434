"""Checkpoints of a run, written by Orbax in a background thread; atomic, the newest few kept.

A checkpoint at step N is `checkpoints/N/` with the network, the optimiser, the weights each role acts with, the
replay's mutable part, the actor and a JSON of counters. Frames, which never change, are in files of their own, each
once (`replay/slot_files.py`), and a checkpoint lists the files it stands on; those that the replay has wholly evicted
are deleted once no checkpoint lists them. CRC-32s of all arrays, of the JSON and of the files of frames are stored and
checked, so damage is noticed and the checkpoint before is used. Nothing is ever unpickled. Knows nothing of roles: it
moves pytrees of arrays.

While a newer state of step N is being written, the older one is `checkpoints/N.replaced/`; a process killed then leaves
it there to be read. Readers take N first, then N.replaced, then the step before.
"""

import errno
import json
import logging
import os
import shutil
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint._src.multihost import multihost

from speedyzero_jax.replay.frame_files import SlotFile, SlotFiles
from speedyzero_jax.types import Params

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step of every save

_ITEMS = ("network", "optimizer", "weights", "replay", "actor")
_REPLACED = ".replaced"

# What readers raise for bytes that are missing, torn or of another shape. TensorStore says ValueError of everything,
# but begins with a code; these codes are about the machine, not the bytes.
_DAMAGE = (
  ValueError, LookupError, NotImplementedError, zipfile.BadZipFile,
  FileNotFoundError, IsADirectoryError, NotADirectoryError,
)  # fmt: skip
_TROUBLE = (
  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED", "CANCELLED",
  "DEADLINE_EXCEEDED",
)  # fmt: skip


class CheckpointError(Exception):
  """A checkpoint can't be written or read; the message names it."""


class Snapshot(NamedTuple):
  """All of a run at one learner step. Leaves are host arrays that nobody else writes to, or jax arrays."""

  step: int
  env_steps: int  # agent steps collected; a run's snapshots with both steps equal are of one moment
  network: Params  # Variables
  optimizer: Params
  weights: dict[str, Params]  # subscriber -> Variables
  replay: dict[
    str, np.ndarray
  ]  # the mutable part; of its own, `tail` [L] is looked at: slots before it are evicted
  actor: dict[str, np.ndarray]
  meta: dict[str, Any]  # JSON: other counters
  slots: dict[str, np.ndarray]  # frames that came since the snapshot before, and where they belong
  heads: np.ndarray  # [L] the replay's heads: where the next snapshot's slots begin


def _crcs(tree: Params) -> list[int]:
  """Of each leaf's bytes, type, shape and place in the tree."""
  crcs = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.asarray(leaf)
    form = f"{jax.tree_util.keystr(path)} {array.dtype.str} {array.shape}"
    crcs.append(zlib.crc32(array.tobytes(), zlib.crc32(form.encode())))
  return crcs


def _crc_of_json(meta: Mapping[str, Any]) -> int:
  text = json.dumps(
    {key: value for key, value in meta.items() if key != "meta_crc32"}, sort_keys=True
  )
  return zlib.crc32(text.encode())


def _take_empty(items: dict[str, Any], name: str) -> dict[str, tuple[str, list[int]]]:
  """Takes arrays without elements, which Orbax refuses, out of an item; returns their types and shapes."""
  empty = {key: array for key, array in items[name].items() if not array.size}
  items[name] = {key: array for key, array in items[name].items() if array.size}
  return {key: (array.dtype.str, list(array.shape)) for key, array in empty.items()}


class Checkpoints:
  """Writes and reads the checkpoints of one run folder.

  Args:
    run_dir: the folder; `checkpoints/` and `replay/` are made in it.
    keep: how many of the newest checkpoints stay, at least.
  """

  def __init__(self, run_dir: Path, keep: int = 3):
    self._directory, self._slot_files = (
      run_dir.resolve() / "checkpoints",
      SlotFiles(run_dir.resolve() / "replay"),
    )
    self.keep = keep
    self._manager: ocp.CheckpointManager | None = None
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._newest: tuple[int, int] | None = None  # learner and agent steps of the newest checkpoint
    self._listed: list[SlotFile] = []  # what it stands on, oldest first
    self.heads: np.ndarray | None = None  # of its replay; None before the first

  def steps(self) -> list[int]:
    """Steps of the checkpoints there are, oldest first."""
    if not self._directory.is_dir():
      return []
    names = {path.name.removesuffix(_REPLACED) for path in self._directory.iterdir()}
    return sorted(int(name) for name in names if name.isdigit())

  def _folders(self, step: int) -> list[Path]:
    """Where a step's checkpoint may be, the better place first."""
    return [self._directory / str(step), self._directory / f"{step}{_REPLACED}"]

  # --- writing ---

  @property
  def newest(self) -> int | None:
    """Step of the newest checkpoint saved or restored; None before the first."""
    return self._newest[0] if self._newest is not None else None

  def save(self, snapshot: Snapshot, *, needed: int | None = None) -> None:
    """Starts writing; waits for the save before. An older state of the same learner step is replaced.

    Args:
      snapshot: what to write.
      needed: checkpoints from this step on stay, however many they are; None: the newest few alone.

    Raises:
      CheckpointError: the save *before* failed (nothing of this one is written).
    """
    self.wait()
    self._thread = threading.Thread(
      target=self._write_in_background, args=(snapshot, needed), name="checkpoint"
    )
    self._thread.start()

  def wait(self) -> None:
    """Waits until what was started is on disk. Raises CheckpointError if it failed."""
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise CheckpointError(f"saving to {self._directory} failed: {_reason(error)}") from error

  def _write_in_background(self, snapshot: Snapshot, needed: int | None) -> None:
    try:
      self._write(snapshot, needed)
    except Exception as error:  # handed to the next `save` or `wait`
      self._error = error

  def _write(self, snapshot: Snapshot, needed: int | None) -> None:
    if self._newest == (snapshot.step, snapshot.env_steps):
      return  # stopped twice at one moment, or a finished run resumed
    listed = [
      file for file in self._listed if np.any(np.array(file.heads) > snapshot.replay["tail"])
    ]
    if len(snapshot.slots["frame"]):
      name = f"slots-{snapshot.step:012d}-{snapshot.env_steps:012d}.npz"
      listed.append(self._slot_files.write(name, snapshot.slots, snapshot.heads))
    items = {name: jax.tree.map(np.asarray, getattr(snapshot, name)) for name in _ITEMS}
    empty = {name: _take_empty(items, name) for name in ("replay", "actor")}
    items = {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}
    meta = {
      "step": snapshot.step,
      "env_steps": snapshot.env_steps,
      "segments": listed,
      "crc32": {name: _crcs(tree) for name, tree in items.items()},
      "empty": empty,
      **snapshot.meta,
    }
    meta["meta_crc32"] = _crc_of_json(meta)
    try:
      self._check_space(sum(leaf.nbytes for leaf in jax.tree.leaves(items)))
      self._commit(snapshot.step, items, meta)
      self._newest, self._listed, self.heads = (
        (snapshot.step, snapshot.env_steps),
        listed,
        snapshot.heads,
      )
      self._remove_old(snapshot.step if needed is None else needed)
    finally:
      self._remove_unlisted()

  def _commit(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Writes `checkpoints/step/`. Whenever this ends, and however, it or what it replaces is there whole."""
    saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **saves)
    folder, replaced = self._folders(step)
    if folder.is_dir():
      shutil.rmtree(replaced, ignore_errors=True)
      self._close_manager()  # it believes in the steps that it saw when it was opened
      os.replace(folder, replaced)
    try:
      if not self._open().save(step, args=args, force=True):
        raise OSError(f"Orbax refused to save step {step}")
    except Exception:
      # What Orbax has begun is of no use, takes space, and its manager may wait for threads that have died.
      self._manager = None
      for leftover in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover, ignore_errors=True)
      if replaced.is_dir() and not folder.is_dir():
        os.replace(replaced, folder)
      raise
    shutil.rmtree(replaced, ignore_errors=True)

  def _remove_old(self, needed: int) -> None:
    """Deletes checkpoints of before `needed` that are not of the newest few."""
    for step in self.steps()[: -self.keep]:
      if step < needed:
        for folder in self._folders(step):
          shutil.rmtree(folder, ignore_errors=True)

  def _remove_unlisted(self) -> None:
    """Deletes files of frames that no checkpoint stands on: evicted from the replay, or of saves that failed."""
    unlisted = self._slot_files.names() - {file.name for file in self._listed}
    try:
      for folder in (folder for step in self.steps() for folder in self._folders(step)):
        if unlisted and folder.is_dir():
          unlisted -= {file.name for file in _listed_in(self._read_meta(folder))}
      self._slot_files.remove(unlisted)
    except (OSError, *_DAMAGE):
      pass  # a checkpoint that can't be read now may stand on any of them: the next save tries again

  def _check_space(self, size: int) -> None:
    """Raises OSError when `size` bytes do not fit; Orbax recovers badly from finding that out half-way."""
    self._directory.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(self._directory).free, 1.1 * size + 2**20
    if free < needed:
      raise OSError(
        errno.ENOSPC,
        f"{needed / 1e6:.2f} MB are needed, but {free / 1e6:.2f} MB are free on the disk",
      )

  def _open(self) -> ocp.CheckpointManager:
    if self._manager is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      options = ocp.CheckpointManagerOptions(  # it deletes nothing: `_remove_old` does
        enable_async_checkpointing=False,
        create=False,
        multiprocessing_options=_alone(),
      )
      self._manager = ocp.CheckpointManager(self._directory, options=options)
    return self._manager

  def close(self) -> None:
    """Waits and lets go of Orbax's threads."""
    try:
      self.wait()
    finally:
      self._close_manager()

  def _close_manager(self) -> None:
    if self._manager is not None:
      self._manager.close()
      self._manager = None

  # --- reading ---

  def restore_network(self, abstract: Params, report: Callable[[str], None]) -> tuple[int, Params]:
    """The newest readable network: (step, Variables). Changes nothing: a run may be going on there. See `restore`."""

    def read(step: int, folder: Path) -> tuple[int, Params]:
      return step, self._read(step, folder, {"network": abstract})[0]["network"]

    return self._first_readable(read, report)

  def restore(
    self,
    abstract: Mapping[str, Params],
    report: Callable[[str], None],
    *,
    newest: int | None = None,
  ) -> tuple[Snapshot, Iterator[dict[str, np.ndarray]]]:
    """Reads the newest checkpoint that is whole; damaged ones are named to `report` and moved aside.

    Args:
      abstract: shapes of `network`, `optimizer` and each subscriber's `weights`; a leaf's sharding says where it goes.
      report: takes a line for each checkpoint that could not be read.
      newest: later steps are not wanted; they are set aside like damaged ones.

    Returns:
      The snapshot (its slots left empty) and the slots of the files it stands on, oldest first: all checked, each
      file loaded when asked for.

    Raises:
      CheckpointError: there is none, none is readable, or the machine failed (memory, permissions, files open) while
        one was read, which is no reason to use an older one. Nothing has been changed then.
    """

    def read(step: int, folder: Path) -> tuple[Path, Snapshot, list[SlotFile]]:
      items, meta = self._read(step, folder, {"replay": None, "actor": None, **abstract})
      listed = _listed_in(meta)
      for file in listed:
        self._slot_files.check(file)
      for name, arrays in meta["empty"].items():
        items[name] = items.get(name, {}) | {
          key: np.zeros(shape, dtype) for key, (dtype, shape) in arrays.items()
        }
      known = {"step", "env_steps", "segments", "crc32", "empty", "meta_crc32"}
      rest = {key: value for key, value in meta.items() if key not in known}
      parts = {name: items.get(name, {}) for name in _ITEMS}
      heads, env_steps = items["replay"]["head"], meta["env_steps"]
      return (
        folder,
        Snapshot(step=step, env_steps=env_steps, meta=rest, slots={}, heads=heads, **parts),
        listed,
      )

    folder, snapshot, listed = self._first_readable(read, report, newest)
    self._newest, self._listed, self.heads = (
      (snapshot.step, snapshot.env_steps),
      listed,
      snapshot.heads,
    )
    self._make_newest(snapshot.step, folder)
    return snapshot, self._slot_files.load(listed)

  def _first_readable(
    self, read: Callable[[int, Path], Any], report: Callable[[str], None], newest: int | None = None
  ) -> Any:
    steps = [step for step in self.steps() if newest is None or step <= newest]
    if not steps:
      wanted = "" if newest is None else f" of step {newest} or before"
      raise CheckpointError(f"there is no checkpoint{wanted} in {self._directory}")
    for step in reversed(steps):
      for folder in self._folders(step):
        if (
          not folder.is_dir()
        ):  # asked late, and again below: a run that goes on here may just have renamed it
          continue
        try:
          return read(step, folder)
        except Exception as error:
          if not isinstance(error, _DAMAGE) or str(error).startswith(_TROUBLE):
            raise CheckpointError(
              f"can't read checkpoint {folder}, which may be whole: {_reason(error)}; nothing was changed"
            ) from error
          if folder.is_dir():
            report(f"checkpoint {folder} is damaged or of another kind: {_reason(error)}")
    raise CheckpointError(f"none of the {len(steps)} checkpoints in {self._directory} can be read")

  def _read(
    self, step: int, folder: Path, abstract: Mapping[str, Params]
  ) -> tuple[dict[str, Params], dict]:
    meta = self._read_meta(folder)
    if meta["step"] != step:
      raise ValueError(f"it is of step {meta['step']}")
    wanted = {name: tree for name, tree in abstract.items() if (folder / name).is_dir()}
    missing = set(meta["crc32"]) & set(abstract) - set(wanted)
    if missing or not set(wanted) <= set(meta["crc32"]):
      raise ValueError(f"items are missing: {', '.join(sorted(missing)) or 'checksums'}")
    args = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
    restored = _restore(folder, ocp.args.Composite(**args))
    items = {name: restored[name] for name in wanted}
    for name, tree in items.items():
      if _crcs(tree) != list(meta["crc32"][name]):
        raise ValueError(f"checksum of '{name}' differs")
    return items, meta

  @staticmethod
  def _read_meta(folder: Path) -> dict[str, Any]:
    meta = _restore(folder, ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
    if not isinstance(meta, dict) or meta.get("meta_crc32") != _crc_of_json(meta):
      raise ValueError("checksum of 'meta' differs")
    return meta

  def begin_anew(self) -> None:
    """Moves all there is out of the way, as damaged checkpoints are: what is saved next is of another run."""
    self._newest, self._listed, self.heads = None, [], None
    self._set_aside(
      [folder for step in self.steps() for folder in self._folders(step) if folder.is_dir()]
    )

  def _make_newest(self, step: int, folder: Path) -> None:
    """Moves what is newer than the checkpoint restored out of the way, and ends a replacement that was cut short.

    Files of frames newer than any checkpoint are what a killed process had begun to save: they are removed.
    """
    place, replaced = self._folders(step)
    damaged = [
      newer
      for later in self.steps()
      if later > step
      for newer in self._folders(later)
      if newer.is_dir()
    ]
    if folder == replaced and place.is_dir():
      damaged.append(place)
    self._set_aside(damaged)
    if folder == replaced:
      os.replace(replaced, place)
    else:
      shutil.rmtree(replaced, ignore_errors=True)

  def _set_aside(self, folders: list[Path]) -> None:
    """Moves these checkpoints, and the files of frames that came after those listed, to `damaged/`."""
    aside = self._directory.parent / "damaged"
    for folder in folders:
      aside.mkdir(exist_ok=True)
      shutil.rmtree(aside / folder.name, ignore_errors=True)
      os.replace(folder, aside / folder.name)
    self._slot_files.end_with(
      self._listed, aside if folders else None
    )  # older checkpoints list none beyond them


def _listed_in(meta: Mapping[str, Any]) -> list[SlotFile]:
  """The files of frames that a checkpoint stands on."""
  return [SlotFile(name, crc32, heads) for name, crc32, heads in meta["segments"]]


def _alone() -> ocp.options.MultiprocessingOptions:
  """Orbax is to wait for no other process: each learner writes checkpoints of its own."""
  multihost.process_index = lambda: (
    0
  )  # in any other process it writes JSON and arrays of NumPy as empty folders
  return ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="alone"
  )


def _restore(folder: Path, args: ocp.args.Composite) -> Any:
  alone = _alone()
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
  )
  with ocp.Checkpointer(handler, multiprocessing_options=alone) as reader:
    return reader.restore(folder, args=args)


def _reason(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:300] if text else ''}"
