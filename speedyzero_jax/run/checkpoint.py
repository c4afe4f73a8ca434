"""Checkpoints of a run, written atomically by Orbax; the newest few are kept.

A run is restored from a checkpoint plus the journal: `recovery.py` picks the checkpoint and
`snapshot.py` loads it.

A checkpoint is `checkpoints/N-M/`, with N learner steps and M agent steps. Its item `network` is a
plain Orbax pytree, readable without this package. Every other item (such as the optimizer, or the
replay's columns except frames) is packed into one byte array, as Orbax takes half a millisecond per
array. A JSON item holds counters and each array's name, dtype and shape. Frames are in the journal;
the checkpoint records which of its slots it references.

CRC-32 checksums of the items and of the JSON are verified. A damaged checkpoint is reported and
moved to `checkpoints/damaged/`, and the previous one is used. Nothing is ever unpickled.
"""

import errno
import functools
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from speedyzero_jax.replay.journal import JournalDamage
from speedyzero_jax.system import orbax_compat
from speedyzero_jax.system.files import sync_folder
from speedyzero_jax.types import Params

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax logs every step of every save

NETWORK = "network"
T = TypeVar("T")

# Errors that readers raise for missing, torn or misshapen data. TensorStore raises ValueError for
# every failure, but its message begins with a status code: those in _MACHINE are system errors.
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
  """The mutable state of a run, identified by its learner and agent steps.

  Its arrays are never written to.
  """

  step: int
  env_steps: int  # agent steps collected
  items: dict[str, Any]  # name -> dict of arrays, or any pytree for which `restore` has a template
  meta: dict[str, Any]  # JSON: other counters
  heads: np.ndarray  # [L] the replay holds slots tails <= t < heads of each lane;
  tails: np.ndarray  # [L] their frames are in the journal


class Checkpoints:
  """The checkpoints in `run_dir/checkpoints/`; the newest `keep` are kept. Not thread-safe."""

  def __init__(self, run_dir: Path, keep: int = 3):
    self._directory = run_dir.resolve() / "checkpoints"
    self._keep = keep

  def steps(self) -> list[int]:
    """Learner steps of the checkpoints, in ascending order. Raises CheckpointError."""
    return sorted({step for step, _ in self._folders()})

  def tails(self) -> np.ndarray | None:
    """The oldest slots [L] that any checkpoint references; None if they cannot be read."""
    try:
      return np.array(_read_meta(next(iter(self._folders().values())))["tails"])
    except (OSError, CheckpointError, *_DAMAGE):
      return None

  def _folders(self) -> dict[tuple[int, int], Path]:
    """Folders by learner and agent steps, oldest first. Raises CheckpointError."""
    try:
      names = os.listdir(self._directory)
    except OSError as error:
      if isinstance(error, FileNotFoundError) and not self._directory.is_symlink():
        return {}
      raise CheckpointError(f"can't read {self._directory}: {_reason(error)}") from error
    matches = filter(None, (re.fullmatch(r"(\d+)-(\d+)", name) for name in names))
    folders = {(int(match[1]), int(match[2])): self._directory / match[0] for match in matches}
    return dict(sorted(folders.items()))

  # --- Writing ---

  def save(self, snapshot: Snapshot, *, needed: int | None = None) -> None:
    """Writes a checkpoint, unless one with the same step counts exists.

    Keeps the newest few, and the newest few of each learner step from `needed` on. Raises
    CheckpointError if writing fails (as on a full disk); earlier checkpoints are then intact.
    """
    folder = self._directory / f"{snapshot.step}-{snapshot.env_steps}"
    if (snapshot.step, snapshot.env_steps) in self._folders():
      return  # stopped twice at the same step, or resumed after the run finished
    try:
      self._write(folder, snapshot)
      sync_folder(folder)  # as Orbax does not; older checkpoints are deleted then
    except Exception as error:
      shutil.rmtree(folder, ignore_errors=True)  # else the next save would take it for intact
      raise CheckpointError(f"saving to {self._directory} failed: {_reason(error)}") from error
    folders = self._folders()
    steps = [step for step, _ in folders]
    for i, old in enumerate([*folders.values()][: -self._keep]):
      superfluous = steps[i + 1 :].count(steps[i]) >= self._keep
      if needed is None or steps[i] < needed or superfluous:
        shutil.rmtree(old, ignore_errors=True)

  def _write(self, folder: Path, snapshot: Snapshot) -> None:
    packed = {name: _pack(tree) for name, tree in snapshot.items.items()}
    layouts = {name: _layout(tree) for name, tree in snapshot.items.items()}
    meta = {
      "step": snapshot.step,
      "env_steps": snapshot.env_steps,
      "heads": np.asarray(snapshot.heads).tolist(),
      "tails": np.asarray(snapshot.tails).tolist(),
      "items": {name: [zlib.crc32(packed[name].data), layouts[name]] for name in packed},
      "counters": snapshot.meta,
    }
    meta["crc32"] = _crc_of_json(meta)
    self._remove_leftovers()  # of processes that were killed, before the space is checked
    self._check_space(sum(array.nbytes for array in packed.values()))
    items = {
      name: ocp.args.StandardSave(tree) if name == NETWORK else ocp.args.ArraySave(packed[name])
      for name, tree in snapshot.items.items()
    }
    try:
      with orbax_compat.checkpointer() as writer:
        writer.save(folder, args=ocp.args.Composite(meta=ocp.args.JsonSave(meta), **items))
    finally:
      self._remove_leftovers()  # of this save, if it failed

  def _remove_leftovers(self) -> None:
    for leftover in self._directory.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(leftover, ignore_errors=True)

  def _check_space(self, size: int) -> None:
    """Raises OSError if `size` bytes do not fit, as Orbax recovers badly from a full disk."""
    self._directory.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(self._directory).free, 1.1 * size + 2**20
    if free < needed:
      message = f"needs {needed / 1e6:.2f} MB, but only {free / 1e6:.2f} MB are free on the disk"
      raise OSError(errno.ENOSPC, message)

  # --- Reading ---

  def restore_network(
    self, template: Params, report: Callable[[str], None], *, newest: int | None = None
  ) -> tuple[int, Params]:
    """Returns the newest readable step and its network; moves nothing. See `restore`."""

    def read(folder: Path) -> tuple[int, Params]:
      meta = _read_meta(folder)
      return meta["step"], _read_items(folder, meta, [NETWORK], {NETWORK: template})[NETWORK]

    return self._first_readable(read, report, newest)

  def restore(
    self,
    templates: Mapping[str, Params],
    report: Callable[[str], None],
    *,
    newest: int | None = None,
    verify: Callable[[np.ndarray, np.ndarray], None] = lambda tails, heads: None,
  ) -> Snapshot:
    """Returns the newest usable checkpoint as numpy arrays; moves later ones aside.

    Args:
      templates: structure, dtypes and shapes of items; others are restored as dicts of arrays.
      report: called with a line for each unusable checkpoint.
      newest: ignores checkpoints after this learner step.
      verify: called with tails and heads [L]; raises JournalDamage if the journal lacks a slot.

    Raises CheckpointError if no checkpoint exists, none is usable, or on a system error (memory,
    permissions, open files), after which it does not fall back to an older one. Nothing is changed
    in that case.
    """

    def read(folder: Path) -> Snapshot:
      meta = _read_meta(folder)
      items = _read_items(folder, meta, meta["items"], templates)
      heads, tails = (np.array(meta[name], np.int64) for name in ("heads", "tails"))
      verify(tails, heads)
      return Snapshot(meta["step"], meta["env_steps"], items, meta["counters"], heads, tails)

    restored = self._first_readable(read, report, newest)
    self.set_aside(later_than=(restored.step, restored.env_steps))
    return restored

  def _first_readable(
    self, read: Callable[[Path], T], report: Callable[[str], None], newest: int | None
  ) -> T:
    folders = [f for (step, _), f in self._folders().items() if newest is None or step <= newest]
    if not folders:
      limit = "" if newest is None else f" at step {newest} or earlier"
      raise CheckpointError(f"there is no checkpoint{limit} in {self._directory}")
    for folder in reversed(folders):
      try:
        return read(folder)
      except Exception as error:
        if not isinstance(error, _DAMAGE) or str(error).startswith(_MACHINE):
          raise CheckpointError(
            f"can't read checkpoint {folder} (it may be intact): {_reason(error)}; "
            "nothing was changed"
          ) from error
        report(f"checkpoint {folder} cannot be used: {_reason(error)}")
    raise CheckpointError(
      f"none of the {len(folders)} checkpoints in {self._directory} can be used"
    )

  def set_aside(self, *, later_than: tuple[int, int] = (-1, -1)) -> None:
    """Moves all checkpoints aside, or those after these learner and agent steps."""
    aside = self._directory / "damaged"  # on the same file system
    for moment, folder in self._folders().items():
      if moment > later_than:
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / folder.name, ignore_errors=True)
        folder.rename(aside / folder.name)


def _read_meta(folder: Path) -> dict[str, Any]:
  """Reads the JSON of a checkpoint. Raises ValueError if its checksum differs."""
  with orbax_compat.checkpointer() as reader:
    meta = reader.restore(folder, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
  if not isinstance(meta, dict) or meta.get("crc32") != _crc_of_json(meta):
    raise ValueError("checksum of 'meta' differs")
  return meta


def _read_items(
  folder: Path, meta: Mapping[str, Any], names: Collection[str], templates: Mapping[str, Params]
) -> dict[str, Any]:
  layouts = {name: meta["items"][name][1] for name in names}
  for name in templates.keys() & layouts.keys():
    if layouts[name] != _layout(templates[name]):
      raise ValueError(f"arrays of '{name}' differ from the run's in names, dtypes or shapes")
  args: dict[str, Any] = {name: ocp.args.ArrayRestore() for name in names}
  blank = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), templates[NETWORK])
  args[NETWORK] = ocp.args.StandardRestore(blank)
  with orbax_compat.checkpointer() as reader:
    restored = reader.restore(folder, args=ocp.args.Composite(**args))
  items: dict[str, Any] = {}
  for name in names:
    packed: np.ndarray = _pack(restored[name]) if name == NETWORK else restored[name]
    if zlib.crc32(packed.data) != meta["items"][name][0]:
      raise ValueError(f"checksum of '{name}' differs")
    items[name] = _unpack(packed, layouts[name])
    if name in templates:
      structure = jax.tree.structure(templates[name])
      items[name] = jax.tree.unflatten(structure, items[name].values())
  return items


def _layout(tree: Params) -> list[list[Any]]:
  """Name, dtype and shape of each array."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return [[name(path), leaf.dtype.name, list(leaf.shape)] for path, leaf in leaves]


def _pack(tree: Params) -> np.ndarray:
  """Concatenates the bytes of all arrays, and one more, as Orbax rejects empty arrays."""
  leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(tree)]
  return np.concatenate([*(x.reshape(-1).view(np.uint8) for x in leaves), np.zeros(1, np.uint8)])


def _unpack(packed: np.ndarray, layout: list[list[Any]]) -> dict[str, np.ndarray]:
  """Restores packed arrays, by name. They are writable."""
  arrays, offset = {}, 0
  for name, dtype, shape in layout:
    end = offset + np.dtype(dtype).itemsize * math.prod(shape)
    arrays[name] = packed[offset:end].copy().view(dtype).reshape(shape)
    offset = end
  return arrays


def _crc_of_json(meta: Mapping[str, Any]) -> int:
  rest = {key: value for key, value in meta.items() if key != "crc32"}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _reason(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:300] if text else ''}"
