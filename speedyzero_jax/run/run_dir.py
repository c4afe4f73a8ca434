"""Run folder: configuration and lock of a run.

A folder of another run, or in use by a process, is refused before anything in it is changed.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError, UnknownKeyError
from speedyzero_jax.config.schema import Config


class RunFolderError(Exception):
  """The folder cannot be used; the message says why and what to do."""


class RunDir:
  """An exclusively held run folder. Use as a context manager, or `close` it."""

  def __init__(self, path: Path, config: Config, lock: int):
    self.path, self.config, self._lock = path, config, lock
    self.evaluation = path / "evaluation.json"

  def __enter__(self) -> "RunDir":
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Releases the lock. May be called twice."""
    if self._lock >= 0:
      os.close(self._lock)
      self._lock = -1


def create(config: Config, name: str) -> RunDir:
  """Creates the folder of a new run.

  Args:
    config: of the run, stored in the folder. `run.dir` is the folder; if empty, `runs/NAME`, with
      a number if that exists.
    name: e.g. quickstart-Catch-s0.

  Raises:
    RunFolderError: the folder holds a run already, is in use, or cannot be written.
  """
  if config.run.dir:
    path = Path(config.run.dir)
  else:
    path, number = Path("runs") / name, 2
    while path.exists():
      path, number = Path("runs") / f"{name}-{number}", number + 1
  try:
    path.mkdir(parents=True, exist_ok=True)
    if (path / "config.yaml").exists():
      raise RunFolderError(_occupied(path, config))
    if any(entry.name not in ("run.lock", "config.yaml.tmp") for entry in path.iterdir()):
      raise RunFolderError(f"{path} is not empty and holds no run; choose another run.dir")
    lock = _lock(path)
    temporary = path / "config.yaml.tmp"
    temporary.write_text(loader.to_yaml(config))
    os.replace(temporary, path / "config.yaml")
  except OSError as error:
    raise RunFolderError(f"can't make a run in {path}: {error.strerror or error}") from error
  return RunDir(path, config, lock)


def open_existing(path: Path, changes: list[str]) -> RunDir:
  """Opens the folder of an earlier run, to resume it.

  Args:
    path: the folder.
    changes: `key=value` overrides of keys that a resumed run may change.

  Raises:
    RunFolderError: it holds no run, is in use, or a change is not allowed.
  """
  stored = read_config(path)
  try:
    config = loader.override(stored, changes)
  except ConfigError as error:
    raise RunFolderError(str(error)) from error
  changed = loader.diff(stored, config)
  different = [f"{key}: {changed[key]}" for key in loader.immutable(config, changed)]
  if different:
    raise RunFolderError(
      f"{path} was started with another configuration ({'; '.join(different)}); "
      "start a new run instead"
    )
  try:
    return RunDir(path, config, _lock(path))
  except OSError as error:
    raise RunFolderError(f"can't use {path}: {error.strerror or error}") from error


def read_config(path: Path) -> Config:
  """The configuration stored in a run folder.

  Raises:
    RunFolderError: there is none, it is damaged, or its keys are of another version of the program.
  """
  try:
    return loader.from_yaml((path / "config.yaml").read_text())
  except OSError as error:
    raise RunFolderError(f"{path} holds no run: {error.strerror or error}") from error
  except UnknownKeyError as error:
    raise RunFolderError(
      f"{path} was written by an earlier version of this program and can't be used: {error}"
    ) from error
  except (ConfigError, UnicodeDecodeError) as error:
    raise RunFolderError(f"{path / 'config.yaml'} can't be read: {error}") from error


def _occupied(path: Path, config: Config) -> str:
  changed = loader.diff(read_config(path), config)
  changed.pop("run.dir", None)  # the same folder may be spelled in several ways
  different = [f"{key}: {values}" for key, values in changed.items()]
  what = (
    f"another configuration ({'; '.join(different[:3])}{'; ...' if len(different) > 3 else ''})"
    if different
    else "this"
  )
  return (
    f"{path} already holds a run of {what}. To continue it: --resume {path}. "
    "Or choose another run.dir."
  )


@contextlib.contextmanager
def supervised(path: Path) -> Iterator[None]:
  """Holds the supervisor's lock of a folder. Raises RunFolderError if another process holds it."""
  try:
    lock = _lock(path, "supervisor.lock")
  except OSError as error:
    raise RunFolderError(f"can't use {path}: {error.strerror or error}") from error
  try:
    yield
  finally:
    os.close(lock)


def _lock(path: Path, name: str = "run.lock") -> int:
  """Locks the folder for this process; the kernel releases it however the process ends."""
  descriptor = os.open(path / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    os.close(descriptor)
    raise RunFolderError(f"{path} is in use by another process") from None
  return descriptor
