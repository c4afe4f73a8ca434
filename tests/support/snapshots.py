"""What the tests of checkpoints share: snapshots of a small imagined run, written, read and compared."""

import jax
import numpy as np
import optax
import pytest

from speedyzero_jax.agents.efficientzero.networks import Variables
from speedyzero_jax.run.checkpoint import Checkpoints, Snapshot

SUBSCRIBERS = ("actor", "reanalyser")
LANES = 2


def variables(step):
  rng = np.random.default_rng(step)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  return Variables(
    {"h": {"kernel": draw(3, 4), "bias": draw(4)}, "scale": draw()}, {"mean": draw(4)}
  )


def snapshot(step, *, since=0, head=None, tail=0, **changes):
  """What a run might hold at learner step `step`: lanes of `head` slots each (as many as steps, if not given), those
  before `tail` evicted, those from `since` on exported."""
  head = step if head is None else head
  rng = np.random.default_rng(1000 * step + head)
  network = variables(step)
  optimizer = optax.chain(
    optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.1, 0.0, 9))
  )
  state = optimizer.init(network.params)
  _, state = optimizer.update(
    jax.tree.map(lambda x: x * 0.1, network.params), state, network.params
  )
  since = max(since, tail)
  n = head - since
  fields = {
    "step": step,
    "network": network,
    "optimizer": jax.device_get(state),
    "weights": {name: variables(step - i - 1) for i, name in enumerate(SUBSCRIBERS)},
    "env_steps": 3 * head,
    "replay": {
      "head": np.full(LANES, head, np.int64),
      "tail": np.full(LANES, tail, np.int64),
      "slot_inserted": rng.integers(2**40, 2**62, (step, LANES), np.int64),
      "priority": rng.random(step),
      "rng": rng.integers(0, 2**64, 6, np.uint64, endpoint=False),
      "slot_first": rng.random(step) < 0.5,
      "slot_reward": rng.normal(size=step).astype(np.float32),
      "num_transitions": np.array(step, np.int64),
      "sweep_refresh": np.zeros(0, np.int64),
      "slot_policy": np.zeros((0, 3), np.float32),
    },
    "actor": {
      "actions": rng.integers(0, 5, (step, LANES)).astype(np.int16),
      "frames_crc": np.array([2**32 - 1]),
    },
    "meta": {"weights": dict.fromkeys(SUBSCRIBERS, step - 1), "sweepers": {"refresh": {}}},
    "slots": {
      "start": np.full(LANES, since, np.int64),
      "count": np.full(LANES, n, np.int64),
      "frame": rng.integers(0, 256, (LANES * n, 2, 2, 3), np.uint8),
    },
    "heads": np.full(LANES, head, np.int64),
  }
  return Snapshot(**(fields | changes))


def abstract():
  one = snapshot(4)
  shape = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
  return {name: shape(getattr(one, name)) for name in ("network", "optimizer", "weights")}


def write(folder, *steps, keep=5):
  """Checkpoints of these steps; returns the snapshots."""
  checkpoints, snapshots, since = Checkpoints(folder, keep), [], 0
  for step in steps:
    snapshots.append(snapshot(step, since=since))
    checkpoints.save(snapshots[-1])
    since = step
  checkpoints.close()
  return snapshots


def read(folder):
  """(snapshot, segments, what was reported)."""
  reported = []
  restored, segments = Checkpoints(folder).restore(abstract(), reported.append)
  return restored, list(segments), reported


def assert_same_tree(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (a, b)), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape) == (y.dtype, y.shape), path
    assert x.tobytes() == y.tobytes(), path


def assert_restored(restored, segments, snapshots):
  """`snapshots`: those the newest of which was restored."""
  for name in ("step", "env_steps", "network", "optimizer", "weights", "replay", "actor", "meta"):
    assert_same_tree(getattr(restored, name), getattr(snapshots[-1], name))
  assert len(segments) == len(snapshots)
  for segment, written in zip(segments, snapshots, strict=True):
    assert_same_tree(segment, written.slots)
  np.testing.assert_array_equal(restored.heads, snapshots[-1].heads)


def replace(folder, newer):
  """Saves a newer state of the newest step."""
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(newer)
  checkpoints.close()


def segment_file(folder, step, env_steps=None):
  return folder / "replay" / f"slots-{step:012d}-{env_steps or 3 * step:012d}.npz"


def flip(path, at=0.5):
  content = bytearray(path.read_bytes())
  if content:
    content[int(at * (len(content) - 1))] ^= 0xFF
  path.write_bytes(content)
