"""Estimate of the memory and time that a run will take, from its compiled and timed programs."""

import math
from collections.abc import Sequence

import jax

from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.warmup import Timing, example_batch
from speedyzero_jax.system import memory


def report(experiment: Experiment, timings: Sequence[Timing]) -> None:
  """Reports the estimate, and warns if there is less memory than that."""
  message, membership = experiment.logger.message, experiment.membership
  host, device = host_bytes(experiment), device_bytes(experiment)
  have, limit = _host_memory(), memory.of_devices("bytes_limit")
  needs = f"this run needs about {_of(host, have)} of host memory"
  if jax.default_backend() != "cpu":
    needs += f", {_of(device, limit)} on each device"
  needs += f"; programs {memory.size(experiment.program_bytes)}"
  if (
    timings and membership.runs_actor and membership.runs_sweeps
  ):  # all work is done in this process
    each = seconds_per_step(timings)
    left = each * (experiment.config.learner.steps - experiment.limiter.learner_steps)
    parts = ", ".join(f"{x.calls:.3g} x {x.program} {1e3 * x.seconds:.3g} ms" for x in timings)
    duration = f"{left:.0f} seconds" if left < 100 else f"{left / 60:.1f} minutes"
    needs += f"; about {duration}, {each:.3g} s a learner step ({parts})"
  message(needs)
  if have is not None and host > have:
    message(
      "warning: that is more host memory than is available; replay.capacity bounds the replay, "
      "learner.prefetch and learner.batch_size the batches"
    )
  if limit is not None and device > limit:
    message(
      "warning: that is more than a device has; replay.frames=host keeps frames off it, a smaller "
      "learner.batch_size makes batches and the training step smaller"
    )


def seconds_per_step(timings: Sequence[Timing]) -> float:
  """Duration of a learner step with its share of all other work, one after the other."""
  return math.fsum(timing.calls * timing.seconds for timing in timings)


def host_bytes(experiment: Experiment) -> float:
  """Host memory of this process: what it has taken, timing its programs included, and the replay.

  A lower bound: the replay will hold a slot for each agent step that it keeps.
  """
  config = experiment.local_config
  kept = min(config.replay.capacity or config.run.env_steps, config.run.env_steps)
  held = experiment.replay.stats(experiment.limiter.learner_steps)["bytes"]
  growth = kept * LaneStore(experiment.agent.schema, 1, 1).slot_bytes - held
  taken = (memory.resident(peak=True) or 0) + max(growth, 0)
  batches = jax.default_backend() == "cpu" and _batches(experiment) * _batch_bytes(experiment)
  return taken + batches


def device_bytes(experiment: Experiment) -> float:
  """Memory on each device: the state, weights of other steps, batches, frames, programs."""
  devices, state = len(experiment.learner.mesh.local_devices), experiment.learner.abstract()
  copies = 1 + len(experiment.agent.subscriptions)  # of the variables
  return (
    _bytes(state)
    + copies * _bytes(state.variables)
    + _batches(experiment) * _batch_bytes(experiment) / devices
    + experiment.replay.bytes_on_devices
    + experiment.program_bytes
  )


def _batches(experiment: Experiment) -> int:
  config = experiment.config
  return (config.learner.prefetch + 2) if config.run.mode == "async" else 1


def _batch_bytes(experiment: Experiment) -> int:
  config, agent = experiment.local_config, experiment.agent
  frames = experiment.replay.blanks(config.learner.batch_size, agent.window.after)
  return _bytes((example_batch(config, agent)[0], frames))


def _bytes(tree: object) -> int:
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _host_memory() -> int | None:
  """Bytes that this process has or can have."""
  free = memory.available()
  return None if free is None else free + (memory.resident() or 0)


def _of(size: float, limit: int | None) -> str:
  return memory.size(size) + ("" if limit is None else f" of {memory.size(limit)}")
