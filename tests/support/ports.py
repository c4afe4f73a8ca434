"""Ports for processes of tests."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_address() -> Iterator[str]:
  """Holds a free port; only sockets with SO_REUSEPORT, as jax's coordinator's, may share it.

  Set JAX_COORDINATOR_BIND_ADDRESS to the yielded address. Connections are refused until a process
  listens.
  """
  with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    yield f"127.0.0.1:{held.getsockname()[1]}"
