"""Compiled programs, which report how long compilation takes and how much memory they need."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

Report = Callable[[str], None]


class Program:
  """A jitted function, or one with its `lower` and name, that reports its compilations."""

  def __init__(self, function: Any, label: str, report: Report):
    self.function, self._label, self._report = function, label, report
    self.__name__ = function.__name__
    self._bytes: dict[tuple, int] = {}  # memory of each compiled form
    self._lock = threading.Lock()

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    self.prepare(*args, **kwargs)
    return self.function(*args, **kwargs)

  def prepare(self, *args: Any, **kwargs: Any) -> None:
    """Compiles it, once for each shape and placement of the second argument and each keyword."""
    leaves = jax.tree.leaves(args[1])
    form = (*kwargs.items(), *((type(x), x.shape) for x in leaves))
    if form in self._bytes:
      return
    with self._lock:
      if form not in self._bytes:
        label = f"{self._label}, batch {len(leaves[0])}"
        begin = time.monotonic()
        self._report(f"compiling {label}: up to a minute or two, less when it was compiled before")
        compiled = self.function.lower(*args, **kwargs).compile()  # found again by calls
        self._report(f"compiled {label} in {time.monotonic() - begin:.0f} s")
        self._bytes[form] = memory_of(compiled)

  @property
  def bytes(self) -> int:
    """Memory on each device that all its compiled forms need beside their arguments."""
    return sum(list(self._bytes.values()))


def memory_of(compiled: jax.stages.Compiled) -> int:
  """Bytes that a program needs on each device beside its arguments; 0 where XLA does not say."""
  found = compiled.memory_analysis()
  if found is None:
    return 0
  return int(found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)
