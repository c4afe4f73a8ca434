"""An actor process: asks for agent steps, takes them, and hands over what it collected."""

import functools

import jax
import numpy as np

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import ACTOR

_report = functools.partial(print, flush=True)


def act(config: Config, agent: Agent, client: Client, role: Role, incarnation: int) -> None:
  """Acts until everything is collected; raises RunOver if the run ends before that.

  `incarnation` is larger than that of any earlier process in this role, since the learner started.
  """
  number = role.number
  welcome: messages.ActorWelcome = client.call(messages.ActorJoin(number, incarnation))
  lanes = len(welcome.heads)
  # Incarnations count from 0 again when all processes restart: the slots collected differ then.
  distinct = incarnation + (int(welcome.heads.sum()) << 32)
  own_seed = derived_seed(config.run.seed, str(role), distinct)
  env = make_env(config.env, lanes, own_seed, training=True)
  like = jax.eval_shape(agent.init, jax.random.key(0))
  weights = RemoteWeights(client, number, like, jax.local_devices()[0])
  inference = Inference(agent, report=_report)
  actor = Actor(
    config,
    agent,
    env,
    inference,
    jax.random.key(own_seed),
    EpisodeStats(lanes),
    lane_offset=welcome.first,
    start=welcome.heads,
  )
  sequence, closed = 0, False
  try:
    while True:
      request = messages.GrantRequest(number, incarnation, sequence, lanes)
      grant: messages.Grant = client.call(request)
      if not grant.steps and closed:
        return
      version = weights.latest(ACTOR, at_least=grant.weights)
      progress, random = grant.progress, grant.random
      if grant.steps:
        segments, count = actor.step(
          version, budget=grant.steps, progress=progress, random=random, last=grant.closing
        )
        closed = grant.closing and count == grant.steps
      else:
        segments, closed = actor.close(version, progress=progress, random=random), True
      scores = np.array([episode.score for episode in actor.finished], np.float64)
      lengths = np.array([episode.length for episode in actor.finished], np.int64)
      packed = messages.pack(segments)
      client.call(messages.Append(number, incarnation, sequence, packed, scores, lengths))
      sequence += 1
  finally:
    env.close()
