"""Where the processes of a run meet: jax.distributed's membership, key-value store and barriers.

The only module that touches jax's private parts (its distributed client and its detection of clusters). Must not know
what the processes do.
"""

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src import distributed
from jax._src.clusters import cluster
from jax._src.lib import _jax

from speedyzero_jax.run.topology import own_address

_HEARTBEAT_TIMEOUT = 20  # seconds; after them a silent process counts as dead
_FAREWELL = 5.0  # seconds
_PREFIX = "speedyzero/"


class RendezvousError(Exception):
  """The processes could not meet; the message says who and where."""


class Place(NamedTuple):
  """One process among others."""

  coordinator: str  # host:port
  num_processes: int
  process_id: int


def detect() -> Place | None:
  """This process' place in a cluster that jax knows (Slurm, Open MPI, Kubernetes, ...); None outside of one.

  Raises:
    RendezvousError: there is a cluster, but it does not say enough.
  """
  for kind in cluster.ClusterEnv._cluster_types:
    if kind.opt_in_only_method or not kind.is_env_present():
      continue
    try:
      count = kind.get_process_count()
      if count < 2:
        return None
      port = os.environ.get("JAX_COORDINATOR_PORT")
      address = kind.get_coordinator_address(timeout_secs=300, override_coordinator_port=port)
      return Place(address, count, kind.get_process_id())
    except (KeyError, ValueError, RuntimeError, OSError) as error:
      raise RendezvousError(
        f"{kind.__name__} was detected, but {type(error).__name__}: {error}"
      ) from error
  return None


class Rendezvous:
  """A member of the run. Make one before anything of jax is used.

  Args:
    place: of this process.
    devices: ids of the accelerators this process may see; None for all (also where jax itself would take one each).
    timeout: seconds to wait for the coordinator.

  `address` is where the others reach this machine.

  Raises:
    RendezvousError: the coordinator could not be reached or refused.
  """

  def __init__(self, place: Place, *, devices: Sequence[int] | None = None, timeout: int = 300):
    self.place = place
    jax.config.update("jax_enable_recoverability", True)  # an actor's death is not everybody's
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    try:
      jax.distributed.initialize(
        coordinator_address=place.coordinator,
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=devices,
        cluster_detection_method="deactivate",  # Slurm's and Open MPI's would leave one device
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
      )
      self.address = own_address(place.coordinator)
    except (RuntimeError, ValueError, OSError) as error:
      raise RendezvousError(
        f"process {place.process_id} could not join {place.coordinator}: {error}"
      ) from error
    self._client: Any = distributed.global_state.client

  def share_devices(self, processes: int) -> None:
    """Processes 0 to `processes` - 1 see each other's devices from now on; every other one has its own, alone.

    To be called by all, before anything else of jax; the former wait here for each other. Told apart they may be of
    different kinds: a process without a GPU keeps none waiting for it, and one that comes back asks nobody.
    """
    if self.place.process_id < processes:
      distributed.global_state.num_processes = processes
      # Gloo's own choice is the host name, which may be nobody's, or a loopback's.
      _jax.make_gloo_tcp_collectives = functools.partial(
        _jax.make_gloo_tcp_collectives, hostname=self.address
      )
    else:
      state = distributed.global_state
      state.client, state.num_processes, state.process_id = None, 1, 0
    jax.local_devices()

  def publish(self, name: str, value: str) -> None:
    """Says something small to all, under a name that replaces what it said before."""
    self._client.key_value_set(_PREFIX + name, value, allow_overwrite=True)

  def lookup(self, name: str, timeout: float) -> str:
    """What was published under a name; waits for it. Raises RendezvousError after `timeout` seconds."""
    try:
      return self._client.blocking_key_value_get(_PREFIX + name, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
      raise RendezvousError(f"nobody published '{name}' within {timeout:.0f} s") from error

  def said(self, folder: str) -> dict[str, str]:
    """What has been published until now under names of this folder, `folder/...`."""
    return dict(self._client.key_value_dir_get(_PREFIX + folder + "/"))

  def count(self, name: str) -> int:
    """How often this was asked of a name before, by anybody."""
    return int(self._client.key_value_increment(_PREFIX + name, 1)) - 1

  def barrier(self, name: str, timeout: float, processes: Sequence[int] | None = None) -> None:
    """Waits until these processes (None: all) are here. A name serves once.

    Raises RendezvousError after `timeout` seconds; that one of them has died is not noticed before (measured, jax
    0.10.2: it is what makes actors expendable).
    """
    try:
      self._client.wait_at_barrier(_PREFIX + name, int(timeout * 1000), processes)
    except jax.errors.JaxRuntimeError as error:
      raise RendezvousError(
        f"not everybody came to '{name}' within {timeout:.0f} s: {error}"
      ) from error

  def devices(self, processes: Sequence[int]) -> list[jax.Device]:
    """Devices of these processes, in the order of their ids: what a mesh is made of."""
    wanted = set(processes)
    return sorted(
      (d for d in jax.devices() if d.process_index in wanted), key=lambda d: (d.process_index, d.id)
    )

  def leave(self) -> None:
    """Says goodbye; the process should end now, without Python's clean-up: jax's own farewell aborts who comes late.

    Process 0, with which the rendezvous ends, waits for the others a little: whom it leaves behind is aborted, too.
    """
    if self.place.process_id:
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self.publish(f"left/{self.place.process_id}", "")
      return
    until = time.monotonic() + _FAREWELL
    for other in range(1, self.place.num_processes):
      with contextlib.suppress(RendezvousError):
        self.lookup(f"left/{other}", max(until - time.monotonic(), 0.01))
