"""Checkpoints of a run, written by Orbax; atomic, the newest few kept.

A checkpoint at learner step N is `checkpoints/N/`: pytrees of arrays and a JSON of counters. It
holds the network, the optimizer and the replay's columns except frames; those are in the journal,
and a checkpoint names the slots of it that it refers to. CRC-32s of all arrays and of the JSON are
stored and checked; a damaged checkpoint is reported, moved to `damaged/`, and the one before is
used. Nothing is ever unpickled.

While a newer state of step N is written, the older one is `checkpoints/N.replaced/`. Readers try N,
then N.replaced, then the step before.
"""

import errno
import json
import logging
import math
import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from speedyzero_jax.replay.journal import JournalDamage
from speedyzero_jax.system import orbax_compat
from speedyzero_jax.types import Params

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every step of every save

_REPLACED = ".replaced"

# What readers raise for bytes that are missing, torn or of another shape. TensorStore raises
# ValueError for everything, but its message begins with a code; these are about the machine.
_DAMAGE = (
  ValueError, LookupError, NotImplementedError, FileNotFoundError, IsADirectoryError,
  NotADirectoryError, JournalDamage,
)  # fmt: skip
_MACHINE = (
  "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNKNOWN", "INTERNAL", "ABORTED",
  "CANCELLED", "DEADLINE_EXCEEDED",
)  # fmt: skip


class CheckpointError(Exception):
  """A checkpoint cannot be written or read; the message names it."""


class Snapshot(NamedTuple):
  """The mutable state of a run at one learner step.

  Leaves are host arrays that are not written to any more, or jax arrays.
  """

  step: int
  env_steps: int  # agent steps collected; snapshots of one run with both steps equal are the same
  items: dict[str, Any]  # name -> nested dict of arrays, or a pytree that `restore` is given
  meta: dict[str, Any]  # JSON: other counters
  heads: np.ndarray  # [L] the replay holds slots tails <= t < heads of each lane,
  tails: np.ndarray  # [L] which are in the journal


class Checkpoints:
  """The checkpoints of one run folder. Not thread-safe.

  Args:
    run_dir: the folder; `checkpoints/` is made in it.
    keep: how many of the newest checkpoints stay, at least.
  """

  def __init__(self, run_dir: Path, keep: int = 3):
    self._directory = run_dir.resolve() / "checkpoints"
    self.keep = keep
    self._newest: tuple[int, int] | None = None

  @property
  def newest(self) -> int | None:
    """Step of the newest checkpoint saved or restored; None before the first."""
    return self._newest[0] if self._newest is not None else None

  def steps(self) -> list[int]:
    """Steps of the checkpoints there are, oldest first."""
    if not self._directory.is_dir():
      return []
    names = {path.name.removesuffix(_REPLACED) for path in self._directory.iterdir()}
    return sorted(int(name) for name in names if name.isdigit())

  def tails(self) -> np.ndarray | None:
    """[L], the oldest slots that any checkpoint refers to; None if one cannot be read."""
    try:
      folders = [folder for step in self.steps() for folder in self._folders(step)]
      return np.min([_read_meta(f)["tails"] for f in folders if f.is_dir()], axis=0)
    except (OSError, *_DAMAGE):
      return None

  def _folders(self, step: int) -> list[Path]:
    """Where a step's checkpoint may be, the better place first."""
    return [self._directory / str(step), self._directory / f"{step}{_REPLACED}"]

  # --- Writing ---

  def save(self, snapshot: Snapshot, *, needed: int | None = None) -> None:
    """Writes a checkpoint. An older state of the same learner step is replaced.

    Args:
      snapshot: what to write.
      needed: checkpoints from this step on stay, however many; None: only the newest few.

    Raises:
      CheckpointError: the disk is full or failed. Earlier checkpoints are intact.
    """
    if self._newest == (snapshot.step, snapshot.env_steps):
      return  # stopped twice at one moment, or a finished run resumed
    try:
      self._write(snapshot)
    except Exception as error:
      raise CheckpointError(f"saving to {self._directory} failed: {_reason(error)}") from error
    self._newest = snapshot.step, snapshot.env_steps
    for step in self.steps()[: -self.keep]:
      if needed is None or step < needed:
        for folder in self._folders(step):
          shutil.rmtree(folder, ignore_errors=True)

  def _write(self, snapshot: Snapshot) -> None:
    items = {name: jax.tree.map(np.asarray, tree) for name, tree in snapshot.items.items()}
    items = {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}
    meta = {
      "step": snapshot.step,
      "env_steps": snapshot.env_steps,
      "heads": np.asarray(snapshot.heads).tolist(),
      "tails": np.asarray(snapshot.tails).tolist(),
      "crc32": {name: _crcs(tree) for name, tree in items.items()},
      "empty": {name: _empty_leaves(tree) for name, tree in items.items()},
      "counters": snapshot.meta,
    }
    meta["meta_crc32"] = _crc_of_json(meta)
    self._check_space(sum(leaf.nbytes for leaf in jax.tree.leaves(items)))
    self._commit(snapshot.step, items, meta)

  def _commit(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Writes `checkpoints/step/`. At any moment either it or what it replaces is there whole."""
    saves = {n: ocp.args.StandardSave(jax.tree.map(_filled, tree)) for n, tree in items.items()}
    args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **saves)
    folder, replaced = self._folders(step)
    self._remove_temporary()
    if folder.is_dir():
      shutil.rmtree(replaced, ignore_errors=True)
      os.replace(folder, replaced)
    try:
      with orbax_compat.checkpointer() as writer:
        writer.save(folder, args=args)
    except BaseException:
      self._remove_temporary()
      if replaced.is_dir() and not folder.is_dir():
        os.replace(replaced, folder)
      raise
    shutil.rmtree(replaced, ignore_errors=True)

  def _remove_temporary(self) -> None:
    """Deletes what a failed save, or a killed process, has begun."""
    for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(leftover, ignore_errors=True)

  def _check_space(self, size: int) -> None:
    """Raises OSError when `size` bytes do not fit; Orbax recovers badly from a full disk."""
    self._directory.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(self._directory).free, 1.1 * size + 2**20
    if free < needed:
      message = f"{needed / 1e6:.2f} MB are needed, {free / 1e6:.2f} MB are free on the disk"
      raise OSError(errno.ENOSPC, message)

  # --- Reading ---

  def restore_item(
    self, name: str, abstract: Params, report: Callable[[str], None]
  ) -> tuple[int, Params]:
    """The newest readable step with one of its items. Changes nothing. See `restore`."""

    def read(step: int, folder: Path) -> tuple[int, Params]:
      return step, _read_items(folder, _read_meta(folder, step), {name: abstract})[name]

    return self._first_readable(read, report)

  def restore(
    self,
    abstract: Mapping[str, Params],
    report: Callable[[str], None],
    *,
    newest: int | None = None,
    verify: Callable[[np.ndarray, np.ndarray], None] = lambda tails, heads: None,
  ) -> Snapshot:
    """The newest usable checkpoint; later ones are moved to `damaged/`.

    Args:
      abstract: structure and shapes of items; a leaf's sharding says where it goes. Items that are
        not named here are nested dicts of numpy arrays.
      report: called with a line for each checkpoint that cannot be used.
      newest: later steps are not wanted.
      verify: called with tails and heads [L]; raises JournalDamage if those slots are not stored.

    Raises:
      CheckpointError: there is none, none is usable, or the machine failed (memory, permissions,
        open files), which is no reason to use an older one. Nothing has been changed then.
    """

    def read(step: int, folder: Path) -> tuple[Path, Snapshot]:
      meta = _read_meta(folder, step)
      wanted = {name for name, tree in abstract.items() if jax.tree.leaves(tree)}
      names = wanted | set(meta["crc32"])
      items: dict[str, Any] = {name: {} for name in abstract}
      items |= _read_items(folder, meta, {name: abstract.get(name) for name in names})
      heads, tails = (np.array(meta[name], np.int64) for name in ("heads", "tails"))
      verify(tails, heads)
      return folder, Snapshot(step, meta["env_steps"], items, meta["counters"], heads, tails)

    folder, snapshot = self._first_readable(read, report, newest)
    self._newest = snapshot.step, snapshot.env_steps
    self._make_newest(snapshot.step, folder)
    return snapshot

  def _first_readable(
    self, read: Callable[[int, Path], Any], report: Callable[[str], None], newest: int | None = None
  ) -> Any:
    steps = [step for step in self.steps() if newest is None or step <= newest]
    if not steps:
      wanted = "" if newest is None else f" of step {newest} or before"
      raise CheckpointError(f"there is no checkpoint{wanted} in {self._directory}")
    for step in reversed(steps):
      for folder in self._folders(step):
        if not folder.is_dir():  # checked late, and again below: a running writer may rename it
          continue
        try:
          return read(step, folder)
        except Exception as error:
          if not isinstance(error, _DAMAGE) or str(error).startswith(_MACHINE):
            raise CheckpointError(
              f"can't read checkpoint {folder}, which may be whole: {_reason(error)}; "
              "nothing was changed"
            ) from error
          if folder.is_dir():
            report(f"checkpoint {folder} cannot be used: {_reason(error)}")
    raise CheckpointError(f"none of the {len(steps)} checkpoints in {self._directory} can be read")

  def set_aside(self) -> None:
    """Moves all checkpoints to `damaged/`, for a run that starts from the beginning."""
    self._newest = None
    self._move_aside([folder for step in self.steps() for folder in self._folders(step)])

  def _make_newest(self, step: int, folder: Path) -> None:
    """Moves later checkpoints than the one restored away, and ends a replacement cut short."""
    place, replaced = self._folders(step)
    self._move_aside([f for later in self.steps() if later > step for f in self._folders(later)])
    if folder == replaced:
      self._move_aside([place])
      os.replace(replaced, place)
    else:
      shutil.rmtree(replaced, ignore_errors=True)

  def _move_aside(self, folders: list[Path]) -> None:
    aside = self._directory.parent / "damaged"
    for folder in folders:
      if folder.is_dir():
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / folder.name, ignore_errors=True)
        os.replace(folder, aside / folder.name)


def _read_meta(folder: Path, step: int | None = None) -> dict[str, Any]:
  """The JSON of a checkpoint, of this step."""
  with orbax_compat.checkpointer() as reader:
    meta = reader.restore(folder, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
  if not isinstance(meta, dict) or meta.get("meta_crc32") != _crc_of_json(meta):
    raise ValueError("checksum of 'meta' differs")
  if step not in (None, meta["step"]):
    raise ValueError(f"it is of step {meta['step']}")
  return meta


def _read_items(
  folder: Path, meta: Mapping[str, Any], wanted: Mapping[str, Params | None]
) -> dict[str, Params]:
  """Items of a checkpoint by name; None for the structure: nested dicts of numpy arrays."""
  missing = [n for n in wanted if not (folder / n).is_dir() or n not in meta["crc32"]]
  if missing:
    raise ValueError(f"items are missing: {', '.join(missing)}")
  trees = {n: None if tree is None else jax.tree.map(_filled, tree) for n, tree in wanted.items()}
  args = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
  with orbax_compat.checkpointer() as reader:
    restored = reader.restore(folder, args=ocp.args.Composite(**args))
  items = {}
  for name in wanted:
    empty = {path: np.zeros(shape, dtype) for path, dtype, shape in meta["empty"][name]}
    items[name] = jax.tree_util.tree_map_with_path(
      lambda path, leaf, empty=empty: empty.get(jax.tree_util.keystr(path), leaf), restored[name]
    )
    if _crcs(items[name]) != meta["crc32"][name]:
      raise ValueError(f"checksum of '{name}' differs")
  return items


def _filled(leaf: Any) -> Any:
  """Orbax refuses arrays without elements: one byte stands for them."""
  if math.prod(leaf.shape):
    return leaf
  return (
    np.zeros(1, np.uint8) if isinstance(leaf, np.ndarray) else jax.ShapeDtypeStruct((1,), np.uint8)
  )


def _empty_leaves(tree: Params) -> list[tuple[str, str, tuple[int, ...]]]:
  """Path, dtype and shape of each array without elements."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return [(jax.tree_util.keystr(p), x.dtype.str, x.shape) for p, x in leaves if not x.size]


def _crcs(tree: Params) -> list[int]:
  """CRC-32 of each leaf's place in the tree, dtype, shape and bytes."""
  crcs = []
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    array = np.ascontiguousarray(leaf)
    form = f"{jax.tree_util.keystr(path)} {array.dtype.str} {np.shape(leaf)}"
    crcs.append(zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(form.encode())))
  return crcs


def _crc_of_json(meta: Mapping[str, Any]) -> int:
  rest = {key: value for key, value in meta.items() if key != "meta_crc32"}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _reason(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:300] if text else ''}"
