"""What jax compiles while a run goes on, and when it has compiled all that it needs."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from speedyzero_jax.system.costs import memory_of

Report = Callable[[str], None]

_CALM = 5  # learner steps without a compilation after which none is expected


class Compilations:
  """Counts what jax compiles in any thread, by the names of functions. A context manager: inside it, it listens.

  What the persistent cache has counts too: a program is made ready once for each shape of its arguments.
  """

  def __init__(self) -> None:
    self.names: list[str] = []  # of what was compiled so far
    self._seconds: dict[str, float] = {}
    self._lock = threading.Lock()

  def __enter__(self) -> "Compilations":
    jax.monitoring.register_event_duration_secs_listener(self._heard)
    return self

  def __exit__(self, *_: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._heard)

  def _heard(self, event: str, duration_secs: float, **details: Any) -> None:
    if not event.startswith("/jax/core/compile/"):
      return
    name = str(details.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
    with self._lock:
      self._seconds[name] = self._seconds.get(name, 0.0) + duration_secs
      if event.endswith("backend_compile_duration"):
        self.names.append(name)

  def seconds(self, name: str) -> float:
    """Spent so far on all compilations of a function: on tracing, on lowering, and in XLA or the cache."""
    with self._lock:
      return self._seconds.get(name, 0.0)


class Program:
  """A jitted function that says when it compiles for other shapes, which can take minutes, and what memory that needs.

  Args:
    function: jitted, or with `lower` and a name as jitted ones have.
    label: says from the arguments, of which the second is what it works on, what a call is to be called; those of
      other shapes otherwise.
    report: takes lines.
  """

  def __init__(self, function: Any, label: Callable[..., str], report: Callable[[str], None]):
    self.function, self.label, self._report = function, label, report
    self.__name__ = function.__name__
    self._lock = threading.Lock()
    self._locks: dict[tuple, threading.Lock] = {}  # of forms, which may compile beside each other
    self._bytes: dict[tuple, int] = {}
    self._seconds: dict[str, float] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    self.prepare(*args, **kwargs)
    return self.function(*args, **kwargs)

  def prepare(self, *args: Any, **kwargs: Any) -> None:
    """Compiles it for these arguments, unless it is."""
    label = self.label(*args, **kwargs)
    # Arrays on devices compile apart from those of the host.
    leaves = jax.tree.leaves(args[1:2])
    form = (label, *((type(x), getattr(x, "shape", None)) for x in leaves))
    if form in self._bytes:
      return
    with self._lock:
      lock = self._locks.setdefault(form, threading.Lock())
    with lock:
      if form in self._bytes:
        return
      begin = time.monotonic()
      self._report(f"compiling {label}: up to a minute or two, less when it was compiled before")
      compiled = self.lower(*args, **kwargs).compile()  # which calls find
      seconds = time.monotonic() - begin
      self._seconds[label] = self._seconds.get(label, 0.0) + seconds
      self._bytes[form] = memory_of(compiled) or 0
      self._report(f"compiled {label} in {seconds:.0f} s")

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As of a jitted function."""
    return self.function.lower(*args, **kwargs)

  def seconds(self, label: str) -> float:
    """Spent on compiling what is called so; 0 if it never was."""
    return self._seconds.get(label, 0.0)

  @property
  def bytes(self) -> int:
    """Memory on each device that all its compiled forms need beside their arguments, as far as XLA says."""
    return sum(self._bytes.values())


class WarmUp:
  """The beginning of a run, until its steps are like those that follow.

  Args:
    compilations: listening.
    worked: whether everything that works only now and then has done so.
  """

  def __init__(self, compilations: Compilations, worked: Callable[[], bool] = lambda: True):
    self._compilations, self._worked = compilations, worked
    self._before, self._calm = -1, 0

  def step(self) -> None:
    """To be called after each learner step."""
    now = len(self._compilations.names)
    if not self.over:
      self._calm = self._calm + 1 if now == self._before and self._worked() else 0
    self._before = now

  @property
  def over(self) -> bool:
    """Whether nothing was compiled for some steps, and everything has worked."""
    return self._calm >= _CALM
