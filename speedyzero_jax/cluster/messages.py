"""What the processes of a unit say to each other: actors and reanalysers ask, the learner's hub answers.

A message is a NamedTuple; its annotations are all that `wire.py` needs to turn it into bytes and to check what comes
in. Plain ints are not negative. What floats in arrays may be is for the replay to say, not checked here.

Letters in shapes, each bound once per message: n slots or states, k states per window, w frames per window, l lanes,
e episodes. `lanes`, `capacity`, `actions` and `frame` are the unit's own (`wire.Form`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.types import Params, Segment


class Spec(NamedTuple):
  """What an array must be; its integers are in [low, below)."""

  dtype: str  # `frame`: the form's
  dims: tuple[str, ...] = ()
  low: int | None = None
  below: str | None = None  # a size of the form


_Lanes = Annotated[np.ndarray, Spec("int32", ("n",), 0, "lanes")]


class ActorJoin(NamedTuple):
  """The first thing an actor says, and again after every start."""

  actor: int
  incarnation: int  # grows with every start; what an older one says is refused


class ActorWelcome(NamedTuple):
  """The actor's lanes are first .. first+l-1."""

  first: int
  heads: Annotated[np.ndarray, Spec("int64", ("l",), 0)]  # slots of the frames it will show first


class ReanalyserJoin(NamedTuple):
  """The first thing a reanalyser says, and again after every start."""

  reanalyser: int
  incarnation: int


class ReanalyserWelcome(NamedTuple):
  """Where the reanalyser finds the frames: in a file to map, if it can, else it fetches them with `FramesRequest`."""

  frames_file: str  # [lanes, capacity, *frame]; empty: there is none
  frames_link: (
    str  # what that is a link to; a file of this name elsewhere is linked to something else
  )


class Append(NamedTuple):
  """What an actor's lanes collected in one step. Sent again until acknowledged: `start` says what is known already."""

  actor: int
  incarnation: int
  sequence: int  # of the grant it was paid from; what it did not use goes back
  segments: list[Segment]
  score: Annotated[
    np.ndarray, Spec("float64", ("e",))
  ]  # of the games that ended with the step: finite, one a lane
  length: Annotated[np.ndarray, Spec("int64", ("e",), 0)]  # theirs, in agent steps


class Acknowledged(NamedTuple):
  """Everything before these slots is safe."""

  heads: Annotated[np.ndarray, Spec("int64", ("l",), 0)]  # of the actor's lanes


class GrantRequest(NamedTuple):
  """An actor asks for up to `steps` agent steps. Sent again with the same sequence number, it is the same request."""

  actor: int
  incarnation: int
  sequence: int  # counts the incarnation's grants
  steps: int


class Grant(NamedTuple):
  """What the actor's next step needs to know."""

  steps: int  # agent steps it may take; 0: none are left, close every lane and go home
  closing: (
    bool  # nothing is left to grant: close every lane after this step, if it uses all of them
  )
  weights: int  # of this learner step or newer are to act with; 0: better old ones than waiting for new ones
  progress: float  # share of training done
  random: bool  # play uniformly at random


class WeightsRequest(NamedTuple):
  """Asks for weights newer than those the subscriber has. Also a sign of life: asked again while there are none."""

  number: int  # of the actor or reanalyser that asks
  subscriber: str
  have: Annotated[int, Spec("int64", low=-1)]  # learner step; -1: none


class Weights(NamedTuple):
  """One version of the network. `named` and `unnamed` lead from a tree to the arrays and back."""

  step: int
  arrays: dict[str, np.ndarray]


class WorkRequest(NamedTuple):
  """A reanalyser asks for a block. If it had one and has not answered it, that one was lost on its way."""

  reanalyser: int
  incarnation: int


class Block(NamedTuple):
  """States to compute: n windows of w frames."""

  block: int
  search: bool  # find policies and search values; otherwise only the network's values
  subscriber: str  # whose weights are to be used
  lane: _Lanes
  cell: Annotated[np.ndarray, Spec("int32", ("n", "w"), 0, "capacity")]
  step: int  # of the weights wanted, at least
  frames: int  # sequence number that the reanalyser's frames must have reached


class Result(NamedTuple):
  """What came of a block. Of a block of values, policy and search_value are empty (m is 0), else m is n."""

  reanalyser: int
  incarnation: int
  block: int
  step: int  # of the weights used
  policy: Annotated[np.ndarray, Spec("float32", ("m", "k", "actions"))]
  search_value: Annotated[np.ndarray, Spec("float32", ("m", "k"))]
  value: Annotated[np.ndarray, Spec("float32", ("n", "k"))]


class FramesRequest(NamedTuple):
  """Asks for the frames from this sequence number on."""

  reanalyser: int
  incarnation: int
  sequence: int


class FramesChunk(NamedTuple):
  """Frames in the order in which they were written, save those that others have taken the place of."""

  sequence: int  # what the next request asks for
  lane: _Lanes
  cell: Annotated[np.ndarray, Spec("int32", ("n",), 0, "capacity")]
  frame: Annotated[np.ndarray, Spec("frame", ("n", "frame"))]


class Ok(NamedTuple):
  """Understood."""


# A list of segments travels as one array per field, those of one slot after the other; `size` tells them apart.
SEGMENTS = {
  "lane": Spec("int32", ("segments",), 0, "lanes"),
  "start": Spec("int64", ("segments",), 0),
  "size": Spec("int32", ("segments",), 1),
  "frame": Spec("frame", ("n", "frame")),
  "first": Spec("bool", ("n",)),
  "terminated": Spec("bool", ("n",)),
  "truncated": Spec("bool", ("n",)),
  "action": Spec("int32", ("n",), -1, "actions"),
  "reward": Spec("float32", ("n",)),
  "policy": Spec("float32", ("n", "actions")),
  "search_value": Spec("float32", ("n",)),
  "value": Spec("float32", ("n",)),
  "step": Spec("int32", ("n",), 0),
}


class Call(NamedTuple):
  """One kind of call; its name is that of the hub's and the client's method."""

  request: type
  answer: type
  poll: bool = (
    False  # the answer may take any time: the hub says None for "nothing yet" and is asked again
  )


CALLS: Mapping[str, Call] = {
  "join_actor": Call(ActorJoin, ActorWelcome),
  "join_reanalyser": Call(ReanalyserJoin, ReanalyserWelcome),
  "append": Call(Append, Acknowledged),
  "grant": Call(GrantRequest, Grant, poll=True),
  "weights": Call(WeightsRequest, Weights, poll=True),
  "work": Call(WorkRequest, Block, poll=True),
  "result": Call(Result, Ok),
  "frames": Call(FramesRequest, FramesChunk, poll=True),
}

# A message's number on the wire is its place here.
KINDS: tuple[type, ...] = tuple(
  dict.fromkeys(kind for call in CALLS.values() for kind in (call.request, call.answer))
)


def named(tree: Params) -> dict[str, Any]:
  """The leaves of a tree by their paths (`jax.tree_util.keystr`), for `Weights.arrays`."""
  return {
    jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  }


def unnamed(like: Params, arrays: Mapping[str, Any]) -> Params:
  """The tree of the structure of `like` that `named` made these arrays from. Raises KeyError if it was another."""
  return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)], like)
