"""The local actor with its environments, and how they come back after a stop: by playing all actions again."""

import jax
import numpy as np

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.config.schema import Config
from speedyzero_jax.envs.batched_env import make_env
from speedyzero_jax.metrics.aggregation import EpisodeStats
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.workers.actor import Actor, ActorState


class Collecting:
  """Acts in all lanes of a replay.

  Args:
    config: of the run, or of the unit.
    inference: shared compiled functions.
    replay: whose lanes to act in.
    seed: of the environments.
    key: randomness of the search.
    stats: returns of finished games go here.
  """

  def __init__(
    self,
    config: Config,
    inference: Inference,
    replay: Replay,
    *,
    seed: int,
    key: jax.Array,
    stats: EpisodeStats,
  ):
    self._config, self._inference, self._replay = config, inference, replay
    self._seed, self._key, self._stats = seed, key, stats
    # Environments that could not be brought back are made anew, from another seed each time: this tells them apart. It
    # is how many slots there were then, of which there are more whenever something came of the ones before.
    self._generation = 0
    self._begin(None)

  def _begin(self, start: np.ndarray | None) -> None:
    seed = self._seed + (
      self._generation << 32
    )  # far from any other run's, and from the evaluation's
    self.env = make_env(self._config.env, self._config.actor.lanes, seed, training=True)
    self._stats.clear()  # also of games that a replay which went another way has finished
    self.actor = Actor(self._config, self.env, self._inference, self._key, self._stats, start=start)

  def _begin_anew(self, generation: int) -> None:
    """Environments from another seed, whose first frames come after all that the replay holds."""
    self.env.close()
    self._generation = generation
    self._begin(self._replay.heads)

  def state(self) -> dict[str, np.ndarray]:
    """For a checkpoint."""
    state = self.actor.state()
    return {
      "actions": state.actions,
      "frames_crc": np.array([state.frames_crc], np.int64),
      "start": state.start,
      "generation": np.array([self._generation], np.int64),
    }

  def restore(self, state: dict[str, np.ndarray]) -> None:
    """Brings environments and actor to where `state` was taken; the replay must be there already.

    Raises:
      RuntimeError: the environments went another way (see `Actor.restore`); `cut` is what remains to be done.
    """
    if generation := int(state["generation"][0]):
      self._begin_anew(generation)
    self.actor.restore(ActorState(state["actions"], int(state["frames_crc"][0]), state["start"]))

  def cut(self) -> None:
    """Begins new games; those that were going on end where they stood."""
    for lane in range(self._config.actor.lanes):
      self._replay.truncate(lane)
    self._begin_anew(int(self._replay.heads.sum()))

  def close(self) -> None:
    """Closes the environments."""
    self.env.close()
