"""Rendezvous of a run's processes: membership and a key-value store, from jax.distributed.

This is the only module that uses private parts of jax: its distributed client, its cluster
detection, and its compilation cache.
"""

import contextlib
import functools
import ipaddress
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax._src import compiler, distributed, lru_cache
from jax._src.clusters import cluster
from jax._src.lib import _jax

from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run.factories import device_count
from speedyzero_jax.run.processes import ALONE

# Seconds of silence after which a process counts as dead, on one machine and on several.
_HEARTBEAT_TIMEOUT, _NETWORK_HEARTBEAT_TIMEOUT = 20, 60
_CACHE_TIMEOUT = 24 * 3600.0  # seconds for which learners wait for each other's cache lookup
_WATCH_SECONDS = 5.0  # between the checks that all learners are alive
_LONGEST_PAUSE = 1.0  # seconds between the lookups of a value
_LEAVE_TIMEOUT = 5.0  # seconds for which process 0 waits for the others to leave
_EXIT_SECONDS = 0.5  # for the last process that has left to exit
_PREFIX = "speedyzero/"
_EXEMPT, _EXEMPT_OF_ALL = "no_grpc_proxy", "no_proxy"  # hosts that gRPC connects to directly


class RendezvousError(Exception):
  """The process could not join the run, lost it, or waited in vain for another."""


class Place(NamedTuple):
  """The position of a process in the run."""

  coordinator: str  # host:port
  num_processes: int
  process_id: int

  @property
  def host(self) -> str:
    """The coordinator's host."""
    return self.coordinator.rpartition(":")[0].strip("[]")

  @property
  def on_one_machine(self) -> bool:
    """Whether the coordinator's address is a loopback address."""
    return _is_loopback(self.host)


def detect() -> Place | None:
  """Returns this process' place in a cluster that jax detects (Slurm, Open MPI, ...), or None.

  Runs of studies and populations are in no cluster, even if their launcher is a task of one.
  Raises ConfigError if a cluster was detected, but its environment is incomplete.
  """
  if ALONE in os.environ:
    return None
  for kind in cluster.ClusterEnv._cluster_types:
    if kind.opt_in_only_method:
      continue
    try:
      if not kind.is_env_present():
        continue
      count = kind.get_process_count()
      if count < 2 or (kind.name == "slurm" and os.environ.get("SLURM_STEP_NUM_TASKS") == "1"):
        return None  # in a shell of salloc, jax's count is the allocation's, but its step has one
      port = os.environ.get("JAX_COORDINATOR_PORT")
      address = kind.get_coordinator_address(timeout_secs=300, override_coordinator_port=port)
      return Place(address, count, kind.get_process_id())
    except Exception as error:  # the `kubernetes` package raises its own
      raise ConfigError(
        f"{kind.__name__} was detected but can't be used: {type(error).__name__}: {error}; to run "
        "without it, add --coordinator localhost:PORT --num-processes 1 --process-id 0"
      ) from error
  return None


class Rendezvous:
  """Membership of this process in the run. Create it before any other use of jax.

  Methods raise RendezvousError if the coordinator can't be reached.

  `devices` has the ids of the accelerators to use; None means all, even in clusters that jax
  detects. Other processes reach this machine at the attribute `address`. Raises RendezvousError if
  the coordinator refuses the process or can't be reached within `timeout` seconds.
  """

  def __init__(self, place: Place, *, devices: Sequence[int] | None = None, timeout: int = 300):
    self.place = place
    local = place.on_one_machine
    jax.config.update("jax_check_proxy_envs", False)  # it would warn of the variable set here
    exempt = os.environ.get(_EXEMPT, os.environ.get(_EXEMPT_OF_ALL, ""))
    os.environ[_EXEMPT] = ",".join(filter(None, (exempt, place.host)))  # else via http_proxy
    jax.config.update("jax_enable_recoverability", True)  # others survive the death of an actor
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM itself
    try:
      jax.distributed.initialize(
        coordinator_address=place.coordinator,
        coordinator_bind_address=place.coordinator if local else None,  # None: all addresses
        num_processes=place.num_processes,
        process_id=place.process_id,
        local_device_ids=devices,
        cluster_detection_method="deactivate",  # Slurm's and Open MPI's expose one device only
        initialization_timeout=timeout,
        heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT if local else _NETWORK_HEARTBEAT_TIMEOUT,
      )
      self.address, self._devices = own_address(place.coordinator), devices
    except (RuntimeError, ValueError, OSError) as error:
      raise RendezvousError(
        f"process {place.process_id} could not join {place.coordinator}: {error}"
      ) from error
    self._client: Any = distributed.global_state.client

  def share_devices(self, processes: int, *, cpu: bool = False) -> None:
    """Lets processes 0 to `processes` - 1 see each other's devices; any other sees its own only.

    Every process must call it before any other use of jax; the sharing processes wait for each
    other. The others may have devices of another kind and may restart at any time. With `cpu`, this
    process uses no accelerator. Raises RendezvousError if there is no device.

    A sharing process aborts once another one is lost, since collectives of NCCL would wait for a
    machine that has vanished.
    """
    if cpu:
      jax.config.update("jax_platforms", "cpu")
    state = distributed.global_state
    if self.place.process_id < processes:
      state.num_processes = processes
      # Gloo's default is the host name, which may resolve to a loopback address or not at all.
      _jax.make_gloo_tcp_collectives = functools.partial(
        _jax.make_gloo_tcp_collectives, hostname=self.address
      )
    else:
      state.client, state.num_processes, state.process_id = None, 1, 0
    self._set_up_compilation_cache(state.client)
    try:
      device_count()
    except ConfigError as error:
      raise RendezvousError(str(error)) from error
    cpu = cpu or "cpu" in os.environ.get("JAX_PLATFORMS", "").split(",")
    if self._devices and not cpu and jax.default_backend() == "cpu":
      raise RendezvousError(
        "jax can't use the GPUs that this process was given; run make cuda12 or make cuda13, unset "
        "LD_LIBRARY_PATH if its CUDA is another one, or set JAX_PLATFORMS=cpu to train on CPUs"
      )
    if self.place.process_id < processes > 1:
      threading.Thread(target=self._watch, args=(range(processes),), daemon=True).start()

  def _watch(self, ids: Sequence[int]) -> None:
    """Aborts this process once one of `ids`, which all call this, dies or freezes."""
    first: dict[int, int] = {}  # incarnations: a process that comes back is not in the collective
    while True:
      with contextlib.suppress(jax.errors.JaxRuntimeError, RendezvousError):  # connection lost
        alive = self._client.get_live_nodes(ids)  # waits until each has called it or is dead
        left = self.published("left")
        first = first or alive
        for other in ids:
          if alive.get(other) != first.get(other, -1) and left.get(f"{_PREFIX}left/{other}") != "":
            print(f"error: process {other}, a learner, is lost", file=sys.stderr, flush=True)
            os.abort()  # as jax does without recoverability
      time.sleep(_WATCH_SECONDS)

  def _set_up_compilation_cache(self, client: Any) -> None:
    # Only process 0 writes to jax's compilation cache, but other processes may have other keys or
    # another disk. Without this, they would recompile everything at each start.
    first: Any = SimpleNamespace(global_state=SimpleNamespace(client=client, process_id=0))
    compiler.distributed = first
    compiler._cache_read = functools.partial(self._read_cache, compiler._cache_read, Counter())
    cache: Any = lru_cache.LRUCache
    cache.put = functools.partialmethod(_replace_entry, cache.put)

  def _read_cache(self, read: Callable, counts: Counter, module: str, *arguments: Any) -> tuple:
    """Reads a program from the compilation cache, if all of its processes can read theirs.

    They divide the timing of kernels among themselves when they compile, so a process that compiles
    a program which another one reads from its cache would wait for it in vain.
    """
    found = read(module, *arguments)
    _, _, _, devices, *_ = arguments
    processes = {device.process_index for device in devices}
    if len(processes) == 1:
      return found
    name = f"cache/{module}/{counts[module]}"
    counts[module] += 1
    try:
      self.publish(f"{name}/{self.place.process_id}", "" if found[0] is None else "found")
      all_found = [self.lookup_of(each, f"{name}/{each}", _CACHE_TIMEOUT) for each in processes]
    except RendezvousError as error:  # a learner is lost, as if in a collective of jax
      raise jax.errors.JaxRuntimeError(str(error)) from error
    return found if all(all_found) else (None, None)

  def publish(self, name: str, value: str) -> None:
    """Publishes a small value to all processes; replaces an earlier one of this name."""
    with _calling(f"can't publish '{name}'"):
      self._client.key_value_set(_PREFIX + name, value, allow_overwrite=True)

  def lookup(self, name: str, timeout: float) -> str:
    """Waits for a published value. Raises RendezvousError after `timeout` seconds without it."""
    with _calling(f"waiting up to {timeout:.0f} s for '{name}' failed"):
      return self._client.blocking_key_value_get(_PREFIX + name, int(timeout * 1000))

  def published(self, folder: str) -> dict[str, str]:
    """Returns the values published so far under names `folder/...`."""
    with _calling(f"can't read '{folder}'"):
      return dict(self._client.key_value_dir_get(_PREFIX + folder + "/"))

  def lookup_of(self, process_id: int, name: str, timeout: float) -> str:
    """Waits for a value that another process publishes under a name `folder/...`.

    Raises RendezvousError if that process leaves without it or, as all other calls, if process 0
    ends, and after `timeout` seconds.
    """
    deadline, pause = time.monotonic() + timeout, 0.01
    while True:
      left = f"{_PREFIX}left/{process_id}" in self.published("left")  # first: it may do both
      # Unlike `lookup`, this leaves no pending call in the coordinator, and signals are handled.
      values = self.published(name.rpartition("/")[0])
      if (value := values.get(_PREFIX + name)) is not None:
        return value
      if left:
        raise RendezvousError(f"process {process_id} has left the run")
      if time.monotonic() > deadline:
        raise RendezvousError(f"process {process_id} has not published '{name}' in {timeout:.0f} s")
      time.sleep(pause)
      pause = min(2 * pause, _LONGEST_PAUSE)

  def count(self, name: str) -> int:
    """Returns the number of earlier calls with this name, by any process."""
    with _calling(f"can't count '{name}'"):
      return int(self._client.key_value_increment(_PREFIX + name, 1)) - 1

  def leave(self, *, failed: bool = False) -> None:
    """Leaves the run; a learner that has `failed` counts as lost.

    The process should then end with `os._exit`, as jax's own exit handler aborts processes that
    leave later. Process 0 hosts the coordinator and first waits briefly for the others, which its
    end would abort.
    """
    if self.place.process_id:
      with contextlib.suppress(RendezvousError):
        self.publish(f"left/{self.place.process_id}", "failed" if failed else "")
      return
    until = time.monotonic() + _LEAVE_TIMEOUT
    for other in range(1, self.place.num_processes):
      with contextlib.suppress(RendezvousError):
        self.lookup(f"left/{other}", max(until - time.monotonic(), 0.01))
    time.sleep(_EXIT_SECONDS)  # processes that have left may still be exiting


@contextlib.contextmanager
def _calling(problem: str) -> Iterator[None]:
  """Raises RendezvousError if a call to the coordinator fails."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    reason = str(error).partition("\n")[0]
    raise RendezvousError(f"{problem} ({reason})") from error


def _replace_entry(cache: Any, put: Callable, key: str, value: bytes) -> None:
  """Writes an entry of the compilation cache atomically, also over an unreadable or older one.

  A cache of limited size, which jax locks, keeps existing entries.
  """
  if cache.eviction_enabled:
    put(cache, key, value)
    return
  path = cache.path / f"{key}{lru_cache._CACHE_SUFFIX}"
  new = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
  try:
    new.write_bytes(value)
    new.replace(path)
  finally:
    new.unlink(missing_ok=True)


def own_address(coordinator: str) -> str:
  """Returns the address at which the run's other machines reach this one; sends nothing.

  It is the local address on the route to the coordinator (host:port). If that is a loopback address
  because the coordinator's machine resolves its own name so (127.0.1.1 on Debian), it is the local
  address on the default route. Raises OSError without a route to the coordinator.
  """
  host, _, port = coordinator.rpartition(":")
  host = host.strip("[]")
  address = _local_address(host, int(port))
  if _is_loopback(address) and not _is_loopback(host):
    with contextlib.suppress(OSError):
      return _local_address("192.0.2.1", 9)  # reserved for documentation, by RFC 5737
  return address


def _local_address(host: str, port: int) -> str:
  family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, kind) as probe:
    probe.connect(where)
    return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
