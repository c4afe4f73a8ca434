"""Trainer of a population's members: run folders, trained by processes of launch/multihost.py."""

import contextlib
import json
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.population.config import OWN, Population, setting_of, texts
from speedyzero_jax.population.controller import Outcome, Settings
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.run.processes import RunProcesses, log_of
from speedyzero_jax.system.exit_codes import USAGE_ERROR
from speedyzero_jax.system.files import sync_folder

_COPIED = "copied.json"  # file in a member's folder with the round after which it was copied
_NOT_COPIED = ("*.lock", "evaluation.json", "wandb", "wandb.json", _COPIED)


class RunTrainer:
  """Trains members `folder/m0`, `folder/m1`, ..., ordinary runs that pause after every round.

  Args:
    population: the population's description.
    folder: parent folder of the members' run folders.
    processes: training processes.
    report: called with a line of text when a member fails.

  Raises:
    ConfigError: a member's folder holds a run of other settings, such as those of a preset that
      has been edited since.
  """

  def __init__(
    self,
    population: Population,
    folder: Path,
    processes: RunProcesses,
    report: Callable[[str], None],
  ):
    self._population, self._folder, self._report = population, folder, report
    config = topology.with_learners(loader.load(population.config, population.settings))
    self._steps, self._options = config.learner.steps, topology.process_options(config)
    self._processes = processes
    own = {*OWN, *(setting_of(knob.key) for knob in population.knobs)}
    for member in range(population.members):
      run_dir.check_same(self.path(member), config, own)

  def path(self, member: int) -> Path:
    """A member's run folder."""
    return self._folder / f"m{member}"

  def train(self, members: Mapping[int, Settings], round_: int) -> Iterable[Outcome]:
    """See `Trainer.train`. Raises Interrupted if the processes are stopped."""
    with ThreadPoolExecutor(self._processes.count) as pool:
      futures = [pool.submit(self._train, *member, round_) for member in members.items()]
      try:
        for future in as_completed(futures):
          yield future.result()
      except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        self._processes.stop(signal.SIGTERM, None)  # the others save
        raise

  def copy(self, member: int, source: int, settings: Settings, round_: int) -> None:
    """See `Trainer.copy`."""
    path = self.path(member)
    new = path.with_suffix(".new")
    if _copied(path) != round_:
      if _copied(new) != round_:  # a killed controller may have left a partial copy
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(self.path(source), new, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        # Keeps the source's seed, since the copy continues its games.
        changes = [*texts(settings), f"run.dir={path}"]
        config = loader.override(run_dir.read_config(new), changes)
        (new / "config.yaml").write_text(loader.to_yaml(config))
        (new / _COPIED).write_text(json.dumps(round_))
        sync_folder(new)
      if path.exists():
        path.rename(tempfile.mkdtemp(prefix=f"{path.name}.old.", dir=self._folder))
      new.rename(path)
    for old in self._folder.glob(f"{path.name}.old*"):
      shutil.rmtree(old, ignore_errors=True)  # on NFS, files that TensorBoard has open remain

  def _train(self, member: int, settings: Settings, round_: int) -> Outcome:
    population, path = self._population, self.path(member)
    rounds = population.rounds
    pause = 0 if round_ == rounds - 1 else self._steps * (round_ + 1) // rounds
    seed = f"run.seed={1000 * population.seed + member}"
    new = ["--config", *population.config, *population.settings, *texts(settings), seed]
    changes = [*self._options, f"run.pause_at={pause}"]
    code = self._processes.train(path, new, changes)
    if code == 0:
      return Outcome(member, json.loads((path / "evaluation.json").read_text())["returns"])
    log = log_of(path)
    if code == USAGE_ERROR:
      raise ConfigError(f"member {member} cannot be trained: {log.read_text().splitlines()[-1]}")
    self._report(f"  member {member} failed with exit code {code}; see {log}")
    return Outcome(member, [])


def _copied(path: Path) -> int | None:
  """The round after which a member's folder was copied; None if it was not, or incompletely."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    round_: int = json.loads((path / _COPIED).read_text())
    return round_
  return None
