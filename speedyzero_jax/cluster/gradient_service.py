"""Service for actors that compute gradients (A3C, Mnih et al. 2016), applied as they arrive.

An actor gets its next grant once its gradient is part of the weights that it can fetch.
"""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.actor_service import ActorService, Session, finished_episodes
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.run.batch_pipeline import PreparedBatch
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.workers.learner import Gradient
from speedyzero_jax.workers.weights import ACTOR, DivergedError

_NONE = Selection(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0))


class GradientService(ActorService):
  """Queues gradients for the learner; its method `step` answers `messages.Gradient`."""

  def __init__(self, experiment: Experiment, roster: Roster):
    super().__init__(experiment, roster)
    self._experiment, self._like = experiment, experiment.learner.abstract().variables
    self._batch = experiment.local_config.learner.batch_size * experiment.agent.window.after
    self._due = experiment.limiter.learner_steps  # that the gradients received so far complete
    self._lock = threading.Lock()

  def _progress(self, session: Session) -> int:
    return self._weights.latest(ACTOR).step

  def _wanted(self, session: Session) -> int:
    # The slot after a trajectory completes it; later it is the first slot of the next trajectory.
    return self._batch + len(session.lanes)

  def _wait_for_steps(self, helper: Helper, session: Session, seconds: float) -> int | None:
    def applied() -> bool:
      return self._weights.latest(ACTOR).step >= session.due

    self._roster.waits(helper)
    self._limiter.wait_for(applied, seconds)
    steps = super()._wait_for_steps(helper, session, seconds) if applied() else None
    if steps == 0:
      self._roster.dismiss(helper)
    return steps

  def _take(self, helper: Helper, session: Session, request: Any) -> None:
    grant = session.grant
    if grant is None and not (request.arrays and request.sequence == 0):
      return  # an earlier attempt of the request has delivered the gradient
    if grant is None or not 0 <= request.steps <= grant.steps:
      granted = grant.steps if grant else 0
      raise ValueError(f"{helper} took {request.steps} steps of {granted} granted")
    episodes = finished_episodes(request)
    if request.arrays:
      self._queue(helper, session, request)
    session.closed = grant.closing and request.steps == grant.steps
    session.grant = None
    self._collector.count(request.steps, episodes, granted=grant.steps)
    self._limiter.end_acting(session)

  def _queue(self, helper: Helper, session: Session, request: messages.Gradient) -> None:
    newest = self._limiter.learner_steps
    if not 0 <= request.version <= newest:
      raise ValueError(f"{helper} used weights of step {request.version}, the newest: {newest}")
    variables = self._checked(helper, request)
    gradient = Gradient(*variables, {}, jnp.zeros(0), jnp.asarray(request.version, jnp.int32))
    with self._lock:
      self._due += 1
      session.due = self._due
      self._experiment.batches.append(PreparedBatch({}, _NONE, request.metrics, gradient))

  def _checked(self, helper: Helper, request: messages.Gradient) -> Variables:
    """Returns the derivatives and running statistics. Raises ValueError if they are malformed."""
    try:
      variables = messages.unnamed(self._like, request.arrays)
      forms = jax.tree.map(lambda x: (x.shape, x.dtype), variables)
    except (KeyError, AttributeError) as error:
      raise ValueError(f"{helper} sent a malformed gradient: {error!r}") from None
    if forms != jax.tree.map(lambda x: (x.shape, x.dtype), self._like):
      raise ValueError(f"{helper} sent a gradient of another network: {forms}"[:500])
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((variables, request.metrics))):
      diverged = DivergedError(request.version)
      self._limiter.stop(diverged)
      raise RunFinished(f"the learner has failed: {diverged}")
    return variables
