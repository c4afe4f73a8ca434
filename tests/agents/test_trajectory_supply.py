"""Tests of the supply of trajectories to actor-critics: sufficiency, lag, and whole runs."""

import dataclasses
import math
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trained
from speedyzero_jax.agents import impala
from speedyzero_jax.agents.base import Variables
from speedyzero_jax.config import loader
from speedyzero_jax.replay.schema import make_schema
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.run import steps, warmup
from speedyzero_jax.run.experiment import TrainingError
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.types import Slots
from trained import experiment
from whole_runs import rows_of

# --- the supply of trajectories


@st.composite
def _supplies(draw):
  """Configurations that use all or almost all trajectories, with a small replay."""
  length, lanes, batch = (draw(st.integers(1, top)) for top in (6, 5, 5))
  wanted = draw(st.integers(1, 20))
  env_steps = wanted * length * batch + lanes * length + draw(st.integers(0, 3 * length * batch))
  most = (env_steps // length - lanes) // batch
  overrides = [
    "env.frame_stack=1", "actor.random_steps=0", f"loss.unroll_length={length}",
    f"actor.lanes={lanes}", f"learner.batch_size={batch}", f"run.env_steps={env_steps}",
    f"learner.steps={draw(st.integers(max(most - 2, 1), most))}",
    f"learner.prefetch={draw(st.integers(1, 3))}",
  ]  # fmt: skip
  config = loader.load([], ["agent=impala", "env.game=Catch", *overrides])
  capacity = config.agent.loss.least_capacity(config)
  return loader.override(config, [f"replay.capacity={capacity}"])


def _lag_bound(config):
  """The bound on the lag in learner steps, as derived in agents/impala.py."""
  lanes, batch = config.actor.lanes, config.learner.batch_size
  ratio = config.run.env_steps / config.learner.steps
  slack = max(2 * lanes, 2 * math.ceil(ratio))
  blocked = (slack + lanes) / ratio + (2 * lanes + 1) / batch
  starved = config.learner.prefetch + 2 + lanes / batch
  return config.actor.weights_interval + 1 + max(blocked, starved)


class _Simulation:
  """Actor, drawing and learner under the conditions of `loops.py`, stepped one by one."""

  def __init__(self, config, ends):
    self.config, self.ends = config, ends
    lanes, loss = config.actor.lanes, config.agent.loss
    schema = make_schema((1, 1, 1), "float32", num_actions=2)
    self.store = LaneStore(schema, lanes, -(-config.replay.capacity // lanes))
    self.queue, self.length = loss.queue(self.store, config), loss.unroll_length
    self.limiter, self.drawn, self.lag = RateLimiter(config), 0, 0

  def may_act(self):
    if self.limiter.collected:
      return False
    return self.limiter.may_collect() or not self.queue.ready(self.config.learner.batch_size)

  def act(self):
    store, head, lanes = self.store, self.store.head, np.arange(self.store.lanes)
    closed = (head == 0) | (store.action[lanes, store.cell(head - 1)] < 0)
    willing = closed | ~self.ends(len(lanes))
    acting = willing & (np.cumsum(willing) <= self.limiter.pool)
    columns = {c.name: np.zeros((len(lanes), *c.shape), c.dtype) for c in store.schema.columns}
    columns |= {"first": closed, "truncated": ~acting}
    columns |= {"action": np.where(acting, 0, -1).astype(np.int32)}
    columns |= {"step": np.full(len(lanes), self.limiter.learner_steps, np.int32)}
    # Closed lanes that may not act add no slot.
    store.append(Slots(lanes, head.copy(), columns).select(acting | ~closed))
    self.limiter.add_env_steps(int(acting.sum()))

  def may_draw(self):
    ahead = self.drawn - self.limiter.learner_steps
    if self.drawn >= self.config.learner.steps or ahead > self.config.learner.prefetch:
      return False
    return self.limiter.may_draw(self.drawn) and (
      self.limiter.collected or self.queue.ready(self.config.learner.batch_size)
    )

  def draw(self):
    selection = self.queue.select(self.config.learner.batch_size, np.random.default_rng(0))
    slots = selection.time[:, None] + np.arange(self.length)
    assert (slots >= self.store.tail[selection.lane][:, None]).all()
    age = self.drawn - self.store["step"][selection.lane[:, None], slots % self.store.capacity]
    self.lag, self.drawn = max(self.lag, age.max()), self.drawn + 1

  def may_learn(self):
    return self.drawn > self.limiter.learner_steps

  def learn(self):
    self.limiter.add_learner_step()


@settings(max_examples=25)
@given(_supplies(), st.floats(0, 0.5), st.integers(0, 2**32 - 1), st.permutations(range(3)))
def test_trajectories_never_run_out_and_their_lag_is_bounded(config, ends, seed, order):
  """With about the most learner steps and the least replay accepted, in any interleaving."""
  rng = np.random.default_rng(seed)
  run = _Simulation(config, lambda lanes: rng.random(lanes) < ends)
  roles = [(run.may_act, run.act), (run.may_draw, run.draw), (run.may_learn, run.learn)]
  random_order = rng.random() < 0.5
  while run.limiter.learner_steps < config.learner.steps:
    possible = [roles[i] for i in order if roles[i][0]()]
    assert possible, "the roles wait for each other"
    possible[rng.integers(len(possible)) if random_order else 0][1]()
  assert run.lag + config.actor.weights_interval <= _lag_bound(config)


# --- whole runs


def _config(*overrides, preset="impala"):
  return loader.load(
    [preset],
    ["network.hidden=8", "loss.unroll_length=5", "actor.lanes=4", "learner.batch_size=4",
     "learner.steps=30", "run.env_steps=620", "replay.capacity=0", "learner.devices=1",
     "run.checkpoint_interval=10", "run.log_interval=5", *overrides],
  )  # fmt: skip


def test_ratios_are_one_on_policy(tmp_path):
  """With an LSTM and frame stacks, at the starts of episodes and across them."""
  config = _config(
    "env.game=CartPole", "env.frame_stack=3", "run.mode=lockstep", "learner.steps=1",
    "network.core=lstm", "network.lstm_hidden=5",
  )  # fmt: skip
  with experiment(config, tmp_path) as run:
    rng = np.random.default_rng(0)
    fresh = run.state.variables.params
    run.state = run.state._replace(
      variables=Variables(jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), fresh), ())
    )
    run.weights.publish(0, run.state.variables)
    while run.replay.num_transitions < 160:
      run.collector.collect()
    while run.replay.ready(4):
      prepared = steps.draw(run, 0)
    assert prepared.arrays["acted_mask"].min() == 0
    metrics = run.learner.fetch(steps.learn(run, prepared)).metrics
    np.testing.assert_allclose(metrics[impala.RATIO], 1, rtol=1e-6)


def test_the_lag_of_an_overlapping_run_is_bounded(tmp_path):
  config = _config("actor.weights_interval=7", "learner.prefetch=1")
  trained.run(config, tmp_path)
  lags = [row[impala.TRAINED_LAG_MAX] for row in rows_of(tmp_path) if impala.TRAINED_LAG_MAX in row]
  assert 6 <= max(lags) <= _lag_bound(config)


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_run_without_enough_trajectories_ends_with_an_error(tmp_path, mode):
  config = _config(f"run.mode={mode}")
  too_many = dataclasses.replace(config.learner, steps=40)  # as the configuration would refuse
  with pytest.raises(TrainingError, match=r"complete \(620 agent steps\).* of 40 needs"):
    trained.run(dataclasses.replace(config, learner=too_many), tmp_path)


def test_a_killed_run_drops_what_it_collected_after_its_checkpoint_and_ends(tmp_path):
  """The ring would evict these trajectories at once, before they could be trained on."""
  config = _config("run.mode=async")
  trained.run(config, tmp_path, stop=12)
  with experiment(config, tmp_path, resume=True) as run:
    before = run.limiter.env_steps
    while run.limiter.env_steps < 560:
      run.collector.collect()
    run.recovery.journal.flush()

  def counts(run):
    return run.limiter.env_steps, run.state.step

  with experiment(config, tmp_path, resume=True) as run:
    assert run.limiter.env_steps == before < 560
  assert trained.run(config, tmp_path, resume=True, after=counts) == (620, 30)


@pytest.mark.parametrize(
  "overrides",
  [
    ("loss.unroll_length=1", "learner.batch_size=1", "actor.lanes=1"),
    # Stacks are longer than trajectories.
    ("loss.unroll_length=2", "env.frame_stack=4", "actor.lanes=2"),
  ],
)
def test_an_example_batch_of_short_trajectories(overrides):
  config = _config(*overrides)
  agent = impala.make_agent(config, (1, 1, 2), np.float32, 3)
  agent.make_selector = lambda _: mock.Mock(spec=["appended"])  # an own one may never be ready
  batch, _ = warmup.example_batch(config, agent)
  slots = config.agent.loss.unroll_length + 1
  shape = config.learner.batch_size, slots, config.env.frame_stack
  assert batch["stack"].shape == shape and batch["acted_mask"].all()


_BLOCKS = ("loss.minibatches=2", "loss.epochs=3", "actor.weights_interval=6")


@pytest.mark.parametrize(
  ("preset", "overrides", "taken", "odd"),
  [
    ("a2c", (), 1, 0),
    ("ppo", ("run.mode=lockstep", "learner.batch_size=2", *_BLOCKS), 6, 0),
    ("ppo", ("run.mode=async", "learner.batch_size=2", *_BLOCKS), 6, 0),
    ("ppo", ("run.mode=async", "learner.batch_size=2", *_BLOCKS), 6, 1),
  ],
)
def test_actors_and_a_synchronous_learner_take_turns(tmp_path, preset, overrides, taken, odd):
  """All lanes step together, so the weights behind each slot are known beforehand: `taken` learner
  steps after those of the block before, even if that is not when weights are due (`odd`)."""

  def acted_with(run):
    store = run.replay.store
    return [store["step"][lane, : store.head[lane]] for lane in range(store.lanes)]

  config = _config("run.env_steps=300", f"learner.steps={10 * taken}", *overrides, preset=preset)
  actor = dataclasses.replace(config.actor, weights_interval=config.actor.weights_interval + odd)
  config = dataclasses.replace(config, actor=actor)
  for lane in trained.run(config, tmp_path, after=acted_with):
    used = np.arange(10 * 5)  # later ones may come while the last weights are published
    block = np.maximum(used - 1, 0) // 5  # that the slot's frame completes
    np.testing.assert_array_equal(lane[used], taken * block)
