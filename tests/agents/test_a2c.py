"""A2C: IMPALA's agent, synchronous, is on-policy, and its gradient is the textbook's."""

import jax
import numpy as np

import trained
from speedyzero_jax.agents import impala
from speedyzero_jax.agents.base import ActInputs
from speedyzero_jax.config import loader
from speedyzero_jax.run import steps
from trained import KEY, experiment
from trajectories import gathered, log_softmax, network, observation, recorded

_T, _STACK, _DISCOUNT, _BATCH, _ACTIONS, _VALUE, _ENTROPY = 5, 2, 0.9, 8, 3, 0.6, 0.2
_TINY = (
  "agent=impala", "env.game=CartPole", f"env.frame_stack={_STACK}", f"env.discount={_DISCOUNT}",
  "network.hidden=4", "network.layers=1", f"loss.unroll_length={_T}", "loss.synchronous=true",
  f"loss.value_coefficient={_VALUE}", f"loss.entropy_coefficient={_ENTROPY}", "actor.lanes=8",
  "actor.random_steps=0", "actor.weights_interval=1", f"learner.batch_size={_BATCH}",
)  # fmt: skip


def _n_step(segment, slots, value):
  """Discounted rewards up to the episode's end, or to the last slot and its value."""
  found = np.array(value[:-1])  # no advantage where no action was taken
  for i in range(_T):
    total, weight, k = 0.0, 1.0, i
    while k < _T and segment.action[slots[k]] >= 0:
      total, weight, k = total + weight * segment.reward[slots[k]], weight * _DISCOUNT, k + 1
    if k > i:
      found[i] = total + (0 if segment.terminated[slots[k]] else weight * value[k])
  return found


def test_the_gradient_is_that_of_advantage_actor_critic():
  config, agent = trained.make(_ACTIONS, *_TINY)
  params = trained.random_params(agent, 4)

  def acts(segment, slot):
    return network(params, observation(segment, slot, _STACK))[0]

  replay, stored = recorded(agent, _STACK, logits=acts)
  selection = replay.select(_BATCH)
  parts = []
  for lane, time in zip(selection.lane, selection.time, strict=True):
    segment, slots = stored[lane], np.arange(time, time + _T + 1)
    x = np.stack([observation(segment, slot, _STACK) for slot in slots])
    acted = segment.action[slots[:-1]] >= 0
    chosen = np.arange(_T), np.maximum(segment.action[slots[:-1]], 0)
    value = network(params, x)[1]
    goal = _n_step(segment, slots, value)
    parts.append((x[:-1], acted, chosen, goal, goal - value[:-1]))

  def loss(params):
    terms = []
    for x, acted, chosen, goal, advantage in parts:
      logits, value = network(params, x)
      log_pi = log_softmax(logits)
      entropy = -(np.exp(log_pi) * log_pi).sum(-1)
      term = -log_pi[chosen] * advantage + _VALUE / 2 * (goal - value) ** 2 - _ENTROPY * entropy
      terms.append(term[acted])
    return np.concatenate(terms).mean()

  learner = trained.make_learner(config, agent)
  batch = gathered(agent, replay, selection)
  assert batch["acted_mask"].min() == 0 == batch["discount"].min()
  state, result = trained.step(learner, trained.restored(learner, params), batch)
  np.testing.assert_allclose(result.metrics[impala.RATIO], 1, rtol=1e-5)
  trained.assert_gradient(params, state.variables.params, loss, rtol=2e-3, atol=1e-3)


def test_a_lockstep_run_is_on_policy(tmp_path):
  """The log ratios are 0 but those of first actions, chosen one learner step before."""
  config = loader.load(
    ["a2c"],
    ["network.hidden=8", "actor.lanes=4", "learner.batch_size=4", "learner.steps=8",
     "run.env_steps=250", "replay.capacity=0", "learner.devices=1", "optim.learning_rate=0.03"],
  )  # fmt: skip
  with experiment(config, tmp_path) as run:
    act = jax.jit(run.agent.act, static_argnames="explore")
    for step in range(8):
      while not run.ready():
        run.collector.collect()
      prepared = steps.draw(run, step)
      batch = jax.device_get(prepared.arrays)
      frames = batch["frames"][:, :-1].reshape(-1, 1, *batch["frames"].shape[2:])
      n, lanes = len(frames), np.zeros(len(frames), np.int32)
      inputs = ActInputs(frames, np.zeros(n, bool), lanes, ())
      variables = jax.device_get(run.state.variables)
      logits = act(variables, inputs, KEY, 0.0, explore=False).columns["logits"]
      now = log_softmax(np.float64(logits)).reshape(batch["logits"].shape)
      change = np.abs(now - log_softmax(np.float64(batch["logits"]))).max(-1)
      change = np.where(batch["acted_mask"] > 0, change, 0)
      assert change[:, 1:].max() < 1e-5
      assert (change[:, 0].max() > 1e-4) == (step > 0)
      steps.settle(run, prepared, steps.learn(run, prepared), step)
