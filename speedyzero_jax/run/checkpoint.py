"""Checkpoints of a run: one .npz file each; atomic, the newest few kept.

`checkpoints/N-M.npz` is the state after N learner and M agent steps. Its arrays, which NumPy alone
can read, are named `ITEM/PATH`; `meta` is a JSON of counters. Frames are in the journal, of which a
checkpoint names the slots that it refers to. The format holds a CRC-32 of each array, which is
checked; a damaged checkpoint is reported, moved to `damaged/`, and the one before is used. Nothing
is ever unpickled.
"""

import functools
import io
import json
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from speedyzero_jax.replay.journal import JournalDamage
from speedyzero_jax.types import Params

T = TypeVar("T")

# What readers raise for bytes that are missing, torn or of another shape. Anything else is about
# the machine.
_DAMAGE = (
  ValueError, LookupError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile,
  zlib.error, struct.error, FileNotFoundError, JournalDamage,
)  # fmt: skip


class CheckpointError(Exception):
  """A checkpoint cannot be written or read; the message names it."""


class Snapshot(NamedTuple):
  """The mutable state of a run at one moment, which its two numbers of steps identify.

  Leaves are arrays that are not written to any more.
  """

  step: int
  env_steps: int  # agent steps collected
  items: dict[str, Any]  # name -> dict of arrays, or any pytree that `restore` has a template of
  meta: dict[str, Any]  # JSON: other counters
  heads: np.ndarray  # [L] the replay holds slots tails <= t < heads of each lane,
  tails: np.ndarray  # [L] which are in the journal


class Checkpoints:
  """The checkpoints in `run_dir/checkpoints/`, of which the newest `keep` stay. Not thread-safe."""

  def __init__(self, run_dir: Path, keep: int = 3):
    self._directory = run_dir.resolve() / "checkpoints"
    self._keep = keep

  def steps(self) -> list[int]:
    """Learner steps of which there are checkpoints, oldest first. Raises CheckpointError."""
    return sorted({step for step, _ in self._files()})

  def tails(self) -> np.ndarray | None:
    """[L], the oldest slots that any checkpoint refers to; None if that cannot be read."""
    try:
      with zipfile.ZipFile(next(iter(self._files().values()))) as file:
        return _read(file, "tails")
    except (OSError, *_DAMAGE):
      return None

  def _files(self) -> dict[tuple[int, int], Path]:
    """Files by learner and agent steps, oldest first."""
    found = {}
    for path in self._directory.glob("*"):
      if path.is_dir():
        raise CheckpointError(
          f"{path} was written by an earlier version of this program and cannot be used"
        )
      if match := re.fullmatch(r"(\d+)-(\d+)\.npz", path.name):
        found[int(match[1]), int(match[2])] = path
    return dict(sorted(found.items()))

  # --- Writing ---

  def save(self, snapshot: Snapshot, *, needed: int | None = None) -> None:
    """Writes a checkpoint, unless there is one of this moment.

    The newest few stay, and all from step `needed` on. Raises CheckpointError if the disk is full
    or failed; earlier checkpoints are intact then.
    """
    path = self._directory / f"{snapshot.step}-{snapshot.env_steps}.npz"
    if path.exists():
      return  # stopped twice at one moment, or a finished run resumed
    try:
      self._write(path, snapshot)
    except OSError as error:
      raise CheckpointError(f"saving to {self._directory} failed: {_reason(error)}") from error
    for (step, _), old in list(self._files().items())[: -self._keep]:
      if needed is None or step < needed:
        old.unlink()

  def _write(self, path: Path, snapshot: Snapshot) -> None:
    items = jax.tree_util.tree_leaves_with_path(snapshot.items)
    arrays = {_name(key): leaf for key, leaf in items}
    arrays |= {"heads": snapshot.heads, "tails": snapshot.tails}
    arrays["meta"] = np.array(json.dumps(snapshot.meta))
    self._directory.mkdir(parents=True, exist_ok=True)
    try:
      with path.with_suffix(".tmp").open("wb") as file:
        np.savez(file, **arrays)
        file.flush()
        os.fsync(file.fileno())
      os.replace(path.with_suffix(".tmp"), path)
      directory = os.open(self._directory, os.O_RDONLY)
      os.fsync(directory)
      os.close(directory)
    finally:  # of this save if it failed, and of processes that were killed
      for leftover in self._directory.glob("*.tmp"):
        leftover.unlink()

  # --- Reading ---

  def restore_item(
    self,
    name: str,
    template: Params,
    report: Callable[[str], None],
    *,
    newest: int | None = None,
  ) -> tuple[int, Params]:
    """The newest readable step with one of its items. Changes nothing. See `restore`."""
    (step, _), item = self._first_readable(
      lambda file: _read_item(file, name, template), report, newest
    )
    return step, item

  def restore(
    self,
    templates: Mapping[str, Params],
    report: Callable[[str], None],
    *,
    newest: int | None = None,
    verify: Callable[[np.ndarray, np.ndarray], None] = lambda tails, heads: None,
  ) -> Snapshot:
    """The newest usable checkpoint, as numpy arrays; later ones are moved to `damaged/`.

    Args:
      templates: structure, dtypes and shapes of items; others are restored as dicts.
      report: called with a line for each checkpoint that cannot be used.
      newest: later learner steps are not wanted.
      verify: called with tails and heads [L]; raises JournalDamage if those slots are not stored.

    Raises CheckpointError if there is none, none is usable, or the machine failed (memory,
    permissions, open files), which is no reason to use an older one. Nothing has been changed then.
    """

    def read(file: zipfile.ZipFile) -> tuple[Any, ...]:
      items: dict[str, Any] = {
        name: _read_item(file, name, template) for name, template in templates.items()
      }
      for member in file.namelist():
        item, _, name = member.removesuffix(".npy").partition("/")
        if name and item not in templates:
          items.setdefault(item, {})[name] = _read(file, f"{item}/{name}")
      meta, heads, tails = (_read(file, name) for name in ("meta", "heads", "tails"))
      verify(tails, heads)
      return items, json.loads(str(meta)), heads, tails

    moment, state = self._first_readable(read, report, newest)
    self._move_aside(later_than=moment)
    return Snapshot(*moment, *state)

  def _first_readable(
    self, read: Callable[[zipfile.ZipFile], T], report: Callable[[str], None], newest: int | None
  ) -> tuple[tuple[int, int], T]:
    files = [(k, path) for k, path in self._files().items() if newest is None or k[0] <= newest]
    if not files:
      wanted = "" if newest is None else f" of step {newest} or before"
      raise CheckpointError(f"there is no checkpoint{wanted} in {self._directory}")
    for moment, path in reversed(files):
      try:
        with zipfile.ZipFile(path) as file:
          return moment, read(file)
      except _DAMAGE as error:
        report(f"checkpoint {path} cannot be used: {_reason(error)}")
      except Exception as error:
        raise CheckpointError(
          f"can't read checkpoint {path}, which may be whole: {_reason(error)}; nothing was changed"
        ) from error
    raise CheckpointError(f"none of the {len(files)} checkpoints in {self._directory} can be read")

  def set_aside(self) -> None:
    """Moves all checkpoints to `damaged/`, for a run that starts from the beginning."""
    self._move_aside(later_than=(-1, -1))

  def _move_aside(self, *, later_than: tuple[int, int]) -> None:
    aside = self._directory.parent / "damaged"
    for moment, path in self._files().items():
      if moment > later_than:
        aside.mkdir(exist_ok=True)
        path.replace(aside / path.name)


_name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")


def _read(file: zipfile.ZipFile, name: str) -> np.ndarray:
  """An array; its checksum is compared before anything of it is believed."""
  content = io.BytesIO(file.read(f"{name}.npy"))
  array: np.ndarray = np.lib.format.read_array(content)  # refuses pickled objects
  return array


def _read_item(file: zipfile.ZipFile, item: str, template: Params) -> Params:
  """An item with the structure of its template. Raises ValueError if it has other arrays."""
  leaves, structure = jax.tree_util.tree_flatten_with_path({item: template})
  stored = {name for name in file.namelist() if name.startswith(f"{item}/")}
  if stored != {f"{_name(key)}.npy" for key, _ in leaves}:
    raise ValueError(f"arrays of '{item}' have other names")
  arrays = [_read(file, _name(key)) for key, _ in leaves]
  for array, (key, wanted) in zip(arrays, leaves, strict=True):
    if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
      raise ValueError(f"'{_name(key)}' is {array.dtype}{array.shape}, not that of this run")
  return jax.tree.unflatten(structure, arrays)[item]


def _reason(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:300] if text else ''}"
