"""Remote subscriptions to weights: the newest version of each, fetched in its own thread."""

import functools

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.following import Following
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.workers.weights import Version


class RemoteWeights(Following):
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
    super().__init__()
    self._client, self._number, self._like, self._where = client, number, like, where
    self._versions: dict[str, Version] = {}
    for subscriber in subscribers:
      self.follow(f"weights-{subscriber}", functools.partial(self._update, subscriber))

  def _update(self, subscriber: str) -> None:
    have = self._versions[subscriber].step if subscriber in self._versions else None
    request = messages.WeightsRequest(self._number, subscriber, have)
    sent: messages.Weights = self._client.call(request)
    version = Version(sent.step, self._unpack(sent))
    with self.changed:
      self._versions[subscriber] = version
      self.changed.notify_all()

  def _unpack(self, sent: messages.Weights) -> Variables:
    def place(like: jax.ShapeDtypeStruct, array) -> jax.Array:
      if array.shape != like.shape:
        raise ValueError(
          f"the unit's network is another: an array is {array.shape}, here {like.shape}"
        )
      return jnp.asarray(jax.device_put(array, self._where), like.dtype)

    return jax.tree.map(place, self._like, messages.unnamed(self._like, sent.arrays))

  def latest(self, subscriber: str, at_least: int = 0) -> Version:
    """The newest version, once it is of this learner step or later (see `Following.wait_for`)."""
    self.wait_for(
      lambda: subscriber in self._versions and self._versions[subscriber].step >= at_least
    )
    return self._versions[subscriber]
