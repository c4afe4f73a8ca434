"""The EfficientZero family as an `Agent`: acting by search, an unrolled loss, and reanalysis."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import (
  AXIS,
  ActInputs,
  ActOutput,
  Agent,
  Arrays,
  LossOutput,
  Variables,
  Window,
  Work,
  mean_over_devices,
)
from speedyzero_jax.agents.efficientzero import losses, metric_names, reanalyse, targets
from speedyzero_jax.agents.efficientzero.config import EfficientZeroConfig, SearchConfig
from speedyzero_jax.agents.efficientzero.network_def import NetworkDef, variables_of
from speedyzero_jax.agents.efficientzero.networks import Network, initial_carry
from speedyzero_jax.agents.efficientzero.observations import stack_frames
from speedyzero_jax.agents.efficientzero.search import (
  KnownEdge,
  ModelStep,
  Root,
  SearchResult,
  make_search,
)
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops import value_encoding
from speedyzero_jax.ops.torsos import normalize
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler, importance_weights
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params


class EfficientZero(Agent):
  """See `agents.base.Agent`. Has no target network, as reanalysis uses its own delayed weights.

  Its columns are the search policy, search value and network value of each state. Subclasses may
  replace `network`.
  """

  network = Network

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    agent_config: EfficientZeroConfig = config.agent
    self._config, self._agent_config, self._stack = config, agent_config, config.env.frame_stack
    axis = AXIS if agent_config.network.batch_norm == "sync" else None
    height, width, channels = frame_shape
    shape = height, width, channels * self._stack
    self.network_def = NetworkDef(
      agent_config.network, shape, actions, axis_name=axis, network=self.network
    )
    self._make_search = partial(
      make_search,
      discount=config.env.discount,
      value_prefix_horizon=agent_config.network.value_prefix_horizon,
      recurrent_fn=self._recurrent,
      initial_carry=partial(initial_carry, agent_config.network),
      improved_values=agent_config.reanalyse.reuse,
    )
    self.schema = make_schema(
      frame_shape,
      frame_dtype,
      actions,
      (
        Column("policy", "float32", (actions,), fill=1 / actions),  # improved by the search
        Column("search_value", "float32"),  # of the root, after the search
        Column("value", "float32"),  # of the root, from the network
      ),
      copies={"bootstrap": "value"},  # the value from which n-step returns bootstrap
      stamps=("policy_step", "bootstrap_step", "value_step"),  # policy_step: of the search
    )
    self.value_scale = 1.0
    unroll = agent_config.loss.unroll_steps
    self.window = Window(after=unroll, within_episode=True)
    self.lookahead = unroll + agent_config.loss.td_steps
    self.subscriptions, self.tasks = reanalyse.make_tasks(
      config, self._searched, self._values, actions
    )

  # --- device

  def init(self, key: jax.Array) -> Variables:
    return self.network_def.init(key)

  def published(self, variables: Variables) -> Variables:
    return self.network_def.fold(variables)

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    search = self._agent_config.search
    result = self._search_windows(
      search, variables, inputs.frames, key, explore=explore, stage=self._stage(progress)
    )
    result = jax.tree.map(lambda x: x[:, 0], result)
    columns = {"policy": result.policy, "search_value": result.search_value, "value": result.value}
    return ActOutput(result.action, columns, (), {} if explore else {"visits": result.visits})

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    variables = Variables(params, batch_stats)
    network = self.network_def.bind(variables)
    observe = partial(network.represent, train=True)
    if self._agent_config.loss.consistency_statistics == "running":
      folded = self.network_def.fold(jax.lax.stop_gradient(variables))
      observe = partial(self.network_def.bind_folded(folded).represent, train=False)
    loss, metrics, td_error = losses.unrolled_loss(
      network,
      losses.LearnerBatch(*(batch[name] for name in losses.LearnerBatch._fields)),
      keys,
      self._agent_config.loss,
      observe=observe,
    )
    statistics = variables_of(network).batch_stats
    if self._agent_config.network.batch_norm == "local":
      statistics = mean_over_devices(statistics)
    return loss, LossOutput(statistics, metrics, td_error)

  def _stage(self, progress: Any) -> jax.Array:
    """Index of the stage of training after a share `progress`."""
    stages = jnp.array(self._agent_config.search.temperature_stages)
    return jnp.searchsorted(stages, progress, side="right")

  def _recurrent(
    self, variables: Variables, state: jax.Array, carry: Any, action: jax.Array
  ) -> ModelStep:
    """Applies g and f for the search, with folded variables."""
    network = self.network_def.bind_folded(variables)
    state, carry, prefix_logits = network.step(state, carry, action)
    value_logits, policy_logits = network.predict(state, False)
    return ModelStep(
      value_prefix=value_encoding.decode(prefix_logits),
      policy_logits=policy_logits,
      value=value_encoding.decode(value_logits),
      state=state,
      carry=carry,
    )

  def _roots(self, variables: Variables, frames: jax.Array) -> Root:
    """Applies h and f, with folded variables: frames [B, S-1+n, H, W, C] -> Root, leaves [B*n]."""
    network = self.network_def.bind_folded(variables)
    observations = stack_frames(frames, self._stack)
    observations = normalize(observations.reshape(-1, *observations.shape[2:]))
    state = network.represent(observations, False)
    value_logits, policy_logits = network.predict(state, False)
    return Root(policy_logits=policy_logits, value=value_encoding.decode(value_logits), state=state)

  def _search_windows(
    self, config: SearchConfig, variables: Variables, frames: Any, key: jax.Array, **options: Any
  ) -> SearchResult:
    """Searches from frames [B, S-1+n, H, W, C]; returns a SearchResult with leaves [B, n, ...]."""
    batch, states = frames.shape[0], frames.shape[1] - self._stack + 1
    root = self._roots(variables, frames)
    result = self._make_search(config)(variables, root, key, **options)
    return jax.tree.map(lambda x: x.reshape(batch, states, *x.shape[1:]), result)

  def _searched(self, variables: Variables, inputs: Arrays, key: jax.Array) -> Arrays:
    """Program of the task `reanalyse`."""
    own, search = self._agent_config.reanalyse, self._agent_config.search
    search = dataclasses.replace(search, simulations=own.simulations or search.simulations)
    known = KnownEdge(*(inputs[x.name].reshape(-1) for x in reanalyse.EDGES)) if own.reuse else None
    stage = self._stage(inputs["step"][0] / self._config.learner.steps)
    result = self._search_windows(
      search, variables, inputs["frames"], key, explore=own.explore, stage=stage, known=known
    )
    return {"policy": result.policy, "search_value": result.search_value, "value": result.value}

  def _values(self, variables: Variables, inputs: Arrays, key: jax.Array) -> Arrays:
    """Program of the tasks `bootstrap` and `refresh`."""
    roots = self._roots(variables, inputs["frames"])
    return {"value": roots.value.reshape(len(inputs["frames"]), -1)}

  # --- host

  def make_selector(self, store: LaneStore) -> PrioritizedSampler:
    return PrioritizedSampler(
      store,
      self._agent_config.priority,
      stack=self._stack,
      lookahead=self.lookahead,
      initial_error=lambda lane, time: (
        None,
        targets.oldest_stamp(store, lane, time, self._config),
      ),
    )

  def batch_work(self, replay: Replay, selection: Selection) -> list[Work]:
    return reanalyse.batch_work(self._config, replay, selection)

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, lane = replay.store, selection.lane
    present, time = replay.clamp(lane, selection.time)
    arrays = targets.compute_targets(store, lane, time, self._config, learner_step)._asdict()
    states = targets.unrolled_times(store, lane, time, self._agent_config.loss.unroll_steps)
    flat, acted = store.flat(lane[:, None], states), arrays["policy_mask"] > 0  # [B, K+1]
    # Beyond the end of an episode the model is unrolled with random actions.
    random = replay.rng.integers(0, store.num_actions, acted[:, 1:].shape, np.int32)
    action = np.where(acted[:, :-1], take(store.action, flat[:, :-1]), random)
    ages = (learner_step - take(store["policy_step"], flat))[acted & present[:, None]]
    progress = learner_step / self._config.learner.steps
    weight = importance_weights(selection.probability, self._agent_config.priority, progress)
    info = {
      metric_names.TARGET_AGE_MEAN: float(ages.mean()) if ages.size else 0.0,
      metric_names.TARGET_AGE_MAX: float(ages.max(initial=0)),
    }
    return {"action": action, "weight": weight, **arrays}, info
