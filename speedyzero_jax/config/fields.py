"""Configuration fields: declaration, parsing, formatting and range checks."""

import dataclasses
import math
import typing
from collections.abc import Iterable
from typing import Any, Literal

Divided = Literal["", "exactly", "at least 1"]

_BOOLS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class ConfigError(ValueError):
  """An invalid setting; the message names it. Launchers print it and exit with status 2."""


def opt(
  default: Any, help: str, interval: str = "", *, mutable: bool = False, divided: Divided = ""
) -> Any:
  """Declares a dataclass field with its documentation and constraints.

  Args:
    default: default value.
    help: meaning, unit and source, printed by `--help`.
    interval: valid range of a number, or of each element of a tuple, such as `"(0, 1]"`.
    mutable: whether a resumed run may change the field.
    divided: set for counts of the whole run that are divided among learner processes. Shares sum
      `exactly` to the value, or are `at least 1` each unless the value is 0.
  """
  metadata = {"help": help, "interval": interval, "mutable": mutable, "divided": divided}
  return dataclasses.field(default=default, metadata=metadata)


def interval_problem(key: str, value: Any, interval: str) -> Iterable[str]:
  """Yields an error message if the number, or an element of the tuple, is outside `interval`."""
  low, high = (float(end) for end in interval[1:-1].split(","))
  for number in value if isinstance(value, tuple) else (value,):
    above = number >= low if interval[0] == "[" else number > low
    below = number <= high if interval[-1] == "]" else number < high
    if not (above and below):
      yield f"{key}: must lie in {interval}, got {show(value)}"
      return


def describe(kind: Any) -> str:
  """Describes a field's type for error messages and `--help`."""
  if typing.get_origin(kind) is Literal:
    return "one of " + ", ".join(typing.get_args(kind))
  names = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
  return names.get(kind, "a list of numbers")


def is_supported(kind: Any) -> bool:
  """Whether `parse` and `show` handle fields of this type."""
  return kind in (bool, int, float, str, tuple[float, ...]) or (
    typing.get_origin(kind) is Literal and all(isinstance(x, str) for x in typing.get_args(kind))
  )


def parse(key: str, value: Any, kind: Any) -> Any:
  """Parses `value`, a string or list of strings, as type `kind`. Raises ConfigError on failure."""
  try:
    if isinstance(value, str):
      return _parse_text(value, kind)
    if isinstance(value, list) and typing.get_origin(kind) is tuple:
      return tuple(_parse_text(part, float) for part in value)
  except (ValueError, KeyError, AttributeError):  # AttributeError: a nested list
    pass
  raise ConfigError(f"{key}: expected {describe(kind)}, got {value!r}")


def _parse_text(text: str, kind: Any) -> Any:
  """Parses `text` as type `kind`. Raises ValueError or KeyError if that is not possible."""
  if kind is str:
    return text
  text = text.strip()
  if kind is bool:
    return _BOOLS[text.lower()]
  if kind is int:
    try:
      return int(text)
    except ValueError:
      number = _parse_text(text, float)
      if number.is_integer():  # 1e5
        return int(number)
      raise
  if kind is float:
    number = float(text)
    if not math.isfinite(number):
      raise ValueError
    return number
  if typing.get_origin(kind) is Literal:
    return {name: name for name in typing.get_args(kind)}[text]
  text = text.removeprefix("[").removesuffix("]")  # the remaining type is tuple[float, ...]
  return tuple(_parse_text(part, float) for part in text.split(",")) if text.strip() else ()


def show(value: Any) -> str:
  """Formats `value` such that `parse` reads it back."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return "[" + ", ".join(map(show, value)) + "]"
  return str(value)
