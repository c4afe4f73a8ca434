"""The learner's service: all calls that a unit's actors and refreshers can make.

`grpc_server.py` is the transport.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.actor_service import ActorService
from speedyzero_jax.cluster.central_actors import CentralActors
from speedyzero_jax.cluster.gradient_service import GradientService
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.refresher_service import RefresherService
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.run.experiment import Experiment


class LearnerService:
  """Serves one unit's actors and refreshers, which the roster counts. Thread-safe."""

  def __init__(self, experiment: Experiment, roster: Roster):
    self._limiter, self._weights = experiment.limiter, experiment.weights
    self._half = experiment.config.topology.weights_dtype == "bfloat16"
    self._roster = roster
    gradients = experiment.config.topology.gradients == "actors"
    actors = (GradientService if gradients else ActorService)(experiment, roster)
    self.environments = CentralActors(experiment, actors, roster).environments
    works = RefresherService(experiment, roster)
    self.execute = works.execute
    self._methods: Mapping[str, Callable[..., Any]] = {
      "join": actors.join,
      "gradient" if gradients else "step": actors.step,
      "weights": self._newest,
      "work": works.work,
      "frames": works.frames,
    }

  def call(self, name: str, helper: Helper, request: Any, *seconds: float) -> Any:
    """Dispatches one call; polls block for up to `seconds` and return None on a timeout.

    Raises ValueError for an unknown helper, an older incarnation or an invalid request, and
    RunFinished if the run has ended.
    """
    self._roster.enter(helper)
    return self._methods[name](helper, request, *seconds)

  def finish(self, patience: float) -> None:
    """Ends the run: all calls raise RunFinished. Waits up to `patience` seconds for the helpers."""
    self._roster.over = True
    self._limiter.notify()
    self._roster.wait_for_dismissal(patience)

  def _newest(self, helper: Helper, request: messages.WeightsRequest) -> messages.Weights:
    version = self._weights.latest(request.subscriber)
    arrays = jax.device_get(messages.named(version.variables))  # jax keeps the copy on the host
    # Rounding on the device would queue behind training steps.
    return messages.Weights(version.step, {name: self._sent(x) for name, x in arrays.items()})

  def _sent(self, array: np.ndarray) -> np.ndarray:
    rounded = self._half and array.ndim > 1 and array.dtype == np.float32
    return array.astype(jnp.bfloat16) if rounded else array
