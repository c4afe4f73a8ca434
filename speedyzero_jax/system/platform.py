"""The platform that programs are built for: jax's default backend, or the target of a GPU plan."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_planned: ContextVar[str | None] = ContextVar("planned", default=None)


def platform() -> str:
  """Returns `cpu`, `cuda`, ..., on which choices while building or tracing programs depend."""
  return _planned.get() or jax.default_backend()


def device_count() -> int:
  """Number of this process' devices. Raises RuntimeError if the platform in JAX_PLATFORMS fails."""
  try:
    return len(jax.local_devices())
  except (RuntimeError, AssertionError) as error:  # jax asserts that a GPU is there
    wanted = os.environ.get("JAX_PLATFORMS")
    what = f"JAX_PLATFORMS={wanted}" if wanted else "jax's default platform"
    reason = str(error).strip().partition("\n")[0] or "no device"
    raise RuntimeError(f"{what} can't be used: {reason}") from error


@contextlib.contextmanager
def planned(name: str) -> Iterator[None]:
  """Context manager in which programs are built for the platform `name`."""
  token = _planned.set(name)
  try:
    yield
  finally:
    _planned.reset(token)
