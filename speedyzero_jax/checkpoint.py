"""Checkpoints of a run, written by Orbax in a background thread; atomic, the newest few kept.

A checkpoint at step N is `checkpoints/N/` with the network, the optimiser, the weights each role acts with, the
replay's mutable part, the actor and a JSON of counters. Frames, which never change, are appended to `replay/` once
each, and a checkpoint lists the files it stands on. CRC-32s of all arrays, of the JSON and of those files are stored
and checked, so damage is noticed and the checkpoint before is used. Nothing is ever unpickled. Knows nothing of roles:
it moves pytrees of arrays.
"""

import errno
import io
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from speedyzero_jax.types import Params

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every step of every save

_ITEMS = ("network", "optimizer", "weights", "replay", "actor")


class CheckpointError(Exception):
  """A checkpoint can't be written or read; the message names it."""


class Snapshot(NamedTuple):
  """All of a run at one learner step. Leaves are host arrays that nobody else writes to, or jax arrays."""

  step: int
  network: Params  # Variables
  optimizer: Params
  weights: dict[str, Params]  # subscriber -> Variables
  replay: dict[str, np.ndarray]  # the mutable part
  actor: dict[str, np.ndarray]
  meta: dict[str, Any]  # JSON: counters
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
  text = json.dumps({key: value for key, value in meta.items() if key != "meta_crc32"}, sort_keys=True)
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
    keep: how many of the newest checkpoints stay.
  """

  def __init__(self, run_dir: Path, keep: int = 3):
    self._directory, self._segments = run_dir.resolve() / "checkpoints", run_dir.resolve() / "replay"
    self._keep = keep
    self._manager: ocp.CheckpointManager | None = None
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._files: list[tuple[str, int]] = []  # segments that the newest checkpoint stands on, with their CRCs
    self.heads: np.ndarray | None = None  # of the newest checkpoint's replay; None before the first

  def steps(self) -> list[int]:
    """Steps of the checkpoints there are, oldest first."""
    if not self._directory.is_dir():
      return []
    return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())

  # --- writing ---

  def save(self, snapshot: Snapshot) -> None:
    """Starts writing; waits for the save before. A learner step that has its checkpoint is not saved again.

    Raises:
      CheckpointError: the save *before* failed (nothing of this one is written).
    """
    self.wait()
    self._thread = threading.Thread(target=self._write_in_background, args=(snapshot,), name="checkpoint")
    self._thread.start()

  def wait(self) -> None:
    """Waits until what was started is on disk. Raises CheckpointError if it failed."""
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    if self._error is not None:
      error, self._error = self._error, None
      raise CheckpointError(f"saving to {self._directory} failed: {_reason(error)}") from error

  def _write_in_background(self, snapshot: Snapshot) -> None:
    try:
      self._write(snapshot)
    except Exception as error:  # handed to the next `save` or `wait`
      self._error = error

  def _write(self, snapshot: Snapshot) -> None:
    if snapshot.step in self.steps():
      return  # stopped twice at one step, or a finished run resumed: what is there, later ones may stand on
    files = list(self._files)
    if len(snapshot.slots["frame"]):
      name = f"slots-{snapshot.step:012d}.npz"
      files.append((name, self._write_segment(self._segments / name, snapshot.slots)))
    items = {name: jax.tree.map(np.asarray, getattr(snapshot, name)) for name in _ITEMS}
    empty = {name: _take_empty(items, name) for name in ("replay", "actor")}
    items = {name: tree for name, tree in items.items() if jax.tree.leaves(tree)}
    crcs = {name: _crcs(tree) for name, tree in items.items()}
    meta = {"step": snapshot.step, "segments": files, "crc32": crcs, "empty": empty, **snapshot.meta}
    meta["meta_crc32"] = _crc_of_json(meta)
    self._check_space(sum(leaf.nbytes for leaf in jax.tree.leaves(items)))
    saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
    args = ocp.args.Composite(meta=ocp.args.JsonSave(meta), **saves)
    try:
      if not self._open().save(snapshot.step, args=args, force=True):
        raise OSError(f"Orbax refused to save step {snapshot.step}")
    except Exception:
      # What Orbax has begun is of no use, takes space, and its manager may wait for threads that have died.
      self._manager = None
      for leftover in self._directory.glob(f"{snapshot.step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover, ignore_errors=True)
      raise
    self._files, self.heads = files, snapshot.heads

  def _check_space(self, size: int) -> None:
    """Raises OSError when `size` bytes do not fit; Orbax recovers badly from finding that out half-way."""
    self._directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(self._directory).free
    if free < 1.1 * size + 2**20:
      raise OSError(errno.ENOSPC, f"{size / 1e6:.1f} MB to write, but {free / 1e6:.1f} MB are free on the disk")

  @staticmethod
  def _write_segment(path: Path, slots: Mapping[str, np.ndarray]) -> int:
    """Returns the file's CRC."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    archive = io.BytesIO()
    np.savez_compressed(archive, **slots)  # type: ignore[arg-type]
    try:
      with temporary.open("wb") as file:
        file.write(archive.getbuffer())
        file.flush()
        os.fsync(file.fileno())
      os.replace(temporary, path)
    except BaseException:
      temporary.unlink(missing_ok=True)
      raise
    return zlib.crc32(archive.getbuffer())

  def _read_segment(self, name: str, crc: int) -> dict[str, np.ndarray]:
    content = (self._segments / name).read_bytes()
    if zlib.crc32(content) != crc:  # NumPy stops reading before zipfile would compare its own
      raise ValueError(f"checksum of '{name}' differs")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
      return {key: archive[key] for key in archive.files}

  def _open(self) -> ocp.CheckpointManager:
    if self._manager is None:
      self._directory.mkdir(parents=True, exist_ok=True)
      options = ocp.CheckpointManagerOptions(max_to_keep=self._keep, enable_async_checkpointing=False)
      self._manager = ocp.CheckpointManager(self._directory, options=options)
    return self._manager

  def close(self) -> None:
    """Waits and lets go of Orbax's threads."""
    try:
      self.wait()
    finally:
      if self._manager is not None:
        self._manager.close()
        self._manager = None

  # --- reading ---

  def restore_network(self, abstract: Params, report: Callable[[str], None]) -> tuple[int, Params]:
    """The newest readable network: (step, Variables). See `restore`."""
    return self._newest(lambda step: (step, self._read(step, {"network": abstract})[0]["network"]), report)

  def restore(self, abstract: Mapping[str, Params], report: Callable[[str], None]) -> tuple[Snapshot, list[dict]]:
    """Reads the newest checkpoint that is whole; damaged ones are named to `report` and moved aside.

    Args:
      abstract: shapes of `network`, `optimizer` and each subscriber's `weights`; a leaf's sharding says where it goes.
      report: takes a line for each checkpoint that could not be read.

    Returns:
      The snapshot (its slots left empty) and its segments of slots, oldest first.

    Raises:
      CheckpointError: there is none, or none is readable.
    """

    def read(step: int) -> tuple[Snapshot, list[dict]]:
      items, meta = self._read(step, {"replay": None, "actor": None, **abstract})
      files = [(name, crc) for name, crc in meta["segments"]]
      segments = [self._read_segment(name, crc) for name, crc in files]
      for name, arrays in meta["empty"].items():
        items[name] = items.get(name, {}) | {key: np.zeros(shape, dtype) for key, (dtype, shape) in arrays.items()}
      known = {"step", "segments", "crc32", "empty", "meta_crc32"}
      rest = {key: value for key, value in meta.items() if key not in known}
      self._files, self.heads = files, items["replay"]["head"]
      parts = {name: items.get(name, {}) for name in _ITEMS}
      return Snapshot(step=step, meta=rest, slots={}, heads=items["replay"]["head"], **parts), segments

    snapshot, segments = self._newest(read, report)
    self._set_aside(after=snapshot.step)
    return snapshot, segments

  def _newest(self, read: Callable[[int], Any], report: Callable[[str], None]) -> Any:
    steps = self.steps()
    if not steps:
      raise CheckpointError(f"there is no checkpoint in {self._directory}")
    for step in reversed(steps):
      try:
        return read(step)
      except Exception as error:  # whatever a damaged file makes its reader raise
        report(f"checkpoint {self._directory / str(step)} is damaged or of another kind: {_reason(error)}")
    raise CheckpointError(f"none of the {len(steps)} checkpoints in {self._directory} can be read")

  def _read(self, step: int, abstract: Mapping[str, Params]) -> tuple[dict[str, Params], dict]:
    directory = self._directory / str(step)
    with ocp.CheckpointManager(self._directory, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
      meta = dict(manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta)
      if meta.get("meta_crc32") != _crc_of_json(meta) or meta["step"] != step:
        raise ValueError("checksum of 'meta' differs")
      wanted = {name: tree for name, tree in abstract.items() if (directory / name).is_dir()}
      missing = set(meta["crc32"]) & set(abstract) - set(wanted)
      if missing or not set(wanted) <= set(meta["crc32"]):
        raise ValueError(f"items are missing: {', '.join(sorted(missing)) or 'checksums'}")
      args = {name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()}
      restored = manager.restore(step, args=ocp.args.Composite(**args))
    items = {name: restored[name] for name in wanted}
    for name, tree in items.items():
      if _crcs(tree) != list(meta["crc32"][name]):
        raise ValueError(f"checksum of '{name}' differs")
    return items, meta

  def _set_aside(self, after: int) -> None:
    """Moves checkpoints newer than the one restored, and the segments only they stand on, out of the way.

    Segments without any checkpoint are what a killed process had begun to save: they are removed.
    """
    aside = self._directory.parent / "damaged"
    newer = [step for step in self.steps() if step > after]
    for step in newer:
      aside.mkdir(exist_ok=True)
      shutil.rmtree(aside / str(step), ignore_errors=True)
      os.replace(self._directory / str(step), aside / str(step))
    known = {name for name, _ in self._files}
    for path in self._segments.glob("slots-*"):
      if path.name in known:
        continue
      if newer and path.suffix == ".npz":
        os.replace(path, aside / path.name)
      else:
        path.unlink()


def _reason(error: BaseException) -> str:
  text = str(error).strip().splitlines()
  return f"{type(error).__name__}: {text[0][:300] if text else ''}"
