"""Actors and reanalysers on the far side of a real service do what local ones would have done, to the bit."""

import contextlib
import dataclasses
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from small_unit import GAME, Blueprint, Seer, Unit, assert_same

from speedyzero_jax.agents.efficientzero.reanalyse import BatchReanalyser
from speedyzero_jax.cluster import (
  codec,
  grpc_server,
  heartbeats,
  messages,
  remote_actor,
  remote_reanalyser,
)
from speedyzero_jax.cluster.grpc_client import Client, Refused
from speedyzero_jax.cluster.remote_reanalyser import FetchedFrames, MappedFrames
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run.builders import replay_capacity
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR, REANALYSER, REFRESHER

TOKEN = bytes(range(32))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
  monkeypatch.setattr(grpc_server, "POLL_SECONDS", 0.2)
  monkeypatch.setattr(
    remote_actor, "make_env", lambda _, lanes, seed, training: tiny.FakeEnv(lanes, seed)
  )
  for module in (remote_actor, remote_reanalyser):
    monkeypatch.setattr(module, "Inference", lambda *_, **__: Seer())


def form_of(unit):
  lanes = unit.config.actor.lanes
  capacity = replay_capacity(unit.config)
  weights = messages.named(jax.eval_shape(Blueprint.init, jax.random.key(0)))
  return codec.Form(lanes, capacity, GAME.num_actions, GAME.frame_shape, GAME.frame_dtype, weights)


@contextlib.contextmanager
def served(unit, clients=4):
  """A function that makes clients of the unit, and one that runs a role in a thread; all have ended at the end."""
  form, threads, errors = form_of(unit), [], []

  def client():
    return opened.enter_context(Client(server.address, TOKEN, form, patience=5.0))

  def start(role, *arguments):
    def body():
      try:
        role(*arguments)
      except BaseException as error:
        errors.append(error)

    threads.append(threading.Thread(target=body, daemon=True))
    threads[-1].start()
    return threads[-1]

  with (
    grpc_server.serve(unit.hub, "127.0.0.1:0", TOKEN, form, clients=clients) as server,
    contextlib.ExitStack() as opened,
  ):
    yield client, start
    begin = time.monotonic()
    unit.hub.finish(10)
    assert time.monotonic() - begin < 5  # everybody has heard it
    for thread in threads:
      thread.join(10)
      assert not thread.is_alive()
    assert not errors


@pytest.mark.parametrize("seed", range(3))
def test_an_actor_collects_what_a_local_one_would(seed):
  unit = Unit(
    f"run.seed={seed}", "actor.random_steps=30", f"run.env_steps={100 + seed}", reanalysers=0
  )
  role, lanes = Role("actor", 0, 0), unit.config.actor.lanes
  learner = unit.learn()
  with served(unit) as (client, start):
    acting = start(remote_actor.act, unit.config, Blueprint, client(), role, 5)
    acting.join(30)  # it goes home by itself when all is collected
    assert not acting.is_alive() and unit.pacer.collected
    learner.join(10)
  own = derived_seed(seed, str(role), 5)
  stats, other = EpisodeStats(lanes), unit.twin()
  actor = Actor(unit.config, tiny.FakeEnv(lanes, own), Seer(), jax.random.key(own), stats)
  taken, episodes = 0, []
  while taken < unit.config.run.env_steps:
    left = unit.config.run.env_steps - taken
    random = taken < unit.config.actor.random_steps
    segments, count = actor.step(
      unit.weights.latest(ACTOR), budget=left, progress=0.0, random=random
    )
    other.append_many(segments)
    episodes += actor.finished
    taken += count
  assert len(episodes) > 3 and unit.episodes == episodes
  assert_same(unit.replay, other)


def test_an_actor_plays_other_games_when_something_was_collected_already(monkeypatch):
  """All may have been started again, and count incarnations from 0."""
  role, seeds = Role("actor", 0, 0), []
  monkeypatch.setattr(
    remote_actor,
    "make_env",
    lambda _, lanes, seed, training: (seeds.append(seed), tiny.FakeEnv(lanes, seed))[1],
  )
  for collected in (0, 3, 6):
    unit = Unit("run.env_steps=60", reanalysers=0)
    unit.fill(collected)
    learner = unit.learn()
    with served(unit) as (client, start):
      start(remote_actor.act, unit.config, Blueprint, client(), role, 0).join(30)
      learner.join(10)
    assert unit.pacer.collected
  assert seeds[0] == derived_seed(0, str(role)) and len(set(seeds)) == 3


def test_an_actor_waits_for_the_weights_that_it_is_granted_steps_with(monkeypatch):
  unit = Unit("run.env_steps=60", "actor.max_lag=5", "actor.weights_interval=2", reanalysers=0)
  for _ in range(4):
    unit.pacer.add_learner_step()
  unit.publish(4)
  asked, latest = [], RemoteWeights.latest
  monkeypatch.setattr(
    RemoteWeights, "latest", lambda *a, at_least: (asked.append(at_least), latest(*a, at_least))[1]
  )
  learner = unit.learn()
  with served(unit) as (client, start):
    start(remote_actor.act, unit.config, Blueprint, client(), Role("actor", 0, 0), 0).join(30)
    learner.join(10)
  assert unit.pacer.collected and asked[0] == 4
  for _ in range(20):
    unit.pacer.add_learner_step()
  assert not unit.pacer.lagging  # nobody waits for who has gone home


def memory(unit):
  """The replay's frames where others can map them: the path, and what it is a link to."""
  descriptor = os.memfd_create("test")
  os.write(descriptor, unit.replay._store.frame.tobytes())
  path = f"/proc/{os.getpid()}/fd/{descriptor}"
  return path, os.readlink(path)


@pytest.mark.parametrize(
  "frames", ["mapped", "elsewhere", "gone", "another's", "none", "on devices"]
)
def test_reanalysers_find_what_a_local_one_would(frames, monkeypatch):
  unit = Unit(
    "reanalyse.schedule=batch", "reanalyse.explore=false", reanalysers=2, patient=True
  )  # they are about to come
  theirs = (
    loader.override(unit.config, ["replay.frames=device"])
    if frames == "on devices"
    else unit.config
  )
  unit.fill(30)
  held, explored, search = [], [], Seer.search
  path, link = memory(unit)
  places = {
    "mapped": (path, link), "elsewhere": (path, "/memfd:other (deleted)"), "gone": (f"{path}000", link),
    "another's": (__file__, link), "none": ("", ""), "on devices": (path, link),
  }  # fmt: skip
  unit.hub._reanalyser_welcome = messages.ReanalyserWelcome(*places[frames])
  kind = MappedFrames if frames == "mapped" else FetchedFrames
  gather = kind.gather

  def spied(*a):
    windows = gather(*a)
    held.append((type(a[0]), isinstance(windows, jax.Array)))
    return windows

  monkeypatch.setattr(kind, "gather", spied)
  monkeypatch.setattr(
    Seer, "search", lambda *a, explore: (explored.append(explore), search(*a, explore=explore))[1]
  )
  other = unit.twin()
  unit.append_to(other)
  local = BatchReanalyser(unit.config, Seer(), unit.weights, jax.random.key(0))
  with served(unit) as (client, start):
    for number in range(2):
      role = Role("reanalyser", 0, number)
      start(remote_reanalyser.reanalyse, theirs, Blueprint, client(), form_of(unit), role, 0)
    for step in (3, 6, 9):
      unit.publish(step)
      lane, at, _ = unit.replay.sample(8)
      assert unit.hub.reanalyse(local.works(unit.replay, lane, at))
      local(other, lane, at)
  assert set(held) == {(kind, frames == "on devices")} and set(explored) == {False}
  assert unit.replay.state_dict()["slot_policy_step"].max() == 9
  assert_same(unit.replay, other, besides={"rng"})


@pytest.mark.parametrize("kind", ["refresh", "reanalyse"])
def test_a_reanalyser_keeps_a_growing_buffer_fresh(kind):
  """Its frames follow what is being collected, also where the ring forgets."""
  schedule = "sweep" if kind == "reanalyse" else "off"
  unit = Unit(
    "replay.capacity=120", f"reanalyse.schedule={schedule}", "reanalyse.max_age=6", kinds=[kind]
  )
  unit.fill(10)
  role = Role("reanalyser", 0, 0)
  with served(unit) as (client, start):
    start(remote_reanalyser.reanalyse, unit.config, Blueprint, client(), form_of(unit), role, 0)
    for step in (6, 12, 18, 24):
      unit.fill(15, seed=step)
      for _ in range(6):
        unit.pacer.add_learner_step()
      unit.publish(step)
    unit.pacer.wait_for(lambda: unit.replay.oldest_step(kind) == 24, 20)
  assert unit.replay.oldest_step(kind) == 24 and unit.replay.heads.min() > 40
  assert set(unit.hub._packed) == {
    REFRESHER if kind == "refresh" else REANALYSER
  }  # other weights did not travel
  state = unit.replay.state_dict()
  lane = np.repeat(np.arange(3), unit.replay.heads - state["tail"])
  at = np.concatenate(
    [np.arange(t, h) for t, h in zip(state["tail"], unit.replay.heads, strict=True)]
  )
  expected = Seer().value(Blueprint.init(number=24), unit.replay.windows(lane, at))[:, 0]
  np.testing.assert_array_equal(
    state["slot_value" if kind == "refresh" else "slot_bootstrap"], expected
  )


@pytest.mark.parametrize("half", [False, True])
def test_weights_arrive_as_they_are_or_rounded_and_are_there_until_the_end(half):
  unit = Unit(half=half)
  unit.weights.publish(2, Blueprint.init(number=1 / 3))
  form = form_of(unit)
  if half:
    bf16 = {
      k: jax.ShapeDtypeStruct(v.shape, jnp.bfloat16)
      for k, v in form.weights.items()
      if v.dtype == np.float32
    }
    form = dataclasses.replace(form, weights={**form.weights, **bf16})
  here, like = jax.local_devices()[1], jax.eval_shape(Blueprint.init, jax.random.key(0))
  with (
    grpc_server.serve(unit.hub, "127.0.0.1:0", TOKEN, form, clients=1) as server,
    Client(server.address, TOKEN, form) as client,
  ):
    weights = RemoteWeights(client, 0, (ACTOR, REANALYSER), like, here)
    got = weights.latest(ACTOR, at_least=2).variables
    number = np.float32(jnp.bfloat16(1 / 3) if half else 1 / 3)
    np.testing.assert_array_equal(got.params["w"], np.full((2, 3), number))
    assert (got.params["w"].dtype, got.batch_stats["n"].dtype) == (np.float32, np.int32)
    assert got.params["w"].devices() == {here}
    assert weights.latest(REANALYSER).step == 0
    late = []
    thread = threading.Thread(
      target=lambda: late.append(weights.latest(REANALYSER, at_least=6).step)
    )
    thread.start()
    unit.publish(6)
    thread.join(10)
    assert late == [6] and weights.latest(ACTOR, at_least=6).step == 6
    unit.hub.finish(0)
    with pytest.raises(grpc_server.RunOver):
      weights.latest(ACTOR, at_least=7)
    assert weights.latest(ACTOR, at_least=6).step == 6  # enough to finish what was begun


def test_what_ends_the_following_is_raised_where_its_results_are_asked_for():
  unit = Unit()
  form, here, like = (
    form_of(unit),
    jax.local_devices()[0],
    jax.eval_shape(Blueprint.init, jax.random.key(0)),
  )
  with (
    grpc_server.serve(unit.hub, "127.0.0.1:0", TOKEN, form, clients=1) as server,
    Client(server.address, TOKEN, form) as client,
  ):
    with pytest.raises(Refused, match="nobody subscribes as 'evaluator'"):
      RemoteWeights(client, 0, ("evaluator",), like, here).latest("evaluator")
    other = like._replace(params={"w": jax.ShapeDtypeStruct((3, 2), np.float32)})
    with pytest.raises(ValueError, match="the unit's network is another"):
      RemoteWeights(client, 0, (ACTOR,), other, here).latest(ACTOR)
    with pytest.raises(Refused, match="has incarnation"):
      FetchedFrames(client, 0, 7, form).gather(np.zeros(1, int), np.zeros((1, 2), int), 1)


@pytest.mark.parametrize("role", ["actor", "reanalyser"])
def test_who_comes_when_the_run_is_over_goes_home(role):
  unit = Unit()
  unit.hub.finish(0)
  with served(unit) as (client, start):
    if role == "actor":
      thread = start(remote_actor.act, unit.config, Blueprint, client(), Role("actor", 0, 0), 0)
    else:
      who = Role("reanalyser", 0, 0)
      thread = start(
        remote_reanalyser.reanalyse, unit.config, Blueprint, client(), form_of(unit), who, 0
      )
    thread.join(10)
    assert not thread.is_alive()


def test_who_is_busy_for_long_shows_that_it_is_there(monkeypatch):
  """In the middle of a search, a process asks for weights."""
  monkeypatch.setattr(heartbeats, "SILENCE", 0.7)  # it does so every 0.2 seconds
  for module in (remote_actor, remote_reanalyser):
    monkeypatch.setattr(module, "Inference", lambda *_, **__: Seer(delay=2.0))
  unit = Unit("actor.random_steps=0", "reanalyse.schedule=sweep", kinds=["reanalyse"])
  unit.fill(10)
  for _ in range(6):
    unit.pacer.add_learner_step()
  unit.publish(6)

  def there():
    summary = unit.presence.summary()
    return summary[names.PRESENT_ACTORS], summary[names.PRESENT_REANALYSERS]

  with served(unit) as (client, start):
    start(remote_actor.act, unit.config, Blueprint, client(), Role("actor", 0, 0), 0)
    start(
      remote_reanalyser.reanalyse,
      unit.config,
      Blueprint,
      client(),
      form_of(unit),
      Role("reanalyser", 0, 0),
      0,
    )
    deadline = time.monotonic() + 20
    while len(unit.told) < 2 or there() != (1, 1):  # both have got something to do
      assert time.monotonic() < deadline
      time.sleep(0.01)
    for _ in range(12):
      time.sleep(0.1)
      assert there() == (1, 1) and len(unit.told) == 2
  time.sleep(0.8)
  assert there() == (0, 0)
