"""Tests of actors that share inference: each receives the actions of its own lanes."""

import threading

import jax
import numpy as np
import pytest

from speedyzero_jax.agents.base import ActInputs, ActOutput
from speedyzero_jax.workers.batched_inference import BatchedInference
from speedyzero_jax.workers.weights import Version


class FakeInference:
  """Returns outputs that depend on a row's inputs; calls wait for `go`."""

  def __init__(self, error=None):
    self.began, self.go, self.batches, self.error = threading.Event(), threading.Event(), [], error

  def decide(self, version, inputs, key, progress, *, explore):
    self.batches.append((version.step, progress, explore, inputs.lane.tolist()))
    self.began.set()
    assert self.go.wait(20)
    if self.error and len(self.batches) > 1:
      raise self.error
    return ActOutput(10 * inputs.lane, {"frame": inputs.frames[:, 0]}, (inputs.core[0] + 1,), {})


def inputs_of(lanes):
  lane = np.array(lanes, np.int32)
  return ActInputs(100.0 * lane[:, None], lane > 2, lane, (lane.astype(np.float32),))


def decide(inference, lanes, version, outcomes):
  try:
    outcomes[lanes] = inference.decide(
      Version(version, None), inputs_of(lanes), jax.random.key(0), 0.5, explore=True
    )
  except ValueError as error:
    outcomes[lanes] = error


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_requests_that_wait_are_one_batch_and_each_gets_its_own_lanes(error):
  fake, outcomes, logged = FakeInference(error), {}, []
  inference = BatchedInference(fake, logged.append)
  requests = {(0, 1, 2): 3, (3, 4): 4, (5,): 5, (6, 7): 4}
  threads = {
    lanes: threading.Thread(target=decide, args=(inference, lanes, version, outcomes))
    for lanes, version in requests.items()
  }
  first, *others = threads.values()
  first.start()
  assert fake.began.wait(20)
  for count, thread in enumerate(others, 1):
    thread.start()
    while len(inference._waiting) < count:
      pass
  fake.go.set()
  for thread in threads.values():
    thread.join(20)
  assert fake.batches == [
    (3, 0.5, True, [0, 1, 2, 2]), (5, 0.5, True, [3, 4, 5, 6, 7, 7, 7, 7])
  ]  # fmt: skip
  for lanes in requests:
    if error and lanes != (0, 1, 2):
      assert outcomes[lanes] is error
      continue
    action, columns, (core,), _ = outcomes[lanes]
    assert action.tolist() == [10 * lane for lane in lanes]
    assert columns["frame"].tolist() == [100.0 * lane for lane in lanes]
    assert core.tolist() == [lane + 1 for lane in lanes]
  assert [row["inference/lanes_mean"] for row in logged if "inference/lanes_mean" in row] == (
    [3] if error else [3, 5]
  )
