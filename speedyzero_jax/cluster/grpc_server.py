"""gRPC server of the learner service, for the calls of `messages.CALLS`.

Only well-formed messages of callers with the run's token reach the service. Refused calls are
logged once per host and call.
"""

import hmac
import logging
import socket
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.addresses import is_loopback

SERVICE = "speedyzero.Unit"
TOKEN = "speedyzero-token-bin"  # key of the metadata; -bin: its value is bytes
MIN_TOKEN = 16  # bytes
POLL_SECONDS = 2.0  # longest wait of a poll, and so the time that a lost caller holds a thread
KEEPALIVE_SECONDS = 5.0  # between pings of a silent peer, and for its answer

_THREADS = 6  # per client: the calls it may have open at once, and a spare
_MAX_TEXT = 1000  # characters of an error: gRPC limits metadata
_MAX_LOGGED = 1000  # hosts and calls remembered

_log = logging.getLogger(__name__)


class RunOver(Exception):
  """The run has ended. Raised by the service in any call, and then by the client's call."""


class Service(Protocol):
  """Methods that the server calls, from many threads at once.

  A ValueError refuses the call, with its text; RunOver ends the caller's work. Polls wait up to
  `seconds` and return None if there is nothing yet. If an answer is lost, the call is repeated.
  """

  def join_actor(self, request: messages.ActorJoin) -> messages.ActorWelcome: ...
  def join_refresher(self, request: messages.RefresherJoin) -> messages.RefresherWelcome: ...
  def append(self, request: messages.Append) -> messages.Acknowledged: ...
  def grant(self, request: messages.GrantRequest, seconds: float) -> messages.Grant | None: ...
  def weights(
    self, request: messages.WeightsRequest, seconds: float
  ) -> messages.Weights | None: ...
  def work(self, request: messages.WorkRequest, seconds: float) -> messages.Block | None: ...
  def result(self, request: messages.Result) -> messages.Ok: ...
  def frames(
    self, request: messages.FramesRequest, seconds: float
  ) -> messages.FramesChunk | None: ...


class Tls(NamedTuple):
  """PEM files. Both ends need a certificate of this authority; the server's names its address."""

  certificate: Path
  key: Path
  authority: Path

  def read(self) -> tuple[bytes, bytes, bytes]:
    """Contents of the three files."""
    return self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()


def channel_options(max_bytes: int) -> list[tuple[str, int]]:
  """gRPC options of both ends: message size, and pings that notice a dead peer in seconds."""
  interval = round(1000 * KEEPALIVE_SECONDS)
  return [
    ("grpc.max_receive_message_length", max_bytes),
    ("grpc.max_send_message_length", -1),  # `codec.encode` checks it
    ("grpc.keepalive_time_ms", interval),
    ("grpc.keepalive_timeout_ms", interval),
    ("grpc.http2.ping_timeout_ms", interval),  # its default of a minute would take precedence
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # the server accepts any number of pings
  ]


class Server:
  """A running server, made by `serve`."""

  def __init__(self, server: grpc.Server, pool: futures.Executor, address: str):
    self._server, self._pool = server, pool
    self.address = address  # host:port, with the port in use

  def stop(self) -> None:
    """Ends all calls, and waits (up to POLL_SECONDS) until no method of the service is running."""
    self._server.stop(None).wait()
    self._pool.shutdown()

  def __enter__(self) -> "Server":
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()


def serve(
  service: Service,
  address: str,
  token: bytes,
  wire: codec.WireFormat,
  *,
  clients: int,
  tls: Tls | None = None,
) -> Server:
  """Starts a server, which runs until `Server.stop` or until the object is deleted.

  Args:
    service: takes all valid calls.
    address: host:port to listen on; port 0 picks a free one.
    token: secret of the run that callers must send, at least 16 bytes.
    wire: format of all messages.
    clients: number of processes that will call; each may have six calls open at once.
    tls: None for plain TCP, where the token can be read on the network.

  Raises:
    OSError: the address cannot be used, or a TLS file not be read.
    ValueError: the token is too short, or address or TLS files are invalid.
  """
  if len(token) < MIN_TOKEN:
    raise ValueError(f"the token has {len(token)} bytes, it must have at least {MIN_TOKEN}")
  host, colon, port = address.rpartition(":")
  if not colon or not host or not port.isdecimal():
    raise ValueError(f"address must be host:port, got {address!r}")
  pool = futures.ThreadPoolExecutor(_THREADS * clients, "service")
  server = grpc.server(
    pool,
    [_Handlers(service, token, wire)],
    options=[*channel_options(wire.max_bytes), ("grpc.so_reuseport", 0)],
  )
  try:
    if tls is None:
      bound = server.add_insecure_port(address)
    else:
      certificate, key, authority = tls.read()
      bound = server.add_secure_port(
        address,
        grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True),
      )
  except RuntimeError as error:
    raise _bind_error(host.strip("[]"), int(port), tls) from error
  if tls is None and not is_loopback(host.strip("[]")):
    _log.warning("%s is served without TLS: the token can be read on the network", address)
  server.start()
  return Server(server, pool, f"{host}:{bound}")


def _bind_error(host: str, port: int, tls: Tls | None) -> Exception:
  """The reason for a failed bind, which gRPC does not report."""
  try:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind(where)
  except OSError as error:
    return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}")
  if tls is not None:
    return ValueError(f"invalid TLS certificate, key or authority: {', '.join(map(str, tls))}")
  return OSError(f"cannot listen on {host}:{port}")


class _Handlers(grpc.GenericRpcHandler):
  """Methods of the service, for callers with the token."""

  def __init__(self, service: Service, token: bytes, wire: codec.WireFormat):
    self._token, self._wire = token, wire
    self._logged: set[tuple[str, str]] = set()
    self._methods = {
      f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
        self._method(name, call, getattr(service, name))
      )
      for name, call in messages.CALLS.items()
    }
    # As a stream, so that the request of an unauthenticated caller is not read.
    self._refusal = grpc.stream_unary_rpc_method_handler(self._refuse)

  def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
    tokens = [value for key, value in details.invocation_metadata if key == TOKEN]
    if len(tokens) != 1 or not hmac.compare_digest(tokens[0], self._token):
      return self._refusal
    return self._methods.get(details.method)

  def _refuse(self, _: Iterator[bytes], context: grpc.ServicerContext) -> None:
    text = "the run's token is missing or wrong"
    self._log_once(context, "call", text)
    context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

  def _method(self, name: str, call: messages.Call, method: Callable[..., Any]) -> Callable:
    waiting = (POLL_SECONDS,) if call.poll else ()

    def answer(data: bytes, context: grpc.ServicerContext) -> Any:
      try:
        request: Any = codec.decode(call.request, data, self._wire)
      except codec.WireError as error:
        self._log_once(context, name, str(error))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error}"[:_MAX_TEXT])
      try:
        found = method(request, *waiting)
        return b"" if found is None and call.poll else codec.encode(found, self._wire)
      except RunOver as error:
        code, text = grpc.StatusCode.ABORTED, str(error)
      except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, codec.WireError):
          code, text = grpc.StatusCode.FAILED_PRECONDITION, str(error)
        else:  # also an answer that cannot be sent
          _log.exception("%s failed", name)
          code, text = grpc.StatusCode.INTERNAL, f"{name}: {error!r}"
      context.abort(code, text[:_MAX_TEXT])

    return answer

  def _log_once(self, context: grpc.ServicerContext, what: str, why: str) -> None:
    host = context.peer().rpartition(":")[0]  # without the port, which changes
    if (host, what) not in self._logged and len(self._logged) < _MAX_LOGGED:
      self._logged.add((host, what))
      _log.warning("refused %s from %s (logged once): %s", what, host, why)
