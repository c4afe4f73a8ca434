"""gRPC server of the learner service, for the calls of `messages.CALLS`.

Only well-formed messages from callers with the run's token reach the service.
"""

import contextlib
import functools
import hmac
import logging
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from speedyzero_jax.cluster import messages

SERVICE = "speedyzero.Unit"
# Keys of the metadata; -bin: its value is bytes.
TOKEN, HELPER = "speedyzero-token-bin", "speedyzero-helper"
POLL_SECONDS = 2.0  # longest wait of one poll, and so the time that a lost caller blocks a thread
KEEPALIVE_SECONDS = 5.0  # interval between pings of a silent peer, and timeout of their answers

_GRACE_SECONDS = 1.0  # for calls in progress when the server stops
_THREADS = 2  # per client: one for its call, one for an earlier call whose caller was lost
_MAX_TEXT = 1000  # characters of an error: gRPC limits metadata

_log = logging.getLogger(__name__)


class RunFinished(Exception):
  """The run has ended. The service can raise it in any call; the client then raises it too."""


def channel_options() -> list[tuple[str, int]]:
  """gRPC options of both ends: any message size, and pings that detect a dead peer in seconds."""
  interval = round(1000 * KEEPALIVE_SECONDS)
  return [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", interval),
    ("grpc.keepalive_timeout_ms", interval),
    ("grpc.http2.ping_timeout_ms", interval),  # its default of a minute would take precedence
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # the server accepts any number of pings
  ]


@contextlib.contextmanager
def serve(service: Any, address: str, token: bytes, *, clients: int) -> Iterator[str]:
  """Context manager that serves; it yields the address, with the port in use.

  On exit it ends all calls and waits (up to POLL_SECONDS) until none is being answered.

  Args:
    service: called from many threads. Its method `call` takes the name of a call, the helper, the
      request and, for polls, the seconds to wait, after which it returns None. Its method
      `environments` (see `messages.STREAM`) takes the helper and an iterator of requests and
      returns an iterator of answers. A ValueError refuses the call, with its text; RunFinished ends
      the caller's work.
    address: host:port to listen on; port 0 picks a free one. Raises OSError if it can't be used.
    token: secret of the run that callers must send. It is not encrypted on the network.
    clients: number of processes that will call, each from one thread.
  """
  pool = futures.ThreadPoolExecutor(_THREADS * clients, "service")
  options = [*channel_options(), ("grpc.so_reuseport", 0)]
  server = grpc.server(pool, [_Handlers(service, token)], options=options)
  host, _, _ = address.rpartition(":")
  try:
    port = server.add_insecure_port(address)
  except RuntimeError as error:  # gRPC does not report the reason
    raise OSError(f"can't listen on {address}: it is not available") from error
  server.start()
  try:
    yield f"{host}:{port}"
  finally:
    server.stop(_GRACE_SECONDS).wait()
    pool.shutdown()


class _Handlers(grpc.GenericRpcHandler):
  """gRPC handlers of the service's calls, for callers with the token."""

  def __init__(self, service: Any, token: bytes):
    self._token = token
    self._methods = {
      f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
        _method(name, call, functools.partial(service.call, name))
      )
      for name, call in messages.CALLS.items()
    }
    name, call = messages.STREAM
    self._methods[f"/{SERVICE}/{name}"] = grpc.stream_stream_rpc_method_handler(
      _stream(name, call, getattr(service, name))
    )
    # A stream handler, so that the request of an unauthenticated caller is not read.
    self._refusal = grpc.stream_unary_rpc_method_handler(_refuse)

  def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
    token = dict(details.invocation_metadata).get(TOKEN, b"")
    if not hmac.compare_digest(token, self._token):
      return self._refusal
    return self._methods.get(details.method)


def _refuse(_: Iterator[bytes], context: grpc.ServicerContext) -> None:
  context.abort(grpc.StatusCode.UNAUTHENTICATED, "the run's token is missing or wrong")


def _method(name: str, call: messages.Call, method: Callable[..., Any]) -> Callable:
  waiting = (POLL_SECONDS,) if call.poll else ()

  def answer(data: bytes, context: grpc.ServicerContext) -> Any:
    with _refusing(name, context):
      request: Any = messages.decode(call.request, data)
      result = method(_helper(context), request, *waiting)
      return b"" if result is None and call.poll else messages.encode(result)

  return answer


def _stream(name: str, call: messages.Call, method: Callable[..., Any]) -> Callable:
  def answers(data: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    with _refusing(name, context):
      requests: Iterator[Any] = (messages.decode(call.request, each) for each in data)
      yield from map(messages.encode, method(_helper(context), requests))

  return answers


@contextlib.contextmanager
def _refusing(name: str, context: grpc.ServicerContext) -> Iterator[None]:
  """Context manager that aborts the call with a status code if an error is raised."""
  try:
    yield
    return
  except RunFinished as error:
    code, text = grpc.StatusCode.ABORTED, str(error)
  except ValueError as error:
    code, text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
  except Exception as error:
    _log.exception("%s failed", name)
    code, text = grpc.StatusCode.INTERNAL, repr(error)
  context.abort(code, text[:_MAX_TEXT])


def _helper(context: grpc.ServicerContext) -> messages.Helper:
  """Returns the calling helper. Raises ValueError if the metadata does not name one."""
  try:
    kind, number, incarnation = dict(context.invocation_metadata())[HELPER].split()
    return messages.Helper(kind, int(number), int(incarnation))
  except (KeyError, ValueError):
    raise ValueError("the call names no helper") from None
