"""An actor in a process of its own: asks for steps, takes them, hands over what came of them."""

import contextlib
import functools

import jax
import numpy as np

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.networks import Blueprint
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import RunOver
from speedyzero_jax.cluster.remote_weights import RemoteWeights
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.run.topology import Role, derived_seed
from speedyzero_jax.workers.actor import Actor
from speedyzero_jax.workers.weights import ACTOR

_say = functools.partial(print, flush=True)  # into a log, which nobody closes for who is killed


def act(config: Config, blueprint: Blueprint, client: Client, role: Role, incarnation: int) -> None:
  """Acts until the run is over.

  Args:
    config: of the unit.
    blueprint: of the network.
    client: of the unit.
    role: of this process.
    incarnation: larger than that of any earlier process in this role, since the learner was started.

  Raises what `Client`'s calls raise, besides RunOver.
  """
  with contextlib.suppress(RunOver):
    _act(config, blueprint, client, role, incarnation)


def _act(
  config: Config, blueprint: Blueprint, client: Client, role: Role, incarnation: int
) -> None:
  number = role.number
  welcome = client.join_actor(messages.ActorJoin(number, incarnation))
  lanes = len(welcome.heads)
  # Incarnations are counted from 0 again when all have been started again: what has been collected tells them apart.
  own_seed = derived_seed(
    config.run.seed, str(role), incarnation + (int(welcome.heads.sum()) << 32)
  )
  env = make_env(config.env, lanes, own_seed, training=True)
  device = jax.local_devices()[0]
  like = jax.eval_shape(blueprint.init, jax.random.key(0))
  weights = RemoteWeights(client, number, (ACTOR,), like, device)
  inference, stats = Inference(config, blueprint, report=_say), EpisodeStats(lanes)
  actor = Actor(
    config,
    env,
    inference,
    jax.random.key(own_seed),
    stats,
    lane_offset=welcome.first,
    start=welcome.heads,
  )
  sequence, closed = 0, False
  try:
    while True:
      grant = client.grant(messages.GrantRequest(number, incarnation, sequence, lanes))
      if not grant.steps and closed:
        return
      version = weights.latest(ACTOR, at_least=grant.weights)
      if grant.steps:
        segments, count = actor.step(
          version,
          budget=grant.steps,
          progress=grant.progress,
          random=grant.random,
          last=grant.closing,
        )
        closed = grant.closing and count == grant.steps
      else:
        segments, closed = actor.close(version, progress=grant.progress, random=grant.random), True
      scores = np.array([episode.score for episode in actor.finished], np.float64)
      lengths = np.array([episode.length for episode in actor.finished], np.int64)
      client.append(messages.Append(number, incarnation, sequence, segments, scores, lengths))
      sequence += 1
  finally:
    env.close()
