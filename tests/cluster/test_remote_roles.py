"""Tests that actors and refreshers behind a real service compute exactly what local ones do."""

import contextlib
import itertools
import subprocess
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from same import assert_same_replays
from small_unit import BATCH, SWEEP
from speedyzero_jax.agents.efficientzero.reanalyse import REANALYSER
from speedyzero_jax.cluster import grpc_server, messages, remote
from speedyzero_jax.cluster.grpc_client import Client, Refused
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.remote import FrameCopy, RemoteWeights
from speedyzero_jax.config import loader
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import ACTOR, DivergedError

TOKEN = bytes(range(32))
ROLE = Role("actor", 0, 0)


class Cluster:
  """The server of a unit, clients, and roles in threads."""

  def __init__(self, unit, monkeypatch):
    self.unit = unit
    self.seeds, self._threads, self._errors = [], [], []
    monkeypatch.setattr(grpc_server, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(remote, "make_env", self._make_env)
    monkeypatch.setattr(remote, "Inference", self._inference)

  def _inference(self, agent, mesh=None, **_):
    return self.unit.inference if mesh is None else Inference(agent, mesh)

  def _make_env(self, _, lanes, seed, training):
    self.seeds.append(seed)
    return tiny.FakeEnv(lanes, seed)

  def __enter__(self):
    self._stack = contextlib.ExitStack()
    self._address = self._stack.enter_context(
      grpc_server.serve(self.unit.service, "127.0.0.1:0", TOKEN, clients=4)
    )
    return self

  def __exit__(self, *error):
    with self._stack:
      assert not self._errors, self._errors
      begin = time.monotonic()
      self.unit.service.finish(10)
      for thread in self._threads:
        thread.join(10)
      if error[0] is None:
        assert not self._errors and not any(thread.is_alive() for thread in self._threads)
        assert time.monotonic() - begin < 8  # all have heard it

  def client(self, kind="actor", number=0, incarnation=0):
    helper = Helper(kind, number, incarnation)
    return self._stack.enter_context(Client(self._address, TOKEN, helper, patience=5.0))

  def _start(self, role, *arguments):
    def body():
      try:
        with contextlib.suppress(grpc_server.RunFinished):
          role(*arguments)
      except BaseException as error:
        self._errors.append(error)

    self._threads.append(threading.Thread(target=body, daemon=True))
    self._threads[-1].start()
    return self._threads[-1]

  def act(self, incarnation=0):
    unit = self.unit
    client = self.client(incarnation=incarnation)
    return self._start(remote.act, unit.config, unit.agent, client)

  def step_environments(self, number=0, incarnation=0):
    client = self.client("actor", number, incarnation)
    return self._start(remote.step_environments, self.unit.config, client)

  def refresh(self, number=0, config=None):
    unit, client = self.unit, self.client("refresher", number)
    arguments = config or unit.config, unit.agent, client, number, unit.refreshers
    return self._start(remote.refresh, *arguments)


def test_an_actor_whose_environment_hangs_ends_its_process():
  hanging = """
import time
from unittest import mock
from speedyzero_jax.cluster import messages, remote
remote.make_env = lambda *_, **__: mock.Mock(step=lambda action: time.sleep(60))
client = mock.Mock(call=lambda _: messages.Welcome(0, [0], 0))
remote.ENV_SECONDS = 0.5
with remote.joined(mock.Mock(), client) as (_, env):
  env.reset()
  time.sleep(1)
  print("waited for the learner", flush=True)
  env.step(0)
"""
  command = [sys.executable, "-c", hanging]
  ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert (ended.returncode, ended.stdout) == (1, "waited for the learner\n")
  assert "line 12 in <module>" in ended.stderr


@pytest.fixture
def cluster(monkeypatch):
  return lambda unit: Cluster(unit, monkeypatch)


@pytest.mark.parametrize(("seed", "central"), [(0, False), (1, False), (1, True)])
def test_an_actor_collects_what_a_local_one_would(make_unit, cluster, seed, central):
  total = 100 + seed
  overrides = f"run.seed={seed}", "actor.random_steps=30", f"run.env_steps={total}"
  # All may be collected before the second learner step, so that progress stays 0.5.
  overrides += "learner.steps=2", "learner.tail_steps=1"
  unit, local = (make_unit(*overrides, refreshers=0) for _ in range(2))
  unit.learn()
  with cluster(unit) as served:
    acting = served.step_environments(0, 5) if central else served.act(5)
    acting.join(30)  # it leaves by itself when all is collected
    assert not acting.is_alive() and unit.limiter.collected
  own, lanes = derived_seed(seed, str(ROLE), 5), unit.config.actor.lanes
  env, key = tiny.FakeEnv(lanes, own), jax.random.key(own)
  actor = Actor(unit.config, unit.agent, env, unit.inference, key)
  taken, episodes = 0, []
  while taken < total:
    slots, count = actor.step(
      unit.weights.latest(ACTOR), budget=total - taken, progress=0.5, random=taken < 30
    )
    local.replay.append(slots)
    episodes += actor.finished
    taken += count
  assert len(episodes) > 3 and unit.episodes == episodes
  assert_same_replays(unit.replay, local.replay)


def test_central_actors_share_inference_and_outlive_their_environments(make_unit, cluster):
  unit = make_unit("actor.lanes=5", "run.env_steps=400", actors=3, refreshers=0)
  learner = unit.learn_in_thread()
  with cluster(unit) as served:
    lost = served.client("actor", 2)
    first = lost.call(messages.Join())
    env = tiny.FakeEnv(len(first.heads), 0)
    steps = iter([env.reset(), *(env.step(np.zeros(2, np.int32)) for _ in range(3))])
    shown = (messages.Observation(step._asdict()) for step in steps)
    assert len(list(itertools.islice(lost.stream(shown), 3))) == 3
    lost.close()
    others = [served.step_environments(0), served.step_environments(1)]
    unit.limiter.wait_for(lambda: unit.limiter.env_steps > 100, 20)
    lane, head = np.arange(first.first, 5), unit.replay.heads[first.first :].copy()
    others.append(served.step_environments(2, 1))
    for thread in others:
      thread.join(30)
    learner.join(10)
  assert unit.limiter.collected and unit.limiter.env_steps == 400
  store = unit.replay.store  # the lost games end, and others begin
  assert (head > 0).all() and store.first[lane, head].all()
  assert (store.truncated | store.terminated)[lane, head - 1].all()


def test_observations_of_another_form_are_refused(make_unit, cluster):
  unit = make_unit(refreshers=0)
  with cluster(unit) as served:
    good = tiny.FakeEnv(3, 0).reset()
    for incarnation, (wrong, match) in enumerate((
      (good._replace(frame=good.frame[:2]), "of 3 lanes"),
      (good._replace(reward=good.reward.astype(np.float64)), "of 3 lanes"),
      (good._replace(reward=good.reward * np.nan), "finite"),
      (good._replace(first=np.array(True)), "of 3 lanes"),
    )):  # fmt: skip
      shown = iter([messages.Observation(wrong._asdict())])
      with pytest.raises(Refused, match=match):
        list(served.client("actor", 0, incarnation).stream(shown))


def test_divergence_in_a_central_actor_ends_the_run_and_not_its_environments(
  make_unit, cluster, monkeypatch, caplog
):
  unit = make_unit("run.env_steps=60", refreshers=0)
  error = DivergedError(0)
  monkeypatch.setattr(unit.experiment.inference, "decide", mock.Mock(side_effect=error))
  with cluster(unit) as served:
    stepping = served.step_environments()
    stepping.join(10)
    assert not stepping.is_alive()  # without an error
  assert unit.limiter.failure is error and unit.limiter.stopping and not caplog.records


def test_an_actor_plays_other_games_when_something_is_stored_already(make_unit, cluster):
  """After a restart of all processes, incarnations start at 0 again."""
  seeds = []
  for collected in (0, 3, 6):
    unit = make_unit("run.env_steps=60", refreshers=0)
    if collected:
      unit.fill(collected)
    learner = unit.learn_in_thread()
    with cluster(unit) as served:
      served.act().join(30)
      learner.join(10)
    assert unit.limiter.collected
    seeds += served.seeds
  assert seeds[0] == derived_seed(0, str(ROLE)) and len(set(seeds)) == 3


def test_an_actor_waits_for_the_weights_of_its_grant(make_unit, cluster, monkeypatch):
  overrides = "run.env_steps=60", "actor.max_lag=5", "actor.weights_interval=2"
  unit = make_unit(*overrides, refreshers=0)
  unit.learn(4)
  unit.publish(4)
  asked, latest = [], RemoteWeights.latest
  monkeypatch.setattr(
    RemoteWeights, "latest", lambda *a, at_least: (asked.append(at_least), latest(*a, at_least))[1]
  )
  learner = unit.learn_in_thread()
  with cluster(unit) as served:
    served.act().join(30)
    learner.join(10)
  assert unit.limiter.collected and asked[0] == 4
  unit.learn(20)
  assert not unit.limiter.lag_exceeded  # none waits for an actor that has left


@pytest.mark.parametrize("on_devices", [False, True])
def test_refreshers_compute_what_a_local_one_would(make_unit, cluster, monkeypatch, on_devices):
  unit = make_unit(*BATCH, "topology.bound_age=true", refreshers=2, durable=True)
  unit.fill(30)
  gathered, prepared, worked, gather = [], set(), set(), FrameCopy.gather
  keys, compute = [], Inference.compute

  def spied(copy, lane, cell, heads):
    (worked if heads.any() else prepared).add(cell.shape)
    gathered.append(isinstance(windows := gather(copy, lane, cell, heads), jax.Array))
    return windows

  def keyed(inference, version, task, inputs, key):
    keys.append(str(jax.random.key_data(key)))
    return compute(inference, version, task, inputs, key)

  monkeypatch.setattr(FrameCopy, "gather", spied)
  monkeypatch.setattr(Inference, "compute", keyed)
  config = loader.override(unit.config, ["replay.frames=device"]) if on_devices else None
  with unit.twin() as local, cluster(unit) as served:
    for number in range(2):
      served.refresh(number, config)
    for step in (3, 6, 9):
      unit.publish(step)
      works, thread, done = unit.executing(8)
      thread.join(120)
      assert done
      local.weights.publish(step, unit.agent.init(number=step))
      for work in works:
        local.run_task(work, jax.random.key(0))
    assert set(gathered) == {on_devices}
    theirs = [key for key in keys if key != str(jax.random.key_data(jax.random.key(0)))]
    assert len(theirs) > 5 and len(set(theirs)) == len(theirs)  # one key per block
    assert worked and worked <= prepared  # every program was compiled before the first block
    assert unit.replay.state_dict()["slot_policy_step"].max() == 9
    assert_same_replays(unit.replay, local.replay, besides={"rng"})


@pytest.mark.parametrize(("task", "stamp"), [("refresh", "value"), ("reanalyse", "bootstrap")])
def test_a_refresher_keeps_a_growing_replay_fresh(make_unit, cluster, task, stamp):
  """Its copy of the frames stays up to date, also after the ring evicts frames."""
  unit = make_unit("replay.capacity=120", "reanalyse.max_age=6", SWEEP[task])
  unit.fill(10)
  with cluster(unit) as served:
    served.refresh()
    for step in (6, 12, 18, 24):
      unit.fill(15, seed=step)
      unit.learn(6)
      unit.publish(step)
    unit.limiter.wait_for(lambda: unit.replay.oldest_step(f"{stamp}_step") == 24, 120)
  assert unit.replay.oldest_step(f"{stamp}_step") == 24 and unit.replay.heads.min() > 40
  tails, heads = unit.replay.tails, unit.replay.heads
  lane = np.repeat(np.arange(3), heads - tails)
  time = np.concatenate([np.arange(*ends) for ends in zip(tails, heads, strict=True)])
  value = tiny.of_stacks(unit.replay.windows(lane, time))[2]
  stored = unit.replay.store[stamp].reshape(-1)[unit.replay.store.flat(lane, time)]
  np.testing.assert_array_equal(stored, value + 24)


@pytest.mark.parametrize("half", [False, True])
def test_weights_arrive_exact_or_rounded_until_the_end(make_unit, cluster, half):
  unit = make_unit(*["topology.weights_dtype=bfloat16"] * half)
  unit.weights.publish(2, unit.agent.init(number=1 / 3))
  here = jax.local_devices()[-1]
  with cluster(unit) as served:
    weights = RemoteWeights(served.client(), unit.agent, here)
    got = weights.latest(ACTOR, at_least=2).variables
    number = np.float32(jnp.bfloat16(1 / 3) if half else 1 / 3)
    np.testing.assert_array_equal(got.params["w"], np.full((2, 3), number), strict=True)
    np.testing.assert_array_equal(got.params["b"], np.full(2, 1 / 3, np.float32), strict=True)
    assert got.batch_stats["n"].dtype == np.int32 and got.params["w"].devices() == {here}
    assert weights.latest(REANALYSER, at_least=0).step == 0
    unit.publish(6)
    assert weights.latest(ACTOR, at_least=2).step == 2  # nothing newer is wanted
    assert weights.latest(REANALYSER, at_least=3).step == 6
    unit.service.finish(0)
    with pytest.raises(grpc_server.RunFinished):
      weights.latest(ACTOR, at_least=6)


def test_weights_of_another_network_are_refused(make_unit, cluster):
  unit = make_unit()
  variables = unit.agent.init()._replace(params={"w": jnp.zeros((3, 2))})
  other = mock.Mock(init=lambda key: variables, published=lambda x: x)
  with cluster(unit) as served:
    with pytest.raises(ValueError, match="an array is"):
      RemoteWeights(served.client(), other, jax.local_devices()[0]).latest(ACTOR, 0)
    unit.roster.dismiss(Helper("actor", 0))
