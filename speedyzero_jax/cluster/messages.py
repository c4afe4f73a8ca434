"""Messages between the learner and its workers: actors and refreshers call, the learner answers.

A message is a NamedTuple, which `codec` converts and checks by its annotations; an int is never
negative. Letters in shapes: n slots or states, k states per window, w frames per window, l lanes,
e episodes, s segments.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.types import Params, Segment

Arrays = dict[str, np.ndarray]


class ActorJoin(NamedTuple):
  """First call of an actor process."""

  actor: int
  incarnation: int  # grows with every start; calls of older incarnations are refused


class ActorWelcome(NamedTuple):
  """The actor's lanes: first .. first+l-1."""

  first: int
  heads: np.ndarray  # [l] int64, next slot to append, by lane


class RefresherJoin(NamedTuple):
  """First call of a refresher process."""

  refresher: int
  incarnation: int


class Step(NamedTuple):
  """What an actor collected with its last grant, and the request for the next.

  It may be sent again, with the same sequence number. Unused steps of the grant are returned.
  """

  actor: int
  incarnation: int
  sequence: int  # counts the incarnation's steps, from 0
  segments: Arrays  # made by `pack`
  score: np.ndarray  # [e] float64, of finished episodes
  length: np.ndarray  # [e] int64, of the same, in agent steps


class Grant(NamedTuple):
  """Permission for an actor's next step; what came with the request is stored durably."""

  steps: int  # agent steps allowed; 0: none are left, close every lane and leave
  closing: bool  # the last grant: close every lane after this step, if all of it is used
  weights: int  # least learner step of the weights to act with
  progress: float  # share of training done
  random: bool  # play uniformly at random


class Observation(NamedTuple):
  """What an actor's environments show first, or after the last actions, for central inference."""

  actor: int
  incarnation: int
  arrays: Arrays  # of an `EnvStep`, by name


class Actions(NamedTuple):
  """The next step of an actor's environments."""

  action: np.ndarray  # [l] int32


class WeightsRequest(NamedTuple):
  """Request for the newest weights of a subscription."""

  number: int  # of the actor or refresher
  subscriber: str


class Weights(NamedTuple):
  """One version of the network's variables, converted by `named` and `unnamed`."""

  step: int
  arrays: Arrays


class WorkRequest(NamedTuple):
  """Request for a block. An unanswered earlier block of the same refresher counts as lost."""

  refresher: int
  incarnation: int


class Block(NamedTuple):
  """States for one of the agent's tasks: n windows of w frames."""

  block: int
  task: str
  lane: np.ndarray  # [n] int32
  cell: np.ndarray  # [n, w] int32
  step: int  # least learner step of the weights to use
  heads: np.ndarray  # [lanes] int64, the refresher must have the frames before these slots
  columns: Arrays  # what the task's program reads besides frames, [n, k, ...] each


class Result(NamedTuple):
  """Outputs of the task for one block, by name; each is [n, k, ...]."""

  refresher: int
  incarnation: int
  block: int
  step: int  # learner step of the weights used
  arrays: Arrays


class FramesRequest(NamedTuple):
  """Request for the frames of these slots and later ones."""

  refresher: int
  incarnation: int
  heads: np.ndarray  # [lanes] int64


class FramesChunk(NamedTuple):
  """Frames in the order of each lane, without evicted ones."""

  heads: np.ndarray  # [lanes] int64, for the next request
  lane: np.ndarray  # [n] int32
  cell: np.ndarray  # [n] int32
  frame: np.ndarray  # [n, *frame]


class Ok(NamedTuple):
  """Answer without content."""


class Call(NamedTuple):
  """Request and answer of a method."""

  request: type
  answer: type
  poll: bool = False  # the service answers None for "nothing yet" and the client asks again


CALLS: Mapping[str, Call] = {  # by method of the service and of the client
  "join_actor": Call(ActorJoin, ActorWelcome),
  "join_refresher": Call(RefresherJoin, Ok),
  "step": Call(Step, Grant, poll=True),
  "weights": Call(WeightsRequest, Weights),
  "work": Call(WorkRequest, Block, poll=True),
  "result": Call(Result, Ok),
  "frames": Call(FramesRequest, FramesChunk),
}
STREAM = "environments", Call(Observation, Actions)  # a call with many requests and answers


def named(tree: Params) -> dict[str, Any]:
  """The leaves of a tree by their paths (`jax.tree_util.keystr`), for `Weights.arrays`."""
  return {
    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def unnamed(like: Params, arrays: Mapping[str, Any]) -> Params:
  """The tree with the structure of `like` and these leaves. Raises KeyError if one is missing."""
  return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)], like)


def pack(segments: Sequence[Segment]) -> Arrays:
  """Segments as one array per column for the slots of all, and "_index": [s] of lane, start, n."""
  if not segments:
    return {}
  columns = [segment.arrays() for segment in segments]
  index = np.array([(x.lane, x.start, len(x.frame)) for x in segments], np.int64)
  return {"_index": index} | {
    name: np.concatenate([column[name] for column in columns]) for name in columns[0]
  }


def unpack(arrays: Arrays, most: int) -> list[Segment]:
  """The segments of `pack`, as views; ValueError for impossible sizes or names, or too many.

  Whether the columns are those of the replay's schema is checked when they are appended.
  """
  if not arrays:
    return []
  columns = dict(arrays)
  index = columns.pop("_index", np.zeros(0))
  if index.dtype != np.int64 or index.shape[1:] != (3,) or (index[:, 2] < 1).any():
    raise ValueError("segments: no valid index of lanes, starts and sizes")
  if len(index) > most:
    raise ValueError(f"segments: {len(index)} are more than {most}")
  missing = set(Segment._fields[2:9]) - columns.keys()
  bounds = [0, *itertools.accumulate(index[:, 2].tolist())]
  if missing or any(column.shape[:1] != (bounds[-1],) for column in columns.values()):
    raise ValueError(f"segments: columns {sorted(missing)} are missing, or differ in slots")
  return [
    Segment.of(lane, start, {name: column[a:b] for name, column in columns.items()})
    for (lane, start, _), (a, b) in zip(index.tolist(), itertools.pairwise(bounds), strict=True)
  ]
