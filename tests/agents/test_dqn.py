"""Tests of DQN: loss in float64, target network and exploration."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import episodes
import trained
from speedyzero_jax.agents import dqn, q_agent
from speedyzero_jax.agents.base import ActInputs, LossOutput, Variables
from speedyzero_jax.config import loader
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import take
from speedyzero_jax.workers.learner import Learner, make_mesh
from trained import KEY, linear, log_softmax

_N, _STACK, _DISCOUNT, _DELTA, _BATCH, _ACTIONS = 3, 2, 0.9, 0.7, 96, 3
_ATOMS = np.linspace(-2, 3, 7)
_C51 = ("network.atoms=7", "network.value_min=-2", "network.value_max=3")
_TINY = (
  "agent=dqn", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.td_steps={_N}", f"loss.huber_delta={_DELTA}",
  "priority.beta_start=0.5", "priority.min_weight=0.3",
  f"learner.batch_size={_BATCH}",
)  # fmt: skip


def _agent(*overrides):
  return trained.make(_ACTIONS, *_TINY, *overrides)


@functools.cache
def _gradient(*overrides):
  return trained.gradient(_agent(*overrides), devices=2)


@functools.cache
def _start(*overrides):
  """Parameters and target parameters."""
  agent = _agent(*overrides)
  return trained.random_params(agent, 4), trained.random_params(agent, 5)


@functools.cache
def _recorded():
  """A replay, and stacks, action and n-step return of each transition that can be sampled."""
  agent = _agent()
  rng = np.random.default_rng(7)
  replay = trained.make_replay(agent, 2, 200, _STACK)
  found = []
  for lane in range(2):
    played = episodes.every_end(_N + 2, rng)
    whole = episodes.recorded(agent.schema, lane, played, rng)
    replay.append(whole)
    start = 0
    for episode in played:
      for i in range(len(episode.rewards)):
        returns = episodes.n_step_return(episode, i, _N, _DISCOUNT)
        if returns:
          now, end = (episodes.observation(whole, start + k, _STACK) for k in (i, i + returns[2]))
          found.append((lane, start + i, now, end, whole["action"][start + i], *returns))
      start += episode.slots
  return replay, [np.array(x) for x in zip(*found, strict=True)]


@functools.cache
def _batch():
  """All transitions that can be sampled, some twice, and the index of each in `_recorded`."""
  replay, recorded = _recorded()
  agent = _agent()
  place = np.arange(_BATCH) % len(recorded[0])
  probability = np.linspace(0.001, 0.1, _BATCH)
  selection = Selection(recorded[0][place].astype(np.int32), recorded[1][place], probability)
  arrays, _ = agent.assemble(replay, selection, learner_step=50)
  frames = replay.windows(selection.lane, selection.time, after=agent.window.after)
  return {"frames": frames, **arrays}, place


def test_slots_without_an_action_are_masked():
  """They may stand in for evicted ones."""
  replay, _ = _recorded()
  lane, time = (x.ravel() for x in np.indices((2, int(replay.store.head.min()))))
  selection = Selection(lane.astype(np.int32), time, np.full(len(lane), 0.1))
  arrays, _ = _agent().assemble(replay, selection, learner_step=50)
  acted = take(replay.store.action, replay.store.flat(lane, time)) >= 0
  assert 0 < acted.sum() < len(acted)
  np.testing.assert_array_equal(arrays["loss_mask"], acted)


def _outputs(params, x, dueling=True):
  """The network in float64: Q [B, A], or logits [B, A, K]."""
  p = jax.tree.map(np.float64, params)

  def per_action(layer, x):
    found = linear(layer, x)
    return found.reshape(len(x), _ACTIONS, *[-1] * (found.shape[1] > _ACTIONS))

  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  if not dueling:
    return per_action(p["advantage"], features)
  streams = np.maximum(linear(p["streams"], features), 0)
  advantage = per_action(p["advantage"], streams[:, 4:])
  value = linear(p["value"], streams[:, :4])
  value = value[:, None] if advantage.ndim == 3 else value
  return value + advantage - advantage.mean(1, keepdims=True)


def _q(params, x, dueling=True):
  outputs = _outputs(params, x, dueling)
  return outputs if outputs.ndim == 2 else np.exp(log_softmax(outputs)) @ _ATOMS


def _weight():
  weight = np.linspace(0.001, 0.1, _BATCH) ** -(0.5 + 0.5 * (1.0 - 0.5))
  return np.maximum(weight / weight.max(), 0.3)


def _reference(double=True, dueling=True):
  """Errors [B] and mean Q(s, a), and the loss as a function of parameters, in float64."""
  _, place = _batch()
  _, _, now, end, action, reward, discount, _ = (x[place] for x in _recorded()[1])
  params, target = _start(*[] if dueling else ["network.dueling=False"])
  next_q = _q(target, end, dueling)
  best = (_q(params, end, dueling) if double else next_q).argmax(-1)
  goal = reward + discount * next_q[np.arange(_BATCH), best]

  def value(params):
    return _q(params, now, dueling)[np.arange(_BATCH), action]

  def loss(params):
    size = np.abs(goal - value(params))
    huber = np.where(size < _DELTA, 0.5 * size**2, _DELTA * (size - 0.5 * _DELTA))
    return (_weight() * huber).mean()

  return goal - value(params), value(params).mean(), loss


def _distributional_reference():
  """KL divergences from the targets [B] and the loss as a function of parameters, in float64."""
  _, place = _batch()
  _, _, now, end, action, reward, discount, _ = (x[place] for x in _recorded()[1])
  params, target = _start(*_C51)
  best = _q(params, end).argmax(-1)
  later = np.exp(log_softmax(_outputs(target, end)))[np.arange(_BATCH), best]
  goal, gap = np.zeros((_BATCH, len(_ATOMS))), _ATOMS[1] - _ATOMS[0]
  for b, k in np.ndindex(goal.shape):  # Bellemare et al. 2017, algorithm 1
    place = (np.clip(reward[b] + discount[b] * _ATOMS[k], -2, 3) - _ATOMS[0]) / gap
    low = min(int(place), len(_ATOMS) - 2)
    goal[b, low] += later[b, k] * (low + 1 - place)
    goal[b, low + 1] += later[b, k] * (place - low)

  def cross_entropy(params):
    log_mass = log_softmax(_outputs(params, now))[np.arange(_BATCH), action]
    return -(goal * log_mass).sum(-1)

  entropy = -(goal * np.log(goal, where=goal > 0, out=np.zeros_like(goal))).sum(-1)
  return cross_entropy(params) - entropy, lambda params: (_weight() * cross_entropy(params)).mean()


# --- the loss


@pytest.mark.parametrize("changes", [(), ("loss.double=False", "network.dueling=False")])
def test_errors_loss_and_gradient_on_two_devices(changes):
  double = dueling = not changes
  params, target = _start(*changes[1:])
  found = _gradient(*changes)(params, _batch()[0], target)
  errors, value, loss = _reference(double, dueling)
  assert np.abs(errors).min() < _DELTA < np.abs(errors).max()
  assert np.abs(errors - _reference(not double, dueling)[0]).max() > 0.1
  np.testing.assert_allclose(found.metrics[dqn.TD_ERROR], np.abs(errors).mean(), rtol=1e-4)
  np.testing.assert_allclose(found.metrics[dqn.Q_VALUE], value, rtol=1e-4)
  np.testing.assert_allclose(found.priority, np.abs(errors), rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found.loss, loss(params), rtol=1e-4)
  trained.assert_gradient(params, found.of_params, loss)


def test_divergences_loss_and_gradient_of_distributions():
  params, target = _start(*_C51)
  found = _gradient(*_C51)(params, _batch()[0], target)
  divergences, loss = _distributional_reference()
  np.testing.assert_allclose(found.priority, divergences, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(found.metrics[dqn.DIVERGENCE], divergences.mean(), rtol=1e-3)
  np.testing.assert_allclose(found.loss, loss(params), rtol=1e-4)
  trained.assert_gradient(params, found.of_params, loss)


@pytest.mark.parametrize("changes", [(), _C51])
def test_masked_samples_have_no_gradient(changes):
  (batch, _), (params, target) = _batch(), _start(*changes)
  masked = np.arange(_BATCH) % 3 == 0
  mask = (~masked).astype(np.float32)
  other = {
    "frames": np.where(masked[:, None, None, None, None], 9, batch["frames"]).astype(np.float32),
    "reward": np.where(masked, 5, batch["reward"]).astype(np.float32),
    "action": np.where(masked, 0, batch["action"]).astype(np.int32),
  }
  gradient = functools.partial(_gradient(*changes), params, target=target)
  priority = trained.assert_masked(gradient, batch, {"loss_mask": mask}, other).priority
  assert not priority[masked].any() and priority[~masked].all()


def test_the_target_network_is_copied_every_interval():
  """Uses an agent of one parameter, which every learner step changes by 1."""

  def loss(params, batch_stats, target, batch, keys):
    return -params["w"], LossOutput((), {}, target["w"] * batch["frames"])

  agent = SimpleNamespace(
    init=lambda key: Variables({"w": np.float32(0)}, ()), loss=loss, target_interval=3
  )
  sgd = ("optim.momentum=0", "optim.learning_rate=1", "optim.warmup_steps=0", "optim.clip_norm=0")
  config = loader.load([], ["agent=dqn", "env.game=Catch", "optim.name=sgd", *sgd])
  learner, seen = Learner(config, agent, make_mesh(jax.devices()[:1])), []
  state, batch = learner.init(KEY), learner.put({"frames": np.ones(1, np.float32)})
  for _ in range(8):
    state, result = learner.step(state, batch, KEY)
    seen.append((float(result.priority[0]), float(state.target["w"])))
  assert seen == [(0, 0), (0, 0), (0, 3), (3, 3), (3, 3), (3, 6), (6, 6), (6, 6)]


# --- acting


def test_lanes_explore_with_the_epsilons_of_ape_x():
  config = q_agent.ExploreConfig()
  expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
  np.testing.assert_allclose(q_agent.epsilons(config, np.arange(8), 8, 0.5), expected, rtol=1e-5)
  second = np.arange(4, 8)  # lanes of the second of two actors
  np.testing.assert_allclose(q_agent.epsilons(config, second, 8, 0.5), expected[4:], rtol=1e-5)
  np.testing.assert_allclose(q_agent.epsilons(config, np.arange(1), 1, 0.5), [0.4])


def test_an_annealed_epsilon_falls_linearly():
  config = q_agent.ExploreConfig("annealed", epsilon_start=0.9, epsilon_end=0.1, share=0.5)
  found = [q_agent.epsilons(config, np.arange(2), 2, p).tolist() for p in (0.0, 0.25, 0.5, 1.0)]
  np.testing.assert_allclose(found, [[e, e] for e in (0.9, 0.5, 0.1, 0.1)], rtol=1e-6)


def test_acting_is_epsilon_greedy():
  lanes = 400
  agent = _agent("explore.epsilon=0.6", "explore.spread=0", f"actor.lanes={lanes}", *_C51)
  params, _ = _start(*_C51)
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


@pytest.mark.parametrize("schedule", ["lanes", "annealed"])
def test_exploration_depends_on_the_given_lanes_and_progress(schedule):
  """Lane 0 at the start acts at random; lane 1, or any lane at the end, greedily."""
  count = 400
  settings = {
    "lanes": ("explore.epsilon=0.9", "explore.spread=1000", "actor.lanes=2"),
    "annealed": ("explore.schedule=annealed", "explore.epsilon_end=0", "actor.lanes=2"),
  }
  agent, (params, _) = _agent(*settings[schedule]), _start()
  frames = np.zeros((count, _STACK, 1, 1, 2), np.float32)
  act = jax.jit(functools.partial(agent.act, explore=True))

  def kinds(lane, progress):
    lanes = np.full(count, lane, np.int32)
    inputs = ActInputs(frames, np.zeros(count, bool), lanes, ())
    return len(set(act(Variables(params, ()), inputs, KEY, progress).action.tolist()))

  assert kinds(0, 0.0) == _ACTIONS
  assert (kinds(1, 0.0), kinds(0, 1.0)) == ((1, 3) if schedule == "lanes" else (3, 1))


def test_the_interval_of_the_target_network_is_a_setting():
  assert _agent("loss.target_interval=7").target_interval == 7
