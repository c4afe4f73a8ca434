"""The learner's service: everything that actors and refreshers of a unit can call.

Implements the calls of `messages.CALLS`. Transport: `grpc_server.py`.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.actor_service import ActorService
from speedyzero_jax.cluster.central_actors import CentralActors
from speedyzero_jax.cluster.refresher_service import RefresherService
from speedyzero_jax.cluster.roster import Roster, Worker
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.workers.weights import ACTOR


class LearnerService:
  """Serves one unit, with these lanes of each actor and so many refreshers. Thread-safe."""

  def __init__(
    self,
    experiment: Experiment,
    *,
    lanes: Sequence[range],
    refreshers: int,
    roster: Roster,
  ):
    self._limiter, self._weights = experiment.limiter, experiment.weights
    self._half = experiment.config.topology.weights_dtype == "bfloat16"
    self._roster = roster
    self._packed: dict[str, messages.Weights] = {}
    actors = ActorService(experiment, lanes, roster)
    self.environments = CentralActors(experiment, actors, roster).environments
    works = RefresherService(experiment, refreshers, roster)
    self.join_actor, self.step = actors.join_actor, actors.step
    self.join_refresher, self.work, self.result = works.join_refresher, works.work, works.result
    self.frames, self.execute = works.frames, works.execute

  def finish(self, patience: float) -> None:
    """Answers every later call with the end of the run; waits so long for workers to hear it."""
    self._roster.over = True
    self._limiter.notify()
    self._roster.wait_for_dismissal(patience)

  def weights(self, request: messages.WeightsRequest) -> messages.Weights:
    """The newest version of a subscription; also after the end, for what was begun before."""
    self._roster.beat(
      Worker("actor" if request.subscriber == ACTOR else "refresher", request.number)
    )
    version = self._weights.latest(request.subscriber)
    packed = self._packed.get(request.subscriber)
    if packed is None or packed.step != version.step:  # two threads may pack the same; no harm
      arrays = {
        name: np.asarray(self._sent(leaf))
        for name, leaf in messages.named(version.variables).items()
      }
      packed = self._packed[request.subscriber] = messages.Weights(version.step, arrays)
    return packed

  def _sent(self, leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(jnp.bfloat16) if self._half and leaf.dtype == jnp.float32 else leaf
