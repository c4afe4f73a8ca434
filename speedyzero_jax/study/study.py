"""A study: variants of a configuration x games x seeds, each combination a run.

```yaml
config: [quickstart]                    # presets of all runs
settings: [learner.steps=4000]          # of all runs
games: [Catch, CartPole]                # or all of Atari-100k (all), or the presets' own (none)
seeds: 5                                # run.seed=0 to 4
vary:                                   # every combination of the factors' values is a variant
  optimizer:
    sgd: [optim.name=sgd, optim.learning_rate=0.5]
    adam: []
  refresh: {on: [], off: [refresh.enabled=false]}
```

What has no `=` among a value's settings is a preset, stacked on those of all runs.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import parse
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.scores import atari100k_games
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.run import run_dir, topology
from speedyzero_jax.run.run_dir import RunFolderError

_OWN = ("run.seed", "run.dir", "env.game")  # settings of single runs
Texts = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Study:
  """What is compared."""

  config: Texts = ()  # presets of all runs
  settings: Texts = ()  # key=value, of all runs
  games: Texts = ()  # none: the presets'
  seeds: int = 3
  vary: Mapping[str, Mapping[str, Texts]] = dataclasses.field(default_factory=dict)


class StudyRun(NamedTuple):
  """One run of a study."""

  variant: str  # the values of the factors, joined by dashes
  game: str
  seed: int
  path: Path
  arguments: list[str]  # of launch/multihost.py for a new run, but for its folder
  config: Config

  @property
  def processes(self) -> list[str]:
    """The launcher's option for a run of several processes, new or resumed."""
    shape = topology.resolve(self.config)
    if shape.num_processes == 1:
      return []
    return ["--processes", f"learner={shape.learners},actor={shape.actors},"
            f"refresher={shape.refreshers}"]  # fmt: skip

  def step(self) -> int:
    """The last learner step in its metrics."""
    return jsonl.last_step(self.path / "metrics.jsonl")

  def score(self) -> float | None:
    """The mean return of the evaluation after the last learner step, if there is one yet."""
    try:
      found = json.loads((self.path / "evaluation.json").read_text())
      return float(found["mean"]) if found["step"] >= self.config.learner.steps else None
    except (OSError, ValueError, KeyError, TypeError):
      return None

  def finished(self) -> bool:
    return self.score() is not None


def load(path: Path) -> Study:
  """Reads a description. Raises ConfigError, with the file's name."""
  try:
    document = loader.read_yaml(path.read_text(encoding="utf-8"))
    known = [field.name for field in dataclasses.fields(Study)]
    for key in document:
      if key not in known:
        raise ConfigError(f"unknown key {key!r}; there are {', '.join(known)}")
    values: dict[str, Any] = {
      key: _texts(document.get(key, []), key) for key in ("config", "settings", "games")
    }
    values["seeds"] = parse("seeds", document.get("seeds", str(Study.seeds)), int)
    values["vary"] = {
      factor: {name: _texts(texts, f"vary.{factor}.{name}") for name, texts in of.items()}
      for factor, of in _mapping(document.get("vary", {}), "vary").items()
      if _mapping(of, f"vary.{factor}")
    }
    return Study(**values)
  except (OSError, UnicodeDecodeError, ConfigError) as error:
    raise ConfigError(f"{path}: {error}") from None


def runs_of(study: Study, folder: Path) -> list[StudyRun]:
  """All runs of a study, seed by seed, so that a stopped study has compared what it could.

  Raises ConfigError for a configuration that cannot run, and RunFolderError if a run's folder holds
  a run of another configuration.
  """
  if study.seeds < 1:
    raise ConfigError(f"seeds: must be at least 1, got {study.seeds}")
  games = atari100k_games() if study.games == ("all",) else study.games or (None,)
  variants = itertools.product(*(of.items() for of in study.vary.values()))
  made = []
  for variant, game in itertools.product(variants, games):
    name = "-".join(value for value, _ in variant)
    texts = [text for _, texts in variant for text in texts]
    made.append((name, *_configured(study, name, texts, game)))
  runs: dict[Path, StudyRun] = {}
  for seed, (name, arguments, config) in itertools.product(range(study.seeds), made):
    own = f"run.seed={seed}"
    method = name or "+".join(Path(preset).stem for preset in study.config)
    path = folder / run_dir.safe_name(f"{method}-{config.env.game}-s{seed}")
    if path in runs:
      raise ConfigError(f"two runs would be called {path.name}: a game or a variant is there twice")
    config = loader.override(config, [own])
    runs[path] = StudyRun(name, config.env.game, seed, path, [*arguments, own], config)
    _check(runs[path])
  return list(runs.values())


def _configured(
  study: Study, name: str, texts: list[str], game: str | None
) -> tuple[list[str], Config]:
  """The launcher's arguments and the configuration of a variant's runs of a game."""
  presets = [*study.config, *(text for text in texts if "=" not in text)]
  settings = [*study.settings, *(text for text in texts if "=" in text)]
  if any(text.partition("=")[0].strip() in _OWN for text in settings):
    raise ConfigError(f"settings: {', '.join(_OWN)} can't be set, every run has its own")
  settings += [] if game is None else [f"env.game={game}"]
  try:
    if not presets:
      raise ConfigError("config: at least one preset is needed, in a study or by --config")
    config = topology.with_learners(loader.load(presets, settings), None)  # as the launcher does
    if config.run.pause_at or not config.evaluation.at_end:
      raise ConfigError(
        "run.pause_at and evaluation.at_end: runs of a study end with an evaluation"
      )
    return ["--config", *presets, *settings], config
  except ConfigError as error:
    raise ConfigError(f"{name}: {error}" if name else str(error)) from None


def _check(run: StudyRun) -> None:
  """Raises RunFolderError if the run's folder holds a run of another configuration."""
  if not (run.path / "config.yaml").exists():
    return
  stored, wanted = (
    {"agent": config.agent.name} | loader.flat(config)
    for config in (run_dir.read_config(run.path), run.config)
  )
  keys = {key for key in stored.keys() | wanted.keys() if stored.get(key) != wanted.get(key)}
  keys.discard("run.dir")
  if keys:
    raise RunFolderError(
      f"{run.path} holds a run of another configuration ({', '.join(sorted(keys))}); "
      "choose another --dir"
    )


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
  if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
    raise ConfigError(f"{key}: expected keys with values, got {value!r}")
  return value


def _texts(value: Any, key: str) -> Texts:
  texts = [value] if isinstance(value, str) and value else value or []
  if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
    raise ConfigError(f"{key}: expected a list of texts, got {value!r}")
  return tuple(texts)
