"""Latest-wins hand-over of network weights from the learner to actors and tasks.

Each subscription has an interval in learner steps. A version is identified by the learner step at
which it was taken.
"""

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import Variables

ACTOR = "actor"  # the subscription of all actors; tasks have others
copy_tree = jax.jit(partial(jax.tree.map, jnp.copy))  # one call rather than one per array


class Version(NamedTuple):
  """Weights and the learner step they were taken at."""

  step: int
  variables: Variables


class DivergedError(Exception):
  """Training has diverged: weights of learner step `step`, or their outputs, are not finite."""

  def __init__(self, step: int):
    super().__init__(
      f"learner step {step} gave values that are not finite: training has diverged. Checkpoints "
      "are intact; lower optim.learning_rate or optim.clip_norm and start again, or resume from "
      "before."
    )


def device_get_finite(version: Version, results: Any) -> Any:
  """Results (a pytree of arrays) computed with a version, on the host.

  Raises DivergedError if they are not finite.
  """
  results = jax.device_get(results)
  if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results)):
    raise DivergedError(version.step)
  return results


class WeightsStore:
  """The newest version of the weights for each subscriber, on `where`. Thread-safe.

  `intervals` are learner steps between updates, by subscriber.
  """

  def __init__(
    self,
    intervals: Mapping[str, int],
    where: jax.Device | jax.sharding.Sharding,
    initial: Variables,
  ):
    self._intervals, self._where = dict(intervals), where
    self._lock = threading.Lock()
    self._versions = dict.fromkeys(intervals, Version(0, self.to_device(initial)))

  def to_device(self, variables: Variables) -> Variables:
    """A copy for subscribers of variables on any mesh, since the learner donates its buffers."""
    here = jax.tree.map(
      lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, variables
    )
    return copy_tree(jax.device_put(here, self._where))

  def publish(self, step: int, variables: Variables) -> None:
    """Publishes the weights after `step` learner steps to the subscribers that are due."""
    due = [name for name, interval in self._intervals.items() if step % interval == 0]
    if not due:
      return
    version = Version(step, self.to_device(variables))
    with self._lock:
      self._versions.update(dict.fromkeys(due, version))

  def latest(self, subscriber: str) -> Version:
    """The newest version for a subscriber. Raises ValueError for an unknown one."""
    if subscriber not in self._intervals:
      raise ValueError(
        f"nobody subscribes as '{subscriber}'; there are {', '.join(self._intervals)}"
      )
    with self._lock:
      return self._versions[subscriber]

  def snapshot(self) -> dict[str, Version]:
    """All versions by subscriber, for a checkpoint."""
    with self._lock:
      return dict(self._versions)

  def restore(self, versions: Mapping[str, Version]) -> None:
    """Restores a snapshot. Raises KeyError for missing subscribers."""
    placed = {
      name: Version(versions[name].step, self.to_device(versions[name].variables))
      for name in self._intervals
    }
    with self._lock:
      self._versions = placed
