"""Parts of agents that learn Q-values: their network and epsilon-greedy exploration."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.agents.base import ActInputs, ActOutput, Variables
from speedyzero_jax.agents.torso_agent import TorsoAgent
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops.recurrent import CoreNetwork
from speedyzero_jax.replay.sampler import importance_weights
from speedyzero_jax.replay.selector import Selection


@dataclasses.dataclass(frozen=True)
class QHeadConfig:
  """The layers after the features."""

  dueling: bool = opt(
    True,
    "Q = V + A - mean A, with a hidden layer for each (Wang et al. 2016); off: one linear layer",
  )


@dataclasses.dataclass(frozen=True)
class ExploreConfig:
  """Epsilon-greedy exploration in training; evaluation is greedy."""

  schedule: Literal["lanes", "annealed"] = opt(
    "lanes",
    "lane i of N always explores with epsilon ** (1 + spread * i / (N-1)) (Ape-X), N being the "
    "lanes of a learner process; or all lanes with one epsilon that falls linearly (DQN)",
  )
  epsilon: float = opt(0.4, "lanes: of the first lane (Ape-X: 0.4)", "[0, 1]")
  spread: float = opt(7.0, "lanes: exponent of the last lane, minus 1 (Ape-X: 7)", "[0, 1000]")
  epsilon_start: float = opt(1.0, "annealed: at the start (DQN: 1)", "[0, 1]")
  epsilon_end: float = opt(0.01, "annealed: at the end (DQN: 0.1, later work: 0.01)", "[0, 1]")
  share: float = opt(0.1, "annealed: share of training in which it falls", "(0, 1]")


class QNetwork(CoreNetwork):
  """Observations [B, T, H, W, C] -> outputs, and recurrent state (see `CoreNetwork.features`).

  The outputs are Q [B, T, A], or with `config.atoms` logits [B, T, A, atoms] of a distribution of
  returns for each action, whose values and advantages are logits too (Rainbow, Hessel et al. 2018).
  """

  def __init__(self, config: Any, shape: tuple[int, int, int], actions: int, rngs: nnx.Rngs):
    super().__init__(config, shape, rngs)
    self.dueling, hidden = config.dueling, config.hidden
    self.shape, atoms = (actions, config.atoms) if config.atoms else (actions,), config.atoms or 1
    if config.dueling:
      self.streams = nnx.Linear(self.width, 2 * hidden, rngs=rngs)  # for value and advantages
      self.value = nnx.Linear(hidden, atoms, rngs=rngs)
    width = hidden if config.dueling else self.width
    self.advantage = nnx.Linear(width, actions * atoms, rngs=rngs)

  def __call__(self, x: jax.Array, first: Any = None, state: Any = ()) -> tuple[jax.Array, Any]:
    features, state = self.features(x, first, state)
    slots = features.shape[:-1]
    if not self.dueling:
      return self.advantage(features).reshape(*slots, *self.shape), state
    for_value, for_advantage = jnp.split(nnx.relu(self.streams(features)), 2, axis=-1)
    advantage = self.advantage(for_advantage).reshape(*slots, *self.shape)
    value = self.value(for_value).reshape(*slots, 1, *self.shape[1:])
    return value + advantage - jnp.mean(advantage, axis=len(slots), keepdims=True), state


class QAgent(TorsoAgent):
  """What agents with a Q-network and a target network have in common."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    super().__init__(config, frame_shape, frame_dtype, actions, QNetwork)
    self.target_interval = config.agent.loss.target_interval

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    outputs, columns, core = self._now(variables, inputs)
    q = self._expected(outputs)
    if not explore:
      return ActOutput(jnp.argmax(q, axis=-1).astype(jnp.int32), columns, core, {"q": q})
    epsilon = epsilons(self._own.explore, inputs.lane, self._config.actor.lanes, progress)
    return ActOutput(epsilon_greedy(q, epsilon, key).astype(jnp.int32), columns, core)

  def _expected(self, outputs: jax.Array) -> jax.Array:
    """Device: Q [..., A] of the network's outputs."""
    return outputs

  def _weights(self, selection: Selection, learner_step: int) -> np.ndarray:
    """Host: importance weights."""
    progress = min(learner_step / self._config.learner.steps, 1.0)
    return importance_weights(selection.probability, self._own.priority, progress)


def epsilons(config: ExploreConfig, lane: Any, lanes: int, progress: Any) -> jax.Array:
  """The epsilon of each lane [n], of so many in all; `progress` is the share of training done."""
  if config.schedule == "lanes":
    return config.epsilon ** (1 + config.spread * (lane % lanes) / max(lanes - 1, 1))
  fallen = jnp.minimum(progress / config.share, 1)
  epsilon = config.epsilon_start + fallen * (config.epsilon_end - config.epsilon_start)
  return jnp.broadcast_to(epsilon, lane.shape)


def epsilon_greedy(q: jax.Array, epsilon: jax.Array, key: jax.Array) -> jax.Array:
  """The best action of Q [n, A], or with probability epsilon [n] any action at random; [n]."""
  best = jnp.argmax(q, axis=-1)
  which, other = jax.random.split(key)
  random = jax.random.randint(other, best.shape, 0, q.shape[-1])
  return jnp.where(jax.random.uniform(which, best.shape) < epsilon, random, best)
