"""Text form of settings: parsing by type, formatting, and suggestions for unknown names."""

import difflib
import math
import typing
from collections.abc import Iterable
from typing import Any

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
  """An invalid setting; the message names it. Launchers print it and exit with status 2."""


def describe(kind: Any) -> str:
  """The expected kind of value, for error messages and `--help`."""
  if typing.get_origin(kind) is typing.Literal:
    return "one of " + ", ".join(typing.get_args(kind))
  return {bool: "true or false", int: "an integer", float: "a number", str: "text"}.get(
    kind, "a list of numbers"
  )


def _parse_text(text: str, kind: Any) -> Any:
  """The value of type `kind` spelled by `text`. Raises ValueError if there is none."""
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


def parse(key: str, value: Any, kind: Any) -> Any:
  """`value`, a text or list of texts, as the type of `key`. Raises ConfigError if it is not one."""
  try:
    if isinstance(value, str):
      return _parse_text(value, kind)
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
      return tuple(_parse_text(part, float) for part in value)
  except (ValueError, AttributeError):  # AttributeError: a list within the list
    pass
  raise ConfigError(f"{key}: expected {describe(kind)}, got {value!r}")


def show(value: Any) -> str:
  """The text that `_parse_text` reads back as `value`."""
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, tuple):
    return "[" + ", ".join(map(show, value)) + "]"
  return str(value)


_ALMOST = 1.8  # of 2, the likeness above which a name is preferred to those with the same last word


def nearest(name: str, candidates: Iterable[str]) -> str:
  """The candidates that `name` may mean.

  Those whose last word is the same or is abbreviated by it (lr), and the one most like it.
  """
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
