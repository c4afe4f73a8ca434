"""Central inference (SEED RL, Espeholt et al. 2020): actors run in the learner's process.

Their environments run in other processes (`remote.step_environments`), and their inference requests
are batched together (`workers/batched_inference.py`).
"""

import queue
import threading
from collections.abc import Iterator

import grpc
import numpy as np

from speedyzero_jax.agents.base import Agent
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.actor_service import ActorService
from speedyzero_jax.cluster.grpc_server import POLL_SECONDS, RunFinished
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.remote import play
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.run.experiment import Experiment
from speedyzero_jax.types import EnvStep
from speedyzero_jax.workers.batched_inference import BatchedInference


class StreamLost(Exception):
  """The stream from the process with the environments has ended."""


class RemoteEnv:
  """Environments of another process as an `Env`; `actions` queues what to send, None ends it."""

  def __init__(self, agent: Agent, lanes: int, observations: Iterator[messages.Observation]):
    schema = agent.schema
    self.num_lanes, self.num_actions = lanes, schema.num_actions
    height, width, channels = schema.frame.shape
    self.frame_shape, self.frame_dtype = (height, width, channels), np.dtype(schema.frame.dtype)
    self.actions: queue.SimpleQueue[messages.Actions | None] = queue.SimpleQueue()
    self._observations = observations
    row = {"frame": (self.frame_dtype, self.frame_shape), "reward": (np.dtype(np.float32), ())}
    self._forms = {name: row.get(name, (np.dtype(bool), ())) for name in EnvStep._fields}

  def reset(self) -> EnvStep:
    """Returns the first observation. Raises ValueError for invalid arrays, or StreamLost."""
    try:
      arrays = next(self._observations).arrays
    except (StopIteration, grpc.RpcError):
      raise StreamLost from None
    forms = {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}
    lanes = {array.shape[:1] for array in arrays.values()}
    if forms != self._forms or lanes != {(self.num_lanes,)}:
      raise ValueError(
        f"observations must be of {self.num_lanes} lanes, with dtypes and shapes {self._forms}"
      )
    if not np.isfinite(arrays["reward"]).all():
      raise ValueError("rewards must be finite")
    return EnvStep(**arrays)

  def step(self, action: np.ndarray) -> EnvStep:
    """Sends actions and returns the next observation, as `reset`."""
    self.actions.put(messages.Actions(action.astype(np.int32)))
    return self.reset()

  def close(self) -> None:
    """Ends the stream."""
    self.actions.put(None)


class CentralActors:
  """Runs an actor for the environments of each stream, as a client of the actor service."""

  def __init__(self, experiment: Experiment, service: ActorService, roster: Roster):
    self._experiment, self._service, self._roster = experiment, service, roster
    self._inference = BatchedInference(experiment.inference, experiment.logger.log_mean)

  def environments(
    self, helper: Helper, observations: Iterator[messages.Observation]
  ) -> Iterator[messages.Actions]:
    """Yields the actions for a helper's environments. Raises the error that ends its actor."""
    self._roster.enter(helper)
    errors: list[BaseException] = []
    welcome = self._service.join(helper, messages.Join())
    env = RemoteEnv(self._experiment.agent, len(welcome.heads), observations)

    def act() -> None:
      try:
        self._play(env, helper, welcome)
      except StreamLost:
        pass
      except (RunFinished, ValueError) as error:
        errors.append(error)  # re-raised in the stream's thread
      except BaseException as error:  # such as divergence
        self._experiment.limiter.stop(error)
        errors.append(RunFinished(f"the learner has failed: {error}"))
      finally:
        self._roster.dismiss(helper)
        env.close()

    thread = threading.Thread(target=act, name=str(helper), daemon=True)
    thread.start()
    yield from iter(env.actions.get, None)
    thread.join()
    if errors:
      raise errors[0]

  def _play(self, env: RemoteEnv, helper: Helper, welcome: messages.Welcome) -> None:
    experiment = self._experiment
    config, agent, latest = experiment.local_config, experiment.agent, experiment.weights.latest

    def request(step: messages.Step) -> messages.Grant:
      while not experiment.limiter.stopping:
        self._roster.enter(helper)
        if (grant := self._service.step(helper, step, POLL_SECONDS)) is not None:
          return grant
      raise RunFinished("the run is stopping")

    inference = self._inference
    play(config, agent, env, inference, welcome, request, lambda name, at_least: latest(name))
