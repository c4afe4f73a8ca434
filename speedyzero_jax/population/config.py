"""Description of a population, read from YAML."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError, interval_problem, opt, parse
from speedyzero_jax.config.yaml_files import named_in_errors, read_yaml, strings
from speedyzero_jax.population.selection import Knob

# A copy continues its source's games by repeating their actions, with the same environment. Stored
# priorities have been raised to `priority.alpha`.
_FIXED = ("run.", "topology.", "network.", "env.sticky_actions", "priority.alpha")
OWN = ("run.dir", "run.seed", "run.pause_at")  # set for each member


@dataclasses.dataclass(frozen=True)
class Population:
  """Description of a population. Each round ends with an evaluation of every member."""

  config: tuple[str, ...]  # presets of the members
  settings: tuple[str, ...]  # `key=value`, for all members
  knobs: tuple[Knob, ...]
  members: int = opt(20, "members (PBT: 20 to 80)", "[2, 1000]")
  rounds: int = opt(
    10, "rounds of equally many learner steps, with selection after all but the last", "[1, 1e6]"
  )
  selection: Literal["truncation", "t_test", "none"] = opt(
    "truncation", "truncation, Welch's t-test on the returns of evaluations (PBT), or none"
  )
  share: float = opt(0.2, "truncation: fraction of members replaced (PBT: 0.2)", "(0, 0.5]")
  level: float = opt(0.05, "t_test: significance level (PBT: 0.05)", "(0, 1)")
  resample: float = opt(
    0.0, "probability of resampling a setting, instead of perturbing it, after a copy", "[0, 1]"
  )
  factors: tuple[float, ...] = opt(
    (0.8, 1.2), "perturbation factors, one of which is drawn at random (PBT: 0.8, 1.2)", "(0, 1e3]"
  )
  seed: int = opt(0, "random seed of selection, exploration and the members' runs", "[0, 1e6]")


def load(path: Path) -> Population:
  """Reads `config`, `settings`, `explore: {key: [low, high, log|linear]}` and the other fields.

  For a list of numbers, `explore` has a list of such ranges; the key of element i is `key.i`.

  Raises:
    ConfigError: the file is unreadable, a key is unknown, a value is out of range, or the members'
      settings are invalid.
  """
  with named_in_errors(path):
    return _population(read_yaml(path.read_text(encoding="utf-8")))


def _population(document: dict[str, Any]) -> Population:
  presets, settings = (strings(document.pop(key, []), key) for key in ("config", "settings"))
  for text in settings:
    if text.partition("=")[0].strip() in OWN:
      raise ConfigError(f"settings: {text} can't be set, as every member has its own")
  if not presets:
    raise ConfigError("config: at least one preset is needed")
  explore = document.pop("explore", None)
  if not isinstance(explore, dict) or not explore:
    raise ConfigError("explore: settings with their ranges are needed")
  fields = {field.name: field for field in dataclasses.fields(Population) if field.metadata}
  values: dict[str, Any] = {}
  for key, value in document.items():
    if key not in fields:
      raise ConfigError(f"unknown key {key!r}; known keys: {', '.join(fields)}")
    values[key] = parse(key, value, fields[key].type)
    if interval := fields[key].metadata["interval"]:
      for problem in interval_problem(key, values[key], interval):
        raise ConfigError(problem)
  if not values.get("factors", True):
    raise ConfigError("factors: at least one is needed")
  members = loader.load(presets, settings)
  knobs = _knobs(explore, members.agent.name)
  low, high = {knob.key: knob.low for knob in knobs}, {knob.key: knob.high for knob in knobs}
  for ends in (low, high, *(low | {key: end} for key, end in high.items())):
    loader.load(presets, [*settings, *texts(ends)])
  population = Population(presets, settings, knobs, **values)
  if population.selection == "t_test" and members.evaluation.episodes < 2:
    raise ConfigError("settings: evaluation.episodes must be at least 2 with selection: t_test")
  if not members.evaluation.at_end:
    raise ConfigError("settings: evaluation.at_end must be true, as selection is by evaluations")
  if population.rounds > members.learner.steps:
    raise ConfigError(f"rounds: must be at most the {members.learner.steps} learner steps")
  return population


def _knobs(explore: Mapping[str, Any], agent: str) -> tuple[Knob, ...]:
  known = loader.fields_of(agent)
  knobs: list[Knob] = []
  for key, value in explore.items():
    kind: Any = known[key].type if key in known else None
    if kind not in (float, tuple[float, ...]) or key.startswith(_FIXED):
      raise ConfigError(
        f"explore: {key!r} is not a float setting of {agent} that can change during training"
      )
    each = [value] if kind is float else value
    if not isinstance(each, list) or not each:
      raise ConfigError(f"explore: {key}: a list of ranges is needed, got {value!r}")
    names = [key] if kind is float else [f"{key}.{i}" for i in range(len(each))]
    knobs += map(_knob, names, each)
  return tuple(knobs)


def _knob(key: str, value: Any) -> Knob:
  if not isinstance(value, list) or len(value) != 3 or value[2] not in ("log", "linear"):
    raise ConfigError(f"explore: {key}: expected [low, high, log or linear], got {value!r}")
  low, high = (parse(f"explore: {key}", text, float) for text in value[:2])
  if not low < high or (value[2] == "log" and low <= 0):
    raise ConfigError(
      f"explore: {key}: low must be less than high, and positive for log, got {value}"
    )
  return Knob(key, low, high, value[2] == "log")


def texts(settings: Mapping[str, float]) -> list[str]:
  """Formats values of knobs as `key=value`, with the elements of a list joined."""
  joined: dict[str, list[str]] = {}
  for key, value in settings.items():
    joined.setdefault(setting_of(key), []).append(repr(value))
  return [f"{key}={','.join(values)}" for key, values in joined.items()]


def setting_of(knob: str) -> str:
  """The key of the setting to which the knob of this key belongs."""
  return re.sub(r"\.\d+$", "", knob)
