"""A refresher process: computes an agent's tasks for blocks of states and returns the results.

It holds the unit's frames: on its devices, if they have room; else mapped, on the learner's machine;
else fetched.
"""

import contextlib
import functools
import os
import threading

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.codec import WireFormat
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.replay import Array
from speedyzero_jax.run.builders import frames_on_devices
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.system import memory
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import make_mesh

_report = functools.partial(print, flush=True)


class MappedFrames:
  """The learner's own frames, mapped from its memory."""

  def __init__(self, path: str, wire: WireFormat):
    frame = wire.schema.frame
    shape = (wire.lanes, wire.capacity, *frame.shape)
    self._frames = np.memmap(path, np.dtype(frame.dtype), "r", shape=shape)

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> np.ndarray:
    """Frames [n, w, ...] of cells, which are there as soon as they are written."""
    return self._frames[lane[:, None], cell]


def _mapped(welcome: messages.RefresherWelcome, wire: WireFormat) -> MappedFrames | None:
  """The learner's frames, unless they are on another machine, or in another container."""
  with contextlib.suppress(OSError):
    if welcome.frames_file and os.readlink(welcome.frames_file) == welcome.frames_link:
      return MappedFrames(welcome.frames_file, wire)
  return None


class FetchedFrames:
  """A copy of the frames that follows the learner's: on these devices, or in host memory."""

  def __init__(
    self,
    client: Client,
    number: int,
    incarnation: int,
    wire: WireFormat,
    on_devices: DeviceFrames | None = None,
  ):
    self._client, self._session, self._on_devices = client, (number, incarnation), on_devices
    if on_devices is None:
      frame = wire.schema.frame
      shape = (wire.lanes, wire.capacity, *frame.shape)
      self._frames = memory.zeros(shape, np.dtype(frame.dtype))
    self._written = 0
    self._changed = threading.Condition()
    self._error: BaseException | None = None
    threading.Thread(target=self._follow, name="frames", daemon=True).start()

  def _follow(self) -> None:
    try:
      while True:
        chunk = self._client.frames(messages.FramesRequest(*self._session, self._written))
        if self._on_devices is None:
          self._frames[chunk.lane, chunk.cell] = chunk.frame
        else:
          self._on_devices.write(chunk.lane, chunk.cell, chunk.frame)
        with self._changed:
          self._written = chunk.sequence
          self._changed.notify_all()
    except BaseException as error:  # raised again in `gather`
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> Array:
    """Frames [n, w, ...] of cells, once so many have been written.

    Raises whatever ended the copying before that.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._error or self._written >= written)
      if self._error and self._written < written:
        raise self._error
    if self._on_devices is None:
      return self._frames[lane[:, None], cell]
    lanes = np.broadcast_to(lane[:, None], cell.shape)
    spread = len(lane) % self._on_devices.devices == 0
    return self._on_devices.gather(lanes, cell, spread=spread)


def refresh(
  config: Config, agent: Agent, client: Client, wire: WireFormat, role: Role, incarnation: int
) -> None:
  """Computes what it is given until the run is over.

  Arguments as for `remote_actor.act`, and the unit's wire format.
  """
  with contextlib.suppress(RunOver):
    _refresh(config, agent, client, wire, role, incarnation)


def _refresh(
  config: Config, agent: Agent, client: Client, wire: WireFormat, role: Role, incarnation: int
) -> None:
  number = role.number
  welcome = client.join_refresher(messages.RefresherJoin(number, incarnation))
  mesh = make_mesh(jax.local_devices())
  on_devices = frames_on_devices(config, agent, mesh, _report)
  mapped = None if on_devices else _mapped(welcome, wire)
  frames = mapped or FetchedFrames(client, number, incarnation, wire, on_devices)
  like = jax.eval_shape(agent.init, jax.random.key(0))
  everywhere = NamedSharding(mesh, PartitionSpec())
  weights = RemoteWeights(client, number, tuple(agent.subscriptions), like, everywhere)
  inference = Inference(agent, config.env.frame_stack, mesh, report=_report)
  key = jax.random.key(derived_seed(config.run.seed, str(role), incarnation))
  while True:
    block = client.work(messages.WorkRequest(number, incarnation))
    subscription = agent.tasks[block.task].subscription
    version = weights.latest(subscription, at_least=block.step)
    windows = frames.gather(block.lane, block.cell, block.frames)
    block_key = jax.random.fold_in(key, block.block)
    results = inference.compute(version, block.task, windows, block_key)
    client.result(
      messages.Result(number, incarnation, block.block, block.task, version.step, results)
    )
