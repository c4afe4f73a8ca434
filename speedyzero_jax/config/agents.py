"""Agents by name: the built-in ones, and modules of the user's own."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, get_origin

from speedyzero_jax.config.fields import ConfigError, is_supported
from speedyzero_jax.config.schema import AgentConfig, Config

_BUILT_IN = "speedyzero_jax.agents"
_AS_STRING = "types of fields can't be strings; remove `from __future__ import annotations`"


def agent_module(name: str) -> Any:
  """Imports the module of an agent: a built-in one, or any other by its dotted name.

  Raises ConfigError if there is no such module, it can't be imported, or it does not define
  `make_agent` and a valid `AGENT_CONFIG` of its name.
  """
  for module in filter(_exists, (f"{_BUILT_IN}.{name}", name)):
    try:
      agent = importlib.import_module(module)
    except Exception as error:
      raise _not_importable(module, error) from error
    missing = [x for x in ("AGENT_CONFIG", "make_agent") if not hasattr(agent, x)]
    if missing and (module == name or len(missing) == 1):
      raise ConfigError(f"agent: module {module} has no {' and no '.join(missing)}")
    if not missing:
      named = getattr(agent.AGENT_CONFIG, "name", None)
      if named != name:  # as in a copy of another agent, whose configuration would build that one
        raise ConfigError(
          f"agent: the name in {module}.AGENT_CONFIG must be {name!r}, got {named!r}"
        )
      if problem := next(_problems(agent.AGENT_CONFIG), ""):
        raise ConfigError(f"agent: {module}.AGENT_CONFIG: {problem}")
      return agent
  available = f"{', '.join(agent_names())}, or a module of your own on PYTHONPATH"
  raise ConfigError(f"agent: unknown agent {name!r}; available: {available}")


def _problems(config: Any) -> Iterator[str]:
  """Yields what is wrong with the declaration of an agent's configuration."""
  if not (isinstance(config, type) and issubclass(config, AgentConfig)):
    yield "must be a subclass of config.schema.AgentConfig"
    return
  yield from _undecorated(config)
  common = {field.name for field in dataclasses.fields(Config)}
  for section in dataclasses.fields(config):
    kind: Any = section.type
    if section.name in common:
      yield f"section {section.name!r} has the name of a section that all agents have"
    if isinstance(kind, str):
      yield _AS_STRING
    elif not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
      yield f"section {section.name!r} must have a dataclass as its type, got {kind!r}"
    else:
      yield from _undecorated(kind)
      yield from _undeclared(section.name, kind)


def _undecorated(config: type) -> Iterator[str]:
  """Yields a problem for each class whose fields would be ignored."""
  for each in config.__mro__:
    kinds = inspect.get_annotations(each).values()
    if "__dataclass_fields__" not in vars(each) and not all(map(_is_class_variable, kinds)):
      yield f"class {each.__name__} must be decorated with @dataclasses.dataclass(frozen=True)"


def _is_class_variable(kind: Any) -> bool:
  return "ClassVar" in kind if isinstance(kind, str) else ClassVar in (kind, get_origin(kind))


def _undeclared(section: str, kind: Any) -> Iterator[str]:
  """Yields problems of the fields of a section."""
  for field in dataclasses.fields(kind):
    key = f"{section}.{field.name}"
    if "interval" not in field.metadata:
      yield f"{key} must be declared by opt(...)"
    if isinstance(field.type, str):
      yield _AS_STRING
    elif not is_supported(field.type):
      types = "bool, int, float, str, Literal of strings or tuple[float, ...]"
      yield f"{key} must be a {types}, got {field.type!r}"


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
