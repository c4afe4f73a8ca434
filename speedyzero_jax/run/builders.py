"""Makes the parts of a run from its configuration, the same way for training, for evaluation and in every process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import Blueprint, make_blueprint
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.replay.device_frames import DeviceFrames, place_frames
from speedyzero_jax.replay.replay import Replay, SweepName
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.workers.weights import Version


class Game(NamedTuple):
  """What must be known of a game before anything can be made for it."""

  frame_shape: tuple[int, int, int]
  frame_dtype: np.dtype
  num_actions: int

  def observation_shape(self, config: Config) -> tuple[int, int, int]:
    """[H, W, S*C], what the network sees."""
    height, width, channels = self.frame_shape
    return height, width, channels * config.env.frame_stack


def game_of(config: Config) -> Game:
  """The configured game. Raises ValueError for one there is not."""
  env = make_env(config.env, 1, 0, training=True)
  env.close()
  return Game(env.frame_shape, env.frame_dtype, env.num_actions)


def blueprint_of(config: Config, game: Game) -> Blueprint:
  """The network, for those who only look."""
  return make_blueprint(config.agent.network, game.observation_shape(config), game.num_actions)


def replay_capacity(config: Config) -> int:
  """Slots per lane. With `replay.capacity` 0 as many as a run can need: one per agent step and one more per episode."""
  wanted = config.replay.capacity or 2 * config.run.env_steps
  shortest = config.env.frame_stack + config.agent.loss.unroll_steps + config.agent.loss.td_steps
  return max(-(-wanted // config.actor.lanes), shortest)


def mean_stored(config: Config, collected: int) -> float:
  """Agent steps in the replay on average, from `collected` of them to the run's end."""
  end = config.run.env_steps
  full = min(replay_capacity(config) * config.actor.lanes, end)
  if collected >= end:
    return full
  now = min(collected, full)
  filling = max(full - collected, 0) / (
    end - collected
  )  # share of the time in which the buffer still grows
  return filling * (now + full) / 2 + (1 - filling) * full


def make_replay(
  config: Config,
  game: Game,
  mesh: Mesh,
  report: Callable[[str], None],
  *,
  seed: int,
  frame_memory: np.ndarray | None = None,
) -> Replay:
  """The replay that a configuration asks for, its frames also on the devices of the mesh if it says so.

  Host memory is committed only as it is used.
  """
  return Replay(
    **_form(config, game),
    num_actions=game.num_actions,
    priority=config.agent.priority,
    loss=config.agent.loss,
    reanalyse=config.agent.reanalyse,
    value_prefix_horizon=config.agent.network.value_prefix_horizon,
    frame_stack=config.env.frame_stack,
    discount=config.env.discount,
    rng_seed=seed,
    device_frames=frames_on_devices(config, game, mesh, report),
    frame_memory=frame_memory,
  )


def frames_on_devices(
  config: Config, game: Game, mesh: Mesh, report: Callable[[str], None]
) -> DeviceFrames | None:
  """Where the devices of the mesh hold the replay's frames, if the configuration says so and they have room.

  They start with room for episodes of ten steps and more.
  """
  form = _form(config, game)
  shortest = config.env.frame_stack + config.agent.loss.unroll_steps + config.agent.loss.td_steps
  rows = (
    form["capacity"] if config.replay.capacity else max(-(-11 * form["capacity"] // 20), shortest)
  )
  return place_frames(config.replay.frames, mesh, rows=rows, report=report, **form)


def _form(config: Config, game: Game) -> dict[str, Any]:
  """What all storage of frames has in common."""
  return {
    "lanes": config.actor.lanes,
    "capacity": replay_capacity(config),
    "frame_shape": game.frame_shape,
    "frame_dtype": game.frame_dtype,
  }


def replay_bytes(config: Config) -> int:
  """Host memory that the replay has in use when a run ends, at least: a slot for each agent step, as far as they are
  kept. An episode has one slot more than it has steps.
  """
  game = game_of(config)
  slot = LaneStore(1, 1, game.frame_shape, game.frame_dtype, game.num_actions).memory()[
    "reserved_bytes"
  ]
  return int(slot) * min(config.replay.capacity or config.run.env_steps, config.run.env_steps)


def sweeps(config: Config) -> list[SweepName]:
  """The whole-buffer passes a configuration needs. Sweep reanalysis refreshes priorities too: one may do for both."""
  passes: list[SweepName] = []
  if config.agent.reanalyse.schedule == "sweep":
    passes.append("reanalyse")
  if config.agent.refresh.enabled and not (
    passes and config.agent.reanalyse.max_age <= config.agent.refresh.max_age
  ):
    passes.append("refresh")
  return passes


def restore_for_evaluation(
  config: Config, run_dir: Path, *, warn: Callable[[str], None], report: Callable[[str], None]
) -> tuple[Inference, Version]:
  """What is needed to play with the newest readable checkpoint of a run. Raises CheckpointError if there is none.

  `warn` takes lines on checkpoints that can't be read, `report` those on what compiles.
  """
  blueprint = blueprint_of(config, game_of(config))
  here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  shapes = jax.eval_shape(blueprint.init, jax.random.key(0))
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
  step, variables = Checkpoints(run_dir).restore_network(abstract, warn)
  return Inference(config, blueprint, report=report), Version(step, variables)


def enable_compilation_cache(config: Config) -> None:
  """Keeps compiled programs between runs."""
  folder = config.run.compile_cache or str(Path.home() / ".cache" / "speedyzero_jax" / "xla")
  jax.config.update("jax_compilation_cache_dir", folder)


def evaluation_seed(config: Config) -> int:
  """Of the environments that a run's evaluations play in."""
  return config.run.seed + 1_000_003
