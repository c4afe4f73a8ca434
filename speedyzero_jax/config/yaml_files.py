"""YAML without implicit types, and errors that name the file.

Plain YAML makes `off` a bool and `1e5` a string. Here scalars stay strings until they are parsed as
their field's type, so presets and `key=value` overrides have the same syntax.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from speedyzero_jax.config.fields import ConfigError


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
  return mapping(document, "top level")


def mapping(value: Any, key: str) -> dict[str, Any]:
  """The mapping, {} if there is no value. Raises ConfigError, naming `key`, for other values."""
  if isinstance(value, dict):
    return value
  if value in (None, ""):  # empty, or everything is commented out
    return {}
  raise ConfigError(f"{key}: expected a mapping, got {value!r}")


def strings(value: Any, key: str) -> tuple[str, ...]:
  """The strings of a list, or a single string. Raises ConfigError, naming `key`, for others."""
  if isinstance(value, str):
    return (value,) if value else ()
  if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
    raise ConfigError(f"{key}: expected a list of strings, got {value!r}")
  return tuple(value)


@contextlib.contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
  """Reraises errors as ConfigError with the file's path in the message."""
  try:
    yield
  except (OSError, UnicodeDecodeError, ConfigError) as error:
    reason = error.strerror if isinstance(error, OSError) else error
    raise ConfigError(f"{path}: {reason}") from None
