"""The run folder: a run's stored configuration, its locks and the log of its starts.

A folder that holds another run or is in use is refused before anything in it changes.
"""

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import IO

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.system.files import write_atomically

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "mctx", "numpy", "envpool")


@dataclasses.dataclass(frozen=True)
class RunDir(contextlib.AbstractContextManager):
  """A run folder locked by this process. Use it as a context manager, or `close` it."""

  path: Path
  _lock: IO

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Releases the lock. May be called twice."""
    self._lock.close()


def create(config: Config, name: str) -> RunDir:
  """Creates the folder of a new run and stores its configuration there.

  The folder is `run.dir`; if that is empty, `runs/NAME`, with a number appended if it exists.
  Raises ConfigError if the folder already holds a run, is in use, or cannot be written.
  """
  path = Path(os.path.expanduser(config.run.dir or "runs"))
  _check_name(path)
  try:
    path.mkdir(parents=True, exist_ok=True)
    if not config.run.dir:
      path = _numbered(path, safe_name(name))
    _check_unused(path)
    with contextlib.ExitStack() as stack:
      lock = stack.enter_context(_lock(path, "run.lock"))
      _check_unused(path)  # another process may have been faster
      write_atomically(path / "config.yaml", loader.to_yaml(config))
      stack.pop_all()
  except OSError as error:
    raise ConfigError(f"can't create a run in {path}: {error.strerror or error}") from error
  return RunDir(path, lock)


def _check_name(path: Path) -> None:
  """Raises ConfigError if Orbax, to which a path is a pattern, can't store checkpoints in it."""
  real = os.path.realpath(path)
  if re.search(r"[\[*?\\\udc80-\udcff]", real):
    raise ConfigError(
      f"{real!r} can't be a run folder: its path must be UTF-8 without any of [ * ? \\"
    )


def _numbered(parent: Path, name: str) -> Path:
  """Creates the folder `name` in `parent`, with a number appended if it exists."""
  path, number = parent / name, 2
  while True:
    try:
      path.mkdir()
      return path
    except FileExistsError:
      path, number = parent / f"{name}-{number}", number + 1


def _check_unused(path: Path) -> None:
  """Raises ConfigError if a folder holds a run or anything else."""
  if (path / "config.yaml").exists():
    raise ConfigError(
      f"{path} already holds a run; continue it with --resume {path}, or choose another run.dir"
    )
  own = ("run.lock", "config.yaml.")  # of a process that was killed
  if not all(entry.name.startswith(own) for entry in path.iterdir()):
    raise ConfigError(f"{path} is not empty and holds no run; choose another run.dir")


def safe_name(text: str) -> str:
  """Turns text into a folder name; game names such as gymnasium:ALE/Pong-v5 contain slashes."""
  return re.sub(r"[^\w.+-]", "-", text)


def resumed(path: Path, changes: list[str]) -> Config:
  """Returns the configuration with which to resume a run, after these `key=value` changes.

  Raises ConfigError if the folder holds no run, or a change is not allowed.
  """
  stored = read_config(path)
  config = loader.override(stored, changes, check=False)
  if different := loader.fixed_changes(stored, config):
    raise ConfigError(
      f"{path} was started with another configuration ({'; '.join(different)}); "
      "start a new run instead"
    )
  loader.validate(config, stored)
  return config


def open_existing(path: Path) -> RunDir:
  """Opens a run folder to resume. Raises ConfigError if it is in use or has an unsuitable name."""
  _check_name(path)
  return RunDir(path, _lock(path, "run.lock"))


def in_use(path: Path) -> bool:
  """Whether another process, or a supervisor, has locked the run folder."""
  for name in ("supervisor.lock", "run.lock"):
    try:
      with (path / name).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      return True
    except OSError:  # not there, or an error that the run itself will report
      continue
  return False


def read_config(path: Path) -> Config:
  """Reads the configuration stored in a run folder.

  Raises ConfigError if it is missing, damaged, or has keys of another version, or if its agent
  can't be imported.
  """
  try:
    return loader.from_yaml((path / "config.yaml").read_text())
  except OSError as error:
    raise ConfigError(f"{path} holds no run: {error.strerror or error}") from error
  except (ConfigError, UnicodeDecodeError) as error:
    raise ConfigError(
      f"can't read {path / 'config.yaml'} with this version and PYTHONPATH: {error}"
    ) from error


def check_same(path: Path, config: Config, besides: Collection[str]) -> None:
  """Raises ConfigError if the folder holds a run of another configuration.

  Settings in `besides` may differ.
  """
  if not (path / "config.yaml").exists():
    return
  stored, expected = (
    {"agent": each.agent.name} | loader.flat(each) for each in (read_config(path), config)
  )
  keys = {key for key in stored.keys() | expected.keys() if stored.get(key) != expected.get(key)}
  if keys := keys.difference(besides):
    raise ConfigError(
      f"{path} contains a run of another configuration ({', '.join(sorted(keys))}); "
      "choose another --dir"
    )


def record_start(path: Path, step: int, devices: int, kind: str) -> None:
  """Appends a line to `starts.jsonl`: the first learner step, the hardware and the versions.

  `devices` is the number of all learner processes' devices; `kind` is such as `NVIDIA H200`.
  """
  cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
  row = {
    names.STEP: step,
    "devices": devices,
    "device": kind,
    "cpu": f"{len(os.sched_getaffinity(0))} x {cpu[1] if cpu else platform.machine()}",
    "system": platform.platform(),
    "host": platform.node(),
    "versions": {"python": platform.python_version(), "code": _commit()}
    | {library: _version(library) for library in _LIBRARIES},
  }
  with contextlib.suppress(OSError), (path / "starts.jsonl").open("ab") as file:  # a full disk
    file.write(jsonl.line(row))


def _version(library: str) -> str:
  try:
    return importlib.metadata.version(library)
  except importlib.metadata.PackageNotFoundError:  # a build without metadata
    return "-"


def _commit() -> str:
  """The commit of the git clone that contains this code; empty outside of one."""
  clone = Path(__file__).parents[2]
  if not (clone / ".git").exists():
    return ""
  command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--exclude=*"]
  try:
    result = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=20)
  except (OSError, subprocess.TimeoutExpired):  # no git, or a slow file system
    return ""
  return result.stdout.strip()


def supervised(path: Path) -> IO:
  """Takes the supervisor's lock of a folder; close it to release. Raises ConfigError if held."""
  return _lock(path, "supervisor.lock")


def _lock(path: Path, name: str) -> IO:
  """Locks a file in the folder; the kernel releases the lock however the process ends."""
  try:
    file = (path / name).open("a")
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    raise ConfigError(f"{path} is in use by another process") from None
  except OSError as error:
    raise ConfigError(f"can't use {path}: {error.strerror or error}") from error
  return file
