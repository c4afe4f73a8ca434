"""The reanalyser: fresh policies, values and priorities for stored states, with weights newer than the actor's were.

`BatchReanalyser` searches the states of a sampled batch (EfficientZero, SpeedyZero). `Sweeper` goes over the whole
buffer round and round: evaluating values and priorities only, it is SpeedyZero's Priority Refresh; searching as well,
it is sweep reanalysis, of which Priority Refresh is a by-product. What to compute is the replay's decision, when is
the caller's. Both write their results into the replay; targets are then made from what is stored.
"""

import jax
import numpy as np

from speedyzero_jax.config import Config
from speedyzero_jax.inference import Inference
from speedyzero_jax.replay.buffer import Replay, SweepName
from speedyzero_jax.weights import WeightsStore

REANALYSER, REFRESHER = "reanalyser", "refresher"  # subscribers of weights


class BatchReanalyser:
  """Searches the K+1 states of each sample and evaluates the states that end its n-step returns.

  Args:
    config: of the run.
    inference: shared compiled functions.
    weights: of the subscriber `reanalyser`, which are the target network.
    key: randomness of the search.
  """

  def __init__(self, config: Config, inference: Inference, weights: WeightsStore, key: jax.Array):
    self._unroll, self._inference, self._weights, self._key = config.learner.unroll_steps, inference, weights, key
    self.calls = 0  # of the search; part of a checkpoint
    self.states = 0  # searched so far

  def __call__(self, replay: Replay, lane: np.ndarray, time: np.ndarray) -> None:
    """Brings everything stored that the targets of these samples (lane [B], time [B]) are made from up to date."""
    step, variables = self._weights.latest(REANALYSER)
    at, states = replay.states_to_search(lane, time)
    if len(at):
      frames = replay.windows(at[:, 0], states[:, 0], after=self._unroll)
      key = jax.random.fold_in(self._key, self.calls)
      result = self._inference.search(variables, frames, key, 1.0, explore=True)
      result = jax.device_get(result)
      real = self._real(states)
      replay.write_search(
        at[real], states[real], result.policy[real], result.search_value[real], result.value[real], step
      )
      self.states += int(real.sum())
    self.calls += 1
    at, states = replay.states_to_bootstrap(lane, time)
    value = np.asarray(self._inference.value(variables, replay.windows(lane, states[:, 0], after=self._unroll)))
    real = self._real(states)
    replay.write_bootstrap(at[real], states[real], value[real], step)

  def _real(self, states: np.ndarray) -> np.ndarray:
    """[B, K+1] where window state k is a stored one, not a repetition of its episode's last frame."""
    return states == states[:, :1] + np.arange(self._unroll + 1)


class Sweeper:
  """Recomputes the stalest stored states, block by block, fast enough for a bound on their age.

  Args:
    config: of the run.
    kind: `refresh` for values and priorities, `reanalyse` for policies and search values too.
    inference: shared compiled functions.
    weights: source of this sweeper's weights (subscriber `refresher` or `reanalyser`).
    key: randomness of the search.
  """

  def __init__(self, config: Config, kind: SweepName, inference: Inference, weights: WeightsStore, key: jax.Array):
    part = config.refresh if kind == "refresh" else config.reanalyse
    self.kind: SweepName = kind
    self.max_age, self._block = part.max_age, part.block
    self._refresh = config.refresh.enabled  # switched off, a sweep leaves priorities alone
    self._subscriber = REFRESHER if kind == "refresh" else REANALYSER
    # Stamps are old already when written: weights are, by their interval, and so are slots that an actor appends.
    self._delay = max(part.weights_interval, config.actor.weights_interval)
    self._inference, self._weights, self._key = inference, weights, key
    self.calls = 0
    self.credit = 0  # states that may be computed now
    self.credited = 0  # learner steps credited so far
    self.states = 0  # computed so far

  def counters(self) -> dict[str, int]:
    """What a checkpoint needs of it."""
    return {"calls": self.calls, "credit": self.credit, "credited": self.credited}

  def restore(self, counters: dict[str, int]) -> None:
    """Puts `counters` back."""
    self.calls, self.credit, self.credited = counters["calls"], counters["credit"], counters["credited"]

  def due(self, replay: Replay, learner_step: int) -> bool:
    """Whether a block should be computed now that `learner_step` steps are taken: owed by the quota, or overdue."""
    while self.credited < learner_step:
      self.credit += replay.quota(self.kind, self._block, self.max_age, self._delay)
      self.credited += 1
    return self.credit >= self._block or self.overdue(replay, learner_step)

  def overdue(self, replay: Replay, learner_step: int) -> bool:
    """Whether something stored would be older than the bound after one more step; the learner must not take it."""
    return learner_step + 1 - replay.oldest_step(self.kind) > self.max_age

  def sweep(self, replay: Replay) -> None:
    """Computes one block."""
    step, variables = self._weights.latest(self._subscriber)
    lane, time = replay.next_block(self.kind, self._block)
    frames = replay.windows(lane, time)
    if self.kind == "reanalyse":
      key = jax.random.fold_in(self._key, self.calls)
      result = jax.device_get(self._inference.search(variables, frames, key, 1.0, explore=True))
      value = result.value[:, 0]
      replay.write_search(lane, time, result.policy[:, 0], result.search_value[:, 0], value, step)
    else:
      value = np.asarray(self._inference.value(variables, frames))[:, 0]
    if self._refresh:
      replay.write_values(lane, time, value, step)
      replay.refresh_priorities(lane, time)
    self.calls += 1
    self.states += len(lane)
    self.credit = max(self.credit - self._block, 0)
