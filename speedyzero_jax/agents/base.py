"""The `Agent` interface: all that actors, learner, replay and loops know of an algorithm.

An agent is pure functions and a few numbers. Functions marked *device* are traced by jax; functions
marked *host* work on numpy arrays of the replay and are called with its lock held (`make_selector`:
before the replay is in use).

Letters: n environments or states, B samples, S stacked frames, T+1 slots of a batch's window.
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

AXIS = "data"  # mesh axis over which batches are divided

Arrays = dict[str, Any]  # numpy or jax arrays by name


class Variables(NamedTuple):
  """A network's state: what the optimizer updates, and running statistics."""

  params: Params
  batch_stats: Params


class ActInputs(NamedTuple):
  """What the environments show, and what the agent remembers; leaves lead with n."""

  frames: Any  # [n, S, H, W, C], oldest first
  first: Any  # [n] bool, an episode starts here: recurrent state is to be reset
  lane: Any  # [n] int32, number of the environment among those of the learner process
  core: Any  # recurrent state, a pytree; () without one


class ActOutput(NamedTuple):
  """What `act` decides; leaves lead with n."""

  action: Any  # [n] int32
  columns: Arrays  # the agent's columns of the schema
  core: Any
  diagnostics: Arrays = {}  # noqa: RUF012 - a pytree: further numbers to look at, [n] or [n, A]


class LossOutput(NamedTuple):
  """What comes of a loss besides its value."""

  batch_stats: Params  # the same on all devices
  metrics: dict[str, jax.Array]  # scalars by metric name, means over the local samples
  priority: jax.Array  # [B], the error behind each sample's priority; zeros if unused


class Window(NamedTuple):
  """Slots whose frames a batch needs, relative to a sample's first slot."""

  after: int  # T: the window is this many slots after the first one
  within_episode: bool  # repeat the first and last frame of the episode beyond its ends


class Task(NamedTuple):
  """Background work: a program over stored states whose results are written back.

  With `max_age` a task sweeps the whole replay, fast enough that no value of `stamp` gets older
  than so many learner steps. Without, it works on what `Agent.batch_work` asks for.
  """

  program: Callable[[Variables, Arrays, jax.Array], Arrays]
  """Device: (variables, inputs, key) -> arrays [B, n, ...] by result name. The inputs are `frames`
  [B, S-1+n, H, W, C] and, by name, the columns [B, n, ...] that the task reads."""
  results: tuple[Column, ...]  # of the program
  write: Callable[[Replay, np.ndarray, np.ndarray, dict[str, np.ndarray], int], None]
  """Host: (replay, lane [m], time [m], results [m, ...], learner step of the weights)."""
  subscription: str  # whose weights are used: a key of `Agent.subscriptions`
  part: str  # name of the work in time profiles, such as "search"
  rate: str = ""  # prefix of the metrics that count its states; empty: not counted
  stamp: str = ""  # of the schema
  max_age: int = 0  # learner steps
  block: int = 0  # states per call of a sweep
  reads: tuple[Column, ...] = ()  # of the schema


class Work(NamedTuple):
  """States to recompute: n in a row from each of B slots on."""

  task: str
  lane: np.ndarray  # [B]
  time: np.ndarray  # [B]
  real: np.ndarray  # [B, n] bool: state k is a stored one, not a repetition of its episode's last


def mean_over_devices(tree: Any) -> Any:
  """Device: the mean over `AXIS`, as one array: CPU processes would send each leaf separately."""
  if jax.lax.axis_size(AXIS) == 1:
    return tree
  flat, unravel = jax.flatten_util.ravel_pytree(tree)
  return unravel(jax.lax.pmean(flat, AXIS))


class Agent(abc.ABC):
  """An algorithm. Its attributes are fixed when it is made, by `make_agent` of its module:

      make_agent(config, frame_shape [H, W, C], frame_dtype, number of actions)

  What has a default here concerns only some algorithms.
  """

  schema: Schema  # of a stored step
  window: Window
  lookahead: int  # slots after a sample's first that its targets may use, at least window.after
  subscriptions: Mapping[str, int] = {}  # weights for tasks: learner steps between updates
  tasks: Mapping[str, Task] = {}
  target_interval: int = 0  # learner steps between copies to the target network; 0: there is none
  on_policy: bool = False  # trained on at once: a resumed run drops what is after its checkpoint
  synchronous: bool = False  # actors wait while there is a batch or one is learned from, and
  # learner steps wait for batches only; else both follow the rate limiter's ratio

  @abc.abstractmethod
  def init(self, key: jax.Array) -> Variables:
    """Device: fresh variables."""

  def initial_core(self, n: int) -> Any:
    """Device: recurrent state at the start of an episode."""
    return ()

  @abc.abstractmethod
  def act(
    self, variables: Variables, inputs: ActInputs, key: jax.Array, progress: Any, *, explore: bool
  ) -> ActOutput:
    """Device: chooses actions. `progress` is the share of training done, [] in [0, 1]."""

  @abc.abstractmethod
  def loss(
    self, params: Params, batch_stats: Params, target: Params, batch: Arrays, keys: jax.Array
  ) -> tuple[jax.Array, LossOutput]:
    """Device: the loss of one device's share of a batch, inside a shard_map over `AXIS`.

    Args:
      params: to be differentiated.
      batch_stats: running statistics.
      target: parameters of the target network; () without one.
      batch: from `assemble`, with `frames` [B, F, H, W, C]; unless `window.within_episode`
        also `stack` [B, T+1, S], the places in F of the frames of each slot.
      keys: [B], one per sample, independent of how the batch is divided among devices.
    """

  @abc.abstractmethod
  def make_selector(self, store: LaneStore) -> Selector:
    """Host: the rule by which samples are chosen."""

  def batch_work(self, replay: Replay, selection: Selection) -> list[Work]:
    """Host: what is to be recomputed before a batch is assembled."""
    return []

  @abc.abstractmethod
  def assemble(
    self, replay: Replay, selection: Selection, learner_step: int
  ) -> tuple[Arrays, dict[str, float]]:
    """Host: the batch but for its frames, [B, ...] each, and numbers to log.

    Arrays whose names end in `_mask` are set to 0 for samples that are evicted before their frames
    are gathered.
    """
