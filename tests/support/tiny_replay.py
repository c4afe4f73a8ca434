"""Small replay of an EfficientZero agent, and random play to fill it."""

import functools

import numpy as np

import reference
import tiny
from speedyzero_jax.agents.efficientzero.agent import EfficientZero
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.replay.selector import Selection
from speedyzero_jax.replay.storage import LaneStore
from speedyzero_jax.types import Slots

LANES, UNROLL, STACK, TD, DISCOUNT = 2, 3, 2, 2, 0.9
ALPHA, MIN_PRIORITY, AGE_INTERVAL = 0.7, 0.01, 12
OVERRIDES = (
  f"loss.unroll_steps={UNROLL}", f"env.frame_stack={STACK}", f"loss.td_steps={TD}",
  f"env.discount={DISCOUNT}", f"priority.alpha={ALPHA}", f"priority.min_priority={MIN_PRIORITY}",
  f"loss.age_interval={AGE_INTERVAL}", "network.value_prefix_horizon=2",
  "reanalyse.schedule=batch", "reanalyse.ratio=1",
)  # fmt: skip


@functools.cache
def make_agent(*overrides):
  """An agent for the reference's frames and actions."""
  config = tiny.config(*OVERRIDES, *overrides)
  return EfficientZero(config, reference.FRAME_SHAPE, np.uint8, reference.NUM_ACTIONS)


def make_store(lanes, capacity):
  return LaneStore(make_agent().schema, lanes, capacity)


def fill(store, stream, seed, rounds=6, longest=None):
  """Appends random slots to random lanes, several lanes at once."""
  rng, longest = np.random.default_rng(seed), longest or store.capacity
  for step in range(rounds):
    store.append(some(stream, rng, step, longest))


def some(stream, rng, step, longest):
  """Random numbers of slots of random lanes, the slots of different lanes interleaved."""
  lanes = rng.permutation(len(stream.heads))[: rng.integers(1, len(stream.heads) + 1)]
  played = [stream.play(l, int(rng.integers(1, longest + 1)), step) for l in sorted(lanes.tolist())]
  slots = Slots.concatenate(played)
  return slots.select(np.argsort(slots.time, kind="stable"))


def make_replay(capacity, *overrides, lanes=LANES, seed=0, **kwargs):
  agent = make_agent(*overrides)
  sizes = {"lanes": lanes, "capacity": capacity, "frame_stack": STACK, "rng_seed": seed}
  sweeps = {"refresh": 1, "reanalyse": 1}
  return Replay(agent.schema, agent.make_selector, **sizes, sweeps=sweeps, **kwargs)


def play(replay, stream, rng, step, longest=5):
  """Appends random numbers of slots to random lanes."""
  replay.append(some(stream, rng, step, longest))


def write(replay, task, lane, time, step, *overrides, **results):
  """Writes results of a task of the agent with these overrides."""
  make_agent(*overrides).tasks[task].write(replay, lane, time, results, step)


def set_priorities(replay, lane, time, error, step):
  """Sets priorities from errors of trained samples, as the learner does."""
  replay.update(Selection(lane, time, np.ones(len(lane))), error, step)


def slots(stream, capacity):
  """(lane, time) arrays of all live slots, in the order of `Replay.state_dict`."""
  return tuple(np.array(x) for x in zip(*stream.live(capacity), strict=True))


def eligible(stream, capacity):
  live = stream.live(capacity)
  return np.array([stream.eligible(l, t, capacity, STACK, UNROLL, TD) for l, t in live])


def stored(replay):
  """The live slots, one item per lane, as read from a journal."""
  store, lanes = replay.store, []
  for lane, (tail, head) in enumerate(zip(store.tail, store.head, strict=True)):
    if head > tail:
      cell = np.arange(tail, head) % store.capacity
      columns = {c.name: store[c.name][lane, cell] for c in replay.schema.columns[1:]}
      columns["frame"] = store.frame[lane, cell]
      lanes.append(Slots.of_lane(lane, int(tail), columns))
  return lanes


def copy_frames(replay, other):
  """Imports a replay's frames into another one."""
  for slots in stored(replay):
    other.import_frames(slots)
