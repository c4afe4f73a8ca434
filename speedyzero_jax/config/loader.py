"""Text to settings and back: presets, `key=value` overrides, `--help`, the saved `config.yaml` of a run.

`config.py` is the schema; everything here is derived from it, so that a new field needs no change but its range in
`config_checks.py`. Whoever gets a value wrong gets one `ConfigError` that names the key. Knows nothing of jax, devices,
processes or run folders.

YAML is read without YAML's own guesses at types (under which `off` is a bool and `1e5` a string): every scalar stays
text until the field's type says how to read it, so that a preset and an override mean the same by the same characters.
"""

import dataclasses
import difflib
import functools
import math
import textwrap
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from speedyzero_jax.config import checks
from speedyzero_jax.config.schema import Config

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
  """A setting that cannot be used; the message names it. Launchers print it and exit with status 2."""


@functools.cache
def _sections() -> dict[str, Any]:
  """Section name -> its dataclass, in the order of `Config`."""
  return {field.name: field.type for field in dataclasses.fields(Config)}


@functools.cache
def _fields() -> dict[str, dataclasses.Field[Any]]:
  """Dotted key -> its field, in the order of `config.py`."""
  return {
    f"{name}.{field.name}": field
    for name, cls in _sections().items()
    for field in dataclasses.fields(cls)
  }


def _flat(config: Config) -> dict[str, Any]:
  """Dotted key -> value."""
  values = {}
  for key in _fields():
    section, name = key.split(".")
    values[key] = getattr(getattr(config, section), name)
  return values


def _build(values: Mapping[str, Any]) -> Config:
  """A configuration from dotted keys and parsed values; keys left out take their defaults."""
  parts: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
  for key, value in values.items():
    section, name = key.split(".")
    parts[section][name] = value
  return Config(**{section: _sections()[section](**part) for section, part in parts.items()})


# --- One value ---


def _describe(kind: Any) -> str:
  """What a field of this type takes, in words."""
  if typing.get_origin(kind) is typing.Literal:
    return "one of " + ", ".join(typing.get_args(kind))
  return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(
    kind, "a list of numbers"
  )


def _parse_text(text: str, kind: Any) -> Any:
  """The value of type `kind` that `text` spells; ValueError if it spells none."""
  if kind is str:
    return text
  text = text.strip()
  if kind is bool:
    if text.lower() not in _BOOLS:
      raise ValueError
    return _BOOLS[text.lower()]
  if kind is int:
    try:
      return int(text)
    except ValueError:
      number = _parse_text(text, float)
      if not number.is_integer():
        raise
      return int(number)
  if kind is float:
    number = float(text)
    if not math.isfinite(number):
      raise ValueError
    return number
  if typing.get_origin(kind) is typing.Literal:
    if text not in typing.get_args(kind):
      raise ValueError
    return text
  if text.startswith("[") and text.endswith("]"):  # what remains is tuple[float, ...]
    text = text[1:-1].strip()
  return tuple(_parse_text(part, float) for part in text.split(",")) if text else ()


def _parse(key: str, value: Any) -> Any:
  """`value`, text or a list of texts, as the type of `key`. ConfigError if it is not of that type."""
  kind = _fields()[key].type
  try:
    if isinstance(value, str):
      return _parse_text(value, kind)
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
      return tuple(_parse_text(part, float) for part in value)
  except (ValueError, AttributeError):  # AttributeError: a list within the list
    pass
  raise ConfigError(f"{key}: expected {_describe(kind)}, got {value!r}")


def _format(value: Any) -> str:
  """The text that `_parse_text` reads back as `value`."""
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, tuple):
    return "[" + ", ".join(map(_format, value)) + "]"
  return str(value)


# --- Unknown names ---


_ALMOST = 1.8  # of 2, how like a name must be to be meant though others end in its last word


def _nearest(name: str, candidates: Iterable[str]) -> str:
  """The candidate most like `name`; or those that end in the same word or abbreviate to it (lr), and one as like."""
  last = name.rpartition(".")[2]
  tails = {c: c.rpartition(".")[2] for c in candidates}
  same = [
    c for c, tail in tails.items() if last in (tail, "".join(word[:1] for word in tail.split("_")))
  ]

  def likeness(candidate: str) -> float:
    pairs = ((name, candidate), (last, tails[candidate]))
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs)

  best = max(tails, key=likeness)
  if same and likeness(best) < _ALMOST:
    return " or ".join(same)
  return " or ".join([*(c for c in same if c != best), best])


def _check_key(key: str, candidates: Collection[str]) -> None:
  if key not in candidates:
    raise ConfigError(f"unknown key {key!r}; the nearest is {_nearest(key, candidates)}")


# --- YAML ---


class _Loader(yaml.BaseLoader):
  """Mappings, lists and text, nothing else; a key given twice is an error rather than a silent choice."""

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
  """The mapping that `text` holds. ConfigError if it holds something else, or nothing readable."""
  try:
    document = yaml.load(text, Loader=_Loader)  # safe: BaseLoader makes no objects
  except yaml.YAMLError as error:
    raise ConfigError(f"not readable as YAML: {error}") from None
  if document is None or document == "":
    return {}
  if not isinstance(document, dict):
    raise ConfigError(f"expected a mapping of keys to values, got {document!r}")
  return document


def _parse_document(document: Mapping[str, Any]) -> dict[str, Any]:
  """Dotted key -> parsed value, for sections as nested mappings or dotted keys."""
  leaves: list[tuple[str, Any]] = []
  for key, value in document.items():
    if isinstance(value, dict) and key not in _fields():
      _check_key(key, _sections())
      leaves += [(f"{key}.{name}", leaf) for name, leaf in value.items()]
    elif key not in _sections():
      leaves.append((key, value))
    elif value != "":  # a section whose keys are all commented out is empty text
      raise ConfigError(f"{key}: expected a mapping of keys to values, got {value!r}")
  values: dict[str, Any] = {}
  for key, value in leaves:
    _check_key(key, _fields())
    if key in values:
      raise ConfigError(f"{key} is given twice")
    values[key] = _parse(key, value)
  return values


# --- Presets ---


def _config_dir() -> Path:
  """`configs/` beside the package (a clone), else in the working directory."""
  beside = Path(__file__).resolve().parents[2] / "configs"
  return beside if beside.is_dir() else Path.cwd() / "configs"


def preset_names() -> list[str]:
  """The presets that a name alone finds."""
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


def _preset_values(path: Path, parents: tuple[Path, ...] = ()) -> dict[str, Any]:
  """Dotted key -> parsed value: what the file's `base` presets say, then what it says itself."""
  path = path.resolve()
  if path in parents:
    raise ConfigError(f"{path}: a preset is its own base")
  try:
    document = _read_yaml(path.read_text(encoding="utf-8"))
    bases = document.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
      raise ConfigError(f"base: expected names of presets, got {bases!r}")
    own = _parse_document(document)
  except (OSError, UnicodeDecodeError, ConfigError) as error:
    raise ConfigError(f"{path}: {error}") from None
  values: dict[str, Any] = {}
  for base in bases:
    values |= _preset_values(_preset_path(base, path.parent), (*parents, path))
  return values | own


# --- What launchers call ---


def load(presets: Sequence[str] = (), overrides: Sequence[str] = ()) -> Config:
  """The defaults of `config.py`, then the presets in order, then the overrides; the later wins, key by key.

  Args:
    presets: names of files in `configs/`, or paths that end in .yaml. A preset may name others that come before it
      (`base: [atari100k]`).
    overrides: `key=value` with dotted keys, such as `env.game=Pong` or `actor.temperatures=1,0.5,0.25`.

  Returns:
    A configuration that `validate` accepts.

  Raises:
    ConfigError: an unknown preset or key (the message names the nearest), a value of the wrong type or out of range,
      a file that cannot be read.
  """
  values: dict[str, Any] = {}
  for preset in presets:
    values |= _preset_values(_preset_path(preset, Path.cwd()))
  return override(_build(values), overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
  """`config` with `key=value` overrides applied, validated. Raises ConfigError as `load` does."""
  values = _flat(config)
  for text in overrides:
    key, equals, value = text.partition("=")
    if not equals:
      raise ConfigError(f"override {text!r} is not of the form key=value")
    _check_key(key.strip(), _fields())
    values[key.strip()] = _parse(key.strip(), value)
  config = _build(values)
  validate(config)
  return config


def to_yaml(config: Config) -> str:
  """Every key with its value, as YAML that `from_yaml` and `load` read back to an equal configuration."""
  nested: dict[str, dict[str, Any]] = {section: {} for section in _sections()}
  for key, value in _flat(config).items():
    section, name = key.split(".")
    nested[section][name] = list(value) if isinstance(value, tuple) else value
  return yaml.safe_dump(nested, sort_keys=False)


def from_yaml(text: str) -> Config:
  """The configuration that `to_yaml` wrote. Keys it lacks (an older run's) take their defaults.

  Ranges are not checked: what was saved was valid when it was saved, and a reader of an old run need not agree.

  Raises:
    ConfigError: unreadable text, an unknown key, a value of the wrong type.
  """
  return _build(_parse_document(_read_yaml(text)))


def diff(a: Config, b: Config) -> list[str]:
  """The keys in which two configurations differ, as lines `key: a's value != b's value`."""
  theirs = _flat(b)
  return [
    f"{key}: {_format(v)} != {_format(theirs[key])}"
    for key, v in _flat(a).items()
    if v != theirs[key]
  ]


def help_text() -> str:
  """Every key with its default, type and meaning, by section, and the presets: what `--help` prints."""
  lines = ["Settings, as key=value (here with their defaults):"]
  for section, cls in _sections().items():
    lines += ["", f"{section}: {cls.__doc__.strip()}"]
    for key, field in _fields().items():
      if key.startswith(f"{section}."):
        lines.append(f"  {key}={_format(field.default)}  ({_describe(field.type)})")
        lines += textwrap.wrap(
          field.metadata["help"], 100, initial_indent="      ", subsequent_indent="      "
        )
  lines += ["", "Presets (--config, several stack, the later wins):"]
  for name in preset_names():
    first_line = (_config_dir() / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    lines.append(f"  {name:14} {first_line.lstrip('# ')}")
  return "\n".join(lines) + "\n"


def validate(config: Config) -> None:
  """Checks ranges, and settings against each other.

  Raises:
    ConfigError: one line for each key whose value cannot be used.
  """
  problems = list(checks.problems(config, _format))
  if problems:
    raise ConfigError("\n".join(problems))
