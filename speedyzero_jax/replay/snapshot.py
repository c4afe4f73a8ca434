"""Conversion of a replay's parts to plain numpy arrays and back, bit for bit."""

import json
from collections.abc import Mapping

import numpy as np

from speedyzero_jax.replay.storage import LaneStore, put, slots_between, take


def pack_rng(rng: np.random.Generator) -> np.ndarray:
  """The state of a PCG64 generator as JSON, uint8 [N]."""
  return np.frombuffer(json.dumps(rng.bit_generator.state).encode(), np.uint8)


def unpack_rng(packed: np.ndarray) -> np.random.Generator:
  """The generator saved by `pack_rng`."""
  bits = np.random.PCG64()
  bits.state = json.loads(packed.tobytes())
  return np.random.Generator(bits)


def export_store(store: LaneStore) -> dict[str, np.ndarray]:
  """The contents of a store except the frames: live slots by lane, oldest first."""
  flat = store.flat(*slots_between(store.tail, store.head))
  state = {f"slot_{name}": take(array, flat) for name, array in store.fields.items()}
  return state | {
    "head": store.head.copy(),
    "tail": store.tail.copy(),
    "num_transitions": np.array(store.num_transitions, np.int64),
  }


def import_store(store: LaneStore, state: Mapping[str, np.ndarray]) -> None:
  """Restores `export_store`.

  Raises ValueError unless `state` is of the slots whose frames the store holds; nothing has changed
  then.
  """
  if not (np.array_equal(state["head"], store.head) and np.array_equal(state["tail"], store.tail)):
    raise ValueError("the state is not of the slots whose frames were imported")
  flat = store.flat(*slots_between(store.tail, store.head))
  for name, array in store.fields.items():
    saved = state[f"slot_{name}"]
    if saved.shape != (len(flat), *array.shape[2:]) or saved.dtype != array.dtype:
      raise ValueError(f"slot_{name} is {saved.dtype}{list(saved.shape)}, not as in this store")
  for name, array in store.fields.items():
    if name in store.stamps:
      store.stamps[name].set(flat, state[f"slot_{name}"])
    else:
      put(array, flat, state[f"slot_{name}"])
  store.num_transitions = int(state["num_transitions"])
  store.stored_transitions = int((state["slot_action"] >= 0).sum())
