"""The order in which programs are sent to devices."""

import contextlib
import threading

from jax.sharding import Mesh

_LOCK = threading.Lock()


def in_order(mesh: Mesh) -> contextlib.AbstractContextManager:
  """To be held by who sends a program with collectives to the devices of this mesh.

  Roles send theirs from threads of their own, and such programs must begin in the same order on every device: else
  each device waits in a different one for the others, forever.
  """
  return _LOCK if mesh.size > 1 else contextlib.nullcontext()
