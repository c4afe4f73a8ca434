"""What tests of actor-critics share: recorded trajectories, and their small network in float64."""

import jax
import numpy as np

import episodes
from speedyzero_jax.replay.replay import Replay


def recorded(agent, stack, *, logits=None):
  """A replay of two lanes with episodes that end everywhere, and the segments in it.

  The agent's columns are random, but for the logits if a function of (segment, slot) gives them.
  """
  rng, stored = np.random.default_rng(7), []
  replay = Replay(
    agent.schema, agent.make_selector, lanes=2, capacity=400, frame_stack=stack, rng_seed=0
  )
  for lane in range(2):
    segment = episodes.segment(agent.schema, lane, episodes.every_end(8, rng), rng)
    extra = {k: rng.normal(size=x.shape).astype(np.float32) for k, x in segment.extra.items()}
    if logits is not None:
      known = [logits(segment, slot) for slot in range(len(segment.frame))]
      extra["logits"] = np.array(known, np.float32)
    stored.append(segment._replace(extra=extra))
    replay.append(stored[-1])
  return replay, stored


def gathered(agent, replay, selection, step=50):
  """A batch as the pipeline makes it."""
  arrays, _ = agent.assemble(replay, selection, step)
  frames, stack = replay.trajectories(selection.lane, selection.time, agent.window.after)
  return {"frames": frames, "stack": stack, **arrays}


def network(params, x):
  """Logits and value of observations, by one hidden layer."""
  p = jax.tree.map(np.float64, params)

  def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

  features = np.maximum(linear(p["torso"]["layers"][0], x), 0)
  return linear(p["policy"], features), linear(p["value"], features)[..., 0]


def log_softmax(x):
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def observation(segment, slot, stack):
  """The stack of a slot's frames, of its episode."""
  start = max(t for t in range(slot + 1) if segment.first[t])
  shown = [segment.frame[max(t, start), 0, 0] for t in range(slot - stack + 1, slot + 1)]
  return np.concatenate(shown)


def returns(segment, slots, value, discount, mix):
  """Discounted sums over each slot's episode, as far as the slots reach: sum of (discount * mix)^k
  times the temporal difference of slot t+k, zeros in slots without an action."""
  length = len(slots) - 1
  total = np.zeros(length)
  for i in range(length):
    for k in range(i, length):
      if segment.action[slots[k]] < 0:
        break
      alive = 0.0 if segment.terminated[slots[k + 1]] else discount
      delta = segment.reward[slots[k]] + alive * value[k + 1] - value[k]
      total[i] += (discount * mix) ** (k - i) * delta
  return total
