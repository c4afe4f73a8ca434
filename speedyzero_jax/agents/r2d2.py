"""R2D2 (Kapturowski et al. 2019): recurrent Q-learning from prioritized sequences.

A sequence consists of `burn_in` slots that only warm up the recurrent state, starting from the one
stored by the actor; `sequence_length` slots that are trained on; and `td_steps` slots that complete
the last returns. Sequences begin at every `stride`-th slot of a lane and may span several episodes.
The recurrent state is reset where an episode starts, so sequences need no padding, and no return or
state depends on another episode. (In the paper sequences end with the episode.)
"""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from speedyzero_jax.agents.base import Arrays, LossOutput, Window
from speedyzero_jax.agents.q_agent import QAgent, QAgentConfig, QHeadConfig
from speedyzero_jax.config.fields import opt
from speedyzero_jax.config.schema import Config
from speedyzero_jax.ops import td
from speedyzero_jax.ops.recurrent import CoreConfig
from speedyzero_jax.ops.torsos import torso_problems
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.sampler import SequenceSampler
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.types import Params

# Means over sequences of the means over their actions, in units of h(Q), see
# `value_encoding.transform`.
TD_ERROR = "losses/td_error"  # |target - Q(s, a)|
Q_VALUE = "losses/q_value"  # Q(s, a)


@dataclasses.dataclass(frozen=True)
class NetworkConfig(CoreConfig, QHeadConfig):
  """The Q-network."""

  core: Literal["none", "lstm"] = opt(
    "lstm", "memory between torso and heads; lstm stores 8 * network.lstm_hidden bytes per step"
  )
  lstm_hidden: int = opt(512, "width of the LSTM (R2D2: 512)", "[1, 1e5]")
  atoms: ClassVar[int] = 0


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Sequences, targets and priorities."""

  burn_in: int = opt(
    40, "slots that only warm up the recurrent state, if any (R2D2: 40)", "[0, 1e4]"
  )
  sequence_length: int = opt(80, "slots of a sequence that are trained on (R2D2: 80)", "[1, 1e4]")
  stride: int = opt(40, "slots between the starts of consecutive sequences (R2D2: 40)", "[1, 1e4]")
  td_steps: int = opt(5, "n of the n-step return (R2D2: 5)", "[1, 1000]")
  target_interval: int = opt(
    2500, "learner steps between copies to the target network (R2D2: 2,500)", "[1, 1e9]"
  )
  priority_max: float = opt(
    0.9,
    "eta in priority = eta * maximum error of a sequence + (1 - eta) * mean error (R2D2: 0.9)",
    "[0, 1]",
  )


@dataclasses.dataclass(frozen=True)
class R2d2Config(QAgentConfig):
  """Configuration of R2D2."""

  name: ClassVar[str] = "r2d2"
  network: NetworkConfig = NetworkConfig()
  loss: LossConfig = LossConfig()

  @property
  def burn_in(self) -> int:
    """Slots of a sequence that only warm up the recurrent state; 0 without one."""
    return self.loss.burn_in if self.network.core == "lstm" else 0

  def problems(self, config: Config) -> Iterable[str]:
    yield from super().problems(config)
    yield from torso_problems(self.network, config.env)
    loss, lanes = self.loss, config.actor.lanes
    slots = self.burn_in + loss.sequence_length + loss.td_steps
    if config.run.env_steps < lanes * slots:
      yield (
        f"loss.sequence_length: with loss.burn_in and loss.td_steps a sequence has {slots} slots; "
        f"run.env_steps must be at least {lanes} x {slots}, one sequence per lane, got "
        f"{config.run.env_steps}"
      )


AGENT_CONFIG = R2d2Config


class R2D2(QAgent):
  """See `agents.base.Agent`."""

  def __init__(self, config: Config, frame_shape: tuple[int, ...], frame_dtype: Any, actions: int):
    loss, burn_in = config.agent.loss, config.agent.burn_in
    super().__init__(
      config, frame_shape, frame_dtype, actions,
      trained=burn_in + np.arange(loss.sequence_length), eta=loss.priority_max, rescaled=True,
      sampler=partial(SequenceSampler, stride=loss.stride),
    )  # fmt: skip
    # The return of the last slot trained on bootstraps td_steps later.
    after = burn_in + loss.sequence_length - 1 + loss.td_steps
    self.window = Window(after=after, within_episode=False)
    self.lookahead = after + loss.stride - 1  # contains a whole sequence wherever a lane begins

  # --- device

  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    acted = batch["loss_mask"]
    # Rescaled Q [B, T + n, A] of the slots after the burn-in.
    q, next_q = (self._unrolled(p, batch, self._agent_config.burn_in) for p in (params, target))
    end = jnp.arange(acted.shape[1]) + batch["steps"]  # [B, T], slots from which to bootstrap
    selector, later = (jnp.take_along_axis(x, end[..., None], axis=1) for x in (q, next_q))
    q, action = q[:, : acted.shape[1]], batch["action"]
    error = acted * td.q_learning_error(
      q, action, batch["reward"], batch["discount"], later, selector, rescaled=True
    )
    loss = jnp.mean(batch["weight"] * jnp.sum(0.5 * error**2, axis=1))
    count = jnp.maximum(jnp.sum(acted, axis=1), 1)
    mean = jnp.sum(jnp.abs(error), axis=1) / count
    value = jnp.sum(acted * td.chosen(q, action), axis=1) / count
    metrics = {TD_ERROR: jnp.mean(mean), Q_VALUE: jnp.mean(value)}
    return loss, LossOutput(batch_stats, metrics, td.mixed_priority(error, acted, self._eta))

  # --- host

  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    store = replay.store
    # An evicted sequence is replaced by the lane's oldest slots; there are enough.
    _, time = replay.clamp(selection.lane, selection.time)
    lane, times = selection.lane[:, None], time[:, None] + np.arange(self.window.after + 1)
    batch = self._batch(store, selection, lane, times[:, self._trained], learner_step)
    return batch | self._states(store, store.flat(lane, times)), {}


make_agent = R2D2
