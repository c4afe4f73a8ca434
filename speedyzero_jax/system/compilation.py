"""Compiled programs with their costs, and detection of compilations during a run."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from speedyzero_jax.system.costs import matmul_flops

Report = Callable[[str], None]

_CALM = 5  # learner steps without a compilation after which none is expected


class Compilations:
  """Names of the functions that jax compiles in any thread, while this context is entered.

  Programs from the persistent cache count too, once for each shape of their arguments.
  """

  def __init__(self) -> None:
    self.names: list[str] = []

  def __enter__(self) -> "Compilations":
    jax.monitoring.register_event_duration_secs_listener(self._heard)
    return self

  def __exit__(self, *_: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._heard)

  def _heard(self, event: str, duration_secs: float, **details: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
      self.names.append(str(details.get("fun_name", "?")).removeprefix("jit(").removesuffix(")"))


class Form(NamedTuple):
  """A program compiled for one set of shapes; sizes and costs are per device."""

  label: str
  compile_seconds: float
  memory: int  # bytes needed beside the arguments; 0 where XLA does not say
  traffic: float | None  # bytes read and written by XLA's count, in which a loop's body counts once
  flops: Counter[str]  # see `matmul_flops`


class Program:
  """A jitted function that reports compilations, which can take minutes, and counts its calls.

  Args:
    function: jitted, or with `lower` and a name as jitted ones have.
    label: describes a call by its arguments; other shapes of the second one need other labels.
    report: takes lines.
  """

  def __init__(self, function: Any, label: Callable[..., str], report: Report):
    self.function, self.label, self._report = function, label, report
    self.__name__ = function.__name__
    self.calls: Counter[str] = Counter()  # so far, by label
    self._lock = threading.Lock()
    self._locks: dict[tuple, threading.Lock] = {}  # so that forms can compile in parallel
    self._forms: dict[tuple, Form] = {}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    label = self.prepare(*args, **kwargs).label
    with self._lock:
      self.calls[label] += 1
    return self.function(*args, **kwargs)

  def prepare(self, *args: Any, **kwargs: Any) -> Form:
    """Compiles it for these arguments, unless it is compiled."""
    label = self.label(*args, **kwargs)
    # Arrays on devices compile apart from those of the host.
    leaves = jax.tree.leaves(args[1:2])
    key = (label, *((type(x), getattr(x, "shape", None)) for x in leaves))
    if key not in self._forms:
      with self._lock:
        lock = self._locks.setdefault(key, threading.Lock())
      with lock:
        if key not in self._forms:
          self._forms[key] = self._compile(label, *args, **kwargs)
    return self._forms[key]

  def _compile(self, label: str, *args: Any, **kwargs: Any) -> Form:
    begin = time.monotonic()
    self._report(f"compiling {label}: up to a minute or two, less when it was compiled before")
    compiled = self.lower(*args, **kwargs).compile()  # found again by calls
    flops = matmul_flops(self.function, *args, **kwargs)
    seconds = time.monotonic() - begin
    self._report(f"compiled {label} in {seconds:.0f} s")
    costs = compiled.cost_analysis() or {}
    return Form(label, seconds, memory_of(compiled), costs.get("bytes accessed"), flops)

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """As of a jitted function."""
    return self.function.lower(*args, **kwargs)

  @property
  def bytes(self) -> int:
    """Memory on each device that all its compiled forms need beside their arguments."""
    return sum(form.memory for form in list(self._forms.values()))


def memory_of(compiled: jax.stages.Compiled) -> int:
  """Bytes that a program needs on each device beside its arguments; 0 where XLA does not say."""
  found = compiled.memory_analysis()
  if found is None:
    return 0
  return int(found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)


class WarmUp:
  """The first steps of a run, until they are like those that follow.

  Args:
    compilations: listening.
    worked: whether all periodic work has been done at least once.
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
    """Whether nothing was compiled for some steps, and all work has begun."""
    return self._calm >= _CALM
