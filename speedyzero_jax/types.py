"""What crosses a border between parts, with shapes and units. Imports nothing of ours.

Letters: L lanes (environments stepped together), B batch, K unroll steps, A actions, S frames in a stack.
A frame is what the environment shows once, unstacked: uint8 [H, W, C] for images, float32 [1, 1, D] for vectors.

A *slot* is one frame of a lane's endless stream, at absolute time t = 0, 1, 2, ... Slot t is followed by a
transition (action[t], reward[t]) into slot t + 1 unless it is the last frame of its episode; the slot after an
episode's last frame is the first frame of the next one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import numpy as np

Params = Any  # a pytree of arrays


class EnvStep(NamedTuple):
  """What all lanes show after one call of `BatchedEnv.step`. All arrays are [L, ...]."""

  frame: np.ndarray  # [L, H, W, C] the frame after the action
  reward: np.ndarray  # [L] float32, raw reward of the action; 0 where `first`
  first: (
    np.ndarray
  )  # [L] bool, this frame starts an episode: the action was ignored, there was no transition
  terminated: (
    np.ndarray
  )  # [L] bool, this frame ends the episode for good (lost life, game over): its value is 0
  truncated: np.ndarray  # [L] bool, this frame ends the episode by a cap: its value is not 0
  game_over: np.ndarray  # [L] bool, the game itself is over (never for a mere lost life)


class Segment(NamedTuple):
  """Consecutive slots of one lane, appended by an actor; n slots, frame i belongs to slot start + i.

  The columns and their dtypes are those of the replay's `Schema`.
  """

  lane: int
  start: int  # absolute time of the first slot
  frame: np.ndarray  # [n, H, W, C]
  first: np.ndarray  # [n] bool, the frame starts an episode
  terminated: np.ndarray  # [n] bool, the frame ends an episode and its value is 0
  truncated: np.ndarray  # [n] bool, the frame ends an episode, bootstrap from its value
  action: np.ndarray  # [n] int32, taken after the frame; -1 where the frame ends an episode
  reward: np.ndarray  # [n] float32, received for `action`, clipped if rewards are clipped
  step: np.ndarray  # [n] int32, learner step of the weights that chose the action
  extra: dict[str, np.ndarray]  # [n, ...] each, the agent's columns by name

  def arrays(self) -> dict[str, np.ndarray]:
    """All columns by name."""
    return dict(zip(self._fields[2:9], self[2:9], strict=True)) | self.extra

  @classmethod
  def of(cls, lane: int, start: int, arrays: dict[str, np.ndarray]) -> "Segment":
    """A segment from its columns by name."""
    base = cls._fields[2:9]
    extra = {name: array for name, array in arrays.items() if name not in base}
    return cls(lane, start, *(arrays[name] for name in base), extra)

  def map(self, function: Callable[[np.ndarray], np.ndarray], start: int) -> "Segment":
    """The segment from slot `start` whose columns are `function` of this one's."""
    return self.of(self.lane, start, {k: function(x) for k, x in self.arrays().items()})


class SearchResult(NamedTuple):
  """What a search says of a batch of roots."""

  action: chex.Array  # [B] int32, the action to play
  policy: chex.Array  # [B, A] float32, the policy target (improved policy, or visit distribution)
  search_value: chex.Array  # [B] float32, the root's value after the search
  value: chex.Array  # [B] float32, the network's value of the root before it


class Targets(NamedTuple):
  """What the learner trains towards, for K + 1 states from each sampled one on."""

  value: np.ndarray  # [B, K+1] float32, undone of no transform: raw return
  value_prefix: np.ndarray  # [B, K] float32, sum of rewards since the prefix was last reset
  policy: np.ndarray  # [B, K+1, A] float32
  value_mask: (
    np.ndarray
  )  # [B, K+1] float32, 1 up to the end and in the absorbing states after a terminal one
  prefix_mask: np.ndarray  # [B, K] float32, the same for value_prefix
  policy_mask: np.ndarray  # [B, K+1] float32, 1 for states in which an action was taken
  consistency_mask: np.ndarray  # [B, K] float32, 1 where state k+1 is a real frame of the episode


class Batch(NamedTuple):
  """A sampled batch as it travels: indices and targets, never frames."""

  lane: np.ndarray  # [B] int32
  time: np.ndarray  # [B] int64, absolute slot of the first state
  action: np.ndarray  # [B, K] int32, actions unrolled; random where the episode is over
  targets: Targets
  probability: np.ndarray  # [B] float64, with which each was drawn
  age: np.ndarray  # [B, K+1] int32, learner steps since the policy targets were computed


class LearnerBatch(NamedTuple):
  """What the jitted learner step takes: frames gathered, importance weights not yet divided by their maximum."""

  frames: chex.Array  # [B, S+K, H, W, C] frames t-S+1 .. t+K, repeated at an episode's edges
  action: chex.Array  # [B, K]
  weight: chex.Array  # [B] float32, p^-beta
  value: chex.Array  # [B, K+1]
  value_prefix: chex.Array  # [B, K]
  policy: chex.Array  # [B, K+1, A]
  value_mask: chex.Array
  prefix_mask: chex.Array
  policy_mask: chex.Array
  consistency_mask: chex.Array
