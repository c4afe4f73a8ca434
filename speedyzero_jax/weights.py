"""Latest-wins hand-over of network weights from the learner to the roles that use them.

Each subscriber has an interval in learner steps (SpeedyZero: actors and refreshers 10, reanalysers 25). A version is
the learner step it was taken at. The reanalyser's version is also the target network: its values bootstrap the targets.
Knows nothing of sockets; a remote store has the same two methods.
"""

import threading
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from speedyzero_jax.networks import Variables


class Version(NamedTuple):
  """Weights and the learner step they were taken at."""

  step: int
  variables: Variables


class WeightsStore:
  """Holds one version per subscriber.

  Args:
    intervals: learner steps between updates, by subscriber.
    device: where subscribers compute.
    initial: what everybody starts with, at learner step 0.
  """

  def __init__(self, intervals: Mapping[str, int], device: jax.Device, initial: Variables):
    self._intervals, self._device = dict(intervals), device
    self._lock = threading.Lock()
    first = Version(0, self.to_device(initial))
    self._versions = dict.fromkeys(intervals, first)

  def to_device(self, variables: Variables) -> Variables:
    """A copy on the subscribers' device; the learner donates its own buffers to its next step."""
    return jax.tree.map(jnp.copy, jax.device_put(variables, self._device))

  def publish(self, step: int, variables: Variables) -> None:
    """Offers the weights after `step` learner steps; copies them once if any subscriber is due."""
    due = [name for name, interval in self._intervals.items() if step % interval == 0]
    if not due:
      return
    version = Version(step, self.to_device(variables))
    with self._lock:
      self._versions.update(dict.fromkeys(due, version))

  def latest(self, subscriber: str) -> Version:
    """The newest version meant for a subscriber."""
    with self._lock:
      return self._versions[subscriber]

  def snapshot(self) -> dict[str, Version]:
    """All subscribers' versions, for a checkpoint."""
    with self._lock:
      return dict(self._versions)

  def restore(self, versions: Mapping[str, Version]) -> None:
    """Puts a snapshot back. Raises KeyError if it is of other subscribers."""
    placed = {name: Version(versions[name].step, self.to_device(versions[name].variables)) for name in self._intervals}
    with self._lock:
      self._versions = placed
