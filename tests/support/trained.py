"""What tests of every agent share: single training steps against float64 arithmetic, whole runs."""

import contextlib

import jax
import numpy as np

from speedyzero_jax.agents.base import Variables
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import agent_module
from speedyzero_jax.metrics.logger import MetricsLogger
from speedyzero_jax.run import snapshot
from speedyzero_jax.run.build import build
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.workers.learner import Learner, make_mesh
from whole_runs import finish

RATE = 0.5
# With plain SGD a step shows the gradient.
SGD = (
  "optim.name=sgd", "optim.momentum=0", f"optim.learning_rate={RATE}", "optim.warmup_steps=0",
  "optim.decay_steps=0", "optim.clip_norm=0", "optim.weight_decay=0", "learner.steps=100",
)  # fmt: skip
KEY = jax.random.key(0)


def make(actions, *overrides):
  """A configuration from these overrides, and its agent for frames of two numbers."""
  config = loader.load([], [*SGD, *overrides])
  agent = agent_module(config.agent.name).make_agent(config, (1, 1, 2), np.float32, actions)
  return config, agent


def make_learner(config, agent, devices=1):
  return Learner(config, agent, make_mesh(jax.devices()[:devices]))


def random_params(agent, seed):
  """Parameters of which none is zero."""
  rng, shapes = np.random.default_rng(seed), jax.eval_shape(agent.init, KEY).params
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)


def restored(learner, params, target=()):
  """A state of the learner with these parameters."""
  opt_state = jax.device_get(learner.init(KEY).opt_state)
  return learner.restore(Variables(params, ()), target, opt_state, 0)


def step(learner, state, batch):
  """The state after a training step, and its result on the host."""
  state, result = learner.step(state, learner.put(batch), KEY)
  return state, jax.device_get(result)


def largest(a, b):
  """The largest difference between two trees."""
  return max(
    jax.tree.leaves(jax.tree.map(lambda x, y: np.abs(x - y).max(), *jax.device_get((a, b))))
  )


def lstm(params, x, first, state):
  """An LSTM over slots [T, D] in float64: outputs [T, H], and the states [T+1, 2H] before each."""
  p, states, outputs = jax.tree.map(np.float64, params), [np.float64(state)], []
  for slot, reset in zip(x, first, strict=True):
    output, cell = np.split(0 * states[-1] if reset else states[-1], 2)
    gates = slot @ p["inputs"]["kernel"] + p["inputs"]["bias"] + output @ p["recurrent"]["kernel"]
    enter, forget, leave, new = np.split(gates, 4)
    cell = _sigmoid(forget + 1) * cell + _sigmoid(enter) * np.tanh(new)
    outputs.append(_sigmoid(leave) * np.tanh(cell))
    states.append(np.concatenate([outputs[-1], cell]))
  return np.array(outputs), np.array(states)


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def assert_gradient(before, after, loss, *, rate=RATE, rtol=1e-3, atol=1e-4):
  """A step of SGD went down the slope of this float64 loss, in random directions."""
  rng, after = np.random.default_rng(0), jax.device_get(after)
  for _ in range(5):
    way = jax.tree.map(lambda x: rng.normal(size=x.shape), before)
    ahead, behind = (jax.tree.map(lambda x, d, h=h: x + h * d, before, way) for h in (1e-6, -1e-6))
    slope = (loss(ahead) - loss(behind)) / 2e-6
    moved = jax.tree.map(lambda x, y, d: ((x - y) / rate * d).sum(), before, after, way)
    np.testing.assert_allclose(sum(jax.tree.leaves(moved)), slope, rtol=rtol, atol=atol)


@contextlib.contextmanager
def experiment(config, folder, *, resume=False):
  """The parts of a run in this folder; closed at the end."""
  resume_step = max(Checkpoints(folder).steps()) if resume else None
  with MetricsLogger(config, folder, resume_step) as logger:
    made = build(config, folder, logger, resume=resume)
    with contextlib.closing(made):
      yield made


def run(config, folder, *, stop=0, resume=False, after=lambda experiment: None):
  """Runs to the end or to learner step `stop`, and saves; returns what `after` makes of it."""
  with experiment(config, folder, resume=resume) as made:
    if stop:
      made.after_step.append(lambda: made.limiter.learner_steps == stop and made.interrupt())
    finished = finish(made)
    if isinstance(finished, BaseException):
      raise finished
    snapshot.save(made, required=True)
    return after(made)
