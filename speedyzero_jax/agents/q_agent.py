"""Base class of agents that learn Q-values: network, exploration and stored priorities.

With `priority.initial=actor` or `refresh.enabled`, each slot stores Q(s, a) and max Q(s, .),
computed by the weights that acted or by newer ones. Initial and refreshed priorities are then
n-step Q-learning errors computed from these values instead of the target network's.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from speedyzero_jax.agents.base import ActInputs, ActOutput, Arrays, Variables
from speedyzero_jax.agents.refresh import (
  REFRESHER,
  RefreshConfig,
  recompute_priorities,
  refresh_task,
  sweep_problems,
)
from speedyzero_jax.agents.torso_agent import TorsoAgent
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config, PriorityConfig
from speedyzero_jax.ops import td
from speedyzero_jax.ops.recurrent import CoreNetwork
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler, importance_weights
from speedyzero_jax.replay.schema import Column
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take

_UNKNOWN = np.float32(-1e30)  # stored in slots played at random, where no Q was computed


@dataclasses.dataclass(frozen=True)
class QHeadConfig:
  """Layers from features to Q-values."""

  dueling: bool = opt(
    True,
    "Q = V + A - mean A, with a hidden layer for V and A each (Wang et al. 2016); off: one linear "
    "layer",
  )


@dataclasses.dataclass(frozen=True)
class ExploreConfig:
  """Epsilon-greedy exploration, in training and with `evaluation.explore`."""

  schedule: Literal["lanes", "annealed"] = opt(
    "lanes",
    "lanes: lane i of the N lanes of a learner process has the constant epsilon "
    "epsilon ** (1 + spread * i / (N-1)) (Ape-X); annealed: all lanes share an epsilon that "
    "decreases linearly (DQN)",
  )
  epsilon: float = opt(0.4, "lanes: epsilon of the first lane (Ape-X: 0.4)", "[0, 1]")
  spread: float = opt(7.0, "lanes: exponent of the last lane, minus 1 (Ape-X: 7)", "[0, 1000]")
  epsilon_start: float = opt(1.0, "annealed: initial epsilon (DQN: 1)", "[0, 1]")
  epsilon_end: float = opt(0.01, "annealed: final epsilon (DQN: 0.1, later work: 0.01)", "[0, 1]")
  share: float = opt(0.1, "annealed: share of training during which epsilon decreases", "(0, 1]")


@dataclasses.dataclass(frozen=True)
class QPriorityConfig(PriorityConfig):
  """Prioritized replay by TD error."""

  initial: Literal["max", "actor"] = opt(
    "max",
    "priority of new samples: the current maximum (Schaul et al. 2016), or the TD error computed "
    "from the actor's Q-values (Ape-X, R2D2), which takes 8 bytes per step",
  )


@dataclasses.dataclass(frozen=True)
class QAgentConfig(AgentConfig):
  """Configuration common to all agents with a Q-network."""

  priority: QPriorityConfig = QPriorityConfig()
  refresh: RefreshConfig = RefreshConfig()
  explore: ExploreConfig = ExploreConfig()

  @property
  def refreshes(self) -> bool:
    return self.refresh.enabled

  def problems(self, config: Config) -> Iterable[str]:
    if self.refresh.enabled:
      yield from sweep_problems("refresh", self.refresh, config)


class QNetwork(CoreNetwork):
  """Observations [B, T, H, W, C] -> outputs, and recurrent state (see `CoreNetwork.features`).

  The outputs are Q [B, T, A]. With `config.atoms` they are logits [B, T, A, atoms] of a return
  distribution for each action; the dueling streams then yield logits, too (Rainbow, Hessel et al.
  2018).
  """

  def __init__(self, config: Any, shape: tuple[int, int, int], actions: int, rngs: nnx.Rngs):
    super().__init__(config, shape, rngs)
    self.dueling, hidden = config.dueling, config.hidden
    self.shape, atoms = (actions, config.atoms) if config.atoms else (actions,), config.atoms or 1
    if config.dueling:
      self.streams = nnx.Linear(self.width, 2 * hidden, rngs=rngs)  # of value and advantages
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
  """Base class of agents with a Q-network and a target network.

  Args:
    config, frame_shape, frame_dtype, actions: see `TorsoAgent`.
    trained: [T], slots of a sample that are trained on, relative to its first slot.
    eta: weight of the maximum error in a sample's priority, see `td.mixed_priority`.
    rescaled: the network outputs h(Q), see `value_encoding.transform`.
    sampler: class of the selector.
  """

  network = QNetwork

  def __init__(
    self,
    config: Config,
    frame_shape: tuple[int, ...],
    frame_dtype: Any,
    actions: int,
    *,
    trained: np.ndarray,
    eta: float = 1.0,
    rescaled: bool = False,
    sampler: Callable[..., PrioritizedSampler] = PrioritizedSampler,
  ):
    agent_config: QAgentConfig = config.agent
    self._stores_q = agent_config.priority.initial == "actor" or agent_config.refresh.enabled
    names = ("value", "best") if self._stores_q else ()
    super().__init__(
      config, frame_shape, frame_dtype, actions, self.network,
      [Column(name, "float32", fill=float(_UNKNOWN)) for name in names],
      ("value_step",) if names else (),
    )  # fmt: skip
    self._trained, self._eta, self._rescaled, self._sampler = trained, eta, rescaled, sampler
    self.target_interval = config.agent.loss.target_interval
    if agent_config.refresh.enabled:
      self.subscriptions = {REFRESHER: agent_config.refresh.weights_interval}
      results = (Column("q", "float32", (actions,)),)
      state = [x for x in self.schema.columns if x.name in ("first", "core")]
      reads = tuple(state) if self._state_size else ()
      task = refresh_task(agent_config.refresh, self._evaluated, results, self._write, reads)
      self.tasks = {"refresh": task}

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    outputs, columns, core = self._now(variables, inputs)
    q = self._expected(outputs)
    action = jnp.argmax(q, axis=-1)
    if explore:
      own, lanes = self._agent_config.explore, self._config.actor.lanes
      action = epsilon_greedy(q, epsilons(own, inputs.lane, lanes, progress), key)
    action = action.astype(jnp.int32)
    if self._stores_q:
      columns |= {"value": td.chosen(q, action), "best": jnp.max(q, axis=-1)}
    return ActOutput(action, columns, core, {} if explore else {"q": q})

  def _expected(self, outputs: jax.Array) -> jax.Array:
    """Device: Q [..., A] from the network's outputs."""
    return outputs

  def _evaluated(self, variables: Variables, inputs: Arrays, key: jax.Array) -> Arrays:
    """Device: the program of Priority Refresh, given frames and any stored recurrent state."""
    frames = inputs["frames"]  # [B, S, H, W, C], since sweeps process single states
    first, core = jnp.zeros(len(frames), bool), self.initial_core(len(frames))
    if self._state_size:
      first, core = inputs["first"][:, 0], inputs["core"][:, 0]
    outputs, _, _ = self._now(variables, ActInputs(frames, first, None, core))
    return {"q": self._expected(outputs)[:, None]}

  # --- host

  def _write(
    self, replay: Replay, lane: np.ndarray, time: np.ndarray, results: Arrays, step: int
  ) -> None:
    store, q = replay.store, results["q"]
    _, stored = replay.clamp(lane, time)
    action = np.maximum(take(store.action, store.flat(lane, stored)), 0)  # -1 at an end
    values = {"value": q[np.arange(len(q)), action], "best": q.max(-1)}
    replay.rewrite("value_step", lane, time, step, values)
    reach = int(self._trained[-1]) + self._agent_config.loss.td_steps
    recompute_priorities(
      replay, lane, time, reach, lambda lane, time: self._stored_errors(store, lane, time)
    )

  def _stored_errors(
    self, store: LaneStore, lane: np.ndarray, time: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Errors [B] of samples (lane [B], time [B]) from stored Q-values, NaN if any is unknown.

    Also returns the learner steps [B] of the oldest weights that each error depends on.
    """
    lane, time = lane[:, None], time[:, None] + self._trained
    returns = self._returns(store, lane, time)
    now, end = store.flat(lane, time), store.flat(lane, time + returns.steps)
    acted = take(store.action, now) >= 0
    value, best = take(store["value"], now), take(store["best"], end)
    unknown = acted & ((value == _UNKNOWN) | ((best == _UNKNOWN) & (returns.discount > 0)))
    target = td.bootstrapped(returns.reward, returns.discount, best, rescaled=self._rescaled)
    error = td.mixed_priority(target - value, acted, self._eta)
    step = np.minimum(take(store["value_step"], now), take(store["value_step"], end))
    return np.where(unknown.any(1), np.nan, error), step.min(1)

  def _returns(self, store: LaneStore, lane: np.ndarray, time: np.ndarray) -> td.NStep:
    """n-step returns [...] of slots (lane, time [...])."""
    n, discount = self._agent_config.loss.td_steps, self._config.env.discount
    return td.n_step(store, lane, time, n, discount)

  def make_selector(self, store: LaneStore) -> PrioritizedSampler:
    def initial_error(lane: np.ndarray, time: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
      error, step = self._stored_errors(store, lane, time)
      return error if self._agent_config.priority.initial == "actor" else None, step

    return self._sampler(
      store,
      self._agent_config.priority,
      stack=self._stack,
      lookahead=self.window.after,
      initial_error=initial_error if self._stores_q else None,
    )

  def _batch(
    self, store: LaneStore, selection: Selection, lane: Any, time: np.ndarray, learner_step: int
  ) -> Arrays:
    """Arrays of the slots (lane, time [B, ...]) to train on."""
    action = take(store.action, store.flat(lane, time))
    progress = learner_step / self._config.learner.steps
    weight = importance_weights(selection.probability, self._agent_config.priority, progress)
    return {
      "action": np.maximum(action, 0),
      "weight": weight,
      # Ends of episodes, and slots that stand in for evicted ones, may have no action.
      "loss_mask": (action >= 0).astype(np.float32),
      **self._returns(store, lane, time)._asdict(),
    }


def epsilons(config: ExploreConfig, lane: Any, lanes: int, progress: Any) -> jax.Array:
  """Returns epsilon [n] of each `lane` [n], out of `lanes`, at a share `progress` of training."""
  if config.schedule == "lanes":
    return config.epsilon ** (1 + config.spread * (lane % lanes) / max(lanes - 1, 1))
  annealed = jnp.minimum(progress / config.share, 1)
  epsilon = config.epsilon_start + annealed * (config.epsilon_end - config.epsilon_start)
  return jnp.broadcast_to(epsilon, lane.shape)


def epsilon_greedy(q: jax.Array, epsilon: jax.Array, key: jax.Array) -> jax.Array:
  """Returns the greedy action [n] for Q [n, A], or a random one with probability epsilon [n]."""
  best = jnp.argmax(q, axis=-1)
  which, other = jax.random.split(key)
  random = jax.random.randint(other, best.shape, 0, q.shape[-1])
  return jnp.where(jax.random.uniform(which, best.shape) < epsilon, random, best)
