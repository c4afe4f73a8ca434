"""A refresher process: computes an agent's tasks for blocks of states and returns the results.

It holds the unit's frames: on its devices, if they have room; else mapped, on the learner's
machine; else fetched.
"""

import contextlib
import functools
import os

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.following import Following
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.replay import Array
from speedyzero_jax.run.builders import frames_on_devices, frames_shape
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.system import memory
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh

_report = functools.partial(print, flush=True)


class MappedFrames:
  """The learner's own frames [lanes, capacity, ...], mapped from its memory."""

  def __init__(self, frames: np.ndarray):
    self._frames = frames

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> np.ndarray:
    """Frames [n, w, ...] of cells, which are there as soon as they are written."""
    return self._frames[lane[:, None], cell]


def _mapped(
  welcome: messages.RefresherWelcome, shape: tuple[int, ...], dtype: np.dtype
) -> MappedFrames | None:
  """The learner's frames, unless they are on another machine, or in another container."""
  with contextlib.suppress(OSError):
    if welcome.frames_file and os.readlink(welcome.frames_file) == welcome.frames_link:
      return MappedFrames(np.memmap(welcome.frames_file, dtype, "r", shape=shape))
  return None


class FetchedFrames(Following):
  """A copy of the frames that follows the learner's: on devices, or an array on the host."""

  def __init__(
    self, client: Client, number: int, incarnation: int, frames: DeviceFrames | np.ndarray
  ):
    super().__init__()
    self._client, self._session, self._frames = client, (number, incarnation), frames
    self._written = 0
    self.follow("frames", self._update)

  def _update(self) -> None:
    request = messages.FramesRequest(*self._session, self._written)
    chunk: messages.FramesChunk = self._client.call(request)
    if isinstance(self._frames, DeviceFrames):
      self._frames.write(chunk.lane, chunk.cell, chunk.frame)
    else:
      self._frames[chunk.lane, chunk.cell] = chunk.frame
    with self.changed:
      self._written = chunk.sequence
      self.changed.notify_all()

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> Array:
    """Frames [n, w, ...] of cells, once so many have been written."""
    self.wait_for(lambda: self._written >= written)
    if isinstance(self._frames, DeviceFrames):
      return self._frames.gather(lane, cell)
    return self._frames[lane[:, None], cell]


def refresh(config: Config, agent: Agent, client: Client, role: Role, incarnation: int) -> None:
  """Computes what it is given until RunOver is raised; the arguments are those of an actor."""
  number = role.number
  join = messages.RefresherJoin(number, incarnation)
  welcome: messages.RefresherWelcome = client.call(join)
  mesh = make_mesh(jax.local_devices())
  on_devices = frames_on_devices(config, agent, mesh, _report)
  shape, dtype = frames_shape(config, agent), np.dtype(agent.schema.frame.dtype)
  mapped = None if on_devices else _mapped(welcome, shape, dtype)
  frames = mapped or FetchedFrames(
    client, number, incarnation, on_devices or memory.zeros(shape, dtype)
  )
  like = jax.eval_shape(agent.init, jax.random.key(0))
  everywhere = NamedSharding(mesh, PartitionSpec())
  weights = RemoteWeights(client, number, tuple(agent.subscriptions), like, everywhere)
  inference = Inference(agent, mesh, report=_report)
  key = jax.random.key(derived_seed(config.run.seed, str(role), incarnation))
  while True:
    block: messages.Block = client.call(messages.WorkRequest(number, incarnation))
    subscription = agent.tasks[block.task].subscription
    version = weights.latest(subscription, at_least=block.step)
    windows = frames.gather(block.lane, block.cell, block.frames)
    block_key = jax.random.fold_in(key, block.block)
    results = inference.compute(version, block.task, windows, block_key)
    client.call(messages.Result(number, incarnation, block.block, version.step, results))
