"""Messages between the learner and its workers: actors and refreshers call, the learner answers.

A message is a NamedTuple. Its annotations are all that `codec` needs to convert and check it: a
plain int is not negative, a plain float is finite, and an array is what its `Spec` says. Values of
float arrays are not checked here.
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.types import Params, Segment


class Spec(NamedTuple):
  """Dtype, shape and range of an array, or the range of an int.

  A letter in a shape has one size throughout a message: n slots or states, k states per window,
  w frames per window, l lanes, e episodes, s segments.
  """

  dtype: str
  shape: tuple[int | str, ...] = ()
  low: int | None = None  # least value of integers
  below: int | str | None = None  # integers are less than this, or this size of the wire format


LANES = Spec("int32", ("n",), 0, "lanes")


class ActorJoin(NamedTuple):
  """First call of an actor process."""

  actor: int
  incarnation: int  # grows with every start; calls of older incarnations are refused


class ActorWelcome(NamedTuple):
  """The actor's lanes: first .. first+l-1."""

  first: int
  heads: Annotated[np.ndarray, Spec("int64", ("l",), 0)]  # next slot to append, by lane


class RefresherJoin(NamedTuple):
  """First call of a refresher process."""

  refresher: int
  incarnation: int


class RefresherWelcome(NamedTuple):
  """Place of the learner's frames: a file to map where that is possible, else fetch them."""

  frames_file: str  # [lanes, capacity, *frame]; empty if there is none
  frames_link: str  # target of that link; on another machine it differs


class Append(NamedTuple):
  """Slots collected in one step. It may be sent again: `start` shows what is stored already."""

  actor: int
  incarnation: int
  sequence: int  # of the grant that it uses; unused steps of the grant are returned
  segments: list[Segment]
  score: Annotated[np.ndarray, Spec("float64", ("e",))]  # of finished episodes
  length: Annotated[np.ndarray, Spec("int64", ("e",), 0)]  # of the same, in agent steps


class Acknowledged(NamedTuple):
  """Slots before these are stored durably."""

  heads: Annotated[np.ndarray, Spec("int64", ("l",), 0)]  # by lane of the actor


class GrantRequest(NamedTuple):
  """Request for up to `steps` agent steps; with the same sequence number, the same request."""

  actor: int
  incarnation: int
  sequence: int  # counts the incarnation's grants
  steps: int


class Grant(NamedTuple):
  """Permission for an actor's next step, with its settings."""

  steps: int  # agent steps allowed; 0: none are left, close every lane and leave
  closing: bool  # the last grant: close every lane after this step, if all of it is used
  weights: int  # least learner step of the weights to act with
  progress: float  # share of training done
  random: bool  # play uniformly at random


class WeightsRequest(NamedTuple):
  """Request for weights newer than the subscriber has; also a sign that the process is alive."""

  number: int  # of the actor or refresher
  subscriber: str
  have: Annotated[int, Spec("int64", low=-1)]  # learner step; -1: none


class Weights(NamedTuple):
  """One version of the network's variables, converted by `named` and `unnamed`."""

  step: int
  arrays: Annotated[dict[str, np.ndarray], "weights"]


class WorkRequest(NamedTuple):
  """Request for a block. An unanswered earlier block of the same refresher counts as lost."""

  refresher: int
  incarnation: int


class Block(NamedTuple):
  """States for one of the agent's tasks: n windows of w frames."""

  block: int
  task: Annotated[str, "task"]
  lane: Annotated[np.ndarray, LANES]
  cell: Annotated[np.ndarray, Spec("int32", ("n", "w"), 0, "capacity")]
  step: int  # least learner step of the weights to use
  frames: int  # number of written frames that the refresher must have


class Result(NamedTuple):
  """Outputs of a task for one block, by name; each is [n, k, ...]."""

  refresher: int
  incarnation: int
  block: int
  task: Annotated[str, "task"]
  step: int  # learner step of the weights used
  arrays: Annotated[dict[str, np.ndarray], "results"]


class FramesRequest(NamedTuple):
  """Request for the frames from this sequence number on."""

  refresher: int
  incarnation: int
  sequence: int


class FramesChunk(NamedTuple):
  """Frames in the order of writing, without those that are overwritten already."""

  sequence: int  # for the next request
  lane: Annotated[np.ndarray, LANES]
  cell: Annotated[np.ndarray, Spec("int32", ("n",), 0, "capacity")]
  frame: Annotated[np.ndarray, "frame"]  # [n, *frame]


class Ok(NamedTuple):
  """Answer without content."""


class Call(NamedTuple):
  """Request and answer of a method."""

  request: type
  answer: type
  poll: bool = False  # the service answers None for "nothing yet" and the client asks again


CALLS: Mapping[str, Call] = {  # by method of the service and of the client
  "join_actor": Call(ActorJoin, ActorWelcome),
  "join_refresher": Call(RefresherJoin, RefresherWelcome),
  "append": Call(Append, Acknowledged),
  "grant": Call(GrantRequest, Grant, poll=True),
  "weights": Call(WeightsRequest, Weights, poll=True),
  "work": Call(WorkRequest, Block, poll=True),
  "result": Call(Result, Ok),
  "frames": Call(FramesRequest, FramesChunk, poll=True),
}


def named(tree: Params) -> dict[str, Any]:
  """The leaves of a tree by their paths (`jax.tree_util.keystr`), for `Weights.arrays`."""
  return {
    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def unnamed(like: Params, arrays: Mapping[str, Any]) -> Params:
  """The tree with the structure of `like` and these leaves. Raises KeyError if one is missing."""
  return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)], like)
