"""The `Agent` interface, through which actors, learner, replay and loops use an algorithm.

An agent is a set of pure functions and a few constants. Functions marked *device* are traced by
JAX. Functions marked *host* work on numpy arrays of the replay and are called with its lock held
(`make_selector`: before the replay is in use).

Dimensions: n environments or states, B samples, S stacked frames, T+1 slots of a batch's window.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.flatten_util
import numpy as np

from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.schema import Column, Schema
from speedyzero_jax.replay.selector import Selection, Selector
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.types import Params

AXIS = "data"  # mesh axis over which batches are sharded

Arrays = dict[str, Any]  # numpy or jax arrays by name


class Variables(NamedTuple):
  """A network's state: trainable parameters and running statistics."""

  params: Params
  batch_stats: Params


class ActInputs(NamedTuple):
  """Observations and recurrent state; leaves have leading dimension n."""

  frames: Any  # [n, S, H, W, C], oldest first
  first: Any  # [n] bool, an episode starts here: `act` must reset the recurrent state
  lane: Any  # [n] int32, index of the environment within the learner process
  core: Any  # recurrent state, a pytree; () without one


class ActOutput(NamedTuple):
  """Output of `act`; leaves have leading dimension n."""

  action: Any  # [n] int32
  columns: Arrays  # the agent's columns of the schema
  core: Any
  diagnostics: Arrays  # shown in videos only, [n] or [n, A]


class LossOutput(NamedTuple):
  """Auxiliary outputs of the loss."""

  batch_stats: Params  # the same on all devices
  metrics: dict[str, jax.Array]  # scalars by metric name, means over the local samples
  priority: jax.Array  # [B], the error that determines each sample's priority; zeros if unused


class Window(NamedTuple):
  """Range of slots whose frames a batch needs, relative to each sample's first slot."""

  after: int  # T, slots after the first one
  within_episode: bool  # pad with the episode's first and last frame instead of crossing its ends


class Task(NamedTuple):
  """Background computation over stored states, whose results are written back to the replay.

  If `max_age` is set, the task sweeps the whole replay, fast enough that no value stamped `stamp`
  gets older than `max_age` learner steps. Otherwise it processes the states that
  `Agent.batch_work` returns for each batch.
  """

  program: Callable[[Variables, Arrays, jax.Array], Arrays]
  """Device: (variables, inputs, key) -> arrays [B, n, ...] by result name. The inputs are `frames`
  [B, S-1+n, H, W, C], the learner step of the variables, `step` [B] int32, all equal, and those in
  `reads`, [B, n, ...] by name."""
  results: tuple[Column, ...]  # names, dtypes and shapes of the program's results
  write: Callable[[Replay, np.ndarray, np.ndarray, dict[str, np.ndarray], int], None]
  """Host: (replay, lane [m], time [m], results [m, ...], learner step of the weights)."""
  subscription: str  # selects the weights: a key of `Agent.subscriptions`
  part: str  # name in time profiles, such as "search"
  rate: str = ""  # prefix of the metrics that count processed states; empty: not counted
  stamp: str = ""  # name in `Schema.stamps`
  max_age: int = 0  # learner steps; 0: no sweep
  block: int = 0  # states per call of a sweep; 0: chosen by device type
  phases: int = 1  # of a sweep; more than 1: most states come after their successors, see `Sweep`
  reads: tuple[Column, ...] = ()
  """Further inputs, not `frames` or `step`; columns of the schema unless `read` is set."""
  read: Callable[[Replay, np.ndarray, np.ndarray, int], Arrays] | None = None
  """Host: (replay, lane [B], time [B], after) -> `reads`, arrays [B, after+1, ...] by name."""

  def inputs(self, replay: Replay, lane: np.ndarray, time: np.ndarray, after: int) -> Arrays:
    """Returns the inputs in `reads` for the states time .. time+after, [B, after+1, ...] each."""
    if self.read is None:
      return replay.values(self.reads, lane, time, after)
    with replay.lock:
      return self.read(replay, lane, time, after)


class Work(NamedTuple):
  """States to recompute in one call of a task: n consecutive states from each of B slots."""

  task: str
  lane: np.ndarray  # [B]
  time: np.ndarray  # [B]
  real: np.ndarray  # [B, n] bool, false where state k repeats its episode's last state


def mean_over_devices(tree: Any) -> Any:
  """Device: the mean over `AXIS`. One packed array, since CPU processes send leaves one by one."""
  if jax.lax.axis_size(AXIS) == 1:
    return tree
  flat, unravel = jax.flatten_util.ravel_pytree(tree)
  return unravel(jax.lax.pmean(flat, AXIS))


class Agent(abc.ABC):
  """An algorithm, constructed by `make_agent` of its module:

      make_agent(config, frame_shape [H, W, C], frame_dtype, number of actions)

  Attributes are constant after construction. Members with a default concern only some algorithms.
  """

  schema: Schema  # of a stored step
  window: Window
  # Slots after a sample's first one that its targets may use, at least `window.after`. A lane has
  # room for `env.frame_stack + lookahead` slots.
  lookahead: int
  subscriptions: Mapping[str, int] = {}  # weights for tasks: learner steps between updates
  tasks: Mapping[str, Task] = {}
  # The column `value` estimates the discounted return, multiplied by this; 0: no such column.
  value_scale: float = 0.0
  target_interval: int = 0  # learner steps between target-network updates; 0: no target network
  # A resumed run discards experience collected after its checkpoint: its behavior policy is lost.
  on_policy: bool = False
  # Acting and learning alternate: actors pause while a batch is ready or in training, and the
  # learner waits only for a full batch. If false, the rate limiter paces both.
  synchronous: bool = False

  @abc.abstractmethod
  def init(self, key: jax.Array) -> Variables:
    """Device: initial variables."""

  def published(self, variables: Variables) -> Variables:
    """Device: variables for inference, the argument of `act` and of the tasks' programs.

    Actors and refreshers get only these.
    """
    return variables

  def initial_core(self, n: int) -> Any:
    """Device: recurrent state at the start of an episode."""
    return ()

  @abc.abstractmethod
  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    """Device: chooses actions. `progress` [] is the completed share of training, in [0, 1]."""

  @abc.abstractmethod
  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    """Device: the loss of one device's shard of a batch, inside a shard_map over `AXIS`.

    Args:
      params: trainable parameters, with respect to which the loss is differentiated.
      batch_stats: running statistics.
      target: parameters of the target network; () without one.
      batch: from `assemble`, plus `frames` [B, F, H, W, C] and, unless `window.within_episode`,
        `stack` [B, T+1, S], the indices into F of each slot's stacked frames.
      keys: [B], one per sample, independent of how the batch is sharded.
    """

  @abc.abstractmethod
  def make_selector(self, store: LaneStore) -> Selector:
    """Host: the rule that selects samples for training."""

  def batch_work(self, replay: Replay, selection: Selection) -> list[Work]:
    """Host: the states to recompute before a batch is assembled."""
    return []

  @abc.abstractmethod
  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    """Host: the batch without its frames, arrays [B, ...], and metrics to log.

    If a sample is evicted before its frames are gathered, arrays whose names end in `_mask` are set
    to 0 for it.
    """
