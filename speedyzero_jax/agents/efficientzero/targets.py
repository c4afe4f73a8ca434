"""Training targets from stored slots: n-step returns, value prefixes, policies and masks.

Pure functions of a `LaneStore` and the run's configuration. `lane` and `time` are [B]; the states
of a sample are time .. time+K. With reanalysis on, the stored policies and values were recomputed
before, see `reanalyse.py`.
"""

from typing import NamedTuple

import numpy as np

from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.storage import LaneStore, take


class Targets(NamedTuple):
  """Training targets for the K + 1 states of each sample."""

  value: np.ndarray  # [B, K+1] float32, an untransformed return
  value_prefix: np.ndarray  # [B, K] float32, sum of rewards since the prefix was last reset
  policy: np.ndarray  # [B, K+1, A] float32
  value_mask: np.ndarray  # [B, K+1] float32, 1 in stored states, and in absorbing ones trained on
  prefix_mask: np.ndarray  # [B, K] float32, the same for value_prefix
  policy_mask: np.ndarray  # [B, K+1] float32, 1 in states in which an action was taken
  consistency_mask: np.ndarray  # [B, K] float32, 1 where state k+1 is a stored frame of the episode


def unrolled_times(store: LaneStore, lane: np.ndarray, time: np.ndarray, unroll: int) -> np.ndarray:
  """Times of the states, clamped to the episode's last stored frame; [B, K+1] int64."""
  return np.minimum(time[:, None] + np.arange(unroll + 1), store.last(lane, time)[:, None])


def transition_age(store: LaneStore, lane: np.ndarray, time: np.ndarray) -> np.ndarray:
  """Age of transitions [B] int64: number collected in all lanes since each, itself included."""
  return store.num_transitions - take(store.inserted, store.flat(lane, time))


def td_horizon(store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config) -> np.ndarray:
  """n of the n-step return, [B] int64; smaller for old data (EZ's off-policy correction)."""
  loss = config.agent.loss
  if not loss.age_interval:
    return np.full_like(time, loss.td_steps)
  shrink = transition_age(store, lane, time) // loss.age_interval
  return np.clip(loss.td_steps - shrink, 1, loss.td_steps)


def bootstrap_times(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config, unroll: int
) -> np.ndarray:
  """Slots from whose values the n-step return of each state bootstraps, [B, K+1] int64.

  They are clamped to the last stored frame of the episode, whose value is used unless terminal.
  """
  states = time[:, None] + np.arange(unroll + 1)
  times = states + td_horizon(store, lane, time, config)[:, None]
  return np.minimum(times, store.last(lane, time)[:, None])


def n_step_values(
  store: LaneStore,
  values: np.ndarray,
  lane: np.ndarray,
  time: np.ndarray,
  config: Config,
  unroll: int,
) -> np.ndarray:
  """n-step returns of the states, [B, K+1] float64, bootstrapping from `values` [L, C].

  z = sum_{i<m} discount^i reward[s+i] + discount^m values[s+m], where m = n, or less if the
  episode's last stored frame comes first. Terminal frames, and states beyond the last stored frame,
  have the value 0.
  """
  td_steps, discount = config.agent.loss.td_steps, config.env.discount
  last = store.last(lane, time)[:, None]
  n = td_horizon(store, lane, time, config)[:, None]
  window = time[:, None] + np.arange(unroll + td_steps)
  flat = store.flat(lane[:, None], window)
  reward = np.where(window < last, take(store.reward, flat), 0.0)
  states = window[:, : unroll + 1]
  end = np.minimum(states + n, last)  # `bootstrap_times`
  flat = store.flat(lane[:, None], end)
  end_value = np.where(take(store.terminated, flat), 0.0, take(values, flat))
  powers = discount ** np.arange(td_steps + 1)
  z = np.where(states <= last, powers[np.maximum(end - states, 0)] * end_value, 0.0)
  for i in range(td_steps):
    z += np.where(i < n, discount**i * reward[:, i : i + unroll + 1], 0.0)
  return z


def compute_targets(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config, learner_step: int
) -> Targets:
  """Computes the targets of the unroll from each live slot.

  States after a terminal frame are absorbing: their value and reward are 0, and they are trained on
  if `loss.absorbing_states`. After a truncated episode's last frame, or beyond a lane's head, masks
  and targets are 0.
  """
  loss, period = config.agent.loss, config.agent.network.value_prefix_horizon
  unroll, at = loss.unroll_steps, lane[:, None]
  states = time[:, None] + np.arange(unroll + 1)  # [B, K+1]
  last = store.last(lane, time)[:, None]
  flat = store.flat(at, np.minimum(states, last))
  stored = states <= last
  terminal = take(store.terminated, store.flat(at, last))  # [B, 1], false in an open episode
  absorbing = terminal & loss.absorbing_states
  acted = stored & (take(store.action, flat) >= 0)
  # Whether the transition out of the state is known.
  known = acted[:, :unroll] | (absorbing & (states[:, :unroll] >= last))

  reward = np.where(acted, take(store.reward, flat), 0.0)
  prefix = np.zeros((len(time), unroll))
  for k in range(unroll):
    before = prefix[:, k - 1] if k % period else 0.0
    prefix[:, k] = before + reward[:, k]

  z = n_step_values(store, store["bootstrap"], lane, time, config, unroll)
  searched = np.where(
    stored & ~(terminal & (states == last)), take(store["search_value"], flat), 0.0
  )
  value = np.where(use_search(store, lane, time, config, learner_step)[:, None], searched, z)
  policy = take(store["policy"], flat)
  policy[~acted] = 0
  return Targets(
    value=value.astype(np.float32),
    value_prefix=np.where(known, prefix, 0.0).astype(np.float32),
    policy=policy,
    value_mask=(stored | absorbing).astype(np.float32),
    prefix_mask=known.astype(np.float32),
    policy_mask=acted.astype(np.float32),
    consistency_mask=stored[:, 1:].astype(np.float32),
  )


def known_edges(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, after: int, config: Config
) -> tuple[np.ndarray, np.ndarray]:
  """Actions taken in the states time .. time+after, and their Q-values from the successors.

  Q = reward + discount * search value of the next slot, or the reward alone if that is terminal
  (ReZero, Xuan et al. 2024). Like windows, times are clamped to stored slots of the episode.

  Returns actions [B, after+1] int32, -1 where Q is unknown: in an episode's last stored slot, and
  where the next slot has not been searched since training began. Q [B, after+1] is float32.
  """
  last, at = store.last(lane, time)[:, None], lane[:, None]
  states = unrolled_times(store, lane, time, after)
  flat, successor = store.flat(at, states), store.flat(at, np.minimum(states + 1, last))
  terminal = take(store.terminated, successor)
  value = np.where(terminal, 0.0, take(store["search_value"], successor))
  qvalue = take(store.reward, flat) + config.env.discount * value
  known = (states < last) & (terminal | (take(store["policy_step"], successor) > 0))
  return np.where(known, take(store.action, flat), -1), qvalue.astype(np.float32)


def use_search(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config, learner_step: int
) -> np.ndarray:
  """Whether samples use the search value rather than the n-step return, [B] bool (EZ-V2)."""
  reanalyse = config.agent.reanalyse
  if reanalyse.value_target != "mixed":
    return np.full(len(time), reanalyse.value_target == "search")
  old = transition_age(store, lane, time) > reanalyse.mixed_newest
  return old & (learner_step >= reanalyse.mixed_start)


def refreshed_errors(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config, learner_step: int
) -> tuple[np.ndarray, np.ndarray]:
  """Computes errors v - z of transitions for Priority Refresh, and their stamps.

  v is the refreshed value. z is the training target at `learner_step`: the n-step return
  bootstrapped from a refreshed value, or the search value if `use_search` selects it and it is at
  least as recent as v (a refresh runs no search). With reanalysis off, z is the target computed
  from the values stored by the actor.

  Returns errors [B] float64, and the learner steps [B] int32 of the oldest weights that each error
  depends on. So a bound on the age of all values bounds the age of all errors.
  """
  flat = store.flat(lane, time)
  value, stamp = take(store["value"], flat), take(store["value_step"], flat)
  searched = use_search(store, lane, time, config, learner_step)
  reanalysed = config.agent.reanalyse.schedule != "off"
  if reanalysed:
    searched &= take(store["policy_step"], flat) >= stamp
  values = store["value" if reanalysed else "bootstrap"]
  returns = n_step_values(store, values, lane, time, config, 0)[:, 0]
  z = np.where(searched, take(store["search_value"], flat), returns)
  return value - z, np.where(searched, stamp, oldest_stamp(store, lane, time, config))


def oldest_stamp(
  store: LaneStore, lane: np.ndarray, time: np.ndarray, config: Config
) -> np.ndarray:
  """The older stamp of the two values in each |v - n-step return|, [B] int32.

  With reanalysis off, only v has a stamp: the return is computed from values that never change.
  """
  v_step = take(store["value_step"], store.flat(lane, time))
  if config.agent.reanalyse.schedule == "off":
    return v_step
  end = store.flat(lane, bootstrap_times(store, lane, time, config, 0)[:, 0])
  older = np.minimum(v_step, take(store["value_step"], end))
  return np.where(take(store.terminated, end), v_step, older)
