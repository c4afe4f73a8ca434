"""Random experience for replay tests, and an independent reference implementation.

The reference is slow: it recomputes everything from lists of episodes.
"""

import dataclasses

import numpy as np

from speedyzero_jax.types import Slots

NUM_ACTIONS = 3
FRAME_SHAPE = (1, 1, 3)


@dataclasses.dataclass
class Slot:
  time: int
  frame: tuple[int, int, int]
  action: int
  reward: float
  policy: list[float]
  search_value: float
  value: float
  bootstrap: float
  policy_step: int
  inserted: int


@dataclasses.dataclass
class Episode:
  slots: list[Slot]
  ending: str = "open"  # or terminated, or truncated


class Stream:
  """Endless random play in several lanes: creates slots and remembers every episode."""

  def __init__(self, lanes: int, seed: int, end_probability: float = 0.15):
    self.rng = np.random.default_rng(seed)
    self.episodes: list[list[Episode]] = [[] for _ in range(lanes)]
    self.heads = [0] * lanes
    self.transitions = 0
    self.end_probability = end_probability

  def play(self, lane: int, n: int, step: int = 0) -> Slots:
    """The next n slots of a lane."""
    start, rows = self.heads[lane], []
    for _ in range(n):
      episodes = self.episodes[lane]
      first = not episodes or episodes[-1].ending != "open"
      if first:
        episodes.append(Episode([]))
      ending = (
        self.rng.choice(["terminated", "truncated"])
        if self.rng.random() < self.end_probability
        else "open"
      )
      policy = self.rng.dirichlet(np.ones(NUM_ACTIONS)).astype(np.float32)
      reward, search_value, value = (float(np.float32(x)) for x in self.rng.normal(size=3))
      time = self.heads[lane]
      slot = Slot(
        time=time,
        frame=(lane, time // 256, time % 256),
        action=int(self.rng.integers(NUM_ACTIONS)),
        reward=reward,
        policy=policy.tolist(),
        search_value=search_value,
        value=value,
        bootstrap=value,
        policy_step=step,
        inserted=self.transitions,
      )
      if ending != "open":
        slot.action = -1
      else:
        self.transitions += 1
      episodes[-1].slots.append(slot)
      episodes[-1].ending = str(ending)
      self.heads[lane] += 1
      rows.append((slot, first, ending))
    slots = [row[0] for row in rows]
    columns = {
      "frame": np.array([s.frame for s in slots], np.uint8).reshape(n, *FRAME_SHAPE),
      "first": np.array([row[1] for row in rows]),
      "terminated": np.array([row[2] == "terminated" for row in rows]),
      "truncated": np.array([row[2] == "truncated" for row in rows]),
      "action": np.array([s.action for s in slots], np.int32),
      "reward": np.array([s.reward for s in slots], np.float32),
      "step": np.full(n, step, np.int32),
    }
    for name in ("policy", "search_value", "value"):
      columns[name] = np.array([getattr(s, name) for s in slots], np.float32)
    return Slots.of_lane(lane, start, columns)

  def find(self, lane: int, time: int) -> tuple[Episode, int]:
    """The episode of a slot, and the slot's index in it."""
    for episode in self.episodes[lane]:
      start = episode.slots[0].time
      if start <= time < start + len(episode.slots):
        return episode, time - start
    raise KeyError((lane, time))

  def slot(self, lane: int, time: int) -> Slot:
    episode, i = self.find(lane, time)
    return episode.slots[i]

  def live(self, capacity: int) -> list[tuple[int, int]]:
    """(lane, time) of the slots that ring buffers of `capacity` still contain."""
    return [
      (lane, t)
      for lane, head in enumerate(self.heads)
      for t in range(max(0, head - capacity), head)
    ]

  def eligible(
    self, lane: int, time: int, capacity: int, stack: int, unroll: int, td_steps: int
  ) -> bool:
    episode, i = self.find(lane, time)
    if episode.slots[i].action < 0:
      return False
    oldest_frame = episode.slots[max(i - stack + 1, 0)].time
    ahead = len(episode.slots) - 1 - i
    return oldest_frame >= self.heads[lane] - capacity and (
      episode.ending != "open" or ahead >= unroll + td_steps
    )


def n_step(episode: Episode, i: int, n: int, discount: float, field: str = "bootstrap") -> float:
  """The n-step return of state i of an episode, computed one transition at a time."""
  z, scale = 0.0, 1.0
  for _ in range(n):
    if i == len(episode.slots) - 1:
      break
    z += scale * episode.slots[i].reward
    scale *= discount
    i += 1
  if i == len(episode.slots) - 1 and episode.ending == "terminated":
    return z
  return z + scale * getattr(episode.slots[i], field)


def horizon(age: int, td_steps: int, age_interval: int) -> int:
  n = td_steps
  while age_interval and age >= age_interval and n > 1:
    age, n = age - age_interval, n - 1
  return n


def targets(
  stream: Stream,
  lane: int,
  time: int,
  *,
  unroll: int,
  prefix_horizon: int,
  td_steps: int,
  age_interval: int,
  discount: float,
  value_target: str = "n_step",
  mixed_start: int = 0,
  mixed_newest: int = 0,
  learner_step: int = 0,
) -> dict[str, list]:
  """The fields of `targets.Targets` for one sample, as nested lists."""
  episode, i = stream.find(lane, time)
  age = stream.transitions - episode.slots[i].inserted
  n = horizon(age, td_steps, age_interval)
  search = value_target == "search" or (
    value_target == "mixed" and learner_step >= mixed_start and age > mixed_newest
  )
  masks = ("value_mask", "prefix_mask", "policy_mask", "consistency_mask")
  out: dict[str, list] = {name: [] for name in ("value", "value_prefix", "policy", *masks)}
  prefix = 0.0
  length = len(episode.slots)
  for k in range(unroll + 1):
    slot = episode.slots[i + k] if i + k < length else None
    absorbing = episode.ending == "terminated" and i + k >= length - 1
    if slot is None or absorbing:
      value = 0.0
    elif search:
      value = slot.search_value
    else:
      value = n_step(episode, i + k, n, discount)
    acted = slot is not None and slot.action >= 0
    out["value"].append(value)
    out["value_mask"].append(float(slot is not None or absorbing))
    out["policy"].append(slot.policy if acted else [0.0] * NUM_ACTIONS)
    out["policy_mask"].append(float(acted))
    if k == unroll:
      break
    if k % prefix_horizon == 0:
      prefix = 0.0
    if acted:
      prefix += slot.reward
    known = acted or absorbing
    out["value_prefix"].append(prefix if known else 0.0)
    out["prefix_mask"].append(float(known))
    out["consistency_mask"].append(float(i + k + 1 < length))
  return out


def window(
  stream: Stream, lane: int, time: int, before: int, after: int, capacity: int
) -> list[tuple[int, int, int]]:
  """Frames around a slot, padded with the episode's first and last stored frames."""
  episode, _ = stream.find(lane, time)
  stored = [slot for slot in episode.slots if slot.time >= stream.heads[lane] - capacity]
  frames = {slot.time: slot.frame for slot in stored}
  return [
    frames[min(max(t, stored[0].time), stored[-1].time)]
    for t in range(time - before, time + after + 1)
  ]
