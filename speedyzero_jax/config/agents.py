"""Agents by name: the built-in ones, and modules of the user's own."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
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
  built_in = f"{_BUILT_IN}.{name}"
  if _spec(built_in) is not None and (agent := _imported(built_in, name)) is not None:
    return agent
  if _spec(name) is not None:
    if (agent := _imported(name, name)) is None:
      raise ConfigError(f"agent: module {name} has no AGENT_CONFIG and no make_agent")
    return agent
  available = f"{', '.join(agent_names())}, or a module of your own on PYTHONPATH"
  raise ConfigError(f"agent: unknown agent {name!r}; available: {available}")


def check_unambiguous(name: str) -> None:
  """Raises ConfigError if a built-in agent hides a user's agent of the same name."""
  used, own = agent_module(name), _spec(name)
  if used.__name__ == name or own is None or own.origin in (None, used.__file__):
    return
  with contextlib.suppress(OSError):  # it has no file
    if b"AGENT_CONFIG" in Path(own.origin).read_bytes():
      raise ConfigError(f"agent: {name} is the name of a built-in agent; rename {own.origin}")


def _imported(module: str, name: str) -> Any:
  """Imports a module; returns None if it defines no agent. Raises as `agent_module`."""
  try:
    agent = importlib.import_module(module)
  except Exception as error:
    raise _not_importable(module, error) from error
  missing = [x for x in ("AGENT_CONFIG", "make_agent") if not hasattr(agent, x)]
  if len(missing) == 2:
    return None
  if missing:
    raise ConfigError(f"agent: module {module} has no {missing[0]}")
  named = getattr(agent.AGENT_CONFIG, "name", None)
  if named != name:  # as in a copy of another agent, whose configuration would build that one
    raise ConfigError(f"agent: the name in {module}.AGENT_CONFIG must be {name!r}, got {named!r}")
  if problem := next(_problems(agent.AGENT_CONFIG), ""):
    raise ConfigError(f"agent: {module}.AGENT_CONFIG: {problem}")
  return agent


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


def _spec(module: str) -> ModuleSpec | None:
  """Finds a module; returns None if there is none."""
  if "" in module.split("."):
    return None  # a relative name
  try:
    return importlib.util.find_spec(module)
  except (ModuleNotFoundError, ValueError):
    return None
  except Exception as error:  # from its package
    raise _not_importable(module, error) from error


def _not_importable(module: str, error: Exception) -> ConfigError:
  at = traceback.extract_tb(error.__traceback__)[-1]
  reason = f"{type(error).__name__}: {error} ({at.filename}:{at.lineno})"
  return ConfigError(f"agent: {module} can't be imported: {reason}")


@functools.cache
def agent_names() -> list[str]:
  """Names of the built-in agents, without unfinished ones."""
  found = []
  for module in pkgutil.iter_modules(importlib.import_module(_BUILT_IN).__path__):
    with contextlib.suppress(ConfigError):
      if _imported(f"{_BUILT_IN}.{module.name}", module.name) is not None:
        found.append(module.name)
  return found
