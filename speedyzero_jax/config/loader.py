"""Loading and saving of configurations: presets, `key=value` overrides, `--help`, `config.yaml`.

All keys are derived from the dataclass fields in `schema.py` and in the agent's configuration. YAML
is read without implicit types (which make `off` a bool and `1e5` a string): scalars stay strings
until they are parsed as the field's type, so presets and overrides have the same syntax.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import pkgutil
import textwrap
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from speedyzero_jax.config.fields import ConfigError, describe, interval_problem, parse, show
from speedyzero_jax.config.schema import AgentConfig, Config

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_AGENT = "agent"  # the one key without a section
_BUILT_IN = "speedyzero_jax.agents"
DEFAULT_AGENT = "efficientzero"

Leaves = dict[str, Any]  # dotted key -> string or list of strings, not yet parsed


# --- Sections and fields ---


def agent_module(name: str) -> Any:
  """Imports the module of an agent: a built-in one, or any other by its dotted name.

  Raises ConfigError if there is no such module, it can't be imported, or it defines no
  `AGENT_CONFIG` of its name.
  """
  for module in filter(_exists, (f"{_BUILT_IN}.{name}", name)):
    try:
      agent = importlib.import_module(module)
    except Exception as error:
      raise _not_importable(module, error) from error
    if hasattr(agent, "AGENT_CONFIG"):
      named = getattr(agent.AGENT_CONFIG, "name", None)
      if named != name:  # as in a copy of another agent, whose configuration would build that one
        raise ConfigError(
          f"agent: the name in {module}.AGENT_CONFIG must be {name!r}, got {named!r}"
        )
      return agent
  available = f"{', '.join(agent_names())}, or a module of your own on PYTHONPATH"
  raise ConfigError(f"agent: unknown agent {name!r}; available: {available}")


def _exists(module: str) -> bool:
  if "" in module.split("."):
    return False  # a relative name
  try:
    return importlib.util.find_spec(module) is not None
  except (ModuleNotFoundError, ValueError):
    return False
  except Exception as error:  # from its package
    raise _not_importable(module, error) from error


def _not_importable(module: str, error: Exception) -> ConfigError:
  at = traceback.extract_tb(error.__traceback__)[-1]
  reason = f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
  return ConfigError(f"agent: {module} can't be imported: {reason}")


@functools.cache
def agent_names() -> list[str]:
  """Names of the built-in agents."""
  folder = Path(__file__).resolve().parents[1] / "agents"
  names = [module.name for module in pkgutil.iter_modules([str(folder)])]
  return [n for n in names if hasattr(importlib.import_module(f"{_BUILT_IN}.{n}"), "AGENT_CONFIG")]


@functools.cache
def _sections(agent: str) -> dict[str, type]:
  """Section name -> its dataclass; `env` first, then the agent's sections, then the others."""
  own = {field.name: field.type for field in dataclasses.fields(agent_module(agent).AGENT_CONFIG)}
  common = {f.name: f.type for f in dataclasses.fields(Config) if f.name != _AGENT}
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


# --- YAML ---


class _Loader(yaml.BaseLoader):
  """Constructs mappings, lists and strings only; duplicate keys are errors."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
      if key.value in seen:
        problem = f"duplicate key {key.value!r}"
        raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
      seen.add(key.value)
    return super().construct_mapping(node, deep)


def read_yaml(text: str) -> dict[str, Any]:
  """Parses `text` as a YAML mapping. Raises ConfigError if it is not one."""
  try:
    document = yaml.load(text, Loader=_Loader)  # safe: BaseLoader constructs no objects
  except yaml.YAMLError as error:
    raise ConfigError(f"not readable as YAML: {error}") from None
  return _mapping(document, "keys to values")


def _mapping(value: Any, of: str) -> dict[str, Any]:
  if isinstance(value, dict):
    return value
  if value in (None, ""):  # empty, or everything is commented out
    return {}
  raise ConfigError(f"expected a mapping of {of}, got {value!r}")


def texts(value: Any, key: str) -> tuple[str, ...]:
  """The strings of a list, or of a single string. Raises ConfigError, naming `key`, for others."""
  if isinstance(value, str):
    return (value,) if value else ()
  if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
    raise ConfigError(f"{key}: expected a list of strings, got {value!r}")
  return tuple(value)


def _leaves(document: Mapping[str, Any]) -> Leaves:
  """Flattens nested sections and dotted keys into dotted key -> unparsed value."""
  result: Leaves = {}
  for key, value in document.items():
    if key == _AGENT or "." in key:
      leaves = {key: value}
    else:
      section = _mapping(value, f"settings for {key!r}")
      leaves = {f"{key}.{name}": leaf for name, leaf in section.items()}
    if duplicates := result.keys() & leaves.keys():
      raise ConfigError(f"duplicate key {min(duplicates)!r}")
    result |= leaves
  return result


def _parsed(leaves: Leaves, agent: str) -> dict[str, Any]:
  """Parses all values. Raises ConfigError for keys that runs of this agent do not have."""
  known = fields_of(agent)
  values = {}
  for key, leaf in leaves.items():
    if key == _AGENT:
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


# --- Presets ---


def preset_names() -> list[str]:
  """Names of the presets in `configs/`."""
  return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


def _preset_path(preset: str, folder: Path) -> Path:
  """Path of a preset, given its name or its path relative to `folder`."""
  if preset.endswith((".yaml", ".yml")):
    return folder / preset
  if preset not in preset_names():
    near = difflib.get_close_matches(preset, preset_names(), n=3, cutoff=0.5)
    raise ConfigError(
      f"unknown preset {preset!r}; the nearest: {', '.join(near or preset_names()) or 'none'}"
    )
  return _CONFIGS / f"{preset}.yaml"


class _Settings(NamedTuple):
  """Settings of a preset for all games, or for one game (`games: {NAME: ...}`)."""

  path: Path
  game: str | None
  leaves: Leaves


def _read_preset(path: Path, parents: tuple[Path, ...] = ()) -> list[_Settings]:
  """Reads the settings of the file's `base` presets in order, then the file's own."""
  path = path.resolve()
  with named_in_errors(path):
    if path in parents:
      raise ConfigError("base: a preset must not be based on itself, directly or indirectly")
    document = read_yaml(path.read_text(encoding="utf-8"))
    bases = texts(document.pop("base", []), "base")
    games = _mapping(document.pop("games", None), "games to settings")
    own = [_Settings(path, None, _leaves(document))]
    for game, settings in games.items():
      leaves = _leaves(_mapping(settings, f"settings for {game}"))
      if leaves.keys() & {"env.game", _AGENT}:
        raise ConfigError("games: env.game and agent can't be set for a single game")
      own.append(_Settings(path, game, leaves))
    paths = [_preset_path(base, path.parent) for base in bases]
  return [part for base in paths for part in _read_preset(base, (*parents, path))] + own


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
  """Reraises errors as ConfigError with the file's path in the message."""
  try:
    yield
  except (OSError, UnicodeDecodeError, ConfigError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise ConfigError(f"{path}: {reason}") from None


# --- Entry points ---


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
  read = [part for preset in presets for part in _read_preset(_preset_path(preset, Path.cwd()))]
  last = _overridden(overrides)
  merged: Leaves = {}
  for leaves in (*(settings.leaves for settings in read if settings.game is None), last):
    merged |= leaves
  agent = parse(_AGENT, merged.get(_AGENT, DEFAULT_AGENT), str)
  agent_module(agent)  # its errors do not concern a preset
  values: dict[str, Any] = {}
  chosen = merged.get("env.game")
  for path, game, leaves in read:
    with named_in_errors(path):
      parsed = _parsed(leaves, agent)  # also for other games, to report their errors
    if game not in (None, chosen) and str(game).lower() == str(chosen).lower():
      raise ConfigError(f"{path}: games: {game!r} differs from env.game={chosen} only in case")
    if game in (None, chosen):
      values |= parsed
  config = build(agent, values | _parsed(last, agent))
  validate(config)
  return config


def override(config: Config, overrides: Sequence[str], *, check: bool = True) -> Config:
  """Applies `key=value` overrides to `config`. Raises ConfigError as `load` does.

  Without `check`, only unknown keys and wrong types are errors.
  """
  leaves, agent = _overridden(overrides), config.agent.name
  if leaves.get(_AGENT, agent) != agent:
    raise ConfigError(f"agent: cannot be changed from {agent} to {leaves[_AGENT]}")
  config = build(agent, flat(config) | _parsed(leaves, agent))
  if check:
    validate(config)
  return config


def _overridden(overrides: Sequence[str]) -> Leaves:
  leaves: Leaves = {}
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ConfigError(f"override {text!r} is not of the form key=value")
    leaves[key.strip()] = value
  return leaves


def validate(config: Config) -> None:
  """Raises ConfigError, with a line per invalid key, if settings are invalid or inconsistent."""
  values, problems = flat(config), list[str]()
  for key, field in fields_of(config.agent.name).items():
    if field.metadata["interval"]:
      problems += interval_problem(key, values[key], field.metadata["interval"])
  if not problems:  # these checks assume that all values are within their intervals
    problems = [*config.problems(), *config.agent.problems(config)]
  if problems:
    raise ConfigError("\n".join(problems))


def to_yaml(config: Config) -> str:
  """Serializes all settings as YAML; `from_yaml` and `load` restore an equal configuration."""
  nested: dict[str, Any] = {_AGENT: config.agent.name}
  for key, value in flat(config).items():
    section, name = key.split(".")
    nested.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
  return yaml.safe_dump(nested, sort_keys=False)


def from_yaml(text: str) -> Config:
  """Restores a configuration from `to_yaml`; missing keys take their defaults.

  Values are not validated again: they were when the configuration was saved. Raises ConfigError if
  the text is unreadable, a key is unknown, or a value has the wrong type.
  """
  leaves = _leaves(read_yaml(text))
  agent = str(leaves.get(_AGENT, DEFAULT_AGENT))
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
    "*: may change in a resumed run",
  ]
  for section, cls in _sections(agent).items():
    lines += ["", f"{section}: {(cls.__doc__ or '').strip()}"]
    for field in dataclasses.fields(cls):
      mark = " *" if field.metadata["mutable"] else ""
      default = f"{section}.{field.name}={show(field.default)}"
      lines.append(f"  {default}  ({describe(field.type)}){mark}")
      lines.append(textwrap.indent(textwrap.fill(field.metadata["help"], 94), " " * 6))
  lines += ["", "Presets (--config NAME ...; later ones take precedence):"]
  for name in preset_names():
    first_line = (_CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    lines.append(f"  {name:14} {first_line.lstrip('# ')}")
  return "\n".join(lines) + "\n"
