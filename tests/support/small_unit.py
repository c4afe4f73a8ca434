"""A unit of the smallest size: a real hub with a real replay, pacer and weights, and stand-ins for what is learned."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import Variables
from speedyzero_jax.agents.efficientzero.reanalyse import Sweeper
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.heartbeats import Presence
from speedyzero_jax.cluster.learner_service import Hub
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run.builders import Game, make_replay
from speedyzero_jax.run.rate_limiter import Pacer
from speedyzero_jax.run.topology import lanes_of_actors
from speedyzero_jax.types import SearchResult
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.learner import make_mesh
from speedyzero_jax.workers.weights import ACTOR, REANALYSER, REFRESHER, WeightsStore

GAME = Game(tiny.FakeEnv.frame_shape, tiny.FakeEnv.frame_dtype, tiny.FakeEnv.num_actions)
SECONDS = 0.05  # that a poll waits


class Blueprint:
  """Of a network that is one number and a counter."""

  @staticmethod
  def init(_key=None, number: float = 0.0) -> Variables:
    return Variables(
      params={"w": jnp.full((2, 3), float(number))}, batch_stats={"n": jnp.zeros((), jnp.int32)}
    )


class Seer(Inference):
  """Says of every state what a checksum of its stack says, plus the network's number."""

  devices = 1

  def __init__(self, stack: int = 2, delay: float = 0.0):
    self._stack, self._delay = stack, delay

  def search(self, variables, frames, key, temperature, *, explore):  # type: ignore[override]
    policy, search_value, value = self._see(variables, frames)
    time.sleep(self._delay)
    salt = int(np.asarray(jax.random.key_data(key)).sum())
    action = (search_value.astype(np.int64) + salt) % policy.shape[-1]
    return SearchResult(action.astype(np.int32), policy, search_value, value)

  def value(self, variables, frames):  # type: ignore[override]
    return self._see(variables, frames)[2]

  def _see(self, variables, frames):
    number = np.float32(variables.params["w"][0, 0])
    states = range(frames.shape[1] - self._stack + 1)
    seen = [tiny.of_stacks(np.asarray(frames[:, k : k + self._stack])) for k in states]
    policy, search_value, value = (np.stack(part, axis=1) for part in zip(*seen, strict=True))
    return policy, search_value + number, value + number


class Unit:
  """A hub and what it connects; the collector is the unit itself.

  `taken` is what a journal would hold: what was acknowledged, in order.
  """

  def __init__(
    self,
    *overrides,
    actors=1,
    reanalysers=1,
    block_timeout=60.0,
    patient=False,
    half=False,
    kinds=(),
  ):
    self.config = tiny.config("priority.alpha=1", *overrides)
    self.replay = self.twin()
    self.pacer = Pacer(self.config)
    intervals = {ACTOR: 2, REANALYSER: 3, REFRESHER: 2}
    self.weights = WeightsStore(intervals, jax.devices()[0], Blueprint.init())
    self.sweepers = [
      Sweeper(self.config, kind, Seer(), self.weights, jax.random.key(0)) for kind in kinds
    ]
    self.taken, self.episodes, self.cuts, self.counted, self.told = [], [], [], {}, []
    self.presence = Presence({"actor": actors, "reanalyser": reanalysers}, self.told.append)
    self.lanes = lanes_of_actors(self.config.actor.lanes, actors)
    self._lock = threading.Lock()
    self.hub = Hub(
      replay=self.replay, pacer=self.pacer, weights=self.weights, collector=self, sweepers=self.sweepers,
      lanes=self.lanes, reanalysers=reanalysers, block_timeout=block_timeout, patient=patient,
      welcome=messages.ReanalyserWelcome("", ""), half_weights=half, count=self._count,
      presence=self.presence,
    )  # fmt: skip

  def twin(self):
    """An empty replay like the unit's."""
    return make_replay(self.config, GAME, make_mesh(jax.local_devices()[:1]), print, seed=0)

  def take(self, segments, episodes, *, granted):
    with self._lock:
      self.replay.append_many(segments)
      self.taken.append(list(segments))
      self.episodes += episodes
      self.pacer.add_env_steps(sum(int((s.action >= 0).sum()) for s in segments), reserved=granted)

  def cut(self, lanes):
    self.cuts.append(list(lanes))
    for lane in lanes:
      self.replay.truncate(lane)

  def _count(self, name, events):
    self.counted[name] = self.counted.get(name, 0) + events

  def fill(self, calls=20, seed=0):
    """Has a local actor play in all lanes; what it played is in `taken`."""
    lanes = self.config.actor.lanes
    stats = EpisodeStats(lanes)
    self.cut(range(lanes))
    actor = Actor(
      self.config,
      tiny.FakeEnv(lanes, seed),
      Seer(),
      jax.random.key(seed),
      stats,
      start=self.replay.heads,
    )
    for _ in range(calls):
      segments, _ = actor.step(
        self.weights.latest(ACTOR), budget=10**6, progress=0.0, random=False, last=False
      )
      self.take(segments, [], granted=0)

  def publish(self, step):
    self.weights.publish(step, Blueprint.init(number=step))

  def append_to(self, replay):
    """What a resumed unit does with its journal."""
    for segments in self.taken:
      for segment in segments:
        if segment.first[0]:
          replay.truncate(segment.lane)
      replay.append_many(segments)

  def learn(self):
    """Takes learner steps in a thread as they fall due, until all are taken or the pacer stops."""

    def body():
      while not self.pacer.stopping and self.pacer.learner_steps < self.config.learner.steps:
        self.pacer.wait_for(lambda: self.pacer.may_learn() and self.replay.num_eligible, 1.0)
        if self.pacer.may_learn() and self.replay.num_eligible:
          self.pacer.add_learner_step()

    thread = threading.Thread(target=body, name="learner", daemon=True)
    thread.start()
    return thread


class Direct:
  """A client without a network between it and the hub."""

  def __init__(self, hub):
    self._hub = hub

  def __getattr__(self, name):
    call = messages.CALLS[name]

    def ask(request):
      answer = getattr(self._hub, name)(request, *[SECONDS] * call.poll)
      while answer is None:
        answer = getattr(self._hub, name)(request, SECONDS)
      return answer

    return ask


def frames_of(replay):
  return replay.export_slots(np.zeros_like(replay.heads))


def assert_same(ours, theirs, *, besides=()):
  """Replays that hold the same and will behave alike."""
  for a, b in ((ours.state_dict(), theirs.state_dict()), (frames_of(ours), frames_of(theirs))):
    assert a.keys() == b.keys()
    for name in a.keys() - set(besides):
      np.testing.assert_array_equal(a[name], b[name], err_msg=name)
