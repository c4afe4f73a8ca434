"""gRPC client of the learner service, with retries.

If only the answer of a call is lost, its retry reaches the service a second time; all calls are
idempotent.
"""

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Any

import grpc

from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_server import (
  HELPER,
  SERVICE,
  TOKEN,
  RunFinished,
  channel_options,
)

CALL_SECONDS = 600.0  # timeout of one attempt, with its transfer; lost peers are noticed earlier

_CONNECT_SECONDS = 2.0  # timeout of one connection attempt
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between attempts
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class Unreachable(Exception):
  """The service did not answer in time."""


class Refused(Exception):
  """The server refused the call, and would refuse a retry."""


class Client(contextlib.AbstractContextManager):
  """A helper's client of its learner service. Thread-safe.

  Calls raise Refused (with the server's text), Unreachable, RunFinished, or ValueError for an
  answer of another type. Polls are repeated without limit. Calls are retried for `patience` seconds
  without connection, plus at most one timeout, and without limit while the server answers pings,
  as its disk may stall. The other arguments are those of `serve`.
  """

  def __init__(
    self,
    address: str,
    token: bytes,
    helper: messages.Helper,
    *,
    patience: float = 60.0,
  ):
    options = [
      *channel_options(),
      ("grpc.initial_reconnect_backoff_ms", 100),
      ("grpc.min_reconnect_backoff_ms", round(1000 * _CONNECT_SECONDS)),
      ("grpc.max_reconnect_backoff_ms", 1000),
      ("grpc.enable_http_proxy", 0),
      ("grpc.use_local_subchannel_pool", 1),  # closing the client ends its connection
    ]
    self._channel = grpc.insecure_channel(address, options)
    self._calls = {name: self._channel.unary_unary(f"/{SERVICE}/{name}") for name in messages.CALLS}
    stream, self._answers = messages.STREAM
    self._stream = self._channel.stream_stream(f"/{SERVICE}/{stream}")
    self._names = {call.request: (name, call) for name, call in messages.CALLS.items()}
    self._address, self._patience = address, patience
    self._metadata = ((TOKEN, token), (HELPER, " ".join(str(part) for part in helper)))

  def call(self, request: Any) -> Any:
    """Returns the answer to a request, of the types in `messages.CALLS`."""
    name, call = self._names[type(request)]
    data = messages.encode(request)
    while not (answer := self._deliver(name, data)) and call.poll:
      time.sleep(_FIRST_PAUSE)  # a stopping learner answers at once, until its threads end
      data = messages.encode(call.poll(request))
    return messages.decode(call.answer, answer)

  def stream(self, requests: Iterator[Any]) -> Iterator[Any]:
    """Yields the answers of `messages.STREAM`; sends each request as soon as it is available.

    A lost connection raises Unreachable at once, as the service keeps no state of ended streams.
    """
    try:
      for data in self._stream(map(messages.encode, requests), metadata=self._metadata):
        yield messages.decode(self._answers.answer, data)
    except grpc.RpcError as error:
      raise self._final(messages.STREAM[0], error) or Unreachable(
        f"{self._address} closed the stream: {error.details()}"
      ) from None

  def close(self) -> None:
    """Closes the connection and cancels pending calls."""
    self._channel.close()

  def __exit__(self, *_: object) -> None:
    self.close()

  def _final(self, name: str, error: grpc.RpcError) -> Exception | None:
    """Returns the exception for an error that a retry would not fix, else None."""
    if error.code() is grpc.StatusCode.ABORTED:
      return RunFinished(error.details())
    if error.code() not in _NO_ANSWER:
      return Refused(f"{name}: {error.code().name}: {error.details()}")
    return None

  def _deliver(self, name: str, data: bytes) -> bytes:
    """Returns the answer to a request, after retries if necessary."""
    begin, pause = time.monotonic(), _FIRST_PAUSE
    while True:
      try:
        return self._calls[name](data, timeout=CALL_SECONDS, metadata=self._metadata)
      except grpc.RpcError as error:
        if final := self._final(name, error):
          raise final from None
        text = error.details()
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
          begin = time.monotonic()
      waited = time.monotonic() - begin
      if waited >= self._patience:
        raise Unreachable(f"{self._address} has not answered for {waited:.0f} seconds: {text}")
      # Random, so that the clients of a restarted server do not all call at once.
      time.sleep(min(random.uniform(pause / 2, pause), self._patience - waited))
      pause = min(2 * pause, _LONGEST_PAUSE)
