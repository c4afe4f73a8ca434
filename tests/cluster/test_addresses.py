"""Tests of the addresses at which a machine can be reached."""

import pytest

from speedyzero_jax.cluster import rendezvous
from speedyzero_jax.cluster.rendezvous import own_address


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_towards_a_loopback_is_a_loopback(host):
  try:
    assert own_address(f"[{host}]:9" if ":" in host else f"{host}:9") == host
  except OSError as error:
    if host == "127.0.0.1":
      raise
    pytest.skip(f"{host}: {error}")


@pytest.mark.parametrize(
  ("coordinator", "routes", "address"),
  [
    ("node1:9", {"node1": "10.1.0.2"}, "10.1.0.2"),
    # On node1 itself, with Debian's /etc/hosts:
    ("node1:9", {"node1": "127.0.1.1", "192.0.2.1": "10.1.0.2"}, "10.1.0.2"),
    ("node1:9", {"node1": "127.0.1.1"}, "127.0.1.1"),  # and without a network
    ("localhost:9", {"localhost": "127.0.0.1", "192.0.2.1": "10.1.0.2"}, "127.0.0.1"),
  ],
)
def test_the_address_is_the_one_on_the_route_to_the_coordinator(
  monkeypatch, coordinator, routes, address
):
  def local_address(host, port):
    if host not in routes:
      raise OSError("no route")
    return routes[host]

  monkeypatch.setattr(rendezvous, "_local_address", local_address)
  assert own_address(coordinator) == address
