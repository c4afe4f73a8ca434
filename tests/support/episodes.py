"""Episodes as plain lists, slots that store them, and n-step returns computed from the lists."""

from typing import NamedTuple

import numpy as np

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.types import Slots


class Episode(NamedTuple):
  """States 0 .. len(rewards) and the rewards between them; open episodes lack the last state."""

  rewards: list[float]
  end: str  # terminated, truncated or open

  @property
  def slots(self) -> int:
    return len(self.rewards) + (self.end != "open")


def every_end(longest: int, rng: np.random.Generator) -> list[Episode]:
  """Shuffled terminated and truncated episodes of 1 .. longest transitions, then an open one."""
  shapes = [(n, end) for n in range(1, longest + 1) for end in ("terminated", "truncated")]
  order = [shapes[i] for i in rng.permutation(len(shapes))] + [(longest, "open")]
  return [Episode(rng.normal(size=n).tolist(), end) for n, end in order]


def recorded(schema: Schema, lane: int, episodes: list[Episode], rng: np.random.Generator) -> Slots:
  """Stores episodes in a lane from time 0; frames, actions and the agent's columns are random."""
  slots = sum(episode.slots for episode in episodes)
  arrays = {c.name: np.zeros((slots, *c.shape), c.dtype) for c in schema.columns}
  arrays["frame"] = rng.normal(size=arrays["frame"].shape).astype(schema.frame.dtype)
  at = 0
  for rewards, end in episodes:
    n = len(rewards)
    arrays["first"][at] = True
    arrays["action"][at : at + n] = rng.integers(0, schema.num_actions, n)
    arrays["reward"][at : at + n] = rewards
    at += n
    if end != "open":
      arrays[end][at], arrays["action"][at] = True, -1
      at += 1
  for column in schema.extra:
    arrays[column.name] = rng.normal(size=(slots, *column.shape)).astype(column.dtype)
  return Slots.of_lane(lane, 0, arrays)


def n_step_return(
  episode: Episode, i: int, n: int, discount: float
) -> tuple[float, float, int] | None:
  """Reward, discount and length of the n-step return of state i.

  None if the state from which it bootstraps is not stored.
  """
  length = min(n, len(episode.rewards) - i)
  total = sum(discount**k * episode.rewards[i + k] for k in range(length))
  ended = i + length == len(episode.rewards)
  if ended and episode.end == "open":
    return None
  return total, 0.0 if ended and episode.end == "terminated" else discount**length, length


def observation(slots: Slots, slot: int, stack: int) -> np.ndarray:
  """The frame stack of a slot, from its episode's frames, as one vector."""
  start = max(t for t in range(slot + 1) if slots["first"][t])
  shown = [slots["frame"][max(t, start), 0, 0] for t in range(slot - stack + 1, slot + 1)]
  return np.concatenate(shown)
