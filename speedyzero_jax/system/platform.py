"""The platform that programs are made for: that of jax's devices, or another while planning."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


def platform() -> str:
  """`cpu`, `cuda`, ...: choices made while a program is built or traced depend on it."""
  return _planned.get() or jax.default_backend()


@contextlib.contextmanager
def planned(name: str) -> Iterator[None]:
  """Makes programs for another platform than that of jax's devices."""
  token = _planned.set(name)
  try:
    yield
  finally:
    _planned.reset(token)
