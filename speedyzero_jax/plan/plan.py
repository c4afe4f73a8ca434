"""Projection of a run's memory and time on GPUs from its compiled programs."""

import io
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.plan import hlo
from speedyzero_jax.plan.programs import EPISODE, Planned, learner_roles, programs
from speedyzero_jax.plan.target import Target
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.run import factories, forecast
from speedyzero_jax.system.compilation import memory_of
from speedyzero_jax.system.memory import format_bytes
from speedyzero_jax.system.platform import planned
from speedyzero_jax.workers.evaluator import MAX_LANES
from speedyzero_jax.workers.learner import Learner

REACHED = 0.8  # fraction of peak FLOP/s reached by matrix products
# Measured on an H200 (docs/gpu.md), and assumed of other GPUs.
CONVOLUTIONS = 0.4  # the same by cuDNN's convolutions, with channels padded to multiples of 64
BANDWIDTH = 0.6  # fraction of the memory bandwidth reached
USABLE = 0.75  # fraction of memory that jax uses by default (XLA_CLIENT_MEM_FRACTION)
LAUNCH = 6e-6  # seconds to launch a kernel: measured minus roofline times, per kernel
COLLECTIVE = 15e-6  # seconds of a small collective operation
ROUND_TRIP = 20e-6  # seconds of a host synchronization for a loop's condition
LOOP_STEPS = 3.0  # mean iterations of loops of unknown length: descents and backups of the search
ASSUMPTIONS = (
  f"A kernel takes the longer of its FLOPs at {REACHED:.0%} of the peak and its bytes at "
  f"{BANDWIDTH:.0%} of the memory bandwidth, plus {LAUNCH * 1e6:g} us to launch. Convolutions "
  f"reach {CONVOLUTIONS:.0%} of the peak, and compute multiples of 64 channels. A collective takes "
  f"{COLLECTIVE * 1e6:g} us, and a loop condition that the host reads {ROUND_TRIP * 1e6:g} us.",
  f"Loops of unknown length (descents and backups in the tree) run {LOOP_STEPS:g} times.",
  "Parts do not overlap. Environments, replay and host transfers keep up and take no device time.",
  "A device runs programs in the order of their dispatch: of each role one at a time, and of the "
  "learner another one ahead. Several learners dispatch their steps at the same time.",
  f"An evaluation plays up to {MAX_LANES} episodes in parallel, of at most {EPISODE} agent steps.",
  "Communication between devices costs latency and memory bandwidth, but not link bandwidth.",
  f"A run may use {USABLE:.0%} of a device's memory, jax's default. Programs are not autotuned, so "
  "their memory is a lower bound; it is summed over all programs, as if they ran concurrently.",
)


class ProgramCost(NamedTuple):
  """Costs of a program: memory, FLOPs, bytes and launches are per device and call."""

  name: str
  batch: int  # over all devices that share a call
  calls: float  # in the whole run
  temporary_bytes: int  # temporaries and results, without arguments
  donated: bool  # whether the state, if any, is updated in place
  launches: float
  collectives: float
  round_trips: float
  unknown_loops: int
  transfers: int  # host transfers inside the program
  slow_convolutions: float  # not by cuDNN, or not in the dtype of activations
  flops: float
  bytes: float
  roofline_seconds: float
  seconds: float  # including launches, collectives and round trips

  @property
  def minutes(self) -> float:
    """Minutes in the whole run."""
    return self.calls * self.seconds / 60


class Plan(NamedTuple):
  """Projected costs of a run on each device of a learner process."""

  programs: list[ProgramCost]
  memory: dict[str, float]  # bytes by use
  available: int  # bytes
  minutes: dict[str, float]  # by part, and `total`
  acting: dict[str, float]  # seconds: mean `interval` of calls, longest `wait` for other programs

  @property
  def fits(self) -> bool:
    """Whether the memory is sufficient."""
    return sum(self.memory.values()) <= self.available

  def as_dict(self) -> dict[str, Any]:
    """Converts the plan for JSON."""
    return {
      "programs": [row._asdict() | {"minutes": row.minutes} for row in self.programs],
      "memory_bytes": self.memory,
      "available_bytes": self.available,
      "fits": self.fits,
      "minutes": self.minutes,
      "acting_seconds": self.acting,
    }


def make_plan(
  config: Config,
  target: Target,
  devices: int,
  *,
  only: Collection[str] | None = None,
  report: Callable[[str], None] = lambda _: None,
) -> Plan:
  """Compiles the programs of a run's learner processes and sums their costs.

  `devices` counts the GPUs of the whole run; `only` names the programs to compile; `report` is
  called with lines of progress.

  Raises:
    RuntimeError: jax cannot compile for GPUs on this machine.
    ValueError: the batch cannot be divided, or a name in `only` is unknown.
  """
  processes, roles = config.topology.learners, learner_roles(config)
  local_config = loader.divide(config, 0, processes)
  dtype = loader.flat(config).get("network.dtype", "float32")
  agent = factories.make_agent(local_config)
  with planned("cuda"):
    mesh = target.mesh(devices, processes)
    local = mesh if processes == 1 else target.mesh(devices // processes)
    learner = Learner(config, agent, mesh)
    all_programs, costs = list(programs(config, local_config, agent, learner, local, roles)), []
    if only is not None and (unknown := set(only) - {program.name for program in all_programs}):
      names = ", ".join(program.name for program in all_programs)
      raise ValueError(f"unknown program {min(unknown)!r}; available: {names}")
    for program in all_programs:
      if only is None or program.name in only:
        report(f"compiling {program.name}, batch {program.batch}")
        costs.append(cost_of(program, program.compile(), target, dtype))
  memory = _memory(local_config, agent, learner, len(local.devices.flat), target, costs)
  tasks = agent.tasks.keys()
  available = int(USABLE * target.memory_bytes)
  return Plan(costs, memory, available, _minutes(costs), _acting(costs, tasks))


def cost_of(
  program: Planned, compiled: jax.stages.Compiled, target: Target, dtype: str
) -> ProgramCost:
  """Computes the costs of a compiled program; `dtype` is that of activations."""
  text = compiled.as_text()
  cost = hlo.cost(text or "", LOOP_STEPS)
  roofline = roofline_seconds(cost, target)
  memory = compiled.memory_analysis()
  aliased = memory.alias_size_in_bytes if memory else 0
  overhead = cost.launches * LAUNCH + cost.collectives * COLLECTIVE + cost.round_trips * ROUND_TRIP
  return ProgramCost(
    program.name, program.batch, program.calls, memory_of(compiled),
    aliased >= 0.99 * program.state_bytes, cost.launches,
    cost.collectives, cost.round_trips, cost.unknown_loops, cost.transfers,
    slow_convolutions(cost, dtype), cost.flops, cost.bytes, roofline, roofline + overhead,
  )  # fmt: skip


def roofline_seconds(cost: hlo.Cost, target: Target) -> float:
  """Seconds of a call's kernels, each limited by its FLOPs or by its bytes."""

  def of_kernel(kernel: hlo.Kernel) -> float:
    reached = CONVOLUTIONS if _is_convolution(kernel) else REACHED
    computing = kernel.computed / (reached * target.peak(kernel.dtype))
    return max(computing, kernel.bytes / (BANDWIDTH * target.bandwidth))

  return math.fsum(kernel.count * of_kernel(kernel) for kernel in cost.kernels)


def _is_convolution(kernel: hlo.Kernel) -> bool:
  return kernel.kind == "convolution" or kernel.kind.startswith("__cudnn$conv")


def slow_convolutions(cost: hlo.Cost, dtype: str) -> float:
  """Number of convolutions not by cuDNN, or not in the dtype of activations."""
  fast_dtype = {"bfloat16": "bf16", "float32": "f32"}[dtype]
  return sum(
    kernel.count
    for kernel in cost.kernels
    if kernel.kind == "convolution" or (_is_convolution(kernel) and kernel.dtype != fast_dtype)
  )


def _memory(
  local_config: Config,
  agent: Agent,
  learner: Learner,
  devices: int,
  target: Target,
  costs: list[ProgramCost],
) -> dict[str, float]:
  frames = DeviceFrames.size(
    agent.schema.frame,
    local_config.actor.lanes,
    factories.replay_capacity(local_config, agent),
  )
  on_devices = local_config.replay.frames == "device" or (
    local_config.replay.frames == "auto" and 2 * frames < USABLE * target.memory_bytes
  )
  return {
    **forecast.training_bytes(local_config, agent, learner, devices),
    "frames of the replay": float(frames) if on_devices else 0.0,
    "programs": float(sum(cost.temporary_bytes for cost in costs)),
  }


def _minutes(costs: list[ProgramCost]) -> dict[str, float]:
  minutes: dict[str, float] = {}
  for cost in costs:
    minutes[cost.name] = minutes.get(cost.name, 0.0) + cost.minutes
  return minutes | {"total": sum(minutes.values())}


def _acting(costs: list[ProgramCost], tasks: Collection[str]) -> dict[str, float]:
  """Interval and wait of acting calls between training steps; {} unless both are planned.

  A wait is longest behind two training steps with publications and a call of each task.
  """
  of = {cost.name: cost for cost in costs}
  if not {"act", "train"} <= of.keys() or not of["act"].calls:
    return {}
  during = sum(cost.minutes for cost in costs if cost.name != "evaluate")
  names = *2 * ("train", "publish"), *tasks
  ahead = [of[name].seconds for name in names if name in of]
  return {"interval": 60 * during / of["act"].calls, "wait": math.fsum(ahead)}


def tables(plan: Plan, target: Target, devices: int) -> str:
  """Formats a plan as text."""
  console = Console(file=io.StringIO(), width=150, color_system=None)
  each = Table(
    "program", "batch", "calls", "memory", "launches", "collectives", "round trips", "GFLOP",
    "GB", "roofline ms", "ms", "minutes", box=None,
  )  # fmt: skip
  for row in plan.programs:
    each.add_row(
      row.name, f"{row.batch:,}", f"{row.calls:,.0f}", format_bytes(row.temporary_bytes),
      f"{row.launches:,.0f}", f"{row.collectives:.0f}", f"{row.round_trips:.0f}",
      f"{row.flops / 1e9:,.1f}", f"{row.bytes / 1e9:,.2f}", f"{row.roofline_seconds * 1e3:.2f}",
      f"{row.seconds * 1e3:.2f}", f"{row.minutes:.2f}",
    )  # fmt: skip
  memory = Table("memory of a device", "", box=None)
  for name, count in plan.memory.items():
    memory.add_row(name, format_bytes(count))
  total = sum(plan.memory.values())
  memory.add_row("total", f"{format_bytes(total)} of {format_bytes(plan.available)}")
  with console.capture() as text:
    console.print(f"{devices} x {target.name}; costs per device and call", "", each, "")
    console.print(memory, "")
    console.print(f"projected: {plan.minutes['total']:.1f} minutes, without overlap")
    if plan.acting:
      interval, wait = (1e3 * plan.acting[key] for key in ("interval", "wait"))
      console.print(
        f"acting: a call every {interval:.0f} ms, after at most {wait:.0f} ms of other programs"
      )
    console.print("")
    for line in ASSUMPTIONS:
      console.print(f"- {line}")
  return text.get()
