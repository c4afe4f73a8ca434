"""Factories of agents, replays and inference, shared by training, evaluation and all processes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.config.agents import agent_module
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.replay.device_frames import DeviceFrames, reason_for_host_frames
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.system import memory
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import Version, publication


def make_agent(config: Config) -> Agent:
  """Returns the configured agent. Raises ValueError for an unknown game or unsuitable sizes."""
  env = make_env(config.env, 1, 0, training=True)
  env.close()
  agent: Agent = agent_module(config.agent.name).make_agent(
    config, env.frame_shape, env.frame_dtype, env.num_actions
  )
  return agent


def replay_capacity(config: Config, agent: Agent) -> int:
  """Slots per lane.

  If `replay.capacity` is 0, they suffice for the whole run if its episodes last at least four agent
  steps (one slot per agent step and one more per episode), and all lanes are equally fast. Actors
  that compute gradients keep one batch each, and their learner nothing.
  """
  if config.topology.gradients == "actors":
    windows = max(config.learner.batch_size // config.actor.lanes, 1)
    return config.env.frame_stack + windows * agent.lookahead
  slots = config.replay.capacity or -(-5 * config.run.env_steps // 4)
  return max(-(-slots // config.actor.lanes), shortest_lane(config, agent))


def shortest_lane(config: Config, agent: Agent) -> int:
  """Minimum slots per lane for the agent to select anything."""
  return config.env.frame_stack + agent.lookahead


def mean_stored(config: Config, agent: Agent, collected: int) -> float:
  """Mean number of stored agent steps over the rest of the run, after `collected` agent steps."""
  end = config.run.env_steps
  full = min(replay_capacity(config, agent) * config.actor.lanes, end)
  if collected >= end:
    return full
  now = min(collected, full)
  # Fraction of the remaining time in which the replay still grows.
  filling = max(full - collected, 0) / (end - collected)
  return filling * (now + full) / 2 + (1 - filling) * full


def make_replay(
  config: Config, agent: Agent, mesh: Mesh, report: Callable[[str], None], *, seed: int
) -> Replay:
  """Returns the configured replay, with frames on the mesh's devices if so configured."""
  lanes, least = config.actor.lanes, shortest_lane(config, agent)
  capacity = replay_capacity(config, agent)
  if 0 < config.replay.capacity < least * lanes:
    report(
      f"warning: replay.capacity={config.replay.capacity} is too small, as each of the {lanes} "
      f"lanes needs {least} slots; each gets {capacity}"
    )
  return Replay(
    agent.schema,
    agent.make_selector,
    lanes=lanes,
    capacity=capacity,
    frame_stack=config.env.frame_stack,
    rng_seed=seed,
    sweeps={name: task.phases for name, task in agent.tasks.items() if task.max_age},
    device_frames=frames_on_devices(config, agent, mesh, report),
  )


def frames_on_devices(
  config: Config, agent: Agent, mesh: Mesh, report: Callable[[str], None]
) -> DeviceFrames | None:
  """Returns the copy of the frames on devices; None if frames stay in host memory only."""
  capacity, frame, lanes = replay_capacity(config, agent), agent.schema.frame, config.actor.lanes
  size = DeviceFrames.size(frame, lanes, capacity)
  reason = reason_for_host_frames(config.replay.frames, mesh, size)
  if reason is not None:
    report(f"frames stay in host memory: {reason}")
    return None
  report(f"frames on {mesh.size} device(s), {memory.format_bytes(size)} each")
  return DeviceFrames(mesh, frame, lanes=lanes, capacity=capacity)


def restore_for_evaluation(
  config: Config,
  run_dir: Path,
  *,
  newest: int | None = None,
  warn: Callable[[str], None],
  report: Callable[[str], None],
) -> tuple[Agent, Inference, Version]:
  """Restores the newest readable checkpoint for acting. Raises CheckpointError if there is none.

  Checkpoints after learner step `newest` are ignored. `warn` receives a line for each unreadable
  checkpoint, `report` receives lines about compilation.
  """
  agent = make_agent(config)
  template: Any = jax.eval_shape(agent.init, jax.random.key(0))
  step, variables = Checkpoints(run_dir).restore_network(template, warn, newest=newest)
  inference = Inference(agent, report=report)
  variables = jax.device_put(variables, jax.local_devices()[0])
  return agent, inference, Version(step, publication(agent)(variables))


def device_count() -> int:
  """Number of this process' devices. Raises ConfigError if the platform in JAX_PLATFORMS fails."""
  try:
    return len(jax.local_devices())
  except (RuntimeError, AssertionError) as error:  # jax asserts that a GPU is there
    wanted = os.environ.get("JAX_PLATFORMS")
    what = f"JAX_PLATFORMS={wanted}" if wanted else "jax's default platform"
    reason = str(error).strip().partition("\n")[0] or "no device"
    raise ConfigError(f"{what} can't be used: {reason}") from error


def enable_compilation_cache(config: Config) -> None:
  folder = config.run.compile_cache or os.environ.get("JAX_COMPILATION_CACHE_DIR")
  path = os.path.expanduser(folder or "~/.cache/speedyzero_jax/xla")  # may be a URL
  known = folder or not path.startswith("~")  # the user may have no home folder
  jax.config.update("jax_compilation_cache_dir", path if known else None)


def evaluation_seed(config: Config) -> int:
  """Seed of a run's evaluation environments."""
  return config.run.seed + 1_000_003
