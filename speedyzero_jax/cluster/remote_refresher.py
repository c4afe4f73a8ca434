"""A refresher process: computes an agent's tasks for blocks of states and returns the results.

It holds a copy of the unit's frames: on its devices, if they have room, else in host memory.
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.replay import Array
from speedyzero_jax.run.builders import frames_on_devices, replay_capacity
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.system import memory
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh

_report = functools.partial(print, flush=True)


class FrameCopy:
  """A copy of the frames in a unit's lanes: on devices, or an array on the host."""

  def __init__(
    self, client: Client, session: tuple[int, int], frames: DeviceFrames | np.ndarray, lanes: int
  ):
    self._client, self._session, self._frames = client, session, frames
    self._heads = np.zeros(lanes, np.int64)  # of the slots copied

  def gather(self, lane: np.ndarray, cell: np.ndarray, heads: np.ndarray) -> Array:
    """Frames [n, w, ...] of cells, after all slots before these heads are copied."""
    while (self._heads < heads).any():
      request = messages.FramesRequest(*self._session, self._heads)
      chunk: messages.FramesChunk = self._client.call(request)
      if isinstance(self._frames, DeviceFrames):
        self._frames.write(chunk.lane, chunk.cell, chunk.frame)
      else:
        self._frames[chunk.lane, chunk.cell] = chunk.frame
      self._heads = chunk.heads
    if isinstance(self._frames, DeviceFrames):
      return self._frames.gather(lane, cell)
    return self._frames[lane[:, None], cell]


def refresh(config: Config, agent: Agent, client: Client, role: Role, incarnation: int) -> None:
  """Computes what it is given until RunOver is raised; the arguments are those of an actor."""
  number = role.number
  client.call(messages.RefresherJoin(number, incarnation))
  mesh = make_mesh(jax.local_devices())
  lanes, frame = config.actor.lanes, agent.schema.frame
  held = frames_on_devices(config, agent, mesh, _report) or memory.zeros(
    (lanes, replay_capacity(config, agent), *frame.shape), np.dtype(frame.dtype)
  )
  frames = FrameCopy(client, (number, incarnation), held, lanes)
  like = jax.eval_shape(agent.init, jax.random.key(0))
  everywhere = NamedSharding(mesh, PartitionSpec())
  weights = RemoteWeights(client, number, like, everywhere)
  inference = Inference(agent, mesh, report=_report)
  key = jax.random.key(derived_seed(config.run.seed, str(role), incarnation))
  while True:
    block: messages.Block = client.call(messages.WorkRequest(number, incarnation))
    subscription = agent.tasks[block.task].subscription
    version = weights.latest(subscription, at_least=block.step)
    windows = frames.gather(block.lane, block.cell, block.heads)
    block_key = jax.random.fold_in(key, block.block)
    results = inference.compute(version, block.task, windows, block_key)
    client.call(messages.Result(number, incarnation, block.block, version.step, results))
