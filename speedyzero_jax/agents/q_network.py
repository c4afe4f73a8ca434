"""The head of a Q-network and epsilon-greedy exploration, for agents that learn Q-values."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from speedyzero_jax.config.fields import opt


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


class QHead(nnx.Module):
  """Layers from features to Q; Q-networks derive from it."""

  def __init__(self, config: QHeadConfig, features: int, hidden: int, actions: int, rngs: nnx.Rngs):
    self.dueling = config.dueling
    if config.dueling:
      self.streams = nnx.Linear(features, 2 * hidden, rngs=rngs)  # for the value and the advantages
      self.value = nnx.Linear(hidden, 1, rngs=rngs)
    self.advantage = nnx.Linear(hidden if config.dueling else features, actions, rngs=rngs)

  def q(self, features: jax.Array) -> jax.Array:
    """Features [..., D] -> Q [..., A]."""
    if not self.dueling:
      return self.advantage(features)
    for_value, for_advantage = jnp.split(nnx.relu(self.streams(features)), 2, axis=-1)
    advantage = self.advantage(for_advantage)
    return self.value(for_value) + advantage - jnp.mean(advantage, axis=-1, keepdims=True)


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
