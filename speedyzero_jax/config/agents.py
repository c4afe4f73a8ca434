"""Agents by name: the built-in ones, and modules of the user's own."""

import functools
import importlib
import importlib.util
import pkgutil
import traceback
from pathlib import Path
from typing import Any

from speedyzero_jax.config.fields import ConfigError

_BUILT_IN = "speedyzero_jax.agents"


def agent_module(name: str) -> Any:
  """Imports the module of an agent: a built-in one, or any other by its dotted name.

  Raises ConfigError if there is no such module, it can't be imported, or it does not define
  `make_agent` and an `AGENT_CONFIG` of its name.
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
