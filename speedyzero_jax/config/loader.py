"""Loading and saving of configurations: presets, `key=value` overrides, `--help`, `config.yaml`.

Everything is derived from the fields of the sections (`schema.py` and the chosen agent's). YAML is
read without its implicit types (under which `off` is a bool and `1e5` a string): scalars stay text
until the field's type parses them, so presets and overrides read the same.
"""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speedyzero_jax.config import checks, fields
from speedyzero_jax.config.schema import AgentConfig, Config
from speedyzero_jax.config.values import ConfigError, describe, nearest, parse, show

_AGENT = "agent"  # the one key without a section
DEFAULT_AGENT = "efficientzero"
_BUILT_IN = "speedyzero_jax.agents"

Leaves = dict[str, Any]  # dotted key -> text or list of texts, not yet parsed


class UnknownKeyError(ConfigError):
  """A key that does not exist."""


# --- Sections and fields ---


def agent_module(name: str) -> Any:
  """The module of an agent: one of this package, or any other by its dotted name.

  Raises:
    ConfigError: no such module, or it is not an agent's.
  """
  for module in (f"{_BUILT_IN}.{name}", name):
    try:
      found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
      found = None
    if found is not None:
      try:
        loaded = importlib.import_module(module)
      except Exception as error:
        raise ConfigError(f"agent: {module} fails with {type(error).__name__}: {error}") from error
      if not hasattr(loaded, "AGENT_CONFIG"):
        continue
      if not (
        isinstance(loaded.AGENT_CONFIG, type) and issubclass(loaded.AGENT_CONFIG, AgentConfig)
      ):
        raise ConfigError(f"agent: AGENT_CONFIG of {module} is not a subclass of AgentConfig")
      return loaded
  raise ConfigError(f"agent: there is no agent {name!r}; there are {', '.join(agent_names())}")


@functools.cache
def agent_names() -> list[str]:
  """The agents of this package."""
  folder = Path(__file__).resolve().parents[1] / "agents"
  names = [path.stem for path in folder.glob("[a-z]*.py")]
  names += [path.parent.name for path in folder.glob("[a-z]*/config.py")]
  return sorted(name for name in names if hasattr(_import(name), "AGENT_CONFIG"))


def _import(name: str) -> Any:
  return importlib.import_module(f"{_BUILT_IN}.{name}")


@functools.cache
def _sections(agent: str) -> dict[str, type]:
  """Section name -> its dataclass: the environment, the agent's sections, then the others."""
  own = {field.name: field.type for field in dataclasses.fields(agent_module(agent).AGENT_CONFIG)}
  common = {f.name: f.type for f in dataclasses.fields(Config) if f.name != _AGENT}
  return {"env": common.pop("env")} | own | common  # type: ignore[return-value]


@functools.cache
def fields_of(agent: str) -> dict[str, dataclasses.Field[Any]]:
  """Dotted key -> its field, for runs of this agent."""
  return {
    f"{name}.{field.name}": field
    for name, section in _sections(agent).items()
    for field in dataclasses.fields(section)
  }


def flat(config: Config) -> dict[str, Any]:
  """Dotted key -> value."""
  values = {}
  for key in fields_of(config.agent.name):
    section, name = key.split(".")
    owner = config if hasattr(config, section) else config.agent
    values[key] = getattr(getattr(owner, section), name)
  return values


def build(agent: str, values: Mapping[str, Any]) -> Config:
  """A configuration from dotted keys and parsed values; missing keys take their defaults."""
  sections = _sections(agent)
  parts: dict[str, dict[str, Any]] = {section: {} for section in sections}
  for key, value in values.items():
    section, name = key.split(".")
    parts[section][name] = value
  made = {section: cls(**parts[section]) for section, cls in sections.items()}
  own_class: type[AgentConfig] = agent_module(agent).AGENT_CONFIG
  own = own_class(**{f.name: made.pop(f.name) for f in dataclasses.fields(own_class)})
  return Config(agent=own, **made)


# --- YAML ---


class _Loader(yaml.BaseLoader):
  """Mappings, lists and text only; duplicate keys are errors."""

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
      if key.value in seen:
        raise yaml.constructor.ConstructorError(
          None, None, f"{key.value!r} is given twice", key.start_mark
        )
      seen.add(key.value)
    return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> dict[str, Any]:
  """The mapping in `text`. Raises ConfigError if there is none."""
  try:
    document = yaml.load(text, Loader=_Loader)  # safe: BaseLoader constructs no objects
  except yaml.YAMLError as error:
    raise ConfigError(f"not readable as YAML: {error}") from None
  if document is None or document == "":
    return {}
  if not isinstance(document, dict):
    raise ConfigError(f"expected a mapping of keys to values, got {document!r}")
  return document


def _leaves(document: Mapping[str, Any]) -> Leaves:
  """Dotted key -> text, from nested sections or dotted keys."""
  found: Leaves = {}
  for key, value in document.items():
    nested = value.items() if isinstance(value, dict) else [("", value)]
    if not isinstance(value, dict) and key != _AGENT and "." not in key:
      if value == "":  # a section whose keys are all commented out is empty text
        continue
      raise ConfigError(f"{key}: expected a mapping of keys to values, got {value!r}")
    for name, leaf in nested:
      full = f"{key}.{name}" if name else key
      if full in found:
        raise ConfigError(f"{full} is given twice")
      found[full] = leaf
  return found


def _parsed(leaves: Leaves, agent: str) -> dict[str, Any]:
  """Dotted key -> value. Raises ConfigError for keys that runs of this agent do not have."""
  known = fields_of(agent)
  values = {}
  for key, leaf in leaves.items():
    if key == _AGENT:
      continue
    if key not in known:
      _refuse_key(key, agent)
    values[key] = parse(key, leaf, known[key].type)
  return values


def _refuse_key(key: str, agent: str) -> None:
  others = [name for name in agent_names() if name != agent and key in fields_of(name)]
  if others:
    raise ConfigError(
      f"{key} is a setting of {', '.join(others)}; the agent of this run is {agent}"
    )
  raise UnknownKeyError(f"unknown key {key!r}; the nearest is {nearest(key, fields_of(agent))}")


# --- Presets ---


def _config_dir() -> Path:
  """`configs/` beside the package (a clone), else in the working directory."""
  beside = Path(__file__).resolve().parents[2] / "configs"
  return beside if beside.is_dir() else Path.cwd() / "configs"


def preset_names() -> list[str]:
  """Presets that can be given by name."""
  return sorted(path.stem for path in _config_dir().glob("*.yaml"))


def _preset_path(preset: str, folder: Path) -> Path:
  """The file of a preset given by name, or by a path relative to `folder`."""
  if preset.endswith((".yaml", ".yml")):
    path = folder / preset
    if not path.is_file():
      raise ConfigError(f"no such preset file: {path}")
    return path
  if preset not in preset_names():
    near = difflib.get_close_matches(preset, preset_names(), n=3, cutoff=0.5)
    raise ConfigError(
      f"unknown preset {preset!r}; the nearest: {', '.join(near or preset_names()) or 'none'}"
    )
  return _config_dir() / f"{preset}.yaml"


class _Preset(typing.NamedTuple):
  """A preset's settings, and those for single games (`games: {NAME: ...}`)."""

  path: Path
  leaves: Leaves
  games: dict[str, Leaves]

  def values(self, agent: str, game: str | None) -> dict[str, Any]:
    """Dotted key -> value for a run of this agent and game. A ConfigError names the file."""
    try:
      games = {name: _parsed(leaves, agent) for name, leaves in self.games.items()}
      for name in games:
        if name != game and name.lower() == str(game).lower():
          raise ConfigError(f"games: {name!r} differs from env.game={game} in upper case only")
      return _parsed(self.leaves, agent) | games.get(str(game), {})
    except ConfigError as error:
      raise ConfigError(f"{self.path}: {error}") from None


def _read_preset(path: Path, parents: tuple[Path, ...] = ()) -> list[_Preset]:
  """The file's `base` presets in order, then the file itself."""
  path = path.resolve()
  if path in parents:
    raise ConfigError(f"{path}: a preset is its own base")
  try:
    document = _read_yaml(path.read_text(encoding="utf-8"))
    bases = document.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
      raise ConfigError(f"base: expected names of presets, got {bases!r}")
    games = document.pop("games", None) or {}
    if not isinstance(games, dict) or not all(isinstance(own, dict) for own in games.values()):
      raise ConfigError("games: expected a mapping of games to settings")
    of_games = {game: _leaves(leaves) for game, leaves in games.items()}
    if any("env.game" in leaves or _AGENT in leaves for leaves in of_games.values()):
      raise ConfigError("games: env.game and agent can't be set for a single game")
    own = _Preset(path, _leaves(document), of_games)
  except (OSError, UnicodeDecodeError, ConfigError) as error:
    raise ConfigError(f"{path}: {error}") from None
  found: list[_Preset] = []
  for base in bases:
    found += _read_preset(_preset_path(base, path.parent), (*parents, path))
  return [*found, own]


# --- Entry points ---


def load(presets: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
  """Defaults, then presets in order, then overrides; later ones win, key by key.

  A preset's settings for the run's game (`games:`) apply right after the rest of the preset.

  Args:
    presets: names of files in `configs/`, or paths that end in .yaml. A preset may build on others
      (`base: [atari100k]`).
    overrides: `key=value` with dotted keys, such as `env.game=Pong` or `search.temperatures=1,0.5`.

  Returns:
    A valid configuration (see `validate`).

  Raises:
    ConfigError: an unknown preset, agent or key (the message names the nearest), a value of the
      wrong type or out of range, an unreadable file.
  """
  read = [part for preset in presets for part in _read_preset(_preset_path(preset, Path.cwd()))]
  last = _overridden(overrides)
  chosen: Leaves = {}
  for leaves in (*(preset.leaves for preset in read), last):
    chosen |= leaves
  agent, game = chosen.get(_AGENT, DEFAULT_AGENT), chosen.get("env.game")
  if not isinstance(agent, str):
    raise ConfigError(f"agent: expected a name, got {agent!r}")
  values: dict[str, Any] = {}
  for preset in read:
    values |= preset.values(agent, game)
  config = build(agent, values | _parsed(last, agent))
  validate(config)
  return config


def override(config: Config, overrides: Sequence[str]) -> Config:
  """`config` with `key=value` overrides applied. Raises ConfigError as `load` does."""
  leaves, agent = _overridden(overrides), config.agent.name
  if leaves.get(_AGENT, agent) != agent:
    raise ConfigError(f"agent: is {agent} and cannot change")
  config = build(agent, flat(config) | _parsed(leaves, agent))
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


def to_yaml(config: Config) -> str:
  """All keys and values as YAML; `from_yaml` and `load` restore an equal configuration."""
  nested: dict[str, Any] = {_AGENT: config.agent.name}
  for key, value in flat(config).items():
    section, name = key.split(".")
    nested.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
  return yaml.safe_dump(nested, sort_keys=False)


def from_yaml(text: str) -> Config:
  """The configuration that `to_yaml` wrote; missing keys take their defaults.

  Intervals are not checked: a saved configuration was valid when it was saved.

  Raises:
    ConfigError: unreadable text, an unknown key, a value of the wrong type.
  """
  leaves = _leaves(_read_yaml(text))
  agent = str(leaves.get(_AGENT, DEFAULT_AGENT))
  return build(agent, _parsed(leaves, agent))


def divide(config: Config, unit: int, units: int) -> Config:
  """The share of learner process `unit` of `units`: divides the fields marked `divided`."""
  values, known = flat(config), fields_of(config.agent.name)
  for key, field in known.items():
    if field.metadata["divided"]:
      values[key] = fields.share(values[key], field.metadata["divided"], unit, units)
  return build(config.agent.name, values)


def diff(a: Config, b: Config) -> dict[str, str]:
  """Key -> `a's value != b's value`, for keys that differ."""
  if a.agent.name != b.agent.name:
    return {_AGENT: f"{a.agent.name} != {b.agent.name}"}
  theirs = flat(b)
  return {
    key: f"{show(value)} != {show(theirs[key])}"
    for key, value in flat(a).items()
    if value != theirs[key]
  }


def immutable(config: Config, keys: Iterable[str]) -> list[str]:
  """The given keys that a resumed run may not change."""
  known = fields_of(config.agent.name)
  return [key for key in keys if key not in known or not known[key].metadata["mutable"]]


def help_text(agent: str = DEFAULT_AGENT) -> str:
  """All settings of runs of this agent with default, type and meaning, and the presets."""
  lines = [
    f"Settings of a run with agent={agent} (one of {', '.join(agent_names())}), as key=value, with",
    "their defaults:",
  ]
  for section, cls in _sections(agent).items():
    lines += ["", f"{section}: {(cls.__doc__ or '').strip()}"]
    for key, field in fields_of(agent).items():
      if key.startswith(f"{section}."):
        lines.append(f"  {key}={show(field.default)}  ({describe(field.type)})")
        lines += textwrap.wrap(
          field.metadata["help"], 100, initial_indent="      ", subsequent_indent="      "
        )
  lines += ["", "Presets (--config, several stack, the later wins):"]
  for name in preset_names():
    first_line = (_config_dir() / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    lines.append(f"  {name:14} {first_line.lstrip('# ')}")
  return "\n".join(lines) + "\n"


def validate(config: Config) -> None:
  """Checks intervals and dependencies between settings.

  Raises:
    ConfigError: one line per key with an invalid value.
  """
  known = fields_of(config.agent.name)
  found = list(checks.interval_problems(known, flat(config)))
  if not found:  # the others compute with these numbers
    found = [*checks.problems(config), *config.agent.problems(config)]
  if found:
    raise ConfigError("\n".join(found))
