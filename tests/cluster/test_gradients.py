"""Tests of gradients computed by actors (A3C): equality with A2C, staleness, refusals, the end."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from small_unit import Direct
from speedyzero_jax.cluster import gradient_actor, messages
from speedyzero_jax.cluster.gradient_actor import GradientActor
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.learner_service import LearnerService
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.config import loader
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.run import batch_pipeline, build, factories, loops, snapshot
from speedyzero_jax.run.experiment import Membership
from speedyzero_jax.types import Slots
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Gradient, Learner, make_mesh
from speedyzero_jax.workers.weights import DivergedError, Version
from supervised import wait_for

# Two actors with two lanes each; T = 5.
OVERRIDES = (
  "network.hidden=4", "actor.lanes=4", "learner.batch_size=2", "learner.steps=40",
  "run.env_steps=500", "learner.devices=1", "evaluation.at_end=false",
)  # fmt: skip
UNROLL = 2 * 5 + 2  # agent steps of a grant


def configured(*overrides):
  return loader.load(["a3c"], [*OVERRIDES, *overrides])


@functools.cache
def parts(devices=1):
  """An agent, and its programs, compiled once."""
  config = configured()
  agent = factories.make_agent(config)
  return agent, Learner(config, agent, make_mesh(jax.devices()[:devices])), Inference(agent)


@pytest.fixture(autouse=True)
def programs(monkeypatch):
  for module in (gradient_actor, build):
    monkeypatch.setattr(module, "Inference", lambda *_, **__: parts()[2])
    monkeypatch.setattr(module, "Learner", lambda *_, **__: parts()[1])


class Unit:
  """A learner process with the service for two actors; it learns in a thread."""

  def __init__(self, experiment):
    self.experiment, self.limiter = experiment, experiment.limiter
    self.staleness, self.sequence = [], [0, 0]
    self.roster = Roster({"actor": 2, "refresher": 0}, lambda _: None)
    self.service = LearnerService(experiment, self.roster)
    log = experiment.logger.log_mean

    def spied(values):
      self.staleness += [int(values[name]) for name in [names.STALENESS] if name in values]
      log(values)

    experiment.logger.log_mean = spied
    self.ended, self.error = None, None
    self.thread = threading.Thread(target=self._learn, daemon=True)

  def _learn(self):
    try:
      self.ended = loops.run(self.experiment)
    except BaseException as error:
      self.error = error
    self.service.finish(0)

  def join(self, actor, incarnation=0):
    self.sequence[actor] = 0
    return self.service.call("join", Helper("actor", actor, incarnation), messages.Join())

  def send(self, actor=0, steps=0, version=0, arrays=None, *, incarnation=0, sequence=None, **more):
    """Sends the actor's next message; returns its grant."""
    number = self.sequence[actor] if sequence is None else sequence
    ended = more.get("episodes", np.zeros((0, 2)))
    request = messages.Gradient(number, steps, ended, version, arrays or {}, {})
    helper = Helper("actor", actor, incarnation)
    grant = self.service.call("gradient", helper, request, more.get("seconds", 60))
    self.sequence[actor] = number + (grant is not None)
    return grant

  def arrays(self, number=0.0):
    like = self.experiment.learner.abstract().variables
    return messages.named(jax.tree.map(lambda x: np.full(x.shape, number, x.dtype), like))

  def state(self):
    limiter = self.limiter
    return limiter.pool, limiter.env_steps, limiter.learner_steps, len(self.experiment.batches)


@pytest.fixture
def make_unit(tmp_path) -> Iterator:
  with contextlib.ExitStack() as stack:

    def make(*overrides, resume_step=None, learn=True):
      config = configured(*overrides)
      logger = stack.enter_context(MetricsLogger(config, tmp_path))
      resume, membership = resume_step is not None, Membership(runs_actor=False, durable=True)
      experiment = build.build(config, tmp_path, logger, resume=resume, membership=membership)
      stack.callback(experiment.close)
      unit = Unit(experiment)
      if learn:
        unit.thread.start()
        stack.callback(unit.thread.join, 20)
      stack.callback(unit.limiter.stop)
      return unit

    yield make


# --- the gradient


@pytest.mark.parametrize("devices", [1, 2])
def test_one_actor_updates_the_weights_as_a2c_would(monkeypatch, devices):
  """The same slots are in the replay of a learner that computes gradients itself."""
  (agent, alone, _), key, played = parts(), jax.random.key(0), []
  learner = parts(devices)[1]
  config = configured("topology.actors=1", "actor.lanes=2")
  env = make_env(config.env, 2, 0, training=True)
  actor = GradientActor(config, agent, env, seed=0, first=2)
  append = actor._replay.append
  monkeypatch.setattr(actor._replay, "append", lambda x: (played.append(x), append(x)))
  replay = factories.make_replay(config, agent, make_mesh(jax.devices()[:1]), print, seed=0)
  ours, theirs = learner.init(key), alone.init(key)
  for step in range(4):
    version = Version(step, jax.device_get(ours.variables))
    taken, _ = actor.unroll(version, messages.Grant(UNROLL, False, step, 0.0, False))
    arrays, metrics = actor.gradient(version)
    slots = Slots.concatenate(played)
    played.clear()
    assert len(slots) == UNROLL - 2 * (step > 0) and taken == (slots["action"] >= 0).sum()
    replay.append(slots)
    batch = batch_pipeline.draw(agent, replay, 2, step, lambda *_: None, contextlib.nullcontext)
    theirs, expected = alone.step(theirs, alone.put(batch.arrays), key)
    variables = messages.unnamed(ours.variables, arrays)
    gradient = Gradient(*variables, {}, np.zeros(0), np.int32(step))
    ours, result = learner.apply(ours, gradient)
    applied = learner.fetch(result).metrics
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
      np.testing.assert_allclose(a, b, rtol=0, atol=0 if devices == 1 else 1e-6)
    assert applied[names.STALENESS] == 0 and ours.step == step + 1
    measured = {**metrics, **applied}
    for name, value in {**alone.fetch(expected).metrics, **batch.info}.items():
      np.testing.assert_allclose(measured[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
  env.close()


def test_gradients_are_applied_once_each_and_their_staleness_is_logged(make_unit):
  unit = make_unit()
  for actor in (0, 1):
    assert unit.join(actor).first == 2 * actor
    grant = unit.send(actor)
    assert (grant.steps, grant.weights, grant.closing) == (UNROLL, 0, False)
  ended = np.array([[1.0, 9]])
  assert unit.send(0, 11, 0, unit.arrays(), episodes=ended).weights == 1
  unit.sequence[0] -= 1  # a retry, as its answer was lost
  assert unit.send(0, 11, 0, unit.arrays(), episodes=ended).weights == 1
  assert unit.send(1, UNROLL, 0, unit.arrays()).weights == 2  # from the same weights
  assert unit.send(0, 10, 1, unit.arrays()).weights == 3
  assert unit.send(0, 10, 3, unit.arrays()).weights == 4
  assert unit.send(0, 10, 4, unit.arrays()).weights == 5
  wait_for(lambda: len(unit.staleness) == 4)  # a step's results are logged after the next one
  assert unit.staleness == [0, 1, 1, 0]
  assert unit.limiter.env_steps == 11 + UNROLL + 30
  assert unit.experiment.collector.episodes.summary()[names.EPISODES] == 1


def test_a_gradient_repeated_while_it_waits_is_queued_once(make_unit):
  unit = make_unit(learn=False)
  unit.join(0)
  unit.send(0)
  for _ in range(2):
    assert unit.send(0, 10, 0, unit.arrays(), seconds=0.01) is None
  assert len(unit.experiment.batches) == 1 and unit.limiter.env_steps == 10
  unit.thread.start()
  assert unit.send(0, 10, 0, unit.arrays()).weights == 1
  assert unit.limiter.env_steps == 10


def test_a_lost_actor_loses_its_unroll_only(make_unit):
  unit = make_unit()
  unit.join(0), unit.join(1)
  pool = unit.limiter.pool
  unit.send(0), unit.send(1)
  unit.join(0, incarnation=1)
  assert unit.limiter.pool == pool - UNROLL
  with pytest.raises(ValueError, match="has incarnation 1 now"):
    unit.send(0, 10, 0, unit.arrays(), sequence=1)
  assert unit.send(0, incarnation=1).steps == UNROLL
  assert unit.send(0, 10, 0, unit.arrays(), incarnation=1).weights == 1


def test_steps_of_a_lost_actor_do_not_go_to_one_that_has_closed_its_lanes(make_unit):
  unit = make_unit("run.env_steps=40", "learner.steps=2", learn=False)
  unit.join(0), unit.join(1)
  granted = [unit.send(*message).steps for message in ((0,), (1,), (0, UNROLL), (1, UNROLL))]
  assert granted == [UNROLL, UNROLL, UNROLL, 40 - 3 * UNROLL]
  assert unit.send(1, 4, seconds=0.01) is None
  unit.join(0, incarnation=1)
  assert unit.send(1, 4, seconds=0.01) is None
  assert unit.send(0, incarnation=1).steps == UNROLL
  unit.join(1, incarnation=1)
  assert unit.send(1, incarnation=1, seconds=0.01) is None
  assert unit.send(0, UNROLL, incarnation=1).steps == unit.send(1, incarnation=1).steps == 0
  begin = time.monotonic()
  unit.service.finish(10)
  assert time.monotonic() - begin < 5  # both are known to have left


# --- refusals


def test_impossible_gradients_are_refused(make_unit):
  unit = make_unit(learn=False)
  unit.join(0)
  good = unit.arrays()
  name, array = next(iter(good.items()))
  others = {key: value for key, value in good.items() if key != name}

  def refused(match, *message, **more):
    before = unit.state()
    with pytest.raises(ValueError, match=match):
      unit.send(0, *message, **more)
    assert unit.state() == before

  refused("took 10 steps of 0 granted", 10, 0, good)
  unit.send(0)
  refused("took 13 steps of 12 granted", UNROLL + 1, 0, good)
  refused("took -1 steps", -1, 0, good)
  refused("used weights of step 1, the newest: 0", 10, 1, good)
  refused("used weights of step -1", 10, -1, good)
  refused("malformed gradient: KeyError", 10, 0, others)
  refused("malformed gradient", 10, 0, {**others, name: [1.0]})
  refused("gradient of another network", 10, 0, {**others, name: array[..., :1]})
  refused("gradient of another network", 10, 0, {**others, name: array.astype(np.float64)})
  refused("episodes must be finite", 10, 0, good, episodes=np.array([[np.nan, 1]]))
  refused("sent step 2 after step 0", 10, 0, good, sequence=2)
  assert unit.send(0, 10, 0, good, seconds=0.01) is None and len(unit.experiment.batches) == 1


def test_a_gradient_that_is_not_finite_ends_the_run(make_unit):
  unit = make_unit()
  unit.join(0)
  unit.send(0)
  with pytest.raises(RunFinished, match="training has diverged"):
    unit.send(0, 10, 0, unit.arrays(np.nan))
  unit.thread.join(10)
  assert isinstance(unit.error, DivergedError) and unit.limiter.learner_steps == 0


# --- the end


def act(unit, number, incarnation=0):
  """Runs an actor's main loop in a thread; returns the thread."""
  client = Direct(unit.service, Helper("actor", number, incarnation))
  config, agent = unit.experiment.local_config, parts()[0]

  def body():
    with contextlib.suppress(RunFinished):
      gradient_actor.send_gradients(config, agent, client)

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  return thread


def finish(unit):
  threads = [unit.thread, act(unit, 0), act(unit, 1)]
  for thread in threads:
    thread.join(60)
  assert not any(thread.is_alive() for thread in threads)
  if unit.error:
    raise unit.error
  assert unit.ended


def test_the_run_ends_with_the_learner_steps_and_resumes_from_a_checkpoint(make_unit):
  unit = make_unit("run.pause_at=15")
  unit.experiment.after_step.append(
    lambda: unit.limiter.learner_steps == 15 and unit.experiment.interrupt()
  )
  threads = [act(unit, 0), act(unit, 1)]
  for thread in (unit.thread, *threads):
    thread.join(60)
  assert unit.ended is False and unit.limiter.learner_steps == 15
  snapshot.save(unit.experiment, required=True)
  steps = unit.limiter.env_steps
  assert 100 < steps < 250
  unit.experiment.close()
  unit = make_unit(resume_step=15, learn=False)
  unit.join(0), unit.send(0)
  assert unit.send(0, 10, 15, unit.arrays(), seconds=0.01) is None  # it is step 16
  unit.experiment.close()
  unit = make_unit(resume_step=15)
  assert (unit.limiter.learner_steps, unit.limiter.env_steps) == (15, steps)
  finish(unit)
  assert unit.limiter.learner_steps == 40 and steps < unit.limiter.env_steps < 500
  assert len(unit.staleness) == 25 and min(unit.staleness) >= 0


def test_the_run_ends_with_the_agent_steps(make_unit, monkeypatch):
  gradient = GradientActor.gradient

  def sometimes(actor, version):
    found = gradient(actor, version)
    return found if version.step < 10 else ({}, {})

  monkeypatch.setattr(GradientActor, "gradient", sometimes)
  unit = make_unit()
  finish(unit)
  assert unit.limiter.env_steps == 500 and 10 <= unit.limiter.learner_steps < 40
