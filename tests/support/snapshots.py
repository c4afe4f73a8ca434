"""Snapshots of a small fictitious run, for tests of checkpoints."""

from typing import NamedTuple

import jax
import numpy as np
import optax

from speedyzero_jax.run.checkpoint import Checkpoints, Snapshot

LANES = 2


class Variables(NamedTuple):
  params: dict
  batch_stats: dict


def variables(step):
  rng = np.random.default_rng(step)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  params = {"h": {"kernel": draw(3, 4), "bias": draw(4)}, "scale": draw()}
  return Variables(params, {"mean": draw(4)})


def optimizer_state(params):
  """An optax state, created without jax computations to avoid their compilation."""
  moments = [jax.tree.map(lambda x, by=by: x * np.float32(by), params) for by in (0.1, 0.01)]
  adam = optax.ScaleByAdamState(np.array(1, np.int32), *moments)
  return optax.EmptyState(), (adam, optax.EmptyState())


def snapshot(step, *, head=None, tail=0, **items):
  """The state of a run at a learner step, with slots tail <= t < head in each lane."""
  head = step if head is None else head
  rng = np.random.default_rng(1000 * step + head)
  network = variables(step)
  default = {
    "network": network,
    "optimizer": optimizer_state(network.params),
    "weights": {name: variables(step - i) for i, name in enumerate(("actor", "refresher"))},
    "replay": {
      "inserted": rng.integers(2**40, 2**62, (step, LANES), np.int64),
      "first": rng.random(step) < 0.5,
      "policy": np.zeros((0, 3), np.float32),
      "priority": rng.random(step),
      "count": np.array(step, np.int64),
      "rng": rng.integers(0, 2**64, 6, np.uint64, endpoint=False),
    },
    "actor": {"actions": rng.integers(0, 5, (step, LANES)).astype(np.int16)},
  }
  return Snapshot(
    step=step,
    env_steps=3 * head,
    items=default | items,
    meta={"weights": {"actor": step, "refresher": step - 1}, "note": None},
    heads=np.full(LANES, head, np.int64),
    tails=np.full(LANES, tail, np.int64),
  )


def abstract():
  shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
  items = snapshot(4).items
  return {name: jax.tree.map(shape, items[name]) for name in ("network", "optimizer", "weights")}


def write(folder, *snapshots, keep=5):
  """Saves and returns snapshots; integers stand for the snapshots of these steps."""
  checkpoints = Checkpoints(folder, keep)
  snapshots = [snapshot(s) if isinstance(s, int) else s for s in snapshots]
  for one in snapshots:
    checkpoints.save(one)
  return snapshots


def read(folder):
  """Returns the restored snapshot and the reported lines."""
  reported = []
  return Checkpoints(folder).restore(abstract(), reported.append), reported


def flip(path, at=0.5):
  """Inverts a byte."""
  content = bytearray(path.read_bytes())
  if content:
    content[int(at * (len(content) - 1))] ^= 0xFF
  path.write_bytes(content)
