"""IMPALA's loss in float64, acting, the supply of trajectories and their lag, and whole runs."""

import contextlib
import dataclasses
import functools
import json
import math
import threading

import episodes
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speedyzero_jax.agents import impala
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.metrics import names
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.run import loops, snapshot, steps, warmup
from speedyzero_jax.run.build import build
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.run.experiment import TrainingError
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.types import Segment
from speedyzero_jax.workers.learner import Learner, make_mesh

_T, _STACK, _DISCOUNT, _LAMBDA, _BATCH, _ACTIONS, _RATE = 7, 2, 0.9, 0.8, 8, 3, 0.5
_RHO, _C, _RHO_PG, _VALUE, _ENTROPY = 1.3, 0.9, 1.1, 0.6, 0.2
_TINY = (
  "agent=impala", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.unroll_length={_T}", f"loss.rho_bar={_RHO}",
  f"loss.vtrace_lambda={_LAMBDA}", f"loss.c_bar={_C}", f"loss.rho_bar_pg={_RHO_PG}",
  f"loss.value_coefficient={_VALUE}", f"loss.entropy_coefficient={_ENTROPY}",
  "actor.random_steps=0", f"learner.batch_size={_BATCH}", "learner.steps=100", "optim.name=sgd",
  "optim.momentum=0", f"optim.learning_rate={_RATE}", "optim.warmup_steps=0",
  "optim.decay_steps=0", "optim.clip_norm=0", "optim.weight_decay=0",
)  # fmt: skip
_KEY = jax.random.key(0)


def _agent(*overrides):
  config = loader.load([], [*_TINY, *overrides])
  return config, impala.make_agent(config, (1, 1, 2), np.float32, _ACTIONS)


@functools.cache
def _learner(*overrides, devices=1):
  return Learner(*_agent(*overrides), make_mesh(jax.devices()[:devices]))


@functools.cache
def _params():
  """Parameters of which none is zero."""
  _, agent = _agent()
  rng = np.random.default_rng(4)
  params = jax.device_get(agent.init(_KEY).params)
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def _recorded(replay, agent):
  """Fills two lanes with episodes that end everywhere, under a random behaviour policy."""
  rng, stored = np.random.default_rng(7), []
  for lane in range(2):
    segment = episodes.segment(agent.schema, lane, episodes.every_end(8, rng), rng)
    logits = rng.normal(size=segment.extra["logits"].shape).astype(np.float32)
    replay.append(segment._replace(extra={"logits": logits}))
    stored.append(segment._replace(extra={"logits": logits}))
  return stored


@functools.cache
def _batch():
  """A batch, and the (lane, time) of its trajectories with the segments they lie in."""
  _, agent = _agent()
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


def _step(learner, batch, params=None):
  opt_state = jax.device_get(learner.init(_KEY).opt_state)
  state = learner.restore(Variables(_params() if params is None else params, ()), (), opt_state, 0)
  state, result = learner.step(state, learner.put(batch), _KEY)
  return state.variables.params, jax.device_get(result)


def _largest(a, b):
  return max(
    jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), *jax.device_get((a, b))))
  )


# --- the loss, from the segments as they were stored


def _network(params, x):
  """Logits and value in float64."""
  p = jax.tree.map(np.float64, params)

  def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
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


def _reference():
  """The number of actions, and the loss's sums as functions of parameters, targets being fixed."""
  _, selection, stored = _batch()
  parts = []
  for lane, time in zip(selection.lane, selection.time, strict=True):
    segment, slots = stored[lane], np.arange(time, time + _T + 1)
    x = np.stack([_observation(segment, slot) for slot in slots])
    logits, value = _network(_params(), x)
    acted = segment.action[slots[:-1]] >= 0
    chosen = np.arange(_T), np.maximum(segment.action[slots[:-1]], 0)
    log_mu = _log_softmax(np.float64(segment.extra["logits"][slots[:-1]]))[chosen]
    ratio = np.exp(_log_softmax(logits[:-1])[chosen] - log_mu)
    parts.append((x[:-1], acted, chosen, *_vtrace(segment, slots, ratio, value)))

  def loss(params):
    total = 0.0
    for x, acted, chosen, target, advantage in parts:
      logits, value = _network(params, x)
      log_pi = _log_softmax(logits)
      entropy = -(np.exp(log_pi) * log_pi).sum(-1)
      terms = -log_pi[chosen] * advantage + _VALUE / 2 * (target - value) ** 2 - _ENTROPY * entropy
      total += terms[acted].sum()
    return total

  return sum(part[1].sum() for part in parts), loss


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradient(reduction):
  rate = {"mean": _RATE, "sum": _RATE / 100}[reduction]
  learner = _learner(f"loss.reduction={reduction}", f"optim.learning_rate={rate}")
  after, result = _step(learner, _batch()[0])
  count, total = _reference()
  assert count < _BATCH * _T  # some slots are ends
  scale = 1 / count if reduction == "mean" else 1
  got = result.metrics[names.LOSS_TOTAL]
  np.testing.assert_allclose(got, scale * total(_params()), rtol=1e-4)
  rng, after = np.random.default_rng(0), jax.device_get(after)
  for _ in range(5):
    way = jax.tree.map(lambda x: rng.normal(size=x.shape), _params())
    ahead, behind = (
      jax.tree.map(lambda x, d, h=h: x + h * d, _params(), way) for h in (1e-6, -1e-6)
    )
    slope = scale * (total(ahead) - total(behind)) / 2e-6
    moved = jax.tree.map(lambda x, y, d: ((x - y) / rate * d).sum(), _params(), after, way)
    np.testing.assert_allclose(sum(jax.tree.leaves(moved)), slope, rtol=2e-3, atol=1e-3 * scale)


def test_masked_trajectories_and_ends_have_no_gradient():
  batch, _, _ = _batch()
  learner, masked = _learner(), np.arange(_BATCH) % 3 == 0
  ends = batch["acted_mask"] == 0
  mask = batch["acted_mask"] * ~masked[:, None]
  after, _ = _step(learner, batch | {"acted_mask": mask})
  hidden = masked[:, None] | ends
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "stack": np.where(masked[:, None, None], 1000, batch["stack"]).astype(np.int32),
    "reward": np.where(hidden, 5, batch["reward"]).astype(np.float32),
    "logits": np.where(hidden[..., None], 7 * batch["logits"], batch["logits"]),
    "action": np.where(hidden, 2, batch["action"]).astype(np.int32),
    "acted_mask": mask,
  }
  again, _ = _step(learner, batch | other)
  assert ends.any() and _largest(after, _params()) > 1e-3
  assert _largest(after, again) == 0
  nothing, result = _step(learner, batch | {"acted_mask": 0 * mask})
  assert result.metrics[names.LOSS_TOTAL] == 0 and _largest(nothing, _params()) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_devices_do_as_one(reduction):
  batch, _, _ = _batch()
  mask = batch["acted_mask"].copy()
  mask[:3, 2:] = 0  # the first device has fewer actions
  (one, alone), (two, both) = (
    _step(_learner(f"loss.reduction={reduction}", devices=n), batch | {"acted_mask": mask})
    for n in (1, 2)
  )
  assert _largest(one, _params()) > 1e-3
  size = max(np.abs(x).max() for x in jax.tree.leaves(jax.device_get(one)))
  assert _largest(one, two) < 1e-6 * max(size, 1)
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
    jax.device_get(act(variables, inputs, _KEY, 0.0, explore=e)) for e in (True, False)
  )
  logits, _ = _network(_params(), stack.reshape(1, -1))
  for out in (explored, greedy):
    np.testing.assert_allclose(out.columns["logits"], logits.repeat(lanes, 0), rtol=1e-4)
  frequency = np.bincount(explored.action, minlength=_ACTIONS) / lanes
  np.testing.assert_allclose(frequency, np.exp(_log_softmax(logits))[0], atol=0.04)
  np.testing.assert_array_equal(greedy.action, logits.argmax())


# --- configuration and the supply of trajectories


@pytest.mark.parametrize(
  ("override", "message"),
  [
    ("network.torso=nature", "network.torso: must be mlp for Catch"),
    ("loss.unroll_length=0", "loss.unroll_length: must lie in"),
    ("loss.reduction=max", "loss.reduction: expected one of mean, sum"),
    ("loss.td_steps=3", "loss.td_steps is a setting of .*dqn"),
    ("actor.random_steps=9", "actor.random_steps: must be 0"),
    ("learner.tail_steps=9", "learner.tail_steps: must be 0"),
    ("learner.steps=375", "learner.steps: must be at most 374, .* 2992 trajectories"),
    ("replay.capacity=809", "replay.capacity: must be 0 or at least 810"),
  ],
)
def test_a_bad_setting_is_named(override, message):
  with pytest.raises(ConfigError, match=message):
    loader.load(["impala"], ["learner.steps=374", override])


@st.composite
def _supplies(draw):
  """Configurations that take all trajectories there are, or almost, from a small replay."""
  length, lanes, batch = (draw(st.integers(1, top)) for top in (6, 5, 5))
  wanted = draw(st.integers(1, 30))
  env_steps = wanted * length * batch + lanes * length + draw(st.integers(0, 3 * length * batch))
  most = (env_steps // length - lanes) // batch
  overrides = [
    "env.frame_stack=1", "actor.random_steps=0", f"loss.unroll_length={length}",
    f"actor.lanes={lanes}", f"learner.batch_size={batch}", f"run.env_steps={env_steps}",
    f"learner.steps={draw(st.integers(max(most - 2, 1), most))}",
    f"learner.prefetch={draw(st.integers(1, 3))}",
  ]  # fmt: skip
  config = loader.load([], ["agent=impala", "env.game=Catch", *overrides])
  capacity = impala.least_capacity(config, length)
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


@settings(max_examples=100)
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
     "learner.steps=60", "run.env_steps=1220", "replay.capacity=0", "learner.devices=1",
     "run.checkpoint_interval=20", "run.log_interval=5", *overrides],
  )  # fmt: skip


def _run(config, folder, *, stop=0, resume=False, after=lambda experiment: None):
  """Runs to the end or to learner step `stop`, and saves; returns what `after` makes of it."""
  resume_step = max(Checkpoints(folder).steps()) if resume else None
  with MetricsLogger(config, folder, resume_step) as logger:
    experiment = build(config, folder, logger, resume=resume)
    with contextlib.closing(experiment):
      if stop:
        experiment.after_step.append(
          lambda: experiment.limiter.learner_steps == stop and experiment.interrupt()
        )
      loops.run(experiment)
      snapshot.save(experiment, required=True)
      return after(experiment)


def _lags(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [row[impala.TRAINED_LAG_MAX] for row in map(json.loads, lines)
          if impala.TRAINED_LAG_MAX in row]  # fmt: skip


def test_ratios_are_one_on_policy(tmp_path):
  """Also in stacks of frames, at the starts of episodes and across them."""
  config = _config("env.game=CartPole", "env.frame_stack=3", "run.mode=lockstep", "learner.steps=1")
  with MetricsLogger(config, tmp_path, None) as logger:
    experiment = build(config, tmp_path, logger, resume=False)
    with contextlib.closing(experiment):
      rng = np.random.default_rng(0)
      fresh = experiment.state.variables.params
      experiment.state = experiment.state._replace(
        variables=Variables(jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), fresh), ())
      )
      experiment.weights.publish(0, experiment.state.variables)
      while experiment.replay.num_transitions < 160:
        experiment.collector.collect()
      while experiment.replay.ready(4):
        prepared = steps.draw(experiment, 0)
      assert prepared.arrays["acted_mask"].min() == 0
      params = jax.device_get(experiment.state.variables.params)
      metrics = steps.learn(experiment, prepared).metrics
      np.testing.assert_allclose(metrics[impala.RATIO], 1, rtol=1e-6)
      assert _largest(params, experiment.state.variables.params) > 0


def _finish(config, folder, seconds=100):
  """`_run` in a thread, so that a deadlock is a failure; returns what it raised."""
  done = []

  def body():
    try:
      done.append(_run(config, folder))
    except BaseException as error:
      done.append(error)

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  thread.join(seconds)
  assert done, "the roles wait for each other"
  return done[0]


@pytest.mark.parametrize("overrides", [(), ("actor.weights_interval=7", "learner.prefetch=1")])
def test_the_lag_of_an_overlapping_run_is_bounded(tmp_path, overrides):
  config = _config(*overrides)
  assert _finish(config, tmp_path) is None
  lags = _lags(tmp_path)
  assert lags and max(lags) <= _lag_bound(config)
  assert max(lags) >= config.actor.weights_interval - 1


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_run_without_enough_trajectories_ends_with_an_error(tmp_path, mode):
  config = _config(f"run.mode={mode}")
  too_many = dataclasses.replace(config.learner, steps=70)  # as the configuration would refuse
  error = _finish(dataclasses.replace(config, learner=too_many), tmp_path)
  assert isinstance(error, TrainingError)
  assert "all 1220 agent steps are collected" in str(error) and "of 70" in str(error)


def test_many_lanes_and_small_batches_begin(tmp_path):
  """Before the first trajectory is complete, actors go on although the learner is behind."""
  config = _config("actor.lanes=40", "learner.batch_size=2", "learner.steps=100",
                   "run.env_steps=1300")  # fmt: skip
  assert _finish(config, tmp_path) is None
  assert max(_lags(tmp_path)) <= _lag_bound(config)


def _everything(experiment):
  replay = {name: x.copy() for name, x in experiment.replay.state_dict().items()}
  return experiment.limiter.env_steps, jax.device_get(experiment.state), replay


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path):
  config = _config("run.mode=lockstep")
  for name in ("whole", "parts"):
    (tmp_path / name).mkdir()
  whole = _run(config, tmp_path / "whole", after=_everything)
  _run(config, tmp_path / "parts", stop=33)
  parts = _run(config, tmp_path / "parts", resume=True, after=_everything)
  assert whole[0] == parts[0] == 1220 and whole[1].step == 60
  jax.tree.map(np.testing.assert_array_equal, whole, parts)


def test_an_interrupted_overlapping_run_has_all_its_trajectories(tmp_path):
  config = _config("run.mode=async")
  for stop in (20, 41):
    _run(config, tmp_path, stop=stop, resume=stop > 20)
  _, state, _ = _run(config, tmp_path, resume=True, after=_everything)
  assert state.step == 60


def test_a_killed_run_drops_what_it_collected_after_its_checkpoint_and_ends(tmp_path):
  """Trajectories that the ring would evict at once could not be trained on."""
  config = _config("run.mode=async")
  _run(config, tmp_path, stop=20)
  with MetricsLogger(config, tmp_path, 20) as logger:
    experiment = build(config, tmp_path, logger, resume=True)
    with contextlib.closing(experiment):
      before = experiment.limiter.env_steps
      while experiment.limiter.env_steps < 1100:
        experiment.collector.collect()
      experiment.recovery.journal.flush()
    experiment = build(config, tmp_path, logger, resume=True)
    with contextlib.closing(experiment):
      assert experiment.limiter.env_steps == before
  env_steps, state, _ = _run(config, tmp_path, resume=True, after=_everything)
  assert (env_steps, state.step) == (1220, 60)


@pytest.mark.parametrize(
  "overrides",
  [
    # Some batches hold resets only.
    ("loss.unroll_length=1", "learner.batch_size=1", "actor.lanes=1", "learner.steps=150",
     "run.env_steps=200"),
    # Few of the trajectories are used, and stacks are longer than them.
    ("loss.unroll_length=2", "env.frame_stack=4", "learner.batch_size=4", "actor.lanes=2",
     "learner.steps=10", "run.env_steps=2000"),
  ],
)  # fmt: skip
def test_short_trajectories(tmp_path, overrides):
  config = _config(*overrides, "replay.capacity=0", "run.mode=lockstep")
  _run(config, tmp_path, after=lambda experiment: warmup.example_batch(experiment))


def test_catch_is_learned(tmp_path):
  config = loader.load(["impala"], ["run.mode=lockstep", "learner.devices=1"])
  evaluation = _run(config, tmp_path, after=steps.evaluate_now)
  assert evaluation.mean >= 0.9  # 1 is perfect
