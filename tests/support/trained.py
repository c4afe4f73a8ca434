"""Helpers for tests of agents: checks of gradients against float64 NumPy, and whole runs."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec
from scipy.special import expit

from speedyzero_jax.agents.base import AXIS, mean_over_devices
from speedyzero_jax.config import loader
from speedyzero_jax.config.agents import agent_module
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run import snapshot
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.workers.learner import make_mesh
from tiny import built, sharing
from whole_runs import finish

KEY = jax.random.key(0)


def make(actions, *overrides):
  """Creates the agent configured by these overrides, for frames of two numbers."""
  config = loader.load([], ["learner.steps=100", *overrides])
  return agent_module(config.agent.name).make_agent(config, (1, 1, 2), np.float32, actions)


class Gradient(NamedTuple):
  """Results of the learner for a batch, before the optimizer."""

  loss: Any
  of_params: Any
  metrics: Any
  priority: Any


def gradient(agent, devices=1):
  """Compiles (params, batch, target) -> `Gradient`, with the batch sharded over `devices`."""

  def local(params, target, batch, keys):
    run = jax.value_and_grad(agent.loss, has_aux=True)
    (loss, out), grads = run(params, (), target, batch, keys)
    return mean_over_devices((loss, grads, out.metrics)), out.priority

  whole, parts = PartitionSpec(), PartitionSpec(AXIS)
  program = jax.jit(
    jax.shard_map(
      local, mesh=make_mesh(jax.devices()[:devices]), in_specs=(whole, whole, parts, parts),
      out_specs=(whole, parts), check_vma=False,
    )
  )  # fmt: skip

  def run(params, batch, target=()):
    keys = jax.random.split(KEY, len(batch["frames"]))
    mean, priority = jax.device_get(program(params, target, batch, keys))
    return Gradient(*mean, priority)

  return run


def random_params(agent, seed):
  """Random parameters, none of them zero."""
  rng, shapes = np.random.default_rng(seed), jax.eval_shape(agent.init, KEY).params
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def make_replay(agent, lanes, capacity, stack):
  sizes = {"lanes": lanes, "capacity": capacity, "frame_stack": stack, "rng_seed": 0}
  return Replay(agent.schema, agent.make_selector, **sizes)


def gathered(agent, replay, selection):
  """A batch of trajectories, of which none is masked after it is assembled."""
  arrays, _ = agent.assemble(replay, selection, 50)
  frames, stack = replay.trajectories(selection.lane, selection.time, agent.window.after)
  return {"frames": frames, "stack": stack, **arrays}


def linear(layer, x):
  return x @ layer["kernel"] + layer["bias"]


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def lstm(params, x, first, state):
  """An LSTM over slots [T, D] in float64: outputs [T, H], and the states [T+1, 2H] before each."""
  p, states, outputs = jax.tree.map(np.float64, params), [np.float64(state)], []
  for slot, reset in zip(x, first, strict=True):
    output, cell = np.split(0 * states[-1] if reset else states[-1], 2)
    gates = slot @ p["inputs"]["kernel"] + p["inputs"]["bias"] + output @ p["recurrent"]["kernel"]
    enter, forget, leave, new = np.split(gates, 4)
    cell = expit(forget + 1) * cell + expit(enter) * np.tanh(new)
    outputs.append(expit(leave) * np.tanh(cell))
    states.append(np.concatenate([outputs[-1], cell]))
  return np.array(outputs), np.array(states)


def q_values(params, x, first, state):
  """Q-values [T, A] of consecutive slots from a one-layer dueling network, optionally with an LSTM.

  Also returns the states [T+1, 2H] before each slot; in float64.
  """
  p, states = jax.tree.map(np.float64, params), None
  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  if "core" in p:
    features, states = lstm(p["core"], features, first, state)
  for_value, for_advantage = np.split(np.maximum(linear(p["streams"], features), 0), 2, axis=1)
  advantage = linear(p["advantage"], for_advantage)
  return linear(p["value"], for_value) + advantage - advantage.mean(-1, keepdims=True), states


def h(x):
  """MuZero's appendix F with epsilon 0.001: x / (sqrt(|x|+1)+1) is sign(x) (sqrt(|x|+1)-1)."""
  return x / (np.sqrt(np.abs(x) + 1) + 1) + 0.001 * x


def inverse_h(y):
  """Inverse of `h`, by R2D2's formula."""
  root = np.sqrt(1 + 4 * 0.001 * (np.abs(y) + 1 + 0.001)) - 1
  return np.sign(y) * ((root / (2 * 0.001)) ** 2 - 1)


def assert_gradient(params, gradient, loss, *, rtol=1e-3, atol=1e-4):
  """Asserts that a gradient matches finite differences of a float64 loss in random directions."""
  rng = np.random.default_rng(0)
  for _ in range(5):
    way = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    ahead, behind = (jax.tree.map(lambda x, d, h=h: x + h * d, params, way) for h in (1e-6, -1e-6))
    along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: (g * d).sum(), gradient, way)))
    np.testing.assert_allclose(along, (loss(ahead) - loss(behind)) / 2e-6, rtol=rtol, atol=atol)


def largest(tree):
  """The largest absolute value in a tree."""
  return max(np.abs(x).max() for x in jax.tree.leaves(tree))


def assert_masked(gradient, batch, masks, other):
  """Asserts that what masks leave out, which `other` replaces, affects neither loss nor gradient.

  Returns the `Gradient` of the batch with these masks.
  """
  none = {name: 0 * mask for name, mask in masks.items()}
  one, same, nothing = (gradient(batch | x) for x in (masks, masks | other, none))
  assert largest(one.of_params) > 1e-3
  jax.tree.map(np.testing.assert_array_equal, one[:2], same[:2])
  assert nothing.loss == 0 == largest(nothing.of_params)
  return one


def experiment(config, folder, *, resume=False):
  """Builds a run in this folder, with programs of earlier ones of an equal agent and batch size."""
  resume_step = max(Checkpoints(folder).steps()) if resume else None
  steps = dataclasses.replace(config.learner, steps=1, tail_steps=0, prefetch=1)
  actor = dataclasses.replace(config.actor, random_steps=0, weights_interval=1)
  key = Config(config.agent, config.env, actor, optim=config.optim, learner=steps)
  return built(config, folder, sharing(key, key), resume_step)


def run(config, folder, *, stop=0, resume=False, after=lambda experiment: None):
  """Runs to the end or to learner step `stop`, saves, and returns `after(experiment)`."""
  with experiment(config, folder, resume=resume) as made:
    if stop:
      made.after_step.append(lambda: made.limiter.learner_steps == stop and made.interrupt())
    finished = finish(made)
    if isinstance(finished, BaseException):
      raise finished
    snapshot.save(made, required=True)
    return after(made)
