"""Agents by name: the built-in ones, and modules of the user's own."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import traceback
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from speedyzero_jax.config.fields import ConfigError, is_supported
from speedyzero_jax.config.schema import Config

_BUILT_IN = "speedyzero_jax.agents"


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


def _problems(config: type) -> Iterator[str]:
  """Yields what is wrong with the declaration of an agent's configuration."""
  yield from _undeclared(config, "AGENT_CONFIG")
  common = {field.name for field in dataclasses.fields(Config)}
  for section in dataclasses.fields(config):
    kind: Any = section.type
    if section.name in common:
      yield f"section {section.name!r} has the name of a section that all agents have"
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
      yield f"section {section.name!r} must have a dataclass as its type, got {kind!r}"
      continue
    yield from _undeclared(kind, f"the class of section {section.name!r}")
    for field in dataclasses.fields(kind):
      key = f"{section.name}.{field.name}"
      if "interval" not in field.metadata:
        yield f"{key} must be declared by opt(...)"
      if not is_supported(field.type):
        types = "bool, int, float, str, Literal of strings or tuple[float, ...]"
        yield f"{key} must be a {types}, got {field.type!r}"


def _undeclared(config: type, what: str) -> Iterator[str]:
  """Yields a problem if annotations of a class are not fields of its dataclass."""
  known = {field.name for field in dataclasses.fields(config)}
  for name, kind in inspect.get_annotations(config).items():
    if isinstance(kind, str):
      yield f"{name!r} has a string as its type; remove `from __future__ import annotations`"
    if name not in known and typing.get_origin(kind) is not ClassVar:
      yield f"{what} must be decorated with @dataclasses.dataclass(frozen=True)"


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
