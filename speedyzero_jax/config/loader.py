"""Loading and saving of configurations: presets, `key=value` overrides, `--help`, `config.yaml`.

All keys are derived from the dataclass fields in `schema.py` and in the agent's configuration.
"""

import dataclasses
import difflib
import functools
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speedyzero_jax.config.agents import agent_module, agent_names, check_unambiguous
from speedyzero_jax.config.fields import ConfigError, describe, interval_problem, parse, show
from speedyzero_jax.config.presets import (
  AGENT_KEY,
  Leaves,
  Settings,
  leaves_of,
  preset_path,
  preset_titles,
  read_preset,
)
from speedyzero_jax.config.schema import AgentConfig, Config, EnvConfig
from speedyzero_jax.config.yaml_files import named_in_errors, read_yaml

DEFAULT_AGENT = "efficientzero"


@functools.cache
def _sections(agent: str) -> dict[str, type]:
  """Section name -> its dataclass; `env` first, then the agent's sections, then the others."""
  own = {field.name: field.type for field in dataclasses.fields(agent_module(agent).AGENT_CONFIG)}
  common = {f.name: f.type for f in dataclasses.fields(Config) if f.name != AGENT_KEY}
  return {"env": common.pop("env")} | own | common  # type: ignore[return-value]


@functools.cache
def fields_of(agent: str) -> dict[str, dataclasses.Field[Any]]:
  """Dotted key -> dataclass field, for all settings of runs of this agent."""
  return {
    f"{name}.{field.name}": field
    for name, section in _sections(agent).items()
    for field in dataclasses.fields(section)
  }


def flat(config: Config) -> dict[str, Any]:
  """Flattens a configuration into dotted key -> value."""
  values = {}
  for key in fields_of(config.agent.name):
    section, name = key.split(".")
    owner = config if hasattr(config, section) else config.agent
    values[key] = getattr(getattr(owner, section), name)
  return values


def build(agent: str, values: Mapping[str, Any]) -> Config:
  """Builds a configuration from dotted keys and parsed values; missing keys take their defaults."""
  sections = _sections(agent)
  parts: dict[str, dict[str, Any]] = {section: {} for section in sections}
  for key, value in values.items():
    section, name = key.split(".")
    parts[section][name] = value
  built = {section: cls(**parts[section]) for section, cls in sections.items()}
  agent_class: type[AgentConfig] = agent_module(agent).AGENT_CONFIG
  agent_config = agent_class(**{f.name: built.pop(f.name) for f in dataclasses.fields(agent_class)})
  return Config(agent=agent_config, **built)


def _parsed(leaves: Leaves, agent: str) -> dict[str, Any]:
  """Parses all values. Raises ConfigError for keys that runs of this agent do not have."""
  known = fields_of(agent)
  values = {}
  for key, leaf in leaves.items():
    if key == AGENT_KEY:
      continue
    if key not in known:
      others = [name for name in agent_names() if name != agent and key in fields_of(name)]
      if others:
        raise ConfigError(
          f"{key} is a setting of {', '.join(others)}, but the agent of this run is {agent}"
        )
      raise ConfigError(f"unknown key {key!r}; the nearest is {_nearest(key, list(known))}")
    values[key] = parse(key, leaf, known[key].type)
  return values


def _nearest(key: str, candidates: Sequence[str]) -> str:
  """Keys of any section with the same field name, else the closest match."""
  last = key.rpartition(".")[2]
  same = [candidate for candidate in candidates if candidate.partition(".")[2] == last]
  return " or ".join(same or difflib.get_close_matches(key, candidates, 1, cutoff=0.0))


def load(presets: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
  """Loads a configuration: defaults, then presets in order, then overrides.

  Later values replace earlier ones key by key. A preset's settings for the run's game (`games:`)
  apply right after its general settings.

  Args:
    presets: names of files in `configs/`, or paths that end in .yaml. A preset may inherit from
      others (`base: [atari100k]`).
    overrides: `key=value` with dotted keys, such as `env.game=Pong` or `search.temperatures=1,0.5`.

  Raises:
    ConfigError: a preset, agent or key is unknown (the message suggests the closest match), a value
      has the wrong type or is out of range, or a file is unreadable.
  """
  read = [part for preset in presets for part in read_preset(preset_path(preset, Path.cwd()))]
  last = _overridden(overrides)
  merged = _merged(read, last)
  agent = _agent(merged)
  values: dict[str, Any] = {}
  chosen = merged.get("env.game", EnvConfig.game)
  for path, game, leaves in read:
    with named_in_errors(path):
      parsed = _parsed(leaves, agent)  # also for other games, to report their errors
    if game not in (None, chosen) and _letters(game) == _letters(chosen):
      raise ConfigError(f"{path}: games: {game!r} is spelled differently from env.game={chosen}")
    if game in (None, chosen):
      values |= parsed
  config = build(agent, values | _parsed(last, agent))
  validate(config)
  return config


def _letters(game: object) -> str:
  return re.sub(r"[^a-z0-9]", "", str(game).lower())


def agent_of(presets: Sequence[str] = (), overrides: Sequence[str] = ()) -> str:
  """The agent that presets and overrides choose; other settings may be invalid.

  Raises ConfigError if a preset or the agent is unknown or unreadable.
  """
  read = [part for preset in presets for part in read_preset(preset_path(preset, Path.cwd()))]
  return _agent(_merged(read, _overridden(overrides)))


def _merged(read: Sequence[Settings], last: Leaves) -> Leaves:
  merged: Leaves = {}
  for leaves in (*(part.leaves for part in read if part.game is None), last):
    merged |= leaves
  return merged


def _agent(merged: Leaves) -> str:
  agent: str = parse(AGENT_KEY, merged.get(AGENT_KEY, DEFAULT_AGENT), str)
  agent_module(agent)  # its errors do not concern a preset
  check_unambiguous(agent)
  return agent


def override(config: Config, overrides: Sequence[str], *, check: bool = True) -> Config:
  """Applies `key=value` overrides to `config`. Raises ConfigError as `load` does.

  Problems that `config` has already are ignored: an earlier version accepted them. Without `check`,
  only unknown keys and wrong types are errors.
  """
  before, leaves, agent = config, _overridden(overrides), config.agent.name
  if leaves.get(AGENT_KEY, agent) != agent:
    raise ConfigError(f"agent: cannot be changed from {agent} to {leaves[AGENT_KEY]}")
  config = build(agent, flat(config) | _parsed(leaves, agent))
  if check:
    validate(config, before)
  return config


def _overridden(overrides: Sequence[str]) -> Leaves:
  leaves: Leaves = {}
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ConfigError(f"override {text!r} is not of the form key=value")
    leaves[key.strip()] = value
  return leaves


def validate(config: Config, before: Config | None = None) -> None:
  """Raises ConfigError, with a line per invalid key, if settings are invalid or inconsistent.

  Problems of the settings `before`, from which these were made, are ignored.
  """
  known = [] if before is None else _problems(before)
  if problems := [problem for problem in _problems(config) if problem not in known]:
    raise ConfigError("\n".join(problems))


def _problems(config: Config) -> list[str]:
  values, problems = flat(config), list[str]()
  for key, field in fields_of(config.agent.name).items():
    if field.metadata["interval"]:
      problems += interval_problem(key, values[key], field.metadata["interval"])
  if not problems:  # these checks assume that all values are within their intervals
    problems = [*config.problems(), *config.agent.problems(config)]
  return problems


def to_yaml(config: Config) -> str:
  """Serializes all settings as YAML; `from_yaml` and `load` restore an equal configuration."""
  nested: dict[str, Any] = {AGENT_KEY: config.agent.name}
  for key, value in flat(config).items():
    section, name = key.split(".")
    nested.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
  return yaml.safe_dump(nested, sort_keys=False)


def from_yaml(text: str) -> Config:
  """Restores a configuration from `to_yaml`; missing keys take their defaults.

  Values are not validated again: they were when the configuration was saved. Raises ConfigError if
  the text is unreadable, a key is unknown, or a value has the wrong type.
  """
  leaves = leaves_of(read_yaml(text))
  if AGENT_KEY not in leaves:  # as in a file that a power failure has emptied
    raise ConfigError(f"{AGENT_KEY} is missing")
  agent = str(leaves[AGENT_KEY])
  return build(agent, _parsed(leaves, agent))


def divide(config: Config, unit: int, units: int) -> Config:
  """Returns learner process `unit`'s share: fields marked `divided` are divided by `units`."""
  values, known = flat(config), fields_of(config.agent.name)
  for key, field in known.items():
    if how := field.metadata["divided"]:
      whole = values[key]
      part = whole // units + (unit < whole % units)
      values[key] = max(part, min(whole, 1)) if how == "at least 1" else part
  return build(config.agent.name, values)


def fixed_changes(a: Config, b: Config) -> list[str]:
  """Lists changed settings that a resumed run may not change, as `key: a's value != b's value`."""
  before, after, known = flat(a), flat(b), fields_of(a.agent.name)
  return [
    f"{key}: {show(value)} != {show(after[key])}"
    for key, value in before.items()
    if value != after[key] and not known[key].metadata["mutable"]
  ]


def help_text(agent: str = DEFAULT_AGENT) -> str:
  """Text of `--help`: this agent's settings with defaults, types and meanings, and the presets."""
  lines = [
    "Settings (key=value) with their defaults before presets, for",
    f"agent={agent} (one of {', '.join(agent_names())});",
    "*: may change in a resumed run. EZ: EfficientZero, EZ-V2: EfficientZero V2, SZ: SpeedyZero,",
    "ours: chosen by this project",
  ]
  for section, cls in _sections(agent).items():
    lines += ["", f"{section}: {(cls.__doc__ or '').strip()}"]
    for field in dataclasses.fields(cls):
      mark = " *" if field.metadata["mutable"] else ""
      default = f"{section}.{field.name}={show(field.default)}"
      lines.append(f"  {default}  ({describe(field.type)}){mark}")
      lines.append(textwrap.indent(textwrap.fill(field.metadata["help"], 94), " " * 6))
  lines += ["", "Presets (--config NAME ...; later ones take precedence):"]
  lines += [f"  {name:14} {title}" for name, title in preset_titles().items()]
  return "\n".join(lines) + "\n"
