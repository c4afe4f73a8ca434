"""AlphaZero (Silver et al. 2018) for board games: self-play, and tree search with the true rules.

Values and rewards are from the perspective of the player to move, so each step has a discount of
-1. A frame is a board (see `envs/rules.py`), which determines the legal moves.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import mctx
import numpy as np
from flax import nnx

from speedyzero_jax.agents.base import (
  ActInputs,
  ActOutput,
  Agent,
  Arrays,
  LossOutput,
  Variables,
  Window,
)
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import AgentConfig, Config, PriorityConfig
from speedyzero_jax.envs.rules import RULES, Rules
from speedyzero_jax.ops import td
from speedyzero_jax.ops.torsos import ResidualBlock, functional
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import PrioritizedSampler
from speedyzero_jax.replay.schema import Column, make_schema
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore, take
from speedyzero_jax.types import Params

# Means over the samples of a batch.
LOSS_POLICY = "losses/policy"  # cross-entropy
LOSS_VALUE = "losses/value"  # squared error
TARGET_ENTROPY = "losses/target_entropy"  # of the search policies, nats: minimum of LOSS_POLICY

_ILLEGAL = -1e9  # logit


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
  """The residual tower and its heads."""

  channels: int = opt(64, "channels of all convolutions (AlphaZero: 256)", "[1, 1e5]")
  blocks: int = opt(4, "residual blocks (AlphaZero: 19)", "[0, 1000]")
  hidden: int = opt(64, "width of the value head's hidden layer (AlphaZero: 256)", "[1, 1e5]")


@dataclasses.dataclass(frozen=True)
class SearchConfig:
  """Tree search for acting and evaluation."""

  algorithm: Literal["gumbel", "puct"] = opt(
    "gumbel", "sequential halving, without root noise (Danihelka et al. 2022), or PUCT (AlphaZero)"
  )
  simulations: int = opt(32, "simulations per move (AlphaZero: 800)", "[1, 1e5]")
  max_considered: int = opt(16, "Gumbel: root actions considered (Danihelka: 16)", "[1, 1e9]")
  c_visit: float = opt(50.0, "Gumbel: visit offset of the value scale (Danihelka: 50)", "[0, 1e6]")
  c_scale: float = opt(
    0.1,
    "Gumbel: value scale; larger ones make self-play less diverse (Danihelka: 1 for Go)",
    "[0, 1e6]",
  )
  c1: float = opt(1.25, "PUCT: exploration constant c1 (AlphaZero: 1.25)", "[0, 1e6]")
  c2: float = opt(19652.0, "PUCT: exploration constant c2 (AlphaZero: 19652)", "[1e-6, 1e6]")
  dirichlet_alpha: float = opt(
    0.3, "PUCT: root noise concentration (AlphaZero: 0.3 for chess, 0.03 for Go)", "[1e-6, 1e6]"
  )
  dirichlet_fraction: float = opt(0.25, "PUCT: share of noise (AlphaZero: 0.25)", "[0, 1]")
  sampled_moves: int = opt(
    30,
    "PUCT: first moves of self-play that are sampled in proportion to visits (AlphaGo Zero: 30)",
    "[0, 1e9]",
  )


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """The loss (z - v)^2 - p log pi; weight decay is `optim.weight_decay`."""

  value_coefficient: float = opt(1.0, "weight of the squared error (AlphaZero: 1)", "[0, 1e6]")
  search_value_weight: float = opt(
    0.0,
    "share of the root's search value in the value target; the rest is the outcome (AlphaZero: 0)",
    "[0, 1]",
  )


@dataclasses.dataclass(frozen=True)
class AlphaZeroConfig(AgentConfig):
  """Configuration of AlphaZero."""

  name: ClassVar[str] = "alphazero"
  network: NetworkConfig = NetworkConfig()
  search: SearchConfig = SearchConfig()
  loss: LossConfig = LossConfig()

  def problems(self, config: Config) -> Iterable[str]:
    env, actor = config.env, config.actor
    if env.game not in RULES:
      yield f"env.game: must be one of {', '.join(RULES)} for alphazero, got {env.game}"
    if env.frame_stack != 1:
      yield f"env.frame_stack: must be 1, as boards are fully observed, got {env.frame_stack}"
    if actor.random_steps:
      yield f"actor.random_steps: must be 0, as the search explores, got {actor.random_steps}"


AGENT_CONFIG = AlphaZeroConfig


class BoardNetwork(nnx.Module):
  """Boards [B, H, W, 2k] -> logits [B, A], values [B] in (-1, 1)."""

  def __init__(self, config: NetworkConfig, rules: Rules, rngs: nnx.Rngs):
    features = rules.height * rules.width * config.channels
    zeros = nnx.initializers.zeros  # the initial policy is uniform and the initial value 0
    inits = nnx.initializers.lecun_normal(), zeros  # each block is initially the identity
    blocks = [ResidualBlock(config.channels, rngs, *inits) for _ in range(config.blocks)]
    self.conv = nnx.Conv(rules.shape[-1], config.channels, (3, 3), rngs=rngs)
    self.blocks = nnx.List(blocks)
    self.policy = nnx.Linear(features, rules.num_actions, kernel_init=zeros, rngs=rngs)
    self.hidden = nnx.Linear(features, config.hidden, rngs=rngs)
    self.value = nnx.Linear(config.hidden, 1, kernel_init=zeros, rngs=rngs)

  def __call__(self, board: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = self.conv(jnp.minimum(board, 1).astype(jnp.float32))  # in Go, numbers of moves are above 1
    for block in self.blocks:
      x = block(x)
    x = nnx.relu(x).reshape(len(x), -1)
    return self.policy(x), jnp.tanh(self.value(nnx.relu(self.hidden(x))))[:, 0]


class AlphaZero(Agent):
  """See `agents.base.Agent`."""

  network = BoardNetwork

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    agent_config: AlphaZeroConfig = config.agent
    self._search, self._loss = agent_config.search, agent_config.loss
    self._rules = RULES[config.env.game]
    self._network = functional(lambda rngs: self.network(agent_config.network, self._rules, rngs))
    columns = Column("search_policy", "float32", (actions,)), Column("search_value", "float32")
    self.schema = make_schema(frame_shape, frame_dtype, actions, columns)
    self.window = Window(after=0, within_episode=True)
    self.lookahead = self._rules.max_moves  # targets are outcomes of whole games

  # --- device

  def init(self, key: jax.Array) -> Variables:
    return Variables(self._network.init(key), ())

  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    output = self.search(variables.params, inputs.frames[:, 0], key, explore=explore)
    summary = output.search_tree.summary()
    shown = {"value": output.search_tree.raw_values[:, 0], "visits": summary.visit_probs}
    columns = {"search_policy": output.action_weights, "search_value": summary.value}
    return ActOutput(output.action.astype(jnp.int32), columns, (), {} if explore else shown)

  def search(
    self, params: Params, board: jax.Array, key: jax.Array, *, explore: bool
  ) -> mctx.PolicyOutput:
    """Searches from boards [n, H, W, 2k]; without `explore` the result does not depend on the key.

    Illegal actions have weight 0, except where the game is over and no action is legal.
    """
    config, legal = self._search, self._rules.legal(board)
    logits, value = self._evaluate(params, board)
    root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=board)
    illegal = ~legal & jnp.any(legal, axis=-1, keepdims=True)
    key = key if explore else jax.random.key(0)
    arguments = params, key, root, self._step, config.simulations, illegal
    if config.algorithm == "gumbel":
      # The constants are meant for Q in [0, 1]; here Q is in [-1, 1].
      qtransform = functools.partial(
        mctx.qtransform_completed_by_mix_value,
        rescale_values=False,
        value_scale=config.c_scale / 2,
        maxvisit_init=config.c_visit,
      )
      return mctx.gumbel_muzero_policy(
        *arguments,
        qtransform=qtransform,
        max_num_considered_actions=min(config.max_considered, self._rules.num_actions),
        gumbel_scale=1.0 if explore else 0.0,
      )
    sampled = (self._rules.moves(board) < config.sampled_moves) & explore
    return mctx.muzero_policy(
      *arguments,
      # Unvisited actions count as losses. So illegal ones, with a prior of 0, rank last.
      qtransform=functools.partial(mctx.qtransform_by_min_max, min_value=-1.0, max_value=1.0),
      pb_c_init=config.c1,
      pb_c_base=config.c2,
      dirichlet_alpha=config.dirichlet_alpha,
      dirichlet_fraction=config.dirichlet_fraction if explore else 0.0,
      temperature=sampled.astype(jnp.float32)[:, None],
    )

  def _evaluate(self, params: Params, board: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits [n, A], masked where illegal, and values [n], 0 where the game is over."""
    logits, value = self._network.apply(params, board)
    legal = jnp.where(self._rules.legal(board), logits, _ILLEGAL)
    return legal, jnp.where(self._rules.over(board), 0.0, value)

  def _step(
    self, params: Params, key: jax.Array, action: jax.Array, board: jax.Array
  ) -> tuple[mctx.RecurrentFnOutput, jax.Array]:
    """The search's model: applies the rules and evaluates the next board with the network."""
    after, reward = self._rules.step(board, action)
    logits, value = self._evaluate(params, after)
    discount = jnp.where(self._rules.over(after), 0.0, -1.0)
    output = mctx.RecurrentFnOutput(
      reward=reward, discount=discount, prior_logits=logits, value=value
    )
    return output, after

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    policy, mask, board = batch["search_policy"], batch["loss_mask"], batch["frames"][:, 0]
    reflected = jax.vmap(jax.random.bernoulli)(keys)  # half of the samples
    board = jnp.where(reflected[:, None, None, None], board[:, :, ::-1], board)
    policy = jnp.where(reflected[:, None], policy[:, self._rules.reflection], policy)
    logits, value = self._evaluate(params, board)
    cross_entropy = jnp.mean(mask * -jnp.sum(policy * jax.nn.log_softmax(logits), axis=-1))
    error = jnp.mean(batch["value_mask"] * (batch["value"] - value) ** 2)
    entropy = jnp.mean(mask * jnp.sum(jax.scipy.special.entr(policy), axis=-1))
    metrics = {LOSS_POLICY: cross_entropy, LOSS_VALUE: error, TARGET_ENTROPY: entropy}
    loss = cross_entropy + self._loss.value_coefficient * error
    return loss, LossOutput(batch_stats, metrics, jnp.zeros(len(mask)))

  # --- host

  def make_selector(self, store: LaneStore) -> PrioritizedSampler:
    uniform = PriorityConfig(alpha=0.0)
    return PrioritizedSampler(store, uniform, stack=1, lookahead=self.lookahead)

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store, lane = replay.store, selection.lane
    _, time = replay.clamp(lane, selection.time)
    returns = td.n_step(store, lane, time, self.lookahead, discount=-1.0)
    known = returns.discount == 0  # truncated games have no outcome
    flat, share = store.flat(lane, time), np.float32(self._loss.search_value_weight)
    batch = {
      "search_policy": take(store["search_policy"], flat),
      "value": (1 - share) * returns.reward + share * take(store["search_value"], flat),
      "value_mask": known.astype(np.float32),
      "loss_mask": np.ones(len(time), np.float32),
    }
    return batch, {}


make_agent = AlphaZero
