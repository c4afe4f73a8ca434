"""The weights that an actor or a refresher works with, fetched from the learner as they are due."""

import jax
import jax.numpy as jnp

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.workers.weights import Version


class RemoteWeights:
  """The newest weights fetched for each subscriber, of the shapes and types in `like`.

  They are put `where`: on a device, or on several with a copy on each.
  """

  def __init__(
    self, client: Client, number: int, like: Variables, where: jax.Device | jax.sharding.Sharding
  ):
    self._client, self._number, self._like, self._where = client, number, like, where
    self._versions: dict[str, Version] = {}

  def latest(self, subscriber: str, at_least: int) -> Version:
    """A version of this learner step or later; the newest, if one has to be fetched."""
    version = self._versions.get(subscriber)
    if version is None or version.step < at_least:
      request = messages.WeightsRequest(self._number, subscriber)
      sent: messages.Weights = self._client.call(request)
      version = self._versions[subscriber] = Version(sent.step, self._unpack(sent))
    return version

  def _unpack(self, sent: messages.Weights) -> Variables:
    def place(like: jax.ShapeDtypeStruct, array) -> jax.Array:
      if array.shape != like.shape:
        raise ValueError(
          f"the unit's network is another: an array is {array.shape}, here {like.shape}"
        )
      return jnp.asarray(jax.device_put(array, self._where), like.dtype)

    return jax.tree.map(place, self._like, messages.unnamed(self._like, sent.arrays))
