"""IMPALA's loss in float64, acting, the supply of trajectories and their lag, and whole runs."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import episodes
import trained
from speedyzero_jax.agents import impala
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.run import steps, warmup
from speedyzero_jax.run.experiment import TrainingError
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.types import Segment
from trained import KEY, RATE, experiment, largest
from whole_runs import rows_of

_T, _STACK, _DISCOUNT, _LAMBDA, _BATCH, _ACTIONS = 7, 2, 0.9, 0.8, 8, 3
_RHO, _C, _RHO_PG, _VALUE, _ENTROPY = 1.3, 0.9, 1.1, 0.6, 0.2
_TINY = (
  "agent=impala", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.unroll_length={_T}", f"loss.rho_bar={_RHO}",
  f"loss.vtrace_lambda={_LAMBDA}", f"loss.c_bar={_C}", f"loss.rho_bar_pg={_RHO_PG}",
  f"loss.value_coefficient={_VALUE}", f"loss.entropy_coefficient={_ENTROPY}",
  "actor.random_steps=0", f"learner.batch_size={_BATCH}", "network.lstm_hidden=3",
)  # fmt: skip


def _agent(*overrides):
  return trained.make(_ACTIONS, *_TINY, *overrides)


@functools.cache
def _learner(reduction="mean", rate=RATE, devices=1, core="none"):
  changes = (f"loss.reduction={reduction}", f"optim.learning_rate={rate}", f"network.core={core}")
  return trained.make_learner(*_agent(*changes), devices)


@functools.cache
def _params(core="none"):
  return trained.random_params(_agent(f"network.core={core}")[1], 4)


def _recorded(replay, agent):
  """Fills two lanes with episodes that end everywhere, under a random behaviour policy."""
  rng, stored = np.random.default_rng(7), []
  for lane in range(2):
    segment = episodes.segment(agent.schema, lane, episodes.every_end(8, rng), rng)
    extra = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in segment.extra.items()}
    stored.append(segment._replace(extra=extra))
    replay.append(stored[-1])
  return stored


@functools.cache
def _batch(core="none"):
  """A batch, and the (lane, time) of its trajectories with the segments they lie in."""
  _, agent = _agent(f"network.core={core}")
  replay = Replay(
    agent.schema, agent.make_selector, lanes=2, capacity=400, frame_stack=_STACK, rng_seed=0
  )
  stored = _recorded(replay, agent)
  selection = replay.select(_BATCH)
  return _gathered(agent, replay, selection), selection, stored


def _gathered(agent, replay, selection, step=50):
  arrays, _ = agent.assemble(replay, selection, step)
  frames, stack = replay.trajectories(selection.lane, selection.time, agent.window.after)
  return {"frames": frames, "stack": stack, **arrays}


def _step(learner, batch, core="none"):
  state, result = trained.step(learner, trained.restored(learner, _params(core)), batch)
  return state.variables.params, result


# --- the loss, from the segments as they were stored


def _network(params, x, first=None, state=None):
  """Logits and value in float64; with a core x are consecutive slots."""
  p = jax.tree.map(np.float64, params)

  def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  if "core" in p:
    features, _ = trained.lstm(p["core"], features, first, state)
  return linear(p["policy"], features), linear(p["value"], features)[..., 0]


def _log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _observation(segment, slot):
  start = max(t for t in range(slot + 1) if segment.first[t])
  shown = [segment.frame[max(t, start), 0, 0] for t in range(slot - _STACK + 1, slot + 1)]
  return np.concatenate(shown)


def _vtrace(segment, slots, ratio, value):
  """Targets and advantages by Espeholt et al.'s recursion, backwards over the window."""
  target, advantage = np.zeros(_T), np.zeros(_T)
  later = value[-1]  # v of the next slot
  for i in reversed(range(_T)):
    if segment.action[slots[i]] < 0:
      later = value[i]
      continue
    discount = 0 if segment.terminated[slots[i + 1]] else _DISCOUNT
    reward = segment.reward[slots[i]]
    delta = min(_RHO, ratio[i]) * (reward + discount * value[i + 1] - value[i])
    trace = discount * _LAMBDA * min(_C, ratio[i]) * (later - value[i + 1])
    mixed = _LAMBDA * later + (1 - _LAMBDA) * value[i + 1]
    advantage[i] = min(_RHO_PG, ratio[i]) * (reward + discount * mixed - value[i])
    target[i] = later = value[i] + delta + trace
  return target, advantage


def _reference(core):
  """The number of actions, and the loss's sums as functions of parameters, targets being fixed."""
  _, selection, stored = _batch(core)
  parts = []
  for lane, time in zip(selection.lane, selection.time, strict=True):
    segment, slots = stored[lane], np.arange(time, time + _T + 1)
    x = np.stack([_observation(segment, slot) for slot in slots])
    x = (x, segment.first[slots], segment.extra["core"][time]) if core == "lstm" else (x,)
    logits, value = _network(_params(core), *x)
    acted = segment.action[slots[:-1]] >= 0
    chosen = np.arange(_T), np.maximum(segment.action[slots[:-1]], 0)
    log_mu = _log_softmax(np.float64(segment.extra["logits"][slots[:-1]]))[chosen]
    ratio = np.exp(_log_softmax(logits[:-1])[chosen] - log_mu)
    parts.append((x, acted, chosen, *_vtrace(segment, slots, ratio, value)))

  def loss(params):
    total = 0.0
    for x, acted, chosen, target, advantage in parts:
      logits, value = (y[:-1] for y in _network(params, *x))
      log_pi = _log_softmax(logits)
      entropy = -(np.exp(log_pi) * log_pi).sum(-1)
      terms = -log_pi[chosen] * advantage + _VALUE / 2 * (target - value) ** 2 - _ENTROPY * entropy
      total += terms[acted].sum()
    return total

  return sum(part[1].sum() for part in parts), loss


@pytest.mark.parametrize(
  ("reduction", "rate", "core"),
  [("mean", RATE, "none"), ("sum", RATE / 100, "none"), ("mean", RATE, "lstm")],
)
def test_loss_and_gradient(reduction, rate, core):
  after, result = _step(_learner(reduction, rate, core=core), _batch(core)[0], core)
  count, total = _reference(core)
  assert count < _BATCH * _T  # some slots are ends
  scale = 1 / count if reduction == "mean" else 1

  def loss(params):
    return scale * total(params)

  np.testing.assert_allclose(result.metrics[names.LOSS_TOTAL], loss(_params(core)), rtol=1e-4)
  trained.assert_gradient(_params(core), after, loss, rate=rate, rtol=2e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_masked_trajectories_and_ends_have_no_gradient(core):
  batch, _, _ = _batch(core)
  learner, masked = _learner(core=core), np.arange(_BATCH) % 3 == 0
  ends = batch["acted_mask"] == 0
  mask = batch["acted_mask"] * ~masked[:, None]
  after, _ = _step(learner, batch | {"acted_mask": mask}, core)
  hidden = masked[:, None] | ends
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "stack": np.where(masked[:, None, None], 1000, batch["stack"]).astype(np.int32),
    "reward": np.where(hidden, 5, batch["reward"]).astype(np.float32),
    "logits": np.where(hidden[..., None], 7 * batch["logits"], batch["logits"]),
    "action": np.where(hidden, 2, batch["action"]).astype(np.int32),
    "acted_mask": mask,
  }
  if core == "lstm":
    other["state"] = np.where(masked[:, None], 3, batch["state"]).astype(np.float32)
  again, _ = _step(learner, batch | other, core)
  assert ends.any() and largest(after, _params(core)) > 1e-3
  assert largest(after, again) == 0
  nothing, result = _step(learner, batch | {"acted_mask": 0 * mask}, core)
  assert result.metrics[names.LOSS_TOTAL] == 0 and largest(nothing, _params(core)) == 0


@pytest.mark.parametrize(
  ("reduction", "rate", "core"),
  [("mean", RATE, "none"), ("sum", RATE / 100, "none"), ("mean", RATE, "lstm")],
)
def test_two_devices_do_as_one(reduction, rate, core):
  batch, _, _ = _batch(core)
  mask = batch["acted_mask"].copy()
  mask[:3, 2:] = 0  # the first device has fewer actions
  (one, alone), (two, both) = (
    _step(_learner(reduction, rate, devices, core), batch | {"acted_mask": mask}, core)
    for devices in (1, 2)
  )
  assert largest(one, _params(core)) > 1e-3
  size = max(np.abs(x).max() for x in jax.tree.leaves(jax.device_get(one)))
  assert largest(one, two) < 1e-6 * max(size, 1)
  for name, value in alone.metrics.items():
    np.testing.assert_allclose(value, both.metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_trajectories_evicted_before_they_are_gathered_count_for_nothing():
  _, agent = _agent()
  shortest = _STACK + agent.lookahead
  replay = Replay(
    agent.schema, agent.make_selector, lanes=2, capacity=shortest, frame_stack=_STACK, rng_seed=0
  )
  columns = {c.name: np.zeros((shortest, *c.shape), c.dtype) for c in agent.schema.columns}
  for lane in range(2):
    first = np.arange(shortest) == 0
    replay.append(Segment.of(lane, 0, columns | {"first": first}))
  selection = replay.select(4)
  replay.append(Segment.of(1, shortest, columns))
  batch = _gathered(agent, replay, selection)
  np.testing.assert_array_equal(batch["acted_mask"].all(1), selection.lane == 0)
  batch = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
  _, result = _step(_learner(), batch)
  assert all(np.isfinite(value) for value in result.metrics.values())
  half, whole = (_step(_learner(), jax.tree.map(lambda x, i=i: x[i], batch))[1] for i in (
    np.flatnonzero(np.tile(selection.lane == 0, 2)).repeat(2), np.arange(_BATCH)
  ))  # fmt: skip
  np.testing.assert_allclose(
    half.metrics[names.LOSS_TOTAL], whole.metrics[names.LOSS_TOTAL], rtol=1e-5
  )


# --- acting


def test_actions_follow_the_stored_logits():
  _, agent = _agent()
  lanes, variables = 3000, Variables(_params(), ())
  stack = np.random.default_rng(0).normal(size=(1, _STACK, 1, 1, 2)).astype(np.float32)
  inputs = ActInputs(stack.repeat(lanes, 0), np.zeros(lanes, bool), np.arange(lanes), ())
  act = jax.jit(agent.act, static_argnames="explore")
  explored, greedy = (
    jax.device_get(act(variables, inputs, KEY, 0.0, explore=e)) for e in (True, False)
  )
  logits, _ = _network(_params(), stack.reshape(1, -1))
  for out in (explored, greedy):
    np.testing.assert_allclose(out.columns["logits"], logits.repeat(lanes, 0), rtol=1e-4)
  frequency = np.bincount(explored.action, minlength=_ACTIONS) / lanes
  np.testing.assert_allclose(frequency, np.exp(_log_softmax(logits))[0], atol=0.04)
  np.testing.assert_array_equal(greedy.action, logits.argmax())


# --- the supply of trajectories


@st.composite
def _supplies(draw):
  """Configurations that take all trajectories there are, or almost, from a small replay."""
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
  capacity = config.agent.loss.supply.least_capacity(config)
  return loader.override(config, [f"replay.capacity={capacity}"])


def _lag_bound(config):
  """Learner steps, as worked out in agents/impala.py."""
  lanes, batch = config.actor.lanes, config.learner.batch_size
  ratio = config.run.env_steps / config.learner.steps
  slack = max(2 * lanes, 2 * math.ceil(ratio))
  blocked = (slack + lanes) / ratio + (2 * lanes + 1) / batch
  starved = config.learner.prefetch + 2 + lanes / batch
  return config.actor.weights_interval + 1 + max(blocked, starved)


class _Simulation:
  """Actor, drawing and learner as in `loops.py`, each taking a step when it may and is told to."""

  def __init__(self, config, ends):
    self.config, self.ends = config, ends
    agent = impala.make_agent(config, (1, 1, 1), np.float32, 2)
    self.store = LaneStore(
      agent.schema, config.actor.lanes, -(-config.replay.capacity // config.actor.lanes)
    )
    self.queue, self.length = agent.make_selector(self.store), config.agent.loss.unroll_length
    self.limiter, self.drawn, self.lag = RateLimiter(config), 0, 0

  def may_act(self):
    if self.limiter.collected:
      return False
    return self.limiter.may_collect() or not self.queue.ready(self.config.learner.batch_size)

  def act(self):
    lanes, budget = self.config.actor.lanes, self.limiter.pool
    closed = [not h or self.store.action[i, (h - 1) % self.store.capacity] < 0
              for i, h in enumerate(self.store.head.tolist())]  # fmt: skip
    acting, segments = 0, []
    for lane in range(lanes):
      end = not closed[lane] and (self.ends() or acting == budget)
      acting += not end
      columns = {c.name: np.zeros((1, *c.shape), c.dtype) for c in self.store.schema.columns}
      columns |= {"first": np.array([closed[lane]]), "truncated": np.array([end])}
      columns |= {"action": np.full(1, -1 if end else 0, np.int32)}
      columns |= {"step": np.full(1, self.limiter.learner_steps, np.int32)}
      if closed[lane] and acting > budget:
        acting -= 1
        continue
      segments.append(Segment.of(lane, int(self.store.head[lane]), columns))
    self.store.append(segments)
    self.limiter.add_env_steps(acting)

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


@given(_supplies(), st.floats(0, 0.5), st.integers(0, 2**32 - 1), st.permutations(range(3)))
def test_trajectories_never_run_out_and_their_lag_is_bounded(config, ends, seed, order):
  """With the most learner steps and the least replay that are accepted, in any interleaving."""
  rng = np.random.default_rng(seed)
  run = _Simulation(config, lambda: rng.random() < ends)
  roles = [(run.may_act, run.act), (run.may_draw, run.draw), (run.may_learn, run.learn)]
  random_order = rng.random() < 0.5
  while run.limiter.learner_steps < config.learner.steps:
    possible = [roles[i] for i in order if roles[i][0]()]
    assert possible, "the roles wait for each other"
    possible[rng.integers(len(possible)) if random_order else 0][1]()
  assert run.lag + config.actor.weights_interval <= _lag_bound(config)


# --- whole runs


def _config(*overrides):
  return loader.load(
    ["impala"],
    ["network.hidden=8", "loss.unroll_length=5", "actor.lanes=4", "learner.batch_size=4",
     "learner.steps=30", "run.env_steps=620", "replay.capacity=0", "learner.devices=1",
     "run.checkpoint_interval=10", "run.log_interval=5", *overrides],
  )  # fmt: skip


@pytest.mark.parametrize("core", ["none", "lstm"])
def test_ratios_are_one_on_policy(tmp_path, core):
  """Also in stacks of frames, at the starts of episodes and across them, and with memory."""
  config = _config(
    "env.game=CartPole", "env.frame_stack=3", "run.mode=lockstep", "learner.steps=1",
    f"network.core={core}", "network.lstm_hidden=5",
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
    params = jax.device_get(run.state.variables.params)
    metrics = steps.learn(run, prepared).metrics
    np.testing.assert_allclose(metrics[impala.RATIO], 1, rtol=1e-6)
    assert largest(params, run.state.variables.params) > 0


@pytest.mark.parametrize(
  ("overrides", "lag"),
  [
    (("actor.weights_interval=7", "learner.prefetch=1"), 6),
    # Before the first trajectory is complete, actors go on although the learner is behind.
    (("actor.lanes=40", "learner.batch_size=2", "learner.steps=100", "run.env_steps=1300"), 0),
  ],
)
def test_the_lag_of_an_overlapping_run_is_bounded(tmp_path, overrides, lag):
  config = _config(*overrides)
  trained.run(config, tmp_path)
  lags = [row[impala.TRAINED_LAG_MAX] for row in rows_of(tmp_path) if impala.TRAINED_LAG_MAX in row]
  assert lag <= max(lags) <= _lag_bound(config)


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_run_without_enough_trajectories_ends_with_an_error(tmp_path, mode):
  config = _config(f"run.mode={mode}")
  too_many = dataclasses.replace(config.learner, steps=40)  # as the configuration would refuse
  with pytest.raises(TrainingError, match=r"all 620 agent steps are collected.* of 40"):
    trained.run(dataclasses.replace(config, learner=too_many), tmp_path)


def test_a_killed_run_drops_what_it_collected_after_its_checkpoint_and_ends(tmp_path):
  """Trajectories that the ring would evict at once could not be trained on."""
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
    # Some batches hold resets only.
    ("loss.unroll_length=1", "learner.batch_size=1", "actor.lanes=1", "learner.steps=60",
     "run.env_steps=80"),
    # Few of the trajectories are used, and stacks are longer than them.
    ("loss.unroll_length=2", "env.frame_stack=4", "learner.batch_size=4", "actor.lanes=2",
     "learner.steps=10", "run.env_steps=600"),
  ],
)  # fmt: skip
def test_short_trajectories(tmp_path, overrides):
  config = _config(*overrides, "run.mode=lockstep")
  trained.run(config, tmp_path, after=lambda run: warmup.example_batch(run.own, run.agent))
