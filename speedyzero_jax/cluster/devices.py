"""Assignment of one machine's accelerators to the processes of a run."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run.processes import MachineShare
from speedyzero_jax.run.topology import Topology
from speedyzero_jax.system.gpus import local_gpus

_FRACTION = "XLA_CLIENT_MEM_FRACTION"  # environment variable
_FORMER = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # its former name; jax refuses both together
_MEMORY = 0.9  # fraction of a device's memory for all its processes together, if that is not set


class Devices(NamedTuple):
  """The accelerators of one process."""

  ids: list[int]
  memory: float  # fraction of each device's


def memory_variables(fraction: float) -> dict[str, str]:
  """Environment variables of a process that uses this fraction of its devices' memory."""
  return {_FRACTION: f"{math.floor(fraction * 1e4) / 1e4:g}", _FORMER: ""}


def _usable() -> float:
  """Fraction of the devices' memory for all processes of a run together."""
  return float(os.environ.get(_FRACTION) or os.environ.get(_FORMER) or _MEMORY)


def machine_shares(together: int | None) -> list[MachineShare]:
  """Divides this machine among `together` concurrent runs; None: one per GPU, at least one.

  Each share has one GPU, with a share of its memory if there are more runs than GPUs; without GPUs,
  an equal share of the cores. Raises ConfigError if `together` is below 1.
  """
  gpus, cores = local_gpus(), sorted(os.sched_getaffinity(0))
  together = max(gpus, 1) if together is None else together
  if together < 1:
    raise ConfigError(f"--together: must be at least 1, got {together}")
  if not gpus:
    parts = [cores[i::together] for i in range(together)] if together <= len(cores) else [cores]
    return [MachineShare({}, parts[i % len(parts)]) for i in range(together)]
  visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
  sharing = -(-together // gpus)
  memory = memory_variables(_usable() / sharing) if sharing > 1 else {}
  devices = [visible[i % gpus] for i in range(together)]
  return [MachineShare({"CUDA_VISIBLE_DEVICES": device} | memory, cores) for device in devices]


def assign_devices(
  topology: Topology, count: int, batch_size: int, *, per_learner: int = 0, central: bool = False
) -> list[Devices | None]:
  """Assigns a machine's `count` devices to its processes, by process id; None: no device.

  A learner gets only as many devices as its part of the batch is divisible by, and at most
  `per_learner`, unless that is 0. If there are enough devices for all processes, each actor and
  refresher gets one of the last devices and the learners share the rest equally. Otherwise the
  learners share all devices, and actors and refreshers use the same ones. With `central` inference
  actors get none. Raises ConfigError for fewer devices than learners, as NCCL does not support two
  processes on one device.
  """
  learners, without = topology.learners, topology.actors if central else 0
  helpers = topology.actors + topology.refreshers - without
  if not count:
    return [None] * topology.num_processes
  if learners > count:
    raise ConfigError(
      f"topology.learners: {learners} learners need a GPU each, and there are {count}; "
      "one learner can use them all"
    )
  separate = count >= learners + helpers
  free = count - helpers if separate else count
  limit = min(free // learners, per_learner or free)
  each = next(n for n in range(limit, 0, -1) if batch_size % (n * learners) == 0)
  assigned = [list(range(i * each, (i + 1) * each)) for i in range(learners)]
  assigned += [[count - 1 - i % (helpers if separate else count)] for i in range(helpers)]
  users = [max(sum(device in other for other in assigned) for device in ids) for ids in assigned]
  memory = _usable()
  shares: list[Devices | None] = [
    Devices(ids, memory / n) for ids, n in zip(assigned, users, strict=True)
  ]
  return [*shares[:learners], *[None] * without, *shares[learners:]]


def describe_devices(topology: Topology, assigned: Sequence[Devices | None], count: int) -> str:
  """Describes the devices of each process, and the unused ones, in one line."""
  given = {str(topology.role(i)): devices.ids for i, devices in enumerate(assigned) if devices}
  parts = [f"{','.join(map(str, ids))} for {role}" for role, ids in given.items()]
  if unused := sorted(set(range(count)).difference(*given.values())):
    parts.append(f"{','.join(map(str, unused))} unused")
  return "; ".join(parts)
