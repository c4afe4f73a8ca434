"""Service for actor processes: sessions, their experience, and grants of agent steps."""

import dataclasses
import threading
from typing import Any

import numpy as np

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.run.topology import Role, derived_seed, lanes_of_actors
from speedyzero_jax.types import Slots
from speedyzero_jax.workers.weights import ACTOR


@dataclasses.dataclass(eq=False)
class Session:
  """State of an actor's session."""

  lanes: range
  incarnation: int = -1
  sequence: int = -1  # of its last answered step
  grant: messages.Grant | None = None  # granted in that answer and not yet used
  due: int = 0  # learner step that its last gradient completes
  closed: bool = False  # it has ended all its episodes and takes no further step
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class ActorService:
  """Answers the calls of actors, which divide the unit's lanes. Thread-safe."""

  def __init__(self, experiment: Experiment, roster: Roster):
    self._collector, self._limiter = experiment.collector, experiment.limiter
    self._replay, self._weights = experiment.replay, experiment.weights
    self._needs_data = experiment.needs_data
    self._run_seed, self._unit = experiment.config.run.seed, experiment.membership.unit
    lanes, actors = experiment.local_config.actor.lanes, roster.counts["actor"]
    self._sessions = [Session(part) for part in lanes_of_actors(lanes, actors)]
    self._roster, self._logger = roster, experiment.logger

  def join(self, helper: Helper, request: messages.Join) -> messages.Welcome:
    """Starts a session.

    A new incarnation replaces a lost actor: its grant is released and its episodes are truncated.
    Raises RunFinished if collection is complete.
    """
    session = self._sessions[helper.number]
    with session.lock:
      if session.incarnation < helper.incarnation:
        session.incarnation, session.sequence, session.closed = helper.incarnation, -1, False
        self._release(session)
        self._collector.truncate(session.lanes)
      if self._limiter.collected:  # otherwise each lane would begin an episode of one slot
        self._roster.dismiss(helper)
        raise RunFinished("all agent steps are collected")
      first, stop = session.lanes.start, session.lanes.stop
      # Progress differs after a restart of all processes, when incarnations start from 0 again.
      part = helper.incarnation + (self._progress(session) << 32)
      seed = derived_seed(self._run_seed, str(Role("actor", self._unit, helper.number)), part)
      return messages.Welcome(first, self._replay.heads[first:stop], seed)

  def _progress(self, session: Session) -> int:
    return int(self._replay.heads[session.lanes].sum())

  def _release(self, session: Session) -> None:
    grant, session.grant = session.grant, None
    if grant is not None:
      self._limiter.add_env_steps(0, reserved=grant.steps)
      self._limiter.end_acting(session)

  def step(self, helper: Helper, request: Any, seconds: float) -> messages.Grant | None:
    """Adds experience to the journal and the replay; grants steps once the limiter allows any.

    Returns None if it allows none within `seconds`.
    """
    session = self._sessions[helper.number]
    with session.lock:
      if helper.incarnation != session.incarnation:
        raise ValueError(f"{helper} of incarnation {helper.incarnation} has no session")
      if request.sequence == session.sequence and session.grant is not None:
        return session.grant  # a retry, as the answer was lost
      if request.sequence != session.sequence + 1:
        raise ValueError(f"{helper} sent step {request.sequence} after step {session.sequence}")
      self._take(helper, session, request)
      if self._limiter.pool <= self._wanted(session) or self._limiter.lag_exceeded:
        self._end_hanging()
      if session.closed and self._limiter.pool and not self._any_acts():
        session.incarnation, session.closed = -1, False
        raise ValueError(f"{helper} must join again, to take the last steps in another's place")
      steps, requested = self._wait_for_steps(helper, session, seconds), self._wanted(session)
      if steps is None:
        self._roster.enter(helper)
        return None
      self._roster.served(helper)
      session.sequence = request.sequence
      if steps:  # with 0 steps the actor leaves, or only sends the final frames of its lanes
        self._limiter.begin_acting(session)  # before the newest weights are looked up
      session.grant = messages.Grant(
        steps=steps,
        # A grant smaller than requested exhausted the budget: the lanes without a step are
        # truncated, even if steps have been released since.
        closing=steps < requested or not self._limiter.pool,
        weights=self._weights.latest(ACTOR).step,
        progress=self._limiter.progress,
        random=self._limiter.playing_randomly,
      )
      return session.grant

  def _any_acts(self) -> bool:
    """Whether an actor has called recently and has not closed its episodes."""
    silences = (self._roster.silence("actor", i) for i in range(len(self._sessions)))
    return any(
      not session.closed and silence <= messages.HANG_SECONDS
      for session, silence in zip(self._sessions, silences, strict=True)
    )

  def _end_hanging(self) -> None:
    """Ends the sessions of actors that hang with a grant, so that others get its steps."""
    for number, session in enumerate(self._sessions):
      if session.lock.acquire(blocking=False):  # else it is making a call
        try:
          if session.grant and self._roster.silence("actor", number) > messages.HANG_SECONDS:
            role = Role("actor", self._unit, number)
            self._logger.message(
              f"{role} has been silent for {messages.HANG_SECONDS:g} s: its episodes are truncated"
            )
            session.incarnation = -1  # refuses its calls until it joins again
            self._release(session)
            self._collector.truncate(session.lanes)
        finally:
          session.lock.release()

  def _wait_for_steps(self, helper: Helper, session: Session, seconds: float) -> int | None:
    """Waits for steps to grant; returns 0 if the actor may leave, None after a timeout."""
    if session.closed:
      self._limiter.wait_for(lambda: self._limiter.collected, seconds)
      if not self._limiter.collected:
        return None
      self._roster.dismiss(helper)
      return 0
    self._roster.waits(helper)
    return self._limiter.reserve(self._wanted(session), seconds, urgent=self._needs_data)

  def _wanted(self, session: Session) -> int:
    """Agent steps to grant at a time."""
    return len(session.lanes)

  def _take(self, helper: Helper, session: Session, request: Any) -> None:
    """Stores slots, unless an earlier attempt of the request has delivered them."""
    grant, heads = session.grant, self._replay.heads
    if not request.slots:
      return self._release(session)
    try:
      slots = Slots(**request.slots)
      self._replay.schema.check(slots)
    except (TypeError, AttributeError) as error:
      raise ValueError(f"malformed slots: {error}") from None
    if not np.isin(slots.lane, session.lanes).all():
      raise ValueError(f"{helper} has lanes {session.lanes}, got lanes {np.unique(slots.lane)}")
    if (slots.time < heads[slots.lane]).all():
      return self._release(session)
    if grant is None:
      raise ValueError(f"{helper} has no grant for the experience it sent")
    taken = int((slots["action"] >= 0).sum())
    if slots["step"].max() > self._limiter.learner_steps:
      raise ValueError(f"{helper} acted with weights newer than the learner's")
    if taken > grant.steps:
      raise ValueError(f"{helper} took {taken} steps of {grant.steps} granted")
    episodes = finished_episodes(request)
    try:
      self._collector.take(slots, episodes, granted=grant.steps)
    except ValueError:
      raise
    except Exception as error:
      raise RunFinished(f"the learner has failed: {error}") from error
    session.closed = grant.closing and taken == grant.steps
    session.grant = None
    self._limiter.end_acting(session)


def finished_episodes(request: messages.Step | messages.Gradient) -> list[Episode]:
  """Returns the episodes in a request. Raises ValueError if they are malformed."""
  if request.episodes.shape[1:] != (2,) or not np.isfinite(request.episodes).all():
    raise ValueError(f"episodes must be finite, [e, 2], got {request.episodes}")
  return [Episode(score, int(length)) for score, length in request.episodes.tolist()]
