"""Publication of network weights from the learner to actors and tasks; only the newest are kept.

Each subscription has an update interval in learner steps. A version is identified by the learner
step at which it was published.
"""

import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import Agent, Variables

ACTOR = "actor"  # subscription of all actors; tasks have others
copy_tree = jax.jit(partial(jax.tree.map, jnp.copy))  # one call rather than one per array


def publication(agent: Agent) -> Callable[[Variables], Variables]:
  """Jitted `Agent.published` that copies, since the learner donates its buffers."""

  @jax.jit
  def publish(variables: Variables) -> Variables:
    return jax.tree.map(jnp.copy, agent.published(variables))

  return publish


class Version(NamedTuple):
  """Published weights, and the number of learner steps after which they were published."""

  step: int
  variables: Variables


class DivergedError(Exception):
  """Training has diverged: the weights of learner step `step` or their outputs are not finite.

  `name` is that of the output, if known.
  """

  def __init__(self, step: int, name: str = ""):
    of = f" ({name})" if name else ""
    super().__init__(
      f"learner step {step} produced values that are not finite{of}: training has diverged. "
      "Earlier checkpoints, if any, are intact; resume from one, or start a new run with a lower "
      "optim.learning_rate or optim.clip_norm"
    )


def device_get_finite(version: Version, results: Any) -> Any:
  """Copies results (a pytree of arrays) computed with a version to the host.

  Raises DivergedError if any value is not finite.
  """
  results = jax.device_get(results)
  for path, leaf in jax.tree.leaves_with_path(results):
    if not np.isfinite(leaf).all():
      raise DivergedError(version.step, jax.tree_util.keystr(path, simple=True, separator="."))
  return results


class WeightsStore:
  """Holds the newest version of the weights for each subscriber. Thread-safe.

  Args:
    intervals: learner steps between updates, by subscriber.
    where: sharding of the versions.
    initial: variables before the first learner step.
    publish: see `publication`.
  """

  def __init__(
    self,
    intervals: Mapping[str, int],
    where: jax.sharding.Sharding,
    initial: Variables,
    publish: Callable[[Variables], Variables] = copy_tree,
  ):
    self._intervals, self._where, self._publish = dict(intervals), where, publish
    self._lock = threading.Lock()
    self._versions = dict.fromkeys(intervals, Version(0, self.derive(initial)))

  def derive(self, variables: Variables) -> Variables:
    """Returns what subscribers get for the learner's variables, which may be on any mesh."""
    return self._publish(self._placed(variables))

  def _placed(self, variables: Variables) -> Variables:
    return jax.tree.map(self._place, variables)

  def _place(self, x: Any) -> jax.Array:
    if not isinstance(x, jax.Array):
      return jax.device_put(x, self._where)
    if x.sharding == self._where:
      return x
    copies = {shard.device: shard.data for shard in x.addressable_shards}
    if x.is_fully_replicated and self._where.device_set <= copies.keys():  # moves nothing
      shards = [copies[device] for device in self._where.device_set]
      return jax.make_array_from_single_device_arrays(x.shape, self._where, shards)
    return jax.device_put(x.addressable_data(0), self._where)

  def publish(self, step: int, variables: Variables, to: Collection[str] = ()) -> None:
    """Publishes the weights of learner step `step` to the subscribers in `to` and those due."""
    due = [name for name, every in self._intervals.items() if step % every == 0 or name in to]
    if not due:
      return
    version = Version(step, self.derive(variables))
    with self._lock:
      self._versions.update(dict.fromkeys(due, version))

  def latest(self, subscriber: str) -> Version:
    """Returns the newest version for a subscriber. Raises ValueError for an unknown one."""
    if subscriber not in self._intervals:
      raise ValueError(
        f"unknown weights subscriber '{subscriber}'; known: {', '.join(self._intervals)}"
      )
    with self._lock:
      return self._versions[subscriber]

  def snapshot(self) -> dict[str, Version]:
    """Returns all versions by subscriber, for a checkpoint."""
    with self._lock:
      return dict(self._versions)

  def restore(self, versions: Mapping[str, Version]) -> None:
    """Restores a snapshot. Raises KeyError if a subscriber is missing."""
    placed = {
      name: Version(versions[name].step, copy_tree(self._placed(versions[name].variables)))
      for name in self._intervals
    }
    with self._lock:
      self._versions = placed
