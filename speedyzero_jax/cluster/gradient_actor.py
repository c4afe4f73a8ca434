"""Actor process that sends gradients instead of experience (A3C, Mnih et al. 2016)."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import Agent, Variables
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.remote import RemoteWeights, joined
from speedyzero_jax.config.schema import Config
from speedyzero_jax.metrics.aggregation import Episode
from speedyzero_jax.run import batch_pipeline
from speedyzero_jax.run.experiment import LEARN
from speedyzero_jax.run.factories import make_replay
from speedyzero_jax.types import Env, Slots
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.learner import Learner, LearnerState, make_mesh
from speedyzero_jax.workers.weights import ACTOR, Version

_report = functools.partial(print, flush=True)


class GradientActor:
  """An actor with a replay for one batch, and the program that computes the batch's gradient.

  `first` is the index of its first lane in the learner's process.
  """

  def __init__(self, config: Config, agent: Agent, env: Env, seed: int, first: int):
    lanes, key = env.num_lanes, jax.random.key(seed)
    own = dataclasses.replace(config, actor=dataclasses.replace(config.actor, lanes=lanes))
    mesh = make_mesh(jax.local_devices()[:1])
    self._agent, self._first, self._size = agent, first, config.learner.batch_size
    self._replay = make_replay(own, agent, mesh, _report, seed=seed)
    self._learner, self._key = Learner(own, agent, mesh, report=_report), key
    inference = Inference(agent, report=_report)
    self._actor = Actor(own, agent, env, inference, key, lane_offset=first, resumable_for=0)

  def unroll(self, version: Version, grant: messages.Grant) -> tuple[int, list[Episode]]:
    """Plays until a batch is complete or the grant is used.

    Returns the number of agent steps, and the episodes that ended.
    """
    steps, episodes = 0, list[Episode]()
    while steps < grant.steps and not self._replay.ready(self._size):
      slots, count = self._actor.step(
        version,
        budget=grant.steps - steps,
        progress=grant.progress,
        random=grant.random,
        last=grant.closing,
      )
      self._replay.append(Slots(slots.lane - self._first, slots.time, slots.columns))
      steps, episodes = steps + count, episodes + self._actor.finished
    return steps, episodes

  def gradient(self, version: Version) -> tuple[messages.Arrays, dict[str, float]]:
    """Returns the arrays and metrics of `messages.Gradient`; {} and {} without a complete batch."""
    if not self._replay.ready(self._size):
      return {}, {}
    # Agents that train once on each trajectory request no work for a batch.
    batch = batch_pipeline.draw(
      self._agent, self._replay, self._size, version.step, lambda *_: None, contextlib.nullcontext
    )
    state = LearnerState(version.variables, (), (), jnp.asarray(version.step, jnp.int32))
    key = jax.random.fold_in(self._key, LEARN)
    found = jax.device_get(self._learner.gradient(state, self._learner.put(batch.arrays), key))
    self._replay.update(batch.selection, found.priority, version.step)
    metrics = {name: float(value) for name, value in found.metrics.items()}
    return messages.named(Variables(found.params, found.batch_stats)), metrics | batch.info


def send_gradients(config: Config, agent: Agent, client: Client) -> None:
  """As `remote.act`, but sends gradients."""
  weights = RemoteWeights(client, agent, jax.local_devices()[0])
  with joined(config, client) as (welcome, env):
    actor = GradientActor(config, agent, env, welcome.seed, welcome.first)
    message = messages.Gradient(0, 0, np.zeros((0, 2)), 0, {}, {})
    for sequence in itertools.count(1):
      grant: messages.Grant = client.call(message)
      if not grant.steps:
        return
      version = weights.latest(ACTOR, at_least=grant.weights)
      steps, episodes = actor.unroll(version, grant)
      ended = np.array(episodes, np.float64).reshape(-1, 2)
      message = messages.Gradient(sequence, steps, ended, version.step, *actor.gradient(version))
