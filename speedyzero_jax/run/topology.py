"""Which process is what, and what share of the run each unit has.

A *unit* is a learner process, the lanes of its replay, and the actors and reanalysers that serve it. Pure functions of
the configuration: every process works out the same.
"""

import contextlib
import dataclasses
import ipaddress
import itertools
import os
import re
import socket
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.config.schema import Config

Kind = Literal["learner", "actor", "reanalyser"]

_GPU = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")  # a number or an id


class Role(NamedTuple):
  """What a process is."""

  kind: Kind
  unit: int  # the learner it is or serves
  number: int  # among those of its kind in the unit

  def __str__(self) -> str:
    return (
      f"{self.kind}-{self.unit}"
      if self.kind == "learner"
      else f"{self.kind}-{self.unit}.{self.number}"
    )


class Topology(NamedTuple):
  """How many processes of each kind. Ids: learners first, then actors, then reanalysers, dealt to the units in turn."""

  learners: int
  actors: int
  reanalysers: int

  @property
  def num_processes(self) -> int:
    return self.learners + self.actors + self.reanalysers

  def role(self, process_id: int) -> Role:
    """What the process with this id is."""
    place = process_id
    for kind, count in zip(("learner", "actor", "reanalyser"), self, strict=True):
      if place < count:
        return Role(kind, place % self.learners, place // self.learners)  # type: ignore[arg-type]
      place -= count
    raise ValueError(f"there are {self.num_processes} processes, no number {process_id}")

  def serving(self, kind: Kind, unit: int) -> int:
    """How many processes of a kind a unit has."""
    roles = (self.role(process_id) for process_id in range(self.num_processes))
    return sum(role.kind == kind and role.unit == unit for role in roles)

  def __str__(self) -> str:
    named = zip(self._fields, self, strict=True)
    return ", ".join(
      f"{count} {name if count > 1 else name[:-1]}" for name, count in named if count
    )


def resolve(config: Config, num_processes: int | None = None) -> Topology:
  """The topology that a configuration asks for.

  Args:
    config: of the run.
    num_processes: that there are; None if it is for the configuration to say.

  Raises:
    ConfigError: the numbers do not fit each other, or the lanes, the batch or the steps can't be shared equally.
  """
  wanted = config.topology
  helpers = wanted.actors + wanted.reanalysers
  learners = wanted.learners or max((num_processes or 0) - helpers, 1)
  topology = Topology(learners, wanted.actors, wanted.reanalysers)
  if num_processes is not None and topology.num_processes != num_processes:
    raise ConfigError(
      f"topology: {num_processes} processes were started, but {learners} learners, {wanted.actors} actors and "
      f"{wanted.reanalysers} reanalysers make {topology.num_processes}"
    )
  for key, value in (
    ("actor.lanes", config.actor.lanes),
    ("learner.batch_size", config.learner.batch_size),
  ):
    if value % learners:
      raise ConfigError(f"{key}: must be a multiple of the {learners} learners, got {value}")
  most = -(-wanted.actors // learners)
  if config.actor.lanes // learners < most:
    raise ConfigError(
      f"actor.lanes: {wanted.actors} actors need a lane each, got {config.actor.lanes}"
    )
  if config.run.mode == "lockstep" and topology.num_processes > 1:
    raise ConfigError("run.mode: lockstep is for one process; many overlap, whatever they agree on")
  if config.profile.steps and learners > 1:
    raise ConfigError(
      "profile.steps: is for one learner; several would wait for the one that looks, and give up"
    )
  return topology


def settle(config: Config, num_processes: int | None = None) -> Config:
  """The configuration with the number of learners that `resolve` finds. Raises as it does."""
  learners = resolve(config, num_processes).learners
  return dataclasses.replace(
    config, topology=dataclasses.replace(config.topology, learners=learners)
  )


def unit_config(config: Config, unit: int, units: int) -> Config:
  """A unit's share of a run: what counts lanes, samples or transitions is divided, what counts learner steps is not.

  All units' shares add up to the whole, but for an age interval of fewer transitions than there are units: 0 would
  switch it off.
  """
  return loader.divide(config, unit, units)


def lanes_of_actors(lanes: int, actors: int) -> list[range]:
  """Each actor's lanes of a unit, as equal as can be."""
  bounds = np.linspace(0, lanes, actors + 1).round().astype(int).tolist()
  return [range(a, b) for a, b in itertools.pairwise(bounds)]


def derived_seed(seed: int, name: str, incarnation: int = 0) -> int:
  """Of what is a process' own (its environments, its search): another for each name, and after every start."""
  return int(np.random.SeedSequence([seed, incarnation, *name.encode()]).generate_state(1)[0])


def is_loopback(host: str) -> bool:
  """Whether this name or address is one that each machine has for itself."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def own_address(coordinator: str) -> str:
  """Where others reach this machine: its address on the way to the coordinator (host:port).

  The coordinator's machine may know its own name as a loopback's (127.0.1.1 on Debian): then it is its address on the
  way to anywhere. Nothing is sent. Raises OSError where there is no way.
  """
  host, _, port = coordinator.rpartition(":")
  host = host.strip("[]")
  address = _address_towards(host, int(port))
  if is_loopback(address) and not is_loopback(host):
    with contextlib.suppress(OSError):
      return _address_towards("192.0.2.1", 9)  # nobody's, by RFC 5737
  return address


def _address_towards(host: str, port: int) -> str:
  family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, kind) as probe:
    probe.connect(where)
    return str(probe.getsockname()[0])


class Devices(NamedTuple):
  """What a process of this machine may use of its accelerators."""

  ids: list[int]
  memory: float  # share of each one's


def local_gpus() -> int:
  """NVIDIA devices of this machine that may be used."""
  platforms = os.environ.get("JAX_PLATFORMS")
  if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):  # jax is to leave them alone
    return 0
  visible = os.environ.get("CUDA_VISIBLE_DEVICES")
  if (
    visible is not None
  ):  # CUDA takes those before the first that can't be one: -1, nothing, NoDevFiles
    return len(list(itertools.takewhile(_GPU.fullmatch, visible.split(","))))
  driver = Path("/proc/driver/nvidia/gpus")
  return len(list(driver.iterdir())) if driver.is_dir() else 0


def deal_devices(topology: Topology, count: int, batch_size: int) -> list[Devices | None]:
  """Shares a machine's devices among its processes, by id; None for all if there are no devices.

  A learner has no more than it can share its part of the batch among equally.

  Where there is one for each process, actors and reanalysers have one each, the last ones, and the learners share the
  others equally. Where there are fewer, learners share them all, and the others live on them too.

  Raises ConfigError where there is none for each learner: NCCL refuses two on the same.
  """
  learners, helpers = topology.learners, topology.actors + topology.reanalysers
  if not count:
    return [None] * topology.num_processes
  if learners > count:
    raise ConfigError(
      f"topology.learners: {learners} learners need a GPU each, and there are {count}; one learner can use them all"
    )
  apart = count >= learners + helpers
  most = 0.9  # of a device's memory
  free = count - helpers if apart else count
  each = next(n for n in range(free // learners, 0, -1) if batch_size % (n * learners) == 0)
  dealt = [list(range(i * each, (i + 1) * each)) for i in range(learners)]
  dealt += [[count - 1 - i % (helpers if apart else count)] for i in range(helpers)]
  crowd = [max(sum(device in other for other in dealt) for device in ids) for ids in dealt]
  return [Devices(ids, most / crowded) for ids, crowded in zip(dealt, crowd, strict=True)]


def dealt_text(topology: Topology, dealt: list[Devices | None], count: int) -> str:
  """What `deal_devices` gave to whom, and which devices nobody has, in a line."""
  given = {str(topology.role(i)): devices.ids for i, devices in enumerate(dealt) if devices}
  idle = set(range(count)).difference(*given.values())
  if idle:
    given["nobody (they can't be shared equally)"] = sorted(idle)
  return "; ".join(f"{','.join(map(str, ids))} for {who}" for who, ids in given.items())
