"""The platform that programs are built for: jax's default backend, or the target of a GPU plan."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


def platform() -> str:
  """Returns `cpu`, `cuda`, ..., on which choices while building or tracing programs depend."""
  return _planned.get() or jax.default_backend()


@contextlib.contextmanager
def planned(name: str) -> Iterator[None]:
  """Context manager in which programs are built for the platform `name`."""
  token = _planned.set(name)
  try:
    yield
  finally:
    _planned.reset(token)
