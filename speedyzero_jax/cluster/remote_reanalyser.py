"""A reanalyser in a process of its own: takes blocks of states, looks at them, hands over what it found.

Holds the unit's frames: on its devices, if they have room; else mapped, on the learner's own machine; else fetched.
"""

import contextlib
import functools
import os
import threading

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import Blueprint
from speedyzero_jax.agents.efficientzero.reanalyse import examine
from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.device_frames import DeviceFrames
from speedyzero_jax.replay.experience import Array
from speedyzero_jax.run.builders import Game, frames_on_devices, sweeps
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.system import memory
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import REANALYSER, REFRESHER

_EMPTY = np.zeros(0, np.float32)
_say = functools.partial(print, flush=True)  # into a log, which nobody closes for who is killed


class MappedFrames:
  """The learner's own frames, read where they are."""

  def __init__(self, path: str, form: codec.Form):
    shape = (form.lanes, form.capacity, *form.frame_shape)
    self._frames = np.memmap(path, form.frame_dtype, "r", shape=shape)

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> np.ndarray:
    """Frames [n, w, ...] of cells; `written` is for those who must fetch them."""
    return self._frames[lane[:, None], cell]


def _mapped(welcome: messages.ReanalyserWelcome, form: codec.Form) -> MappedFrames | None:
  """The learner's frames, if they can be mapped here: not from another machine, container or user."""
  with contextlib.suppress(OSError):
    if welcome.frames_file and os.readlink(welcome.frames_file) == welcome.frames_link:
      return MappedFrames(welcome.frames_file, form)
  return None


class FetchedFrames:
  """A copy of the frames, fetched as they are written: on these devices, or in host memory."""

  def __init__(
    self,
    client: Client,
    number: int,
    incarnation: int,
    form: codec.Form,
    on_devices: DeviceFrames | None = None,
  ):
    self._client, self._session = client, (number, incarnation)
    self._on_devices = on_devices
    if on_devices is None:
      self._frames = memory.zeros((form.lanes, form.capacity, *form.frame_shape), form.frame_dtype)
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
    except BaseException as error:  # raised again where frames are asked for
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def gather(self, lane: np.ndarray, cell: np.ndarray, written: int) -> Array:
    """Frames [n, w, ...] of cells, once so many have been written. Raises whatever ended the fetching before."""
    with self._changed:
      self._changed.wait_for(lambda: self._error or self._written >= written)
      if self._error and self._written < written:
        raise self._error
    if self._on_devices is None:
      return self._frames[lane[:, None], cell]
    lanes = np.broadcast_to(lane[:, None], cell.shape)
    return self._on_devices.gather(lanes, cell, spread=len(lane) % self._on_devices.devices == 0)


def _used(config: Config) -> tuple[str, ...]:
  """Whose weights are needed; the others need not travel."""
  used = {
    REANALYSER: config.agent.reanalyse.schedule != "off",
    REFRESHER: "refresh" in sweeps(config),
  }
  return tuple(subscriber for subscriber, needed in used.items() if needed)


def reanalyse(
  config: Config,
  blueprint: Blueprint,
  client: Client,
  form: codec.Form,
  role: Role,
  incarnation: int,
) -> None:
  """Looks at what it is given until the run is over. Arguments as for `remote_actor.act`, and the unit's form."""
  with contextlib.suppress(RunOver):
    _reanalyse(config, blueprint, client, form, role, incarnation)


def _reanalyse(
  config: Config,
  blueprint: Blueprint,
  client: Client,
  form: codec.Form,
  role: Role,
  incarnation: int,
) -> None:
  number = role.number
  welcome = client.join_reanalyser(messages.ReanalyserJoin(number, incarnation))
  mesh = make_mesh(jax.local_devices())
  height, width, channels = form.frame_shape
  game = Game((height, width, channels), np.dtype(form.frame_dtype), form.actions)
  on_devices = frames_on_devices(config, game, mesh, _say)
  mapped = None if on_devices else _mapped(welcome, form)
  frames = mapped or FetchedFrames(client, number, incarnation, form, on_devices)
  like = jax.eval_shape(blueprint.init, jax.random.key(0))
  everywhere = NamedSharding(mesh, PartitionSpec())
  weights = RemoteWeights(client, number, _used(config), like, everywhere)
  inference = Inference(config, blueprint, mesh, report=_say)
  key = jax.random.key(derived_seed(config.run.seed, str(role), incarnation))
  while True:
    block = client.work(messages.WorkRequest(number, incarnation))
    version = weights.latest(block.subscriber, at_least=block.step)
    windows = frames.gather(block.lane, block.cell, block.frames)
    one_key = jax.random.fold_in(key, block.block)
    findings = examine(
      inference,
      version,
      windows,
      search=block.search,
      key=one_key,
      explore=config.agent.reanalyse.explore,
    )
    policy, search_value = findings.policy, findings.search_value
    if policy is None or search_value is None:
      states = findings.value.shape[1]
      policy, search_value = _EMPTY.reshape(0, states, form.actions), _EMPTY.reshape(0, states)
    client.result(
      messages.Result(
        number, incarnation, block.block, findings.step, policy, search_value, findings.value
      )
    )
