"""The reanalyser: fresh policies, values and priorities for stored states, with weights newer than the actor's were.

`BatchReanalyser` takes the states of a sampled batch (EfficientZero, SpeedyZero). `Sweeper` goes over the whole
buffer round and round: evaluating values and priorities only, it is SpeedyZero's Priority Refresh; searching as well,
it is sweep reanalysis, of which Priority Refresh is a by-product. Both say which states are to be looked at (`Work`);
`examine` looks, here or in another process; `record` writes what it found (`Findings`) into the replay.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from speedyzero_jax.agents.efficientzero.inference import Inference
from speedyzero_jax.agents.efficientzero.config import ReanalyseConfig, RefreshConfig
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.device_frames import host_bytes
from speedyzero_jax.replay.experience import Array
from speedyzero_jax.replay.replay import Replay, SweepName
from speedyzero_jax.workers.weights import REANALYSER, REFRESHER, Version, WeightsStore, fetched

_SLACK = 2  # learner steps whose sweeping may be owed
_ON_CPU, _ON_ACCELERATOR = (
  256,
  4096,
)  # states in a call: more are no faster on two cores; for GPUs by arithmetic

Reanalyse = Callable[
  [Replay, np.ndarray, np.ndarray], None
]  # brings up to date what samples (lane, time) rest on


class Work(NamedTuple):
  """States to be looked at anew: n in a row from each of B slots on."""

  search: bool  # policies and search values are wanted, not only values
  subscriber: str  # whose weights are to be used
  lane: np.ndarray  # [B]
  time: np.ndarray  # [B]
  real: (
    np.ndarray
  )  # [B, n] bool: state k is a stored one, not a repetition of its episode's last frame
  refresh: bool  # priorities are to follow the values

  def frames(self, replay: Replay, devices: int) -> Array:
    """What is to be looked at, [B, S-1+n, H, W, C], by so many devices."""
    spread = len(self.lane) % devices == 0
    return replay.windows(self.lane, self.time, after=self.real.shape[1] - 1, spread=spread)


class Findings(NamedTuple):
  """What was seen in them."""

  step: int  # learner step of the weights used
  value: np.ndarray  # [B, n] float32, the network's
  policy: np.ndarray | None  # [B, n, A] float32; None if not searched
  search_value: np.ndarray | None  # [B, n] float32


def examine(
  inference: Inference,
  version: Version,
  frames: Array,
  *,
  search: bool,
  key: jax.Array,
  explore: bool,
) -> Findings:
  """Looks at frames [B, S-1+n, H, W, C] with these weights; `explore`: a search has noise at its root.

  Raises DivergedError if what they say is not finite.
  """
  if not search:
    return Findings(
      version.step, fetched(version, inference.value(version.variables, frames)), None, None
    )
  result = fetched(version, inference.search(version.variables, frames, key, 1.0, explore=explore))
  return Findings(version.step, result.value, result.policy, result.search_value)


def record(replay: Replay, work: Work, findings: Findings) -> None:
  """Writes findings into the replay, where newer ones are not there already. Raises ValueError if they don't fit."""
  if findings.value.shape != work.real.shape:
    raise ValueError(f"values must be {list(work.real.shape)}, got {list(findings.value.shape)}")
  real = work.real
  time = (work.time[:, None] + np.arange(real.shape[1]))[real]
  lane = np.broadcast_to(work.lane[:, None], real.shape)[real]
  value = findings.value[real]
  if work.search:
    if (
      findings.policy is None
      or findings.search_value is None
      or findings.search_value.shape != real.shape
    ):
      raise ValueError("a search finds policies and search values")
    replay.write_search(
      lane, time, findings.policy[real], findings.search_value[real], value, findings.step
    )
  elif not work.refresh:
    replay.write_bootstrap(lane, time, value, findings.step)
  if work.refresh:
    replay.write_values(lane, time, value, findings.step)
    replay.refresh_priorities(lane, time, findings.step)


class BatchReanalyser:
  """Searches the K+1 states of each sample and evaluates the states that end its n-step returns.

  Args:
    config: of the run.
    inference: shared compiled functions.
    weights: of the subscriber `reanalyser`, which are the target network.
    key: randomness of the search.
  """

  def __init__(self, config: Config, inference: Inference, weights: WeightsStore, key: jax.Array):
    self._unroll, self._inference, self._weights, self._key = (
      config.agent.loss.unroll_steps,
      inference,
      weights,
      key,
    )
    self._explore = config.agent.reanalyse.explore
    self.calls = 0  # part of a checkpoint
    self.states = 0  # searched so far
    self.host_bytes = 0  # handed to the device so far

  def works(self, replay: Replay, lane: np.ndarray, time: np.ndarray) -> list[Work]:
    """All that the targets of these samples (lane [B], time [B]) are made from."""
    works = []
    for search, (at, states) in (
      (True, replay.states_to_search(lane, time)),
      (False, replay.states_to_bootstrap(lane, time)),
    ):
      if len(at):
        real = states == states[:, :1] + np.arange(self._unroll + 1)
        works.append(Work(search, REANALYSER, at[:, 0], states[:, 0], real, refresh=False))
    return works

  def __call__(self, replay: Replay, lane: np.ndarray, time: np.ndarray) -> None:
    """Brings it up to date."""
    version, key = self._weights.latest(REANALYSER), jax.random.fold_in(self._key, self.calls)
    for work in self.works(replay, lane, time):
      frames = work.frames(replay, self._inference.devices)
      found = examine(
        self._inference, version, frames, search=work.search, key=key, explore=self._explore
      )
      record(replay, work, found)
      self.host_bytes += host_bytes(frames)
      self.states += int(work.real.sum()) if work.search else 0
    self.calls += 1


def block_of(part: ReanalyseConfig | RefreshConfig) -> int:
  """States that a sweep looks at in one call: as configured, or as many as fill a device of this process' kind."""
  return part.block or (_ON_CPU if jax.default_backend() == "cpu" else _ON_ACCELERATOR)


class Sweeper:
  """Recomputes the stalest stored states, block by block, fast enough for a bound on their age.

  Args:
    config: of the run.
    kind: `refresh` for values and priorities, `reanalyse` for policies and search values too.
    inference: shared compiled functions.
    weights: source of this sweeper's weights (subscriber `refresher` or `reanalyser`).
    key: randomness of the search.
  """

  def __init__(
    self,
    config: Config,
    kind: SweepName,
    inference: Inference,
    weights: WeightsStore,
    key: jax.Array,
  ):
    part = config.agent.refresh if kind == "refresh" else config.agent.reanalyse
    self.kind: SweepName = kind
    self.max_age, self.block = part.max_age, block_of(part)
    self._refresh = config.agent.refresh.enabled  # switched off, a sweep leaves priorities alone
    self._explore = config.agent.reanalyse.explore
    self._subscriber = REFRESHER if kind == "refresh" else REANALYSER
    # Stamps are old already when written: weights are, by their interval, and so are slots that an actor appends.
    self._delay = max(part.weights_interval, config.actor.weights_interval)
    self._inference, self._weights, self._key = inference, weights, key
    self.calls = 0
    self.credit = 0  # states that may be computed now
    self.credited = 0  # learner steps credited so far
    self.states = 0  # computed so far
    self.host_bytes = 0  # handed to the device so far

  def counters(self) -> dict[str, int]:
    """What a checkpoint needs of it."""
    return {"calls": self.calls, "credit": self.credit, "credited": self.credited}

  def restore(self, counters: dict[str, int]) -> None:
    """Puts `counters` back."""
    self.calls, self.credit, self.credited = (
      counters["calls"],
      counters["credit"],
      counters["credited"],
    )

  def due(self, replay: Replay, learner_step: int) -> bool:
    """Whether a block should be computed now that `learner_step` steps are taken: owed by the quota, or overdue."""
    while self.credited < learner_step:
      self.credit += replay.quota(self.kind, self.block, self.max_age, self._delay)
      self.credited += 1
    return self.credit >= self.block or self.overdue(replay, learner_step)

  def calls_per_step(self, stored: float) -> float:
    """Blocks for each learner step, on average, with so many states in the replay."""
    return (stored / self.block + 1.5) / (
      self.max_age - self._delay - 1
    )  # see Sweep.quota; half a block is padding

  def overdue(self, replay: Replay, learner_step: int) -> bool:
    """Whether something stored would be older than the bound after one more step; the learner must not take it."""
    return learner_step + 1 - replay.oldest_step(self.kind) > self.max_age

  def behind(self, replay: Replay, learner_step: int) -> bool:
    """Whether a block and some learner steps' work are owed: the learner should wait now, not for long at the bound."""
    quota = replay.quota(self.kind, self.block, self.max_age, self._delay)
    return self.credit + (learner_step - self.credited) * quota > self.block + _SLACK * quota

  def next(self, replay: Replay) -> Work:
    """Takes the next block; what was owed for it is paid."""
    lane, time = replay.next_block(self.kind, self.block)
    self.credit = max(self.credit - self.block, 0)
    real = np.ones((len(lane), 1), bool)
    return Work(self.kind == "reanalyse", self._subscriber, lane, time, real, self._refresh)

  def sweep(self, replay: Replay) -> None:
    """Computes one block."""
    version, key = self._weights.latest(self._subscriber), jax.random.fold_in(self._key, self.calls)
    work = self.next(replay)
    frames = work.frames(replay, self._inference.devices)
    found = examine(
      self._inference, version, frames, search=work.search, key=key, explore=self._explore
    )
    record(replay, work, found)
    self.calls += 1
    self.states += len(work.lane)
    self.host_bytes += host_bytes(frames)
