"""Orbax checkpointing in one process of several, without waiting for the others.

Orbax's options cover the barriers (`active_processes`) and most writers (`primary_host`), but not
two things (orbax-checkpoint 0.12.8): the writer of numpy arrays does nothing unless the process
index is 0, and writers signal each other through the key-value store of jax.distributed, under keys
that are the same in all processes. Each learner process writes its own checkpoints, so both are
patched while Orbax works.
"""

import contextlib
import threading
from collections.abc import Iterator
from unittest import mock

import orbax.checkpoint as ocp
from orbax.checkpoint._src.futures import signaling_client
from orbax.checkpoint._src.multihost import multihost

_JOIN_SECONDS = 10.0
_lock = threading.Lock()  # the patches are global


@contextlib.contextmanager
def checkpointer() -> Iterator[ocp.Checkpointer]:
  """A checkpointer of composite items that treats this process as the only one."""
  options = ocp.options.MultiprocessingOptions(
    primary_host=0, active_processes={0}, barrier_sync_key_prefix="single_process"
  )
  composite = ocp.CompositeOptions(multiprocessing_options=options)
  local = signaling_client.ThreadSafeKeyValueSignalingClient()
  with (
    _lock,
    mock.patch.object(multihost, "process_index", lambda: 0),
    mock.patch.object(signaling_client, "get_signaling_client", lambda: local),
  ):
    handler = ocp.CompositeCheckpointHandler(composite_options=composite)
    try:
      with ocp.Checkpointer(handler, multiprocessing_options=options) as opened:
        yield opened
    finally:  # after a failure, other writers of the same save may still be running
      for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
          threading.Thread.join(thread, _JOIN_SECONDS)  # Orbax's own `join` would re-raise
