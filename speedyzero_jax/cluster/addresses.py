"""Network addresses of this machine."""

import contextlib
import ipaddress
import socket


def is_loopback(host: str) -> bool:
  """Whether this name or address means the machine itself, on any machine."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def own_address(coordinator: str) -> str:
  """The address at which the run's other machines reach this one; sends nothing.

  It is the local address on the route to the coordinator (host:port), without which OSError is
  raised. On the coordinator's machine its own name may mean a loopback address (127.0.1.1 on
  Debian): then the one on the default route.
  """
  host, _, port = coordinator.rpartition(":")
  host = host.strip("[]")
  address = _local_address(host, int(port))
  if is_loopback(address) and not is_loopback(host):
    with contextlib.suppress(OSError):
      return _local_address("192.0.2.1", 9)  # reserved for documentation, by RFC 5737
  return address


def _local_address(host: str, port: int) -> str:
  family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, kind) as probe:
    probe.connect(where)
    return str(probe.getsockname()[0])
