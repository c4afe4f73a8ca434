"""Minimal learner process with its service, and its helpers' calls.

Journal, replay, rate limiter and weights are real, created by `run.build.build`. There is no
training: the agent is `tiny.ChecksumAgent`, and learner steps are only counted.
"""

import contextlib
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import tiny
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.learner_service import LearnerService
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.run import build, factories
from speedyzero_jax.run.experiment import Experiment, Membership
from speedyzero_jax.run.topology import lanes_of_actors
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR

SECONDS = 0.02  # timeout of a poll
A_HELPER, NO_RESULT = Helper("actor", 0), messages.Results(0, 0, {})
NAMES = {call.request: (name, bool(call.poll)) for name, call in messages.CALLS.items()}
BATCH = ("reanalyse.schedule=batch", "refresh.enabled=false")
SWEEP = {"reanalyse": "refresh.enabled=false", "refresh": "reanalyse.schedule=off"}


class Unit:
  """A learner process that serves actors and refreshers.

  Attributes:
    waits: metrics reported by the roster.
    now: time of the roster's clock, in seconds.
  """

  def __init__(self, folder, experiment: Experiment, overrides, actors: int, refreshers: int):
    self.folder, self.experiment, self.config = folder, experiment, experiment.config
    self._overrides, self.refreshers = overrides, refreshers
    self.agent, self.inference = experiment.agent, experiment.inference
    self.replay, self.weights = experiment.replay, experiment.weights
    self.limiter, self.collector = experiment.limiter, experiment.collector
    self.journal = experiment.recovery.journal
    self.lanes = lanes_of_actors(self.config.actor.lanes, actors)
    self.waits: list[dict[str, float]] = []
    self.now = 0.0
    counts = {"actor": actors, "refresher": refreshers}
    self.roster = Roster(counts, self.waits.append, lambda: self.now)
    self.episodes = []
    experiment.collector.episodes.record = self.episodes.append
    self.service = LearnerService(experiment, self.roster)

  # --- calls

  def join(self, actor=0, incarnation=0):
    return self.service.call("join", Helper("actor", actor, incarnation), messages.Join())

  def step(self, slots=None, sequence=0, actor=0, incarnation=0, *, episodes=(), seconds=SECONDS):
    """Sends slots and requests agent steps."""
    ended = np.array(episodes, np.float64).reshape(-1, 2)
    request = messages.Step(sequence, {} if slots is None else vars(slots), ended)
    return self.service.call("step", Helper("actor", actor, incarnation), request, seconds)

  def ask_weights(self, subscriber=ACTOR, helper=A_HELPER):
    return self.service.call("weights", helper, messages.WeightsRequest(subscriber))

  def work(self, refresher=0, incarnation=0, seconds=SECONDS, request=NO_RESULT):
    helper = Helper("refresher", refresher, incarnation)
    return self.service.call("work", helper, request, seconds)

  def frames(self, heads=None, refresher=0, incarnation=0):
    heads = np.zeros_like(self.replay.heads) if heads is None else heads
    helper = Helper("refresher", refresher, incarnation)
    return self.service.call("frames", helper, messages.FramesRequest(heads))

  def result(self, block, refresher=0, incarnation=0, *, step=None, arrays=None, seconds=SECONDS):
    """Sends a block's result, by default computed by its task; returns the next block."""
    lane = np.broadcast_to(block.lane[:, None], block.cell.shape)
    version = self.weights.latest(self.agent.tasks[block.task].subscription)
    if arrays is None:
      inputs = {"frames": self.replay.store.frame[lane, block.cell], **block.columns}
      arrays = self.inference.compute(version, block.task, inputs, jax.random.key(9))
    step = version.step if step is None else step
    request = messages.Results(block.block, step, arrays)
    return self.work(refresher, incarnation, seconds, request)

  # --- the work of actors and the learner

  def player(self, actor=0, seed=0) -> Actor:
    """The actor of an actor process."""
    lanes = self.lanes[actor]
    return self.actor_of(seed, lanes.start, self.replay.heads[lanes.start : lanes.stop])

  def actor_of(self, seed, first, heads) -> Actor:
    return Actor(
      self.config, self.agent, tiny.FakeEnv(len(heads), seed), self.inference,
      jax.random.key(seed), lane_offset=first, start=heads,
    )  # fmt: skip

  def play(self, player, granted):
    """Takes a granted step; returns its slots and their number of agent steps."""
    return player.step(
      self.weights.latest(ACTOR), budget=granted.steps, progress=0.0, random=False,
      last=granted.closing,
    )  # fmt: skip

  def fill(self, calls=20, seed=0):
    """Collects experience in all lanes, without grants."""
    self.collector.truncate(range(self.config.actor.lanes))
    player = self.actor_of(seed, 0, self.replay.heads)
    for _ in range(calls):
      slots, _ = self.play(player, messages.Grant(10**6, False, 0, 0.0, False))
      self.collector.take(slots, [], granted=0)

  def publish(self, step):
    """Publishes weights of a learner step; their value is the step's number."""
    self.weights.publish(step, self.agent.init(number=step))

  def learn(self, steps=1):
    for _ in range(steps):
      self.limiter.add_learner_step()

  def learn_in_thread(self) -> threading.Thread:
    """Counts learner steps in a thread as they become due, until the last one."""
    limiter, ready = self.limiter, self.experiment.can_draw

    def body():
      while not limiter.stopping and limiter.learner_steps < self.config.learner.steps:
        limiter.wait_for(lambda: limiter.may_learn() and ready(), 60.0)
        if limiter.may_learn() and ready():
          limiter.add_learner_step()

    thread = threading.Thread(target=body, name="learner", daemon=True)
    thread.start()
    return thread

  def refuses(self, call, match):
    """Asserts that the call is refused and no saved state changes."""

    def saved():
      limiter = self.limiter.pool, self.limiter.env_steps
      return *limiter, self.journal.heads.tolist(), len(self.episodes), self.replay.state_dict()

    before = saved()
    with pytest.raises(ValueError, match=match):
      call()
    assert before[:4] == saved()[:4]
    for name, array in saved()[4].items():
      np.testing.assert_array_equal(array, before[4][name], err_msg=name)

  def executing(self, size=4):
    """Has refreshers execute a sampled batch's work, in a thread.

    Returns the work, the thread, and a list that is empty until the work is done.
    """
    selection, done = self.replay.select(size), []
    works = self.agent.batch_work(self.replay, selection)

    def body():
      self.service.execute(works, 0)
      done.append(True)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return works, thread, done

  @contextlib.contextmanager
  def twin(self) -> Iterator[Experiment]:
    """Restarts the process from a copy of its durable journal, without a checkpoint."""
    folder = self.folder / "twin"
    folder.mkdir()
    for path in self.folder.glob("journal.sqlite*"):
      shutil.copy(path, folder)
    with _parts(folder, self._overrides, True, resume_step=0) as experiment:
      yield experiment


@contextlib.contextmanager
def unit(
  folder: Path, *overrides: str, actors: int = 1, refreshers: int = 1, durable: bool = False
) -> Iterator[Unit]:
  """Creates a unit in a folder, with `key=value` overrides of the tiny configuration.

  If `durable`, experience is on disk when it is acknowledged, as in a run with several processes.
  """
  with _parts(folder, overrides, durable) as experiment:
    made = Unit(folder, experiment, overrides, actors, refreshers)
    try:
      yield made
    finally:
      experiment.limiter.stop()


@contextlib.contextmanager
def _parts(
  folder: Path, overrides: tuple[str, ...], durable: bool, resume_step: int | None = None
) -> Iterator[Experiment]:
  changes = "run.mode=async", "priority.alpha=1", *overrides
  programs = tiny.checksum_parts(*(x for x in changes if x.startswith(("reanalyse", "refresh"))))[1]
  membership = Membership(runs_actor=False, runs_sweeps=False, durable=durable)
  with (
    mock.patch.object(factories, "make_agent", tiny.ChecksumAgent),
    mock.patch.object(build, "Inference", lambda *_, **__: programs),
    tiny.experiment(
      folder, *changes, resume_step=resume_step, membership=membership, shared=False
    ) as experiment,
  ):
    yield experiment


class Direct:
  """Client that calls the service within this process."""

  def __init__(self, service: LearnerService, helper: Helper):
    self._service, self._helper = service, helper

  def call(self, request):
    name, poll = NAMES[type(request)]
    answer = None
    while answer is None:
      answer = self._service.call(name, self._helper, request, *[SECONDS] * poll)
    return answer


def last_actions(unit: Unit) -> np.ndarray:
  """[L], the action of each lane's newest slot; -1 in the last slot of an episode."""
  store = unit.replay.store
  return store.action.reshape(-1)[store.flat(np.arange(store.lanes), unit.replay.heads - 1)]
