"""Remote subscriptions to weights: the newest version of each, fetched in its own thread."""

import threading

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.workers.weights import Version


class RemoteWeights:
  """The newest weights of some subscribers.

  Args:
    client: of the unit.
    number: of the actor or refresher.
    subscribers: whose versions to keep.
    like: shapes and types of the network's variables.
    where: to put them; a device, or several with a copy on each.
  """

  def __init__(
    self,
    client: Client,
    number: int,
    subscribers: tuple[str, ...],
    like: Variables,
    where: jax.Device | jax.sharding.Sharding,
  ):
    self._client, self._number, self._like, self._where = client, number, like, where
    self._versions: dict[str, Version] = {}
    self._changed = threading.Condition()
    self._error: BaseException | None = None
    for subscriber in subscribers:
      threading.Thread(
        target=self._follow, args=(subscriber,), name=f"weights-{subscriber}", daemon=True
      ).start()

  def _follow(self, subscriber: str) -> None:
    have: int | None = None
    try:
      while True:
        request = messages.WeightsRequest(self._number, subscriber, have)
        sent: messages.Weights = self._client.call(request)
        version = Version(sent.step, self._unpack(sent))
        have = sent.step
        with self._changed:
          self._versions[subscriber] = version
          self._changed.notify_all()
    except BaseException as error:  # raised again in `latest`
      with self._changed:
        self._error = error
        self._changed.notify_all()

  def _unpack(self, sent: messages.Weights) -> Variables:
    def place(like: jax.ShapeDtypeStruct, array) -> jax.Array:
      if array.shape != like.shape:
        raise ValueError(
          f"the unit's network is another: an array is {array.shape}, here {like.shape}"
        )
      return jnp.asarray(jax.device_put(array, self._where), like.dtype)

    return jax.tree.map(place, self._like, messages.unnamed(self._like, sent.arrays))

  def latest(self, subscriber: str, at_least: int = 0) -> Version:
    """The newest version, once it is of this learner step or later.

    Raises whatever ended the subscription; RunOver only if there is no such version: with one, the
    caller's work can still be done.
    """
    with self._changed:
      self._changed.wait_for(lambda: self._error or self._at(subscriber) >= at_least)
      if self._error and not (
        isinstance(self._error, RunOver) and self._at(subscriber) >= at_least
      ):
        raise self._error
      return self._versions[subscriber]

  def _at(self, subscriber: str) -> int:
    version = self._versions.get(subscriber)
    return -1 if version is None else version.step
