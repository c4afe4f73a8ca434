"""Studies: one run for each combination of configuration variant, game and seed.

```yaml
config: [quickstart]                    # presets of all runs
settings: [learner.steps=4000]          # settings of all runs
games: [Catch, CartPole]                # [all]: Atari-100k; if omitted, the presets' games
seeds: 5                                # run.seed=0 to 4
vary:                                   # every combination of the factors' values is a variant
  optimizer:
    sgd: [optim.name=sgd, optim.learning_rate=0.5]
    adam: []
  refresh: {on: [], off: [refresh.enabled=false]}
```

Entries without `=` among a value's settings are presets, stacked on those of all runs.
"""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError, parse
from speedyzero_jax.config.schema import Config
from speedyzero_jax.config.yaml_files import mapping, named_in_errors, read_yaml, strings
from speedyzero_jax.envs.batched_env import check_game
from speedyzero_jax.envs.scores import atari100k_games
from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.run import run_dir, topology

_OWN = ("run.seed", "run.dir", "env.game")  # set for each run
Texts = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Study:
  """Description of a study; see the module docstring."""

  config: Texts = ()  # presets of all runs
  settings: Texts = ()  # `key=value`, for all runs
  games: Texts = ()  # empty: the presets' games
  seeds: int = 3
  vary: Mapping[str, Mapping[str, Texts]] = dataclasses.field(default_factory=dict)


class StudyRun(NamedTuple):
  """One run of a study."""

  variant: str  # the values of the factors, joined by dashes
  game: str
  seed: int
  path: Path
  arguments: list[str]  # arguments of launch/multihost.py for a new run, except run.dir
  config: Config

  @property
  def processes(self) -> list[str]:
    """The launcher's `--processes` option, for new and resumed runs; empty for one process."""
    return topology.process_options(self.config)

  def step(self) -> int:
    """The last learner step in the run's metrics."""
    return int(jsonl.last_row(self.path / "metrics.jsonl").get(names.STEP, 0))

  def score(self) -> float | None:
    """Mean return of the evaluation after the last learner step; None before it."""
    last, step = jsonl.last_row(self.path / "metrics.jsonl"), self.config.learner.steps
    try:
      result = json.loads((self.path / "evaluation.json").read_text())
      if self.config.complete(last.get(names.STEP, 0), last.get(names.ENV_STEPS, 0)):
        step = min(step, last[names.STEP])  # A3C may end earlier
      return float(result["mean"]) if result["step"] >= step else None
    except (OSError, ValueError, KeyError, TypeError):
      return None

  def finished(self) -> bool:
    return self.score() is not None


def load(path: Path) -> Study:
  """Reads a study's description. Raises ConfigError; the message names the file."""
  with named_in_errors(path):
    document = read_yaml(path.read_text(encoding="utf-8"))
    known = [field.name for field in dataclasses.fields(Study)]
    for key in document:
      if key not in known:
        raise ConfigError(f"unknown key {key!r}; known keys: {', '.join(known)}")
    values: dict[str, Any] = {
      key: strings(document.get(key, []), key) for key in ("config", "settings", "games")
    }
    values["seeds"] = parse("seeds", document.get("seeds", str(Study.seeds)), int)
    values["vary"] = {
      factor: _variants(f"vary.{factor}", of)
      for factor, of in mapping(document.get("vary"), "vary").items()
    }
    return Study(**values)


def _variants(key: str, document: Any) -> dict[str, tuple[str, ...]]:
  variants = mapping(document, key)
  if not variants:
    raise ConfigError(f"{key}: needs at least one variant")
  return {name: strings(texts, f"{key}.{name}") for name, texts in variants.items()}


def runs_of(study: Study, folder: Path) -> list[StudyRun]:
  """Returns all runs of a study, ordered by seed, so that a stopped study has complete seeds.

  Raises ConfigError if a configuration is invalid, or a run's folder contains a run of another.
  """
  if study.seeds < 1:
    raise ConfigError(f"seeds: must be at least 1, got {study.seeds}")
  games: list[str | None] = []
  for game in study.games or (None,):
    games += atari100k_games() if game == "all" else [game]
  variants = itertools.product(*(of.items() for of in study.vary.values()))
  configured = []
  for variant, game in itertools.product(variants, games):
    name = "-".join(value for value, _ in variant)
    texts = [text for _, texts in variant for text in texts]
    configured.append((name, *_configured(study, name, texts, game)))
  try:
    for game in {config.env.game for *_, config in configured}:
      check_game(game)
  except ValueError as error:
    raise ConfigError(f"games: {error}") from None
  runs: dict[Path, StudyRun] = {}
  for seed, (name, arguments, config) in itertools.product(range(study.seeds), configured):
    seed_setting = f"run.seed={seed}"
    method = name or "+".join(Path(preset).stem for preset in study.config)
    path = folder / run_dir.safe_name(f"{method}-{config.env.game}-s{seed}")
    if path in runs:
      raise ConfigError(
        f"two runs would be named {path.name}: rename a variant or remove a duplicate game"
      )
    config = loader.override(config, [seed_setting])
    runs[path] = StudyRun(name, config.env.game, seed, path, [*arguments, seed_setting], config)
    run_dir.check_same(path, runs[path].config, ["run.dir"])
  return list(runs.values())


def _configured(
  study: Study, name: str, texts: list[str], game: str | None
) -> tuple[list[str], Config]:
  """Returns the launcher's arguments and the configuration of a variant's runs of a game."""
  presets = [*study.config, *(text for text in texts if "=" not in text)]
  settings = [*study.settings, *(text for text in texts if "=" in text)]
  if any(text.partition("=")[0].strip() in _OWN for text in settings):
    raise ConfigError(f"settings: {', '.join(_OWN)} can't be set, as every run has its own")
  settings += [] if game is None else [f"env.game={game}"]
  try:
    if not presets:
      raise ConfigError("config: at least one preset is needed, in a study or by --config")
    config = topology.with_learners(loader.load(presets, settings))  # as the launcher does
    if config.run.pause_at or not config.evaluation.at_end:
      raise ConfigError(
        "run.pause_at must be 0 and evaluation.at_end true: runs of a study end with an evaluation"
      )
    return ["--config", *presets, *settings], config
  except ConfigError as error:
    raise ConfigError(f"{name}: {error}" if name else str(error)) from None
