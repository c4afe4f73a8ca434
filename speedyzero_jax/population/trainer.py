"""Members as run folders, trained by processes of launch/multihost.py."""

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.population.config import Population
from speedyzero_jax.population.controller import Outcome, Settings
from speedyzero_jax.run import run_dir

_LAUNCHER = Path(__file__).resolve().parents[2] / "launch" / "multihost.py"
_WRONG_USE = 2  # exit code of the launcher
_COPIED = "copied.json"  # in a member's folder: the round after which it was copied
_OWN = ("*.lock", "evaluation.json", _COPIED)


class Interrupted(Exception):
  """A signal stopped the members, which have saved."""


class RunTrainer:
  """Members `folder/m0`, `folder/m1`, ..., each an ordinary run that pauses after every round.

  Args:
    population: the members' description.
    folder: theirs.
    places: environment variables of processes that run at the same time, such as the device of
      each; the number of places is that of members trained together.
    report: receives a line when a member fails.
  """

  def __init__(
    self,
    population: Population,
    folder: Path,
    places: Sequence[Mapping[str, str]],
    report: Callable[[str], None],
  ):
    self._population, self._folder, self._report = population, folder, report
    self._steps = loader.load(population.config, population.settings).learner.steps
    self._free: queue.Queue[Mapping[str, str]] = queue.Queue()
    self._count = len(places)
    for place in places:
      self._free.put(place)
    self._running: set[subprocess.Popen] = set()
    self._stopping = threading.Event()

  def path(self, member: int) -> Path:
    """A member's run folder."""
    return self._folder / f"m{member}"

  def stop(self) -> None:
    """Interrupts all members, which save and end; `train` raises Interrupted. For handlers."""
    self._stopping.set()
    for process in tuple(self._running):
      process.send_signal(signal.SIGTERM)

  def train(self, members: Mapping[int, Settings], round_: int) -> Iterable[Outcome]:
    """See `Trainer.train`. Raises Interrupted after `stop`."""
    with ThreadPoolExecutor(self._count) as pool:
      futures = [pool.submit(self._train, *member, round_) for member in members.items()]
      for future in as_completed(futures):
        yield future.result()

  def copy(self, member: int, source: int, settings: Settings, round_: int) -> None:
    """See `Trainer.copy`."""
    path = self.path(member)
    new, old = path.with_suffix(".new"), path.with_suffix(".old")
    if _copied(path) != round_:
      if _copied(new) != round_:  # what a controller that was killed left behind
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(self.path(source), new, ignore=shutil.ignore_patterns(*_OWN))
        # The seed is the source's: its games go on, in lockstep move by move.
        changes = [*_texts(settings), f"run.dir={path}"]
        config = loader.override(run_dir.read_config(new), changes)
        (new / "config.yaml").write_text(loader.to_yaml(config))
        (new / _COPIED).write_text(json.dumps(round_))
      if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
      new.rename(path)
    shutil.rmtree(old, ignore_errors=True)

  def _train(self, member: int, settings: Settings, round_: int) -> Outcome:
    population, path = self._population, self.path(member)
    rounds = population.rounds
    pause = 0 if round_ == rounds - 1 else self._steps * (round_ + 1) // rounds
    if (path / "config.yaml").exists():
      arguments = ["--resume", str(path)]
    else:
      own = [f"run.dir={path}", f"run.seed={1000 * population.seed + member}"]
      arguments = ["--config", *population.config, *population.settings, *_texts(settings), *own]
    place = self._free.get()
    try:
      code = self._call([*arguments, f"run.pause_at={pause}"], path, place)
    finally:
      self._free.put(place)
    if self._stopping.is_set():
      raise Interrupted
    if code == 0:
      return Outcome(member, json.loads((path / "evaluation.json").read_text())["returns"])
    log = path.with_suffix(".log")
    if code == _WRONG_USE:
      raise ConfigError(f"member {member} can't be trained: {log.read_text().splitlines()[-1]}")
    self._report(f"  member {member} ended with exit code {code}: see {log}")
    return Outcome(member, [])

  def _call(self, arguments: list[str], path: Path, place: Mapping[str, str]) -> int:
    """Exit code of a run, whose output goes to a log beside its folder."""
    if self._stopping.is_set():
      return -signal.SIGTERM
    if path.exists():  # a process that a killed controller left behind ends with its round
      run_dir.wait_until_free(path)
    with path.with_suffix(".log").open("a") as log:
      process = subprocess.Popen(
        [sys.executable, str(_LAUNCHER), *arguments],
        env=os.environ | place, stdout=log, stderr=log, start_new_session=True,
      )  # fmt: skip
      self._running.add(process)
      if self._stopping.is_set():
        process.send_signal(signal.SIGTERM)
      try:
        return process.wait()
      finally:
        self._running.discard(process)


def _texts(settings: Settings) -> list[str]:
  return [f"{key}={value!r}" for key, value in settings.items()]


def _copied(path: Path) -> int | None:
  """The round after which a folder was copied."""
  with contextlib.suppress(FileNotFoundError):
    round_: int = json.loads((path / _COPIED).read_text())
    return round_
  return None
