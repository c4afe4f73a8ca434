"""Estimate of a run's memory and time from its compiled and timed programs."""

import math
from collections.abc import Sequence

import jax

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing, example_batch
from speedyzero_jax.system import memory
from speedyzero_jax.workers.learner import Learner


def report(experiment: Experiment, timings: Sequence[Timing]) -> None:
  """Logs the estimate; warns if the machine has less memory."""
  message, membership = experiment.logger.message, experiment.membership
  have, limit = memory.usable(), memory.device_limit()
  separate = limit is not None or jax.default_backend() != "cpu"
  host, device = host_bytes(experiment), device_bytes(experiment) if separate else 0.0
  needs = f"this run needs about {_of(host, have)} of host memory"
  if separate:
    needs += f", {_of(device, limit)} on each device"
  needs += f"; programs {memory.format_bytes(experiment.program_bytes)}"
  if timings and membership.runs_actor and membership.runs_sweeps:  # this process does all work
    each = seconds_per_step(timings)
    left = each * (experiment.config.learner.steps - experiment.limiter.learner_steps)
    parts = ", ".join(f"{x.calls:.3g} x {x.program} {1e3 * x.seconds:.3g} ms" for x in timings)
    duration = f"{left:.0f} seconds" if left < 100 else f"{left / 60:.1f} minutes"
    needs += f"; about {duration}, {each:.3g} s a learner step ({parts})"
  message(needs)
  if have is not None and host > have:
    message(
      "warning: less host memory is available; reduce replay.capacity, learner.prefetch or "
      "learner.batch_size"
    )
  if limit is not None and device > limit:
    message(
      "warning: a device has less memory; set replay.frames=host to keep frames off it, or reduce "
      "learner.batch_size"
    )


def seconds_per_step(timings: Sequence[Timing]) -> float:
  """Seconds per learner step with its share of all other work, run sequentially."""
  return math.fsum(timing.calls * timing.seconds for timing in timings)


def host_bytes(experiment: Experiment) -> float:
  """Host memory in bytes: this process' peak so far, the replay's growth and, on CPU, batches.

  A lower bound: it counts only one replay slot per stored agent step.
  """
  config = experiment.local_config
  slots = experiment.replay.store.capacity * config.actor.lanes
  kept = min(slots, config.run.env_steps)
  held = experiment.replay.stats(experiment.limiter.learner_steps)["bytes"]
  growth = kept * experiment.replay.store.slot_bytes - held
  taken = (memory.resident(peak=True) or 0) + max(growth, 0)
  batches = jax.default_backend() == "cpu" and _batches_bytes(config, experiment.agent)
  return taken + batches


def device_bytes(experiment: Experiment) -> float:
  """Bytes on each device: of training, frames of the replay and programs."""
  config, agent, learner = experiment.local_config, experiment.agent, experiment.learner
  training = training_bytes(config, agent, learner, len(learner.mesh.local_devices))
  held = experiment.replay.bytes_on_devices + experiment.program_bytes
  return sum(training.values()) + held


def training_bytes(
  local_config: Config, agent: Agent, learner: Learner, devices: int
) -> dict[str, float]:
  """Bytes by use of training on each of a process' devices, which share its batches."""
  state, copies = learner.abstract(), 1 + len(agent.subscriptions)
  published = jax.eval_shape(agent.published, state.variables)
  return {
    "weights": memory.bytes_of((state.variables, state.target, state.step)),
    "copies of the weights": copies * memory.bytes_of(published),
    "optimizer": memory.bytes_of(state.opt_state),
    "batches": _batches_bytes(local_config, agent) / devices,
  }


def _batches_bytes(local_config: Config, agent: Agent) -> int:
  """Bytes of all batches of a process that exist at a time."""
  learner = local_config.learner
  window = local_config.env.frame_stack + agent.window.after
  batch = memory.bytes_of(example_batch(local_config, agent)[0])
  batch += learner.batch_size * window * agent.schema.frame.nbytes
  return batch * (learner.prefetch + 2 if local_config.run.mode == "async" else 1)


def _of(size: float, limit: int | None) -> str:
  return memory.format_bytes(size) + ("" if limit is None else f" of {memory.format_bytes(limit)}")
