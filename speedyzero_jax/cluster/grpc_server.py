"""The server of a unit: carries calls of `messages.CALLS` over gRPC to a hub. `client.py` is its other end.

Nothing reaches the hub but well-formed messages of callers that know the unit's token. Refusals are logged once per
host and call. Must not know what the hub does.
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
from speedyzero_jax.run.topology import is_loopback

SERVICE = "speedyzero.Unit"
TOKEN = "speedyzero-token-bin"  # key of the metadata; -bin: its value is bytes
MIN_TOKEN = 16  # bytes
POLL_SECONDS = (
  2.0  # for which the hub may keep a poll waiting: how long a caller that is gone holds a thread
)
KEEPALIVE_SECONDS = 5.0  # between pings of a silent peer, and for its answer

_THREADS = 6  # per client: the calls it can have open at once, and one to spare
_MAX_TEXT = 1000  # characters of an error sent: metadata has little room
_MAX_LOGGED = 1000  # hosts and calls remembered

_log = logging.getLogger(__name__)


class RunOver(Exception):
  """The run has ended or the unit has stopped. A hub may raise it in any call; the client's call then raises it too."""


class Hub(Protocol):
  """What a server needs. Called from many threads at once.

  A ValueError is a refusal whose text the caller gets; RunOver sends the caller home. Polls wait for news up to
  `seconds` and return None if there is none. A caller may be gone before an answer reaches it: it will ask again.
  """

  def join_actor(self, request: messages.ActorJoin) -> messages.ActorWelcome: ...
  def join_reanalyser(self, request: messages.ReanalyserJoin) -> messages.ReanalyserWelcome: ...
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
  """PEM files. Both ends show a certificate of this authority; the server's must name the address that clients use."""

  certificate: Path
  key: Path
  authority: Path

  def read(self) -> tuple[bytes, bytes, bytes]:
    """Contents of the three files."""
    return self.certificate.read_bytes(), self.key.read_bytes(), self.authority.read_bytes()


def channel_options(max_bytes: int) -> list[tuple[str, int]]:
  """gRPC's options on both ends: what a message may weigh, and that a dead peer is noticed in seconds."""
  interval = round(1000 * KEEPALIVE_SECONDS)
  return [
    ("grpc.max_receive_message_length", max_bytes),
    ("grpc.max_send_message_length", -1),  # `wire.encode` has seen to it
    ("grpc.keepalive_time_ms", interval),
    ("grpc.keepalive_timeout_ms", interval),
    (
      "grpc.http2.ping_timeout_ms",
      interval,
    ),  # else a minute, whatever the line above says (grpcio 1.85)
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # a server does not mind being pinged
  ]


class Server:
  """A running service, made by `serve`."""

  def __init__(self, server: grpc.Server, pool: futures.Executor, address: str):
    self._server, self._pool = server, pool
    self.address = address  # host:port that it listens on

  def stop(self) -> None:
    """Ends all calls, and waits (up to POLL_SECONDS) until no method of the hub is running."""
    self._server.stop(None).wait()
    self._pool.shutdown()

  def __enter__(self) -> "Server":
    return self

  def __exit__(self, *_: object) -> None:
    self.stop()


def serve(
  hub: Hub, address: str, token: bytes, form: codec.Form, *, clients: int, tls: Tls | None = None
) -> Server:
  """Serves a hub until `Server.stop`, or until nobody holds the server any more.

  Args:
    hub: gets all valid calls.
    address: host:port to listen on; port 0 picks a free one.
    token: what callers must show, at least 16 bytes.
    form: of all messages.
    clients: processes that will call; each may have six calls open at once.
    tls: None for plain TCP, which shows the token to whoever can listen.

  Raises:
    OSError: the address cannot be listened on, or a TLS file not be read.
    ValueError: the token is too short, the address is none, or TLS files hold something else.
  """
  if len(token) < MIN_TOKEN:
    raise ValueError(f"the token has {len(token)} bytes, it must have at least {MIN_TOKEN}")
  host, colon, port = address.rpartition(":")
  if not colon or not host or not port.isdecimal():
    raise ValueError(f"address must be host:port, got {address!r}")
  pool = futures.ThreadPoolExecutor(_THREADS * clients, "service")
  server = grpc.server(
    pool,
    [_Handlers(hub, token, form)],
    options=[*channel_options(form.max_bytes), ("grpc.so_reuseport", 0)],
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
    raise _why_not(host.strip("[]"), int(port), tls) from error
  if tls is None and not is_loopback(host.strip("[]")):
    _log.warning(
      "%s is served without TLS: whoever can listen to the network can read the token", address
    )
  server.start()
  return Server(server, pool, f"{host}:{bound}")


def _why_not(host: str, port: int, tls: Tls | None) -> Exception:
  """The reason for a failed bind, which gRPC keeps to itself."""
  try:
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
      probe.bind(where)
  except OSError as error:
    return OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}")
  if tls is not None:
    return ValueError(
      f"gRPC takes no such certificate, key and authority: {', '.join(map(str, tls))}"
    )
  return OSError(f"cannot listen on {host}:{port}")


class _Handlers(grpc.GenericRpcHandler):
  """Finds and guards the hub's methods."""

  def __init__(self, hub: Hub, token: bytes, form: codec.Form):
    self._token, self._form = token, form
    self._logged: set[tuple[str, str]] = set()
    self._methods = {
      f"/{SERVICE}/{name}": grpc.unary_unary_rpc_method_handler(
        self._method(name, call, getattr(hub, name))
      )
      for name, call in messages.CALLS.items()
    }
    # As a stream, so that what a stranger sends is never read.
    self._stranger = grpc.stream_unary_rpc_method_handler(self._refuse_stranger)

  def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
    shown = [value for key, value in details.invocation_metadata if key == TOKEN]
    if len(shown) != 1 or not hmac.compare_digest(shown[0], self._token):
      return self._stranger
    return self._methods.get(details.method)

  def _refuse_stranger(self, _: Iterator[bytes], context: grpc.ServicerContext) -> None:
    text = "the unit's token is missing or another"
    self._log_once(context, "a stranger's call", text)
    context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

  def _method(
    self, name: str, call: messages.Call, method: Callable[..., Any]
  ) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    waiting = (POLL_SECONDS,) if call.poll else ()

    def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
      try:
        request: Any = codec.decode(call.request, data, self._form)
      except codec.WireError as error:
        self._log_once(context, name, str(error))
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name}: {error}"[:_MAX_TEXT])
      try:
        found = method(request, *waiting)
      except RunOver as error:
        context.abort(grpc.StatusCode.ABORTED, str(error)[:_MAX_TEXT])
      except ValueError as error:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:_MAX_TEXT])
      except Exception as error:
        _log.exception("%s failed", name)
        context.abort(grpc.StatusCode.INTERNAL, f"{name}: {error!r}"[:_MAX_TEXT])
      if found is None and call.poll:
        return b""
      try:
        return codec.encode(found, self._form)
      except Exception as error:  # the hub's mistake, whatever it is
        _log.exception("%s was answered with what cannot be sent", name)
        context.abort(grpc.StatusCode.INTERNAL, f"{name}: {error!r}"[:_MAX_TEXT])
        raise

    return answer

  def _log_once(self, context: grpc.ServicerContext, what: str, why: str) -> None:
    host = context.peer().rpartition(":")[0]  # a caller that comes back has another port
    if (host, what) not in self._logged and len(self._logged) < _MAX_LOGGED:
      self._logged.add((host, what))
      _log.warning("refused %s from %s (logged once): %s", what, host, why)
