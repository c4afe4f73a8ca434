"""A lock for dispatching programs that span several devices."""

import contextlib
import threading

from jax.sharding import Mesh

_LOCK = threading.Lock()


def dispatch_lock(mesh: Mesh) -> contextlib.AbstractContextManager:
  """Context manager to hold while dispatching a program with collectives on this mesh.

  Such programs must start in the same order on every device, whichever threads dispatch them;
  otherwise their collectives deadlock.
  """
  return _LOCK if mesh.size > 1 else contextlib.nullcontext()
