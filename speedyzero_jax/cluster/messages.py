"""Messages between the learner and its helpers: actors and refreshers call, the learner answers.

A message is a NamedTuple, sent as a msgpack map `{kind: fields}` with arrays in flax's encoding.
Letters in shapes: n slots or states, k states per window, w frames per window, l lanes, e episodes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from flax import serialization

from speedyzero_jax.replay.schema import Schema
from speedyzero_jax.run.topology import Kind
from speedyzero_jax.types import Params

HANG_SECONDS = 600.0  # time without a call after which an actor with a grant hangs

Arrays = dict[str, np.ndarray]
Message = TypeVar("Message")


class Helper(NamedTuple):
  """The actor or refresher that calls; sent with every request."""

  kind: Kind
  number: int
  incarnation: int = 0  # increases with every restart; calls of older incarnations are refused

  def __str__(self) -> str:
    return f"{self.kind} {self.number}"


class Join(NamedTuple):
  """First call of an actor process."""


class Welcome(NamedTuple):
  """Answer to `Join`: the actor's lanes, first .. first+l-1."""

  first: int
  heads: np.ndarray  # [l] int64, next slot to append, by lane
  seed: int  # of this incarnation's environments and exploration


class Step(NamedTuple):
  """Experience collected with an actor's last grant, and the request for the next grant.

  A retry has the same sequence number. Unused steps of the last grant are released.
  """

  sequence: int  # index among the incarnation's steps, from 0
  slots: dict[str, Any]  # fields of `Slots`; {}: none
  episodes: np.ndarray  # [e, 2] float64, return and agent steps of finished episodes


class Grant(NamedTuple):
  """Permission for an actor's next step; the experience in the request is stored."""

  steps: int  # agent steps allowed; 0: none are left, truncate all episodes and exit
  closing: bool  # the last grant: close every lane after this step, if all of it is used
  weights: int  # minimum learner step of the weights to act with
  progress: float  # fraction of training done
  random: bool  # play uniformly at random


class Gradient(NamedTuple):
  """A gradient from an actor (A3C), and the request for its next grant; otherwise as `Step`."""

  sequence: int
  steps: int  # agent steps taken with the last grant
  episodes: np.ndarray  # [e, 2] float64
  version: int  # learner step of the weights
  arrays: Arrays  # of `Variables`, `named`: derivatives and running statistics; {}: none
  metrics: dict[str, float]


class Observation(NamedTuple):
  """First observation of an actor's environments, or that after the last actions."""

  arrays: Arrays  # of an `EnvStep`, by name


class Actions(NamedTuple):
  """Actions for the next step of an actor's environments, from central inference."""

  action: np.ndarray  # [l] int32


class WeightsRequest(NamedTuple):
  """Request for the newest weights of a subscription."""

  subscriber: str


class Weights(NamedTuple):
  """One version of the network's variables, converted by `named` and `unnamed`."""

  step: int
  arrays: Arrays


class Results(NamedTuple):
  """Results of a refresher's last block, and the request for the next block.

  It can be retried. Any other block assigned to this refresher is then considered lost.
  """

  block: int  # 0: none, in the first call
  step: int  # learner step of the weights used
  arrays: Arrays  # outputs of the task, by name; each is [n, k, ...]


class Block(NamedTuple):
  """States for one of the agent's tasks: n windows of w frames."""

  block: int  # from 1
  task: str
  lane: np.ndarray  # [n] int32
  cell: np.ndarray  # [n, w] int32
  step: int  # minimum learner step of the weights to use
  heads: np.ndarray  # [lanes] int64, the refresher must first have all frames before these slots
  columns: Arrays  # inputs of the task's program besides frames, [n, k, ...] each


class FramesRequest(NamedTuple):
  """Request for the frames from these slots on."""

  heads: np.ndarray  # [lanes] int64


def frames_per_chunk(schema: Schema) -> int:
  """Largest number of frames in one answer, so that they have about 32 MB."""
  return max(1, min(256, (32 << 20) // schema.slot_bytes))


class FramesChunk(NamedTuple):
  """Frames that are not evicted, in the order of slots within each lane."""

  heads: np.ndarray  # [lanes] int64, for the next request
  lane: np.ndarray  # [n] int32
  cell: np.ndarray  # [n] int32
  frame: np.ndarray  # [n, *frame]


class Call(NamedTuple):
  """The request and answer types of a call."""

  request: type
  answer: type
  # For polls: the service takes the payload, answers None for "nothing yet", and the client asks
  # again, with the request that this function returns, without payload.
  poll: Callable[[Any], Any] | None = None


def _empty(request: Step | Gradient) -> Step | Gradient:
  episodes = request.episodes[:0]
  if isinstance(request, Step):
    return request._replace(slots={}, episodes=episodes)
  return request._replace(steps=0, episodes=episodes, arrays={}, metrics={})


CALLS: Mapping[str, Call] = {
  "join": Call(Join, Welcome),
  "step": Call(Step, Grant, _empty),
  "gradient": Call(Gradient, Grant, _empty),
  "weights": Call(WeightsRequest, Weights),
  "work": Call(Results, Block, lambda _: Results(0, 0, {})),
  "frames": Call(FramesRequest, FramesChunk),
}
STREAM = "environments", Call(Observation, Actions)  # a call with many requests and answers


def encode(message: Any) -> bytes:
  """Encodes a message as bytes."""
  fields = {type(message).__name__: message._asdict()}
  return serialization.msgpack_serialize(fields, in_place=True)


def decode(kind: type[Message], data: bytes) -> Message:
  """Decodes a message of this kind, with read-only arrays. Raises ValueError for other data.

  Types of fields are not checked, as callers with the run's token are trusted.
  """
  try:
    return kind(**serialization.msgpack_restore(data)[kind.__name__])
  except Exception as error:  # flax and msgpack raise several types
    raise ValueError(f"not a message of kind {kind.__name__}: {error!r}"[:300]) from None


def named(tree: Params) -> dict[str, Any]:
  """Returns a tree's leaves by their paths (`jax.tree_util.keystr`), for `Weights.arrays`."""
  return {
    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def unnamed(like: Params, arrays: Mapping[str, Any]) -> Params:
  """Rebuilds a tree with the structure of `like` from `named` leaves. Raises KeyError."""
  return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)], like)
