"""Actor and refresher processes: their main loops, as clients of the learner's service."""

import contextlib
import faulthandler
import functools
import itertools
import queue
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import Agent, Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.replay import Array
from speedyzero_jax.run.factories import frames_on_devices, replay_capacity
from speedyzero_jax.run.warmup import placeholders, task_shapes
from speedyzero_jax.system import memory
from speedyzero_jax.types import Env, EnvStep, Slots
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.batched_inference import BatchedInference
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import ACTOR, Version

# Timeout of an environment's call; less than the uptime after which the supervisor and the recipes
# count deaths from 0 again.
ENV_SECONDS = 300.0

_report = functools.partial(print, flush=True)


class RemoteWeights:
  """A cache of the newest weights fetched for each subscriber.

  `where` is the device that holds them, or the sharding, with a copy on each device.
  """

  def __init__(self, client: Client, agent: Agent, where: jax.Device | jax.sharding.Sharding):
    self._client, self._where = client, where
    variables = jax.eval_shape(agent.init, jax.random.key(0))
    self._like = jax.eval_shape(agent.published, variables)
    self._versions: dict[str, Version] = {}

  def latest(self, subscriber: str, at_least: int) -> Version:
    """Returns weights of learner step `at_least` or later; fetches the newest if necessary."""
    version = self._versions.get(subscriber)
    if version is None or version.step < at_least:
      sent: messages.Weights = self._client.call(messages.WeightsRequest(subscriber))
      version = self._versions[subscriber] = Version(sent.step, self._unpack(sent))
    return version

  def _unpack(self, sent: messages.Weights) -> Variables:
    def place(like: jax.ShapeDtypeStruct, array) -> jax.Array:
      if array.shape != like.shape:
        raise ValueError(
          f"the learner has a different network: an array is {array.shape}, here {like.shape}"
        )
      return jnp.asarray(jax.device_put(array, self._where), like.dtype)

    return jax.tree.map(place, self._like, messages.unnamed(self._like, sent.arrays))


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
  """Ends this process, with a traceback, after `ENV_SECONDS`."""
  faulthandler.dump_traceback_later(ENV_SECONDS, exit=True)  # also if it holds the GIL
  try:
    yield
  finally:
    faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def joined(config: Config, client: Client) -> Iterator[tuple[messages.Welcome, Env]]:
  """Context manager of an actor's new environments, in the lanes that the learner assigns."""
  welcome: messages.Welcome = client.call(messages.Join())
  env = make_env(config.env, len(welcome.heads), welcome.seed, training=True)
  for name in ("reset", "step"):
    setattr(env, name, _time_limit()(getattr(env, name)))
  with contextlib.closing(env):
    yield welcome, env


def act(config: Config, agent: Agent, client: Client) -> None:
  """Acts until collection is complete; raises RunFinished if the run ends first."""
  weights = RemoteWeights(client, agent, jax.local_devices()[0])
  inference = Inference(agent, report=_report)
  with joined(config, client) as (welcome, env):
    play(config, agent, env, inference, welcome, client.call, weights.latest)


def play(
  config: Config,
  agent: Agent,
  env: Env,
  inference: Inference | BatchedInference,
  welcome: messages.Welcome,
  request: Callable[[messages.Step], messages.Grant],
  latest: Callable[..., Version],
) -> None:
  """Acts in new environments until collection is complete.

  `request` sends experience and returns the next grant; `latest` returns a subscriber's weights, of
  learner step `at_least` or later.
  """
  actor = Actor(
    config, agent, env, inference, jax.random.key(welcome.seed),
    lane_offset=welcome.first, start=welcome.heads, resumable_for=0,
  )  # fmt: skip
  slots: Slots | None = None
  closed = False
  for sequence in itertools.count():
    ended = np.array(actor.finished, np.float64).reshape(-1, 2)
    grant = request(messages.Step(sequence, vars(slots) if slots else {}, ended))
    if not grant.steps and closed:
      return
    version = latest(ACTOR, at_least=grant.weights)
    progress, random = grant.progress, grant.random
    if grant.steps:
      slots, count = actor.step(
        version, budget=grant.steps, progress=progress, random=random, last=grant.closing
      )
      closed = grant.closing and count == grant.steps
    else:
      slots, closed = actor.close_lanes(version, progress=progress, random=random), True


def step_environments(config: Config, client: Client) -> None:
  """As `act`, but the actions come from the learner's process (see `central_actors.py`)."""
  observations: queue.SimpleQueue[messages.Observation | None] = queue.SimpleQueue()

  def send(step: EnvStep) -> None:
    observations.put(messages.Observation(step._asdict()))

  with joined(config, client) as (_, env):
    try:
      send(env.reset())
      for answer in client.stream(iter(observations.get, None)):
        send(env.step(answer.action))
    finally:
      observations.put(None)


class FrameCopy:
  """A copy of the frames of a unit's replay, on devices or in a host array."""

  def __init__(self, client: Client, frames: DeviceFrames | np.ndarray, lanes: int):
    self._client, self._frames = client, frames
    self._heads = np.zeros(lanes, np.int64)  # next slots to copy

  def copy(self) -> int:
    """Copies frames that are not copied yet, as many as one message holds; returns their number."""
    chunk: messages.FramesChunk = self._client.call(messages.FramesRequest(self._heads))
    if not len(chunk.lane):
      return 0
    if isinstance(self._frames, DeviceFrames):
      self._frames.write(chunk.lane, chunk.cell, chunk.frame)
    else:
      self._frames[chunk.lane, chunk.cell] = chunk.frame
    self._heads = chunk.heads
    return len(chunk.lane)

  def gather(self, lane: np.ndarray, cell: np.ndarray, heads: np.ndarray) -> Array:
    """Returns the frames [n, w, ...] of cells, once all slots before `heads` are copied."""
    while (self._heads < heads).any():
      self.copy()
    if isinstance(self._frames, DeviceFrames):
      return self._frames.gather(lane, cell)
    return self._frames[lane[:, None], cell]


def refresh(config: Config, agent: Agent, client: Client, seed: int, refreshers: int) -> None:
  """Computes blocks of states until RunFinished is raised; `refreshers` share each batch's."""
  mesh = make_mesh(jax.local_devices())
  lanes, frame = config.actor.lanes, agent.schema.frame
  storage = frames_on_devices(config, agent, mesh, _report) or memory.zeros(
    (lanes, replay_capacity(config, agent), *frame.shape), np.dtype(frame.dtype)
  )
  frames = FrameCopy(client, storage, lanes)
  weights = RemoteWeights(client, agent, NamedSharding(mesh, PartitionSpec()))
  inference = Inference(agent, mesh, report=_report)
  key = jax.random.key(seed)
  while frames.copy() == messages.frames_per_chunk(agent.schema):
    pass
  for name, count, after in task_shapes(config, agent, refreshers):
    variables = weights.latest(agent.tasks[name].subscription, at_least=0).variables
    cell = np.zeros((count, config.env.frame_stack + after), np.int32)
    windows = frames.gather(cell[:, 0], cell, np.zeros(lanes, np.int64))
    inputs = {"frames": windows, **placeholders(agent.tasks[name], count, after)}
    inference.tasks[name].prepare(variables, inputs, key)
  request = messages.Results(0, 0, {})
  while True:
    block: messages.Block = client.call(request)
    subscription = agent.tasks[block.task].subscription
    version = weights.latest(subscription, at_least=block.step)
    windows = frames.gather(block.lane, block.cell, block.heads)
    block_key = jax.random.fold_in(key, block.block)
    inputs = {"frames": windows, **block.columns}
    results = inference.compute(version, block.task, inputs, block_key)
    request = messages.Results(block.block, version.step, results)
