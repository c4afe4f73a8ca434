"""Tests of the gRPC client with servers that are missing, refuse it, die or hang."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import samples
from fake_service import EACH, FakeService, connect, serving
from ports import reserved_address
from speedyzero_jax.cluster import grpc_client as client_module
from speedyzero_jax.cluster import grpc_server, messages
from speedyzero_jax.cluster.grpc_client import Refused, Unreachable


def test_a_missing_server_is_unreachable_after_a_while():
  begin = time.monotonic()
  with (
    reserved_address() as address,
    connect(address, patience=1.0) as client,
    pytest.raises(Unreachable, match=r"127.0.0.1:\d+ has not answered for \d+ seconds"),
  ):
    client.call(EACH[messages.Join])
  assert 1 <= time.monotonic() - begin < 5


def test_a_wrong_token_is_not_retried():
  begin = time.monotonic()
  with (
    serving(FakeService()) as server,
    connect(server, bytes(32)) as client,
    pytest.raises(Refused, match="UNAUTHENTICATED"),
  ):
    client.call(EACH[messages.Step])
  assert time.monotonic() - begin < 5


def start_server(role: str, address: str = "127.0.0.1:0") -> tuple[subprocess.Popen, str]:
  """A process with a fake service, whose grants hold its process id as the learner step."""
  process = subprocess.Popen(
    [sys.executable, __file__, role, address], stdout=subprocess.PIPE, text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
  )  # fmt: skip
  assert process.stdout is not None
  served = process.stdout.readline().strip()
  assert served, f"ended with {process.wait()}"
  return process, served


def test_a_client_outlives_its_server():
  """The server is killed before it answers; another one on its port answers the same call."""
  first, address = start_server("mute")
  second = None
  try:
    with connect(address) as client:
      assert client.call(EACH[messages.Step]).weights == first.pid
      answers: list[messages.Block] = []
      thread = threading.Thread(target=lambda: answers.append(client.call(EACH[messages.Results])))
      thread.start()
      assert first.stdout.readline() == "asked\n"
      first.kill()
      first.wait()
      second, _ = start_server("serve", address)
      thread.join(20)
      assert samples.leaves(*answers) == samples.leaves(EACH[messages.Block])
      assert client.call(EACH[messages.Step]).weights == second.pid
  finally:
    for process in (first, second):
      if process is not None:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_busy_server_is_waited_for_and_one_that_hangs_is_noticed(monkeypatch):
  """Pings are answered while Python cannot run, as when jax compiles with the lock held.

  A process that is stopped, not killed, keeps its connection open: only missing answers to pings
  reveal it.
  """
  monkeypatch.setattr(grpc_server, "KEEPALIVE_SECONDS", 1.0)
  process, address = start_server("busy")
  try:
    with connect(address, patience=0.1) as client:
      client.call(EACH[messages.Join])
      begin = time.monotonic()
      client.call(EACH[messages.Results])
      assert time.monotonic() - begin > 2.5
      process.send_signal(signal.SIGSTOP)
      os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until all its threads have stopped
      begin = time.monotonic()
      with pytest.raises(Unreachable):
        client.call(EACH[messages.Step])
      assert time.monotonic() - begin < 20
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_server_that_stalls_is_waited_for(monkeypatch):
  monkeypatch.setattr(client_module, "CALL_SECONDS", 0.3)
  service, stalled = FakeService(), threading.Event()
  service.answers["join"] = lambda _: stalled.wait(20) and EACH[messages.Welcome]
  with serving(service) as server, connect(server, patience=0.1) as client:
    timer = threading.Timer(2, stalled.set)
    timer.start()
    assert client.call(EACH[messages.Join]).seed == EACH[messages.Welcome].seed
    timer.join()


def main(role: str, address: str) -> None:
  """Entry point of the other processes of these tests."""
  service = FakeService()
  service.answers["step"] = EACH[messages.Grant]._replace(weights=os.getpid())
  if role == "mute":
    service.answers["work"] = lambda _: print("asked", flush=True) or threading.Event().wait()
  if role == "busy":
    hold_the_lock = ctypes.PyDLL(None).sleep
    service.answers["work"] = lambda _: hold_the_lock(3) or EACH[messages.Block]
  with serving(service, address) as served:
    print(served, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
  main(*sys.argv[1:])
