"""Compiled programs that report their compilation time and memory."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

Report = Callable[[str], None]


class Program:
  """A jitted function, or an object with its `lower` and `__name__`, that reports compilations."""

  def __init__(self, function: Any, label: str, report: Report):
    self.function, self._label, self._report = function, label, report
    self.__name__ = function.__name__
    self._bytes: dict[tuple, int] = {}  # memory of each compiled form
    self._lock = threading.Lock()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    self.prepare(*args, **kwargs)
    return self.function(*args, **kwargs)

  def prepare(self, *args: Any, **kwargs: Any) -> None:
    """Compiles the function, unless it was compiled for arguments of the same form.

    The form is the shape and array type of every leaf of the second argument, and the keywords.
    """
    leaves = jax.tree.leaves(args[1])
    form = (*kwargs.items(), *((type(x), x.shape) for x in leaves))
    if form in self._bytes:
      return
    with self._lock:
      if form not in self._bytes:
        label = f"{self._label}, batch {len(leaves[0])}"
        begin = time.monotonic()
        self._report(f"compiling {label}: may take minutes, seconds if cached")
        compiled = self.function.lower(*args, **kwargs).compile()  # later calls reuse it
        self._report(f"compiled {label} in {time.monotonic() - begin:.0f} s")
        self._bytes[form] = memory_of(compiled)

  @property
  def bytes(self) -> int:
    """Bytes on each device that all compiled forms need in addition to their arguments."""
    return sum(list(self._bytes.values()))


def memory_of(compiled: jax.stages.Compiled) -> int:
  """Bytes on each device that a program needs in addition to its arguments; 0 if unknown."""
  stats = compiled.memory_analysis()
  if stats is None:
    return 0
  return int(stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes)
