"""Actor processes that only step environments, with actions from the learner's process.

The other end of the stream is `central_actors.py`.
"""

import queue

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.remote import actor_seed
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.run.topology import Role
from speedyzero_jax.types import EnvStep


def step_environments(
  config: Config, _: Agent, client: Client, role: Role, incarnation: int
) -> None:
  """Steps environments until collection is complete; arguments and errors as in `remote.act`."""
  welcome = client.call(messages.Join())
  seed = actor_seed(config, role, incarnation, welcome.heads)
  env = make_env(config.env, len(welcome.heads), seed, training=True)
  observations: queue.SimpleQueue[messages.Observation | None] = queue.SimpleQueue()

  def send(step: EnvStep) -> None:
    observations.put(messages.Observation(step._asdict()))

  try:
    send(env.reset())
    for answer in client.stream(iter(observations.get, None)):
      send(env.step(answer.action))
  finally:
    observations.put(None)
    env.close()
