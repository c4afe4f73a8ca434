"""What a unit's learner does with what its actors and reanalysers say: sessions, grants, experience, weights, work.

Answers the calls of `messages.CALLS` (see `service.Hub`); all methods may be called from many threads at once. Owns no
socket and no thread, and knows nothing of networks: it connects callers with the replay, the pacer and the weights.
"""

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.efficientzero.reanalyse import Findings, Sweeper, Work, record
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.cluster.heartbeats import Presence
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.rate_limiter import Pacer
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.weights import ACTOR, WeightsStore

_CHUNK = 256  # frames in one answer
_LOOK = 1.0  # seconds between looks at who is there


class Collector(Protocol):
  """Takes experience in: durably, into the replay, and into the counters, as one.

  Raises ValueError for what is refused. Whatever else it raises it tells who runs the unit, for which all is over then.
  """

  def take(
    self, segments: Sequence[Segment], episodes: Sequence[Episode], *, granted: int
  ) -> None: ...

  def cut(self, lanes: Sequence[int]) -> None: ...


@dataclasses.dataclass(eq=False)
class _Actor:
  """An actor's session."""

  lanes: range
  incarnation: int = -1
  sequence: int = -1  # of its last grant
  grant: messages.Grant | None = None  # not yet paid back by an append
  closed: bool = False  # it has ended all its episodes and takes no further step
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass
class _Handed:
  """A block that somebody is computing."""

  work: Work
  holder: tuple[int, int]  # reanalyser, incarnation
  deadline: float


class Batch:
  """Works of a sampled batch, to be waited for."""

  def __init__(self, works: Sequence[Work]):
    self.left = len(works)


class Hub:
  """Serves one unit.

  Args:
    replay: of the unit.
    pacer: of the unit.
    weights: of the unit's learner.
    collector: takes the actors' experience.
    sweepers: whole-buffer passes that the reanalysers do.
    lanes: of each actor.
    reanalysers: how many there are.
    block_timeout: seconds after which a block that did not come back is given to somebody else; after twice as long
      nobody waits for it any more.
    patient: wait for a batch as long as it takes, whoever is there.
    welcome: what reanalysers are told of the frames.
    half_weights: send weights as bfloat16.
    count: takes rates: of states searched, of states refreshed.
    presence: is told who is there.
  """

  def __init__(
    self,
    *,
    replay: Replay,
    pacer: Pacer,
    weights: WeightsStore,
    collector: Collector,
    sweepers: Sequence[Sweeper],
    lanes: Sequence[range],
    reanalysers: int,
    block_timeout: float,
    patient: bool,
    welcome: messages.ReanalyserWelcome,
    half_weights: bool,
    count: Callable[[str, float], None],
    presence: Presence,
  ):
    self._replay, self._pacer, self._weights, self._collector = replay, pacer, weights, collector
    self._sweepers, self._block_timeout, self._patient = sweepers, block_timeout, patient
    self._reanalyser_welcome, self._half = welcome, half_weights
    self._actors = [_Actor(part) for part in lanes]
    self._reanalysers = [-1] * reanalysers  # incarnations
    self._lock = threading.Lock()  # of what follows
    self._numbers = itertools.count(1)
    self._waiting: deque[tuple[Work, Batch]] = deque()
    self._handed: dict[int, _Handed] = {}
    self._batches: dict[int, Batch] = {}
    self._count, self._presence = count, presence
    self._packed: dict[str, messages.Weights] = {}
    self._over = False
    self._joined: set[str] = set()  # who is to be sent home
    self._sent_home = threading.Condition()

  def finish(self, patience: float) -> None:
    """From now on every caller is sent home. Waits so many seconds for those who are there to come and hear it."""
    self._over = True
    self._pacer.notify()
    with self._sent_home:
      self._sent_home.wait_for(lambda: not self._joined, patience)

  def _go_on(self, who: str) -> None:
    """Raises RunOver for whom there is nothing more to do."""
    if self._over:
      self._goodbye(who)
      raise RunOver("the run has ended")

  def _welcome(self, who: str) -> None:
    with self._sent_home:
      self._joined.add(who)

  def _goodbye(self, who: str) -> None:
    with self._sent_home:
      self._joined.discard(who)
      self._sent_home.notify_all()

  # --- actors

  def join_actor(self, request: messages.ActorJoin) -> messages.ActorWelcome:
    """A new incarnation's lanes begin new episodes; what its forerunner had not handed over is nobody's.

    Raises RunOver when there is nothing left to collect.
    """
    actor = self._actor(request.actor)
    with actor.lock:
      if request.incarnation < actor.incarnation:
        raise ValueError(
          f"actor {request.actor} has incarnation {actor.incarnation} now, this is {request.incarnation}"
        )
      if request.incarnation > actor.incarnation:
        actor.incarnation, actor.sequence, actor.closed = request.incarnation, -1, False
        self._give_back(actor)
        self._collector.cut(actor.lanes)
        self._presence.joined("actor", request.actor)
      if (
        self._pacer.collected
      ):  # an episode would be one empty slot in each lane, for which an old one has to go
        self._goodbye(f"actor {request.actor}")
        raise RunOver("everything is collected")
      self._welcome(f"actor {request.actor}")
      heads = self._replay.heads[actor.lanes.start : actor.lanes.stop]
    return messages.ActorWelcome(actor.lanes.start, heads)

  def _actor(self, number: int) -> _Actor:
    self._go_on(f"actor {number}")
    self._presence.heard("actor", number)
    return self._actors[number]

  def _give_back(self, actor: _Actor) -> None:
    grant, actor.grant = actor.grant, None
    if grant is not None:
      self._pacer.release(grant.steps)
      self._pacer.end_acting(actor)

  def grant(self, request: messages.GrantRequest, seconds: float) -> messages.Grant | None:
    """Agent steps from the unit's pool, as soon as the pacer allows any."""
    actor = self._actor(request.actor)
    with actor.lock:
      _check(actor.incarnation, request.incarnation, f"actor {request.actor}")
      if request.sequence == actor.sequence and actor.grant is not None:
        return actor.grant  # the answer was lost
      if request.sequence <= actor.sequence:
        raise ValueError(f"grant {request.sequence} of actor {request.actor} was used already")
      wanted = min(request.steps, len(actor.lanes))
      if actor.closed:
        self._pacer.wait_for(lambda: self._pacer.collected, seconds)
        steps = None
        if self._pacer.collected:  # which is all it was waiting for
          steps = 0
          self._goodbye(f"actor {request.actor}")
      else:
        self._presence.asks("actor", request.actor)
        steps = self._pacer.reserve(wanted, seconds, urgent=lambda: not self._replay.num_eligible)
      if steps is None:
        self._go_on(f"actor {request.actor}")
        return None
      self._presence.served("actor", request.actor)
      self._give_back(actor)
      actor.sequence = request.sequence
      if steps:  # else it goes home, or closes its lanes with frames that no step follows
        self._pacer.begin_acting(actor)  # before looking what weights there are
      actor.grant = messages.Grant(
        steps=steps,
        # Fewer than wanted are all there were, whatever came back since: lanes that are not reached are cut.
        closing=steps < wanted or not self._pacer.pool,
        weights=self._weights.latest(ACTOR).step if self._pacer.bounds_lag else 0,
        progress=self._pacer.progress,
        random=self._pacer.playing_randomly,
      )
      return actor.grant

  def append(self, request: messages.Append) -> messages.Acknowledged:
    """Makes experience durable and part of the replay. What is there already is acknowledged again."""
    actor = self._actor(request.actor)
    with actor.lock:
      _check(actor.incarnation, request.incarnation, f"actor {request.actor}")
      heads = self._replay.heads
      for segment in request.segments:
        if segment.lane not in actor.lanes:
          raise ValueError(
            f"lane {segment.lane} is not actor {request.actor}'s: it has {actor.lanes}"
          )
      new = [s for s in request.segments if s.start + len(s.frame) > heads[s.lane]]
      if new:
        if actor.grant is None or request.sequence != actor.sequence:
          raise ValueError(f"actor {request.actor} was not granted what it appends")
        taken = sum(int((segment.action >= 0).sum()) for segment in new)
        if max(int(s.step.max()) for s in new) > self._pacer.learner_steps:
          raise ValueError(f"actor {request.actor} acted with weights that there are none of")
        if taken > actor.grant.steps:
          raise ValueError(
            f"actor {request.actor} took {taken} steps of {actor.grant.steps} granted"
          )
        if (
          len(request.score) > len(actor.lanes)
          or not np.isfinite(request.score).all()
          or (request.length < 0).any()
        ):
          raise ValueError(
            "score and length must be of at most one game for each lane, finite and not negative"
          )
        ended = zip(request.score.tolist(), request.length.tolist(), strict=True)
        try:
          self._collector.take(new, [Episode(*game) for game in ended], granted=actor.grant.steps)
        except ValueError:
          raise
        except Exception as error:
          raise RunOver(f"the unit has failed: {error}") from error
        actor.closed = actor.grant.closing and taken == actor.grant.steps
        actor.grant = None
        self._pacer.end_acting(actor)
      heads = self._replay.heads[actor.lanes.start : actor.lanes.stop]
    return messages.Acknowledged(heads)

  # --- weights

  def weights(self, request: messages.WeightsRequest, seconds: float) -> messages.Weights | None:
    """The newest version meant for a subscriber, if it has not got it."""
    self._presence.heard("actor" if request.subscriber == ACTOR else "reanalyser", request.number)
    version = self._weights.wait_newer(
      request.subscriber, request.have, 0.0 if self._over else seconds
    )
    if version is None and self._over:  # not before: a block may want the newest
      raise RunOver("the run has ended")
    if version is None:
      return None
    packed = self._packed.get(request.subscriber)
    if packed is None or packed.step != version.step:  # two threads may pack the same; no harm
      arrays = {
        name: np.asarray(
          leaf.astype(jnp.bfloat16) if self._half and leaf.dtype == jnp.float32 else leaf
        )
        for name, leaf in messages.named(version.variables).items()
      }
      packed = self._packed[request.subscriber] = messages.Weights(version.step, arrays)
    return packed

  # --- reanalysers

  def join_reanalyser(self, request: messages.ReanalyserJoin) -> messages.ReanalyserWelcome:
    """What its forerunner was computing is given to others at once."""
    who = f"reanalyser {request.reanalyser}"
    self._go_on(who)
    with self._lock:
      known = self._incarnation(request.reanalyser)
      if request.incarnation < known:
        raise ValueError(f"{who} has incarnation {known} now, this is {request.incarnation}")
      if request.incarnation > known:
        self._presence.joined("reanalyser", request.reanalyser)
      self._reanalysers[request.reanalyser] = request.incarnation
      self._welcome(who)
      gone = [
        n
        for n, h in self._handed.items()
        if h.holder[0] == request.reanalyser and h.holder[1] < request.incarnation
      ]
      for number in gone:
        self._again(number)
    self._pacer.notify()
    return self._reanalyser_welcome

  def _incarnation(self, reanalyser: int) -> int:
    self._presence.heard("reanalyser", reanalyser)
    return self._reanalysers[reanalyser]

  def _again(self, number: int) -> None:
    """Puts a block that was handed out back where it came from. A sweep comes round to its states by itself."""
    handed, batch = self._handed.pop(number), self._batches.pop(number, None)
    if batch is not None:
      self._waiting.appendleft((handed.work, batch))

  def work(self, request: messages.WorkRequest, seconds: float) -> messages.Block | None:
    """The next block: of a batch that the learner waits for, or of a sweep that is due."""
    who = f"reanalyser {request.reanalyser}"
    self._go_on(who)
    _check(self._incarnation(request.reanalyser), request.incarnation, who)
    found: list[messages.Block] = []

    def look() -> bool:
      if block := self._next((request.reanalyser, request.incarnation)):
        found.append(block)
      return bool(found) or self._over

    self._presence.asks("reanalyser", request.reanalyser)
    self._pacer.wait_for(look, seconds)
    if not found:
      self._go_on(who)
      return None
    self._presence.served("reanalyser", request.reanalyser)
    return found[0]

  def _next(self, holder: tuple[int, int]) -> messages.Block | None:
    with self._lock:
      now = time.monotonic()
      for number in [n for n, h in self._handed.items() if h.deadline < now or h.holder == holder]:
        self._again(number)  # overdue, or lost on its way: who has a block asks for none
      batch = None
      if self._waiting:
        work, batch = self._waiting.popleft()
      else:
        due = (
          s
          for s in self._sweepers
          if self._replay.num_eligible and s.due(self._replay, self._pacer.learner_steps)
        )
        sweeper = next(due, None)
        if sweeper is None:
          return None
        work = sweeper.next(self._replay)
      number = next(self._numbers)
      self._handed[number] = _Handed(work, holder, now + self._block_timeout)
      if batch is not None:
        self._batches[number] = batch
    cell, written = self._replay.window_cells(work.lane, work.time, work.real.shape[1] - 1)
    return messages.Block(
      block=number,
      search=work.search,
      subscriber=work.subscriber,
      lane=work.lane.astype(np.int32),
      cell=cell.astype(np.int32),
      step=self._weights.latest(work.subscriber).step,
      frames=written,
    )

  def result(self, request: messages.Result) -> messages.Ok:
    """Writes what was found; of a block that somebody else has meanwhile been given, nothing."""
    with self._lock:
      self._incarnation(request.reanalyser)
      handed = self._handed.get(request.block)
      if handed is None or handed.holder != (request.reanalyser, request.incarnation):
        return messages.Ok()
    newest = self._weights.latest(handed.work.subscriber).step
    if not 0 <= request.step <= newest:
      raise ValueError(f"result.step must be in 0..{newest}, got {request.step}")
    found = len(request.policy) > 0
    findings = Findings(
      request.step,
      request.value,
      request.policy if found else None,
      request.search_value if found else None,
    )
    record(self._replay, handed.work, findings)
    with self._lock:
      if self._handed.pop(request.block, None) is not None:
        batch = self._batches.pop(request.block, None)
        if batch is not None:
          batch.left -= 1
    if handed.work.search or handed.work.refresh:
      rate = names.REANALYSED_PER_SECOND if handed.work.search else names.REFRESHED_PER_SECOND
      self._count(rate, int(handed.work.real.sum()))
    self._pacer.notify()
    return messages.Ok()

  def reanalyse(self, works: Sequence[Work]) -> bool:
    """Has a sampled batch's works done and waits for them. Returns whether all were done.

    Unless patient it does not wait forever, and not at all while no reanalyser is heard of. Never when the run is to
    end.
    """
    parts = [part for work in works for part in _split(work, len(self._reanalysers))]
    batch = Batch(parts)
    with self._lock:
      self._waiting.extend((part, batch) for part in parts)
    self._pacer.notify()
    until = (
      math.inf if self._patient else time.monotonic() + 2 * self._block_timeout
    )  # once handed out again, maybe

    def settled() -> bool:
      return not batch.left or self._pacer.hurrying or self._pacer.stopping

    while (
      not settled()
      and time.monotonic() < until
      and (self._patient or self._presence.anybody("reanalyser"))
    ):
      self._pacer.wait_for(settled, min(_LOOK, until - time.monotonic()))
    with (
      self._lock
    ):  # what is being computed may still come back, but is not worth being handed out again
      self._waiting = deque(item for item in self._waiting if item[1] is not batch)
      self._batches = {
        number: other for number, other in self._batches.items() if other is not batch
      }
    return batch.left == 0

  def frames(self, request: messages.FramesRequest, seconds: float) -> messages.FramesChunk | None:
    """Frames in the order in which they came, for reanalysers on other machines."""
    _check(
      self._incarnation(request.reanalyser), request.incarnation, f"reanalyser {request.reanalyser}"
    )
    self._pacer.wait_for(
      lambda: self._over or self._replay.frames_written > request.sequence, seconds
    )
    following, lane, cell, frame = self._replay.frames_since(request.sequence, _CHUNK)
    if not len(lane):
      if self._over:  # not before: a block may need them
        raise RunOver("the run has ended")
      return None
    return messages.FramesChunk(following, lane.astype(np.int32), cell.astype(np.int32), frame)


def _check(known: int, said: int, who: str) -> None:
  if said != known:
    raise ValueError(f"{who} has incarnation {known} now, this is {said}")


def _split(work: Work, parts: int) -> list[Work]:
  """The same work in about equal parts."""
  bounds = np.linspace(0, len(work.lane), min(parts, len(work.lane)) + 1).astype(int)
  return [
    work._replace(lane=work.lane[a:b], time=work.time[a:b], real=work.real[a:b])
    for a, b in itertools.pairwise(bounds.tolist())
  ]
