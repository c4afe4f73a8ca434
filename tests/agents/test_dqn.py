"""DQN against float64 arithmetic, its target network and its exploration."""

import functools

import jax
import numpy as np
import pytest

import episodes
import trained
from speedyzero_jax.agents import dqn
from speedyzero_jax.agents.base import ActInputs, Variables
from speedyzero_jax.metrics import names
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from trained import KEY, largest

_N, _STACK, _DISCOUNT, _DELTA, _BATCH, _ACTIONS = 3, 2, 0.9, 0.7, 96, 3
_TINY = (
  "agent=dqn", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.td_steps={_N}", f"loss.huber_delta={_DELTA}",
  "loss.target_interval=3", "priority.beta_start=0.5", "priority.min_weight=0.3",
  f"learner.batch_size={_BATCH}",
)  # fmt: skip


def _agent(*overrides):
  return trained.make(_ACTIONS, *_TINY, *overrides)


@functools.cache
def _learner(*overrides, devices=1):
  return trained.make_learner(*_agent(*overrides), devices)


@functools.cache
def _start(dueling=True):
  """Parameters and target parameters."""
  _, agent = _agent(f"network.dueling={dueling}")
  return trained.random_params(agent, 4), trained.random_params(agent, 5)


@functools.cache
def _recorded():
  """A replay, and of each transition that can be sampled: stacks, action and n-step return."""
  _, agent = _agent()
  rng = np.random.default_rng(7)
  replay = Replay(
    agent.schema, agent.make_selector, lanes=2, capacity=200, frame_stack=_STACK, rng_seed=0
  )
  found = []
  for lane in range(2):
    played = episodes.every_end(_N + 2, rng)
    whole = episodes.segment(agent.schema, lane, played, rng)
    replay.append(whole)
    start = 0
    for episode in played:
      for i in range(len(episode.rewards)):
        returns = episodes.n_step_return(episode, i, _N, _DISCOUNT)
        if returns:

          def stack(k, start=start, whole=whole):
            shown = [whole.frame[start + max(j, 0), 0, 0] for j in range(k - _STACK + 1, k + 1)]
            return np.concatenate(shown)

          end = stack(i + returns[2])
          found.append((lane, start + i, stack(i), end, whole.action[start + i], *returns))
      start += episode.slots
  return replay, [np.array(x) for x in zip(*found, strict=True)]


@functools.cache
def _batch():
  """All transitions that can be sampled, some twice, and the place of each in `_recorded`."""
  replay, recorded = _recorded()
  _, agent = _agent()
  place = np.arange(_BATCH) % len(recorded[0])
  probability = np.linspace(0.001, 0.1, _BATCH)
  selection = Selection(recorded[0][place].astype(np.int32), recorded[1][place], probability)
  arrays, _ = agent.assemble(replay, selection, learner_step=50)
  frames = replay.windows(selection.lane, selection.time, after=agent.window.after)
  return {"frames": frames, **arrays}, place


def _q(params, x, dueling=True):
  """The network in float64."""
  p = jax.tree.map(np.float64, params)

  def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  if not dueling:
    return linear(p["advantage"], features)
  streams = np.maximum(linear(p["streams"], features), 0)
  advantage = linear(p["advantage"], streams[:, 4:])
  return linear(p["value"], streams[:, :4]) + advantage - advantage.mean(-1, keepdims=True)


def _reference(double=True, dueling=True):
  """Targets [B] and the loss as a function of parameters, in float64."""
  _, place = _batch()
  _, _, now, end, action, reward, discount, _ = (x[place] for x in _recorded()[1])
  params, target = _start(dueling)
  next_q = _q(target, end, dueling)
  best = (_q(params, end, dueling) if double else next_q).argmax(-1)
  goal = reward + discount * next_q[np.arange(_BATCH), best]
  beta = 0.5 + 0.5 * (1.0 - 0.5)
  weight = np.linspace(0.001, 0.1, _BATCH) ** -beta
  weight = np.maximum(weight / weight.max(), 0.3)

  def error(params):
    return goal - _q(params, now, dueling)[np.arange(_BATCH), action]

  def loss(params):
    size = np.abs(error(params))
    huber = np.where(size < _DELTA, 0.5 * size**2, _DELTA * (size - 0.5 * _DELTA))
    return (weight * huber).mean()

  return error(params), loss


def _step(learner, batch, state=None, dueling=True):
  state = trained.restored(learner, *_start(dueling)) if state is None else state
  return trained.step(learner, state, batch)


# --- the loss


@pytest.mark.parametrize(("double", "dueling"), [(True, True), (False, True), (True, False)])
def test_errors_loss_and_gradient(double, dueling):
  learner = _learner(f"loss.double={double}", f"network.dueling={dueling}")
  state, result = _step(learner, _batch()[0], dueling=dueling)
  errors, loss = _reference(double, dueling)
  assert np.abs(errors).min() < _DELTA < np.abs(errors).max()
  np.testing.assert_allclose(result.priority, np.abs(errors), rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(result.metrics[names.LOSS_TOTAL], loss(_start(dueling)[0]), rtol=1e-4)
  trained.assert_gradient(_start(dueling)[0], state.variables.params, loss)


def test_double_learning_changes_the_targets():
  assert np.abs(_reference(True)[0] - _reference(False)[0]).max() > 0.1


def test_masked_samples_have_no_gradient():
  batch, _ = _batch()
  learner, masked = _learner(), np.arange(_BATCH) % 3 == 0
  mask = (~masked[:, None]).astype(np.float32)
  state, result = _step(learner, batch | {"loss_mask": mask})
  assert not result.priority[masked].any() and result.priority[~masked].all()
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "reward": np.where(masked, 5, batch["reward"]).astype(np.float32),
    "action": np.where(masked, 0, batch["action"]).astype(np.int32),
  }
  again, _ = _step(learner, batch | other | {"loss_mask": mask})
  assert largest(state.variables.params, _start()[0]) > 1e-3
  assert largest(state.variables.params, again.variables.params) == 0
  nothing, result = _step(learner, batch | {"loss_mask": 0 * mask})
  assert result.metrics[names.LOSS_TOTAL] == 0
  assert largest(nothing.variables.params, _start()[0]) == 0


def test_evicted_samples_are_masked():
  _, agent = _agent()
  replay = Replay(
    agent.schema, agent.make_selector, lanes=1, capacity=9, frame_stack=_STACK, rng_seed=0
  )
  rng = np.random.default_rng(0)
  whole = episodes.segment(agent.schema, 0, episodes.every_end(3, rng), rng)
  replay.append(whole.map(lambda x: x[:9], 0))
  selection = replay.select(32)
  replay.append(whole.map(lambda x: x[9:13], 9))
  arrays, _ = agent.assemble(replay, selection, 0)
  np.testing.assert_array_equal(arrays["loss_mask"][:, 0], selection.time >= 4)
  assert 0 < arrays["loss_mask"].sum() < 32


def test_the_target_network_is_copied_every_interval():
  learner, (batch, _) = _learner(), _batch()
  state, expected = trained.restored(learner, *_start()), _start()[1]
  for step in range(1, 8):
    state, _ = _step(learner, batch, state)
    params = jax.device_get(state.variables.params)
    assert largest(params, expected) > 1e-3
    expected = params if step % 3 == 0 else expected
    assert largest(state.target, expected) == 0


def test_two_devices_do_as_one():
  (one, alone), (two, both) = (_step(_learner(devices=devices), _batch()[0]) for devices in (1, 2))
  assert largest(one.variables.params, two.variables.params) < 1e-6
  assert largest(one.variables.params, _start()[0]) > 1e-3
  np.testing.assert_allclose(alone.priority, both.priority, rtol=1e-5)
  for name, value in alone.metrics.items():
    np.testing.assert_allclose(value, both.metrics[name], rtol=1e-5, err_msg=name)


# --- acting


def test_lanes_explore_with_the_epsilons_of_ape_x():
  config = dqn.ExploreConfig()
  expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
  np.testing.assert_allclose(dqn.epsilons(config, np.arange(8), 8, 0.5), expected, rtol=1e-5)
  np.testing.assert_allclose(dqn.epsilons(config, np.arange(1), 1, 0.5), [0.4])


def test_an_annealed_epsilon_falls_linearly():
  config = dqn.ExploreConfig("annealed", epsilon_start=0.9, epsilon_end=0.1, share=0.5)
  found = [dqn.epsilons(config, np.arange(2), 2, p).tolist() for p in (0.0, 0.25, 0.5, 1.0)]
  np.testing.assert_allclose(found, [[e, e] for e in (0.9, 0.5, 0.1, 0.1)], rtol=1e-6)


def test_acting_is_epsilon_greedy():
  lanes = 400
  _, agent = _agent("explore.epsilon=0.6", "explore.spread=0", f"actor.lanes={lanes}")
  params, _ = _start()
  frames = np.random.default_rng(0).normal(size=(lanes, _STACK, 1, 1, 2)).astype(np.float32)
  inputs = ActInputs(frames, np.zeros(lanes, bool), np.arange(lanes), ())
  act = jax.jit(agent.act, static_argnames="explore")
  explored, greedy = (
    jax.device_get(act(Variables(params, ()), inputs, KEY, 0.0, explore=e)) for e in (True, False)
  )
  q = _q(params, frames.reshape(lanes, -1))
  np.testing.assert_array_equal(greedy.action, q.argmax(-1))
  other = explored.action != greedy.action
  assert abs(other.mean() - 0.6 * (1 - 1 / _ACTIONS)) < 0.08
