"""Batched inference, shared by several actors of one process."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from speedyzero_jax.agents.base import ActInputs, ActOutput
from speedyzero_jax.metrics import names
from speedyzero_jax.workers.inference import Inference
from speedyzero_jax.workers.weights import Version


def padded_batch_size(lanes: int) -> int:
  """Batch size used for a number of lanes: the next power of two."""
  return 1 << (lanes - 1).bit_length()


class _Request(NamedTuple):
  """A caller's inputs, and its future output."""

  version: Version
  inputs: ActInputs
  output: Future[ActOutput]


class BatchedInference:
  """`Inference.decide` for several calling threads.

  Requests that arrive while a batch is computed form the next batch, padded to a power of two
  lanes. A request that arrives while the devices are idle is computed at once. `log` receives
  metrics.
  """

  def __init__(self, inference: Inference, log: Callable[[Mapping[str, float]], None]):
    self._inference, self._log = inference, log
    self._waiting: deque[_Request] = deque()
    self._computing = threading.Lock()

  def decide(
    self, version: Version, inputs: ActInputs, key: jax.Array, progress: float, *, explore: bool
  ) -> ActOutput:
    """Like `Inference.decide`, with this version or a newer one.

    Slots are stamped with the version asked for, so their ages may be overstated. One caller's
    `key` is used for the whole batch.
    """
    begin = time.monotonic()
    request = _Request(version, inputs, Future())
    self._waiting.append(request)
    with self._computing:
      if not request.output.done():  # else another caller has computed it
        batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
          self._compute(batch, key, progress, explore)
        except BaseException as error:
          for each in batch:
            each.output.set_exception(error)
    self._log({names.INFERENCE_SECONDS: time.monotonic() - begin})
    return request.output.result()

  def _compute(self, batch: list[_Request], key: jax.Array, progress: float, explore: bool) -> None:
    bounds = np.cumsum([0, *(len(each.inputs.lane) for each in batch)])
    lanes = int(bounds[-1])
    rows = np.minimum(np.arange(padded_batch_size(lanes)), lanes - 1)

    def join(*parts: Any) -> np.ndarray:
      return np.concatenate(parts)[rows]

    inputs = jax.tree.map(join, *(each.inputs for each in batch))
    version = max((each.version for each in batch), key=lambda version: version.step)
    out = self._inference.decide(version, inputs, key, progress, explore=explore)
    self._log({names.INFERENCE_LANES: lanes})
    ends = itertools.pairwise(bounds)
    outputs = [jax.tree.map(lambda x, a=begin, b=end: x[a:b], out) for begin, end in ends]
    for each, output in zip(batch, outputs, strict=True):
      each.output.set_result(output)
