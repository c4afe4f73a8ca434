"""A lock for launching programs that span several devices."""

import contextlib
import threading

from jax.sharding import Mesh

_LOCK = threading.Lock()


def in_order(mesh: Mesh) -> contextlib.AbstractContextManager:
  """Held while a program with collectives is launched on the devices of this mesh.

  Such programs must begin in the same order on every device, whichever threads launch them, or
  their collectives wait for each other forever.
  """
  return _LOCK if mesh.size > 1 else contextlib.nullcontext()
