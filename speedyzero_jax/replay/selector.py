"""Interface of the rules that select stored slots for training."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np


class Selection(NamedTuple):
  """Slots selected for a batch: the first state of each sample."""

  lane: np.ndarray  # [B] int32
  time: np.ndarray  # [B] int64, absolute
  probability: np.ndarray  # [B] float64, sampling probability; 1 if not sampled at random


class Selector(Protocol):
  """A rule that selects stored slots for training. Called with the replay's lock held."""

  @property
  def count(self) -> int:
    """Number of samples that can be selected."""

  def appended(self, lane: np.ndarray, old_head: np.ndarray) -> None:
    """Called after lanes [m] have grown from `old_head` [m], or their open episodes have ended."""

  def select(self, n: int, rng: np.random.Generator) -> Selection:
    """Selects the next n samples. Raises ValueError if there are not enough."""

  def ready(self, n: int) -> bool:
    """Whether `select(n)` can be called."""

  def update(self, selection: Selection, priority: np.ndarray, step: int) -> None:
    """Receives the errors [B] computed in learner step `step`."""

  def stats(self, learner_step: int) -> dict[str, float]:
    """Returns metrics to log under `replay/`."""

  def state_dict(self) -> dict[str, np.ndarray]:
    """Returns the state that cannot be derived from the store."""

  def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
    """Restores `state_dict` into a new selector over the restored store."""
