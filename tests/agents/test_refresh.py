"""Tests of priorities of DQN and R2D2 from stored Q-values: the actor's, then refreshed ones."""

import jax
import numpy as np
import pytest

import trained
from speedyzero_jax.agents.base import Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.refresher_service import RefresherService
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.config import loader
from speedyzero_jax.run import steps
from trained import experiment

_N, _BURN_IN, _LENGTH, _STRIDE, _ETA, _DISCOUNT, _ALPHA = 3, 2, 4, 3, 0.7, 0.9, 0.8
_AGENTS = {
  "dqn": (),
  "r2d2": (
    "network.lstm_hidden=3", f"loss.burn_in={_BURN_IN}", f"loss.sequence_length={_LENGTH}",
    f"loss.stride={_STRIDE}", f"loss.priority_max={_ETA}",
  ),
}  # fmt: skip


def _config(agent, *overrides):
  return loader.load(
    [agent],
    ["env.game=CartPole", "env.frame_stack=2", f"env.discount={_DISCOUNT}", "network.hidden=4",
     "network.layers=1", f"loss.td_steps={_N}", "actor.lanes=3", f"priority.alpha={_ALPHA}",
     "priority.initial=actor", "refresh.enabled=true", "refresh.block=32", "learner.batch_size=4",
     "learner.steps=1000", "learner.devices=1", "run.env_steps=400", "run.mode=lockstep",
     *_AGENTS[agent], *overrides],
  )  # fmt: skip


def _error(slots, q, t, rescaled):
  """Error of the transition out of slot t of a lane; None if its end is not stored."""
  end, total = t, 0.0
  while end < t + _N and slots["action"][end] >= 0:
    total += _DISCOUNT ** (end - t) * slots["reward"][end]
    end += 1
    if end == len(q):
      return None
  value, discount = q[end].max(), 0.0 if slots["terminated"][end] else _DISCOUNT ** (end - t)
  if rescaled:
    goal = trained.h(total + discount * trained.inverse_h(value))
  else:
    goal = total + discount * value
  return abs(goal - q[t][slots["action"][t]])


def _reference(run, params):
  """The priority of every slot, 0 if none, from the network in float64."""
  store, found, sequences = run.replay.store, [], "core" in run.replay.store.fields
  for lane, head in enumerate(store.head):
    assert not store.tail[lane]
    slots = {name: field[lane, :head] for name, field in store.fields.items()}
    first, action, frame = slots["first"], slots["action"], np.float64(store.frame[lane, :head])
    before = frame[np.where(first, np.arange(head), np.arange(head) - 1)]
    x = np.concatenate([before, frame], axis=-1)[:, 0, 0]
    state = slots.get("core", [None] * head)
    q = [trained.q_values(params, x[[t]], first[[t]], state[t])[0][0] for t in range(head)]
    for t in range(head):
      size = None
      if not sequences:
        size = _error(slots, q, t, False) if action[t] >= 0 else None
      elif t % _STRIDE == 0 and t + _BURN_IN + _LENGTH + _N <= head:
        of_sequence = t + _BURN_IN + np.arange(_LENGTH)
        sizes = [_error(slots, q, s, True) for s in of_sequence if action[s] >= 0]
        size = _ETA * max(sizes) + (1 - _ETA) * np.mean(sizes)
      found.append(0.0 if size is None else (size + 1e-6) ** _ALPHA)
  return np.array(found)


def _stamps(run):
  """The learner step of the oldest value that each slot's priority depends on, if it has one."""
  store, found = run.replay.store, []
  window = slice(_BURN_IN, _BURN_IN + _LENGTH) if "core" in store.fields else slice(1)
  for lane, head in enumerate(store.head):
    step, slots = store["value_step"][lane, :head], np.arange(head)
    ends = np.append(np.flatnonzero(store.action[lane, :head] < 0), head - 1)
    bootstrap = np.minimum(slots + _N, ends[np.searchsorted(ends, slots)])
    oldest = np.minimum(step, step[bootstrap])
    found += [oldest[t:][window].min(initial=20) for t in slots]
  return np.array(found)


def _play(run, seed):
  """Collects all experience with random parameters; returns these parameters."""
  params = trained.random_params(run.agent, seed)
  run.weights.publish(0, Variables(params, ()))
  while not run.limiter.collected:
    run.collector.collect()
  return params


def _priorities(run):
  return run.replay.state_dict()["priority"]


def _refresh_here(run):
  (sweeper,) = run.sweepers
  steps.sweep(run, sweeper)


def _refresh_in_a_host(run):
  """The calls of a refresher process, with encoded messages; frames are read from the replay."""
  roster, helper = Roster({"refresher": 1}, lambda _: None), messages.Helper("refresher", 0)
  service, request = RefresherService(run, roster), messages.Results(0, 0, {})
  roster.enter(helper)

  def sent(message):
    return messages.decode(type(message), messages.encode(message))

  def refresh(run):
    nonlocal request
    run.limiter.add_learner_step()
    block = service.work(helper, sent(request), 0.01)
    request = messages.Results(0, 0, {})
    if block is None:
      return
    block, version = sent(block), run.weights.latest("refresher")
    inputs = {"frames": run.replay.store.gather(block.lane[:, None], block.cell), **block.columns}
    arrays = run.inference.compute(version, block.task, inputs, jax.random.key(0))
    request = messages.Results(block.block, version.step, arrays)

  return refresh


@pytest.mark.parametrize(
  ("agent", "host", "random", "initial"),
  [
    ("dqn", False, True, "actor"), ("dqn", True, False, "actor"), ("dqn", False, False, "max"),
    ("r2d2", False, False, "actor"), ("r2d2", True, True, "actor"),
  ],
)  # fmt: skip
def test_priorities_are_those_of_the_weights_that_acted_and_then_of_the_refresher(
  agent, host, random, initial, tmp_path
):
  """All slots have the same weights; after random play, new samples have the largest priority."""
  own = f"actor.random_steps={400 if random else 0}", f"priority.initial={initial}"
  config = _config(agent, *own)
  with experiment(config, tmp_path) as run:
    acting, largest = _play(run, 0), random or initial == "max"
    expected = (_reference(run, acting) > 0) * 1.0 if largest else _reference(run, acting)
    np.testing.assert_allclose(_priorities(run), expected, rtol=2e-3, atol=1e-4)
    assert (expected > 0).sum() > 60
    newer = trained.random_params(run.agent, 1)
    run.weights.publish(20, Variables(newer, ()))
    refresh = _refresh_in_a_host(run) if host else _refresh_here
    for _ in range(400):
      refresh(run)
      live = run.replay.state_dict()
      held = live["priority"] > 0
      np.testing.assert_array_equal(live["priority_step"][held], _stamps(run)[held])
      if run.replay.oldest_step("value_step") == 20:
        break
    np.testing.assert_allclose(_priorities(run), _reference(run, newer), rtol=2e-3, atol=1e-4)
    assert (live["priority_step"][held] == 20).all()
