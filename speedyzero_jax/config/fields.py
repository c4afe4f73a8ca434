"""Declaration of configuration fields: default, help, valid interval and behaviour on resume."""

import dataclasses
from typing import Any, Literal

Divided = Literal["", "exactly", "at least 1"]


def opt(
  default: Any, help: str, interval: str = "", *, mutable: bool = False, divided: Divided = ""
) -> Any:
  """A dataclass field that carries its documentation and constraints.

  Args:
    default: value if nothing sets the field.
    help: meaning, unit and source, printed by `--help`.
    interval: valid values of a number, or of each number of a tuple, such as `"(0, 1]"`.
    mutable: a resumed run may change the field.
    divided: the field counts lanes, samples or transitions of the whole run, shared among learner
      processes: shares add up `exactly`, or are `at least 1` each unless the value is 0.
  """
  metadata = {"help": help, "interval": interval, "mutable": mutable, "divided": divided}
  return dataclasses.field(default=default, metadata=metadata)


def inside(value: float, interval: str) -> bool:
  """Whether a number lies in an interval such as `"[0, 1)"`."""
  low, high = (float(end) for end in interval[1:-1].split(","))
  above = value >= low if interval[0] == "[" else value > low
  return above and (value <= high if interval[-1] == "]" else value < high)


def share(value: int, divided: Divided, unit: int, units: int) -> int:
  """Share of learner process `unit` of a field's value."""
  part = value // units + (unit < value % units)
  return max(part, min(value, 1)) if divided == "at least 1" else part
