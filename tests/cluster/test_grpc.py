"""Tests of the gRPC server and client over real sockets, some of them with several processes."""

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import samples
from speedyzero_jax.cluster import grpc_client as client_module
from speedyzero_jax.cluster import grpc_server, messages
from speedyzero_jax.cluster.grpc_client import Client, Refused, Unreachable
from speedyzero_jax.cluster.grpc_server import RunFinished, serve
from speedyzero_jax.cluster.messages import CALLS
from supervised import wait_for

EXAMPLES = int(os.environ.get("SPEEDYZERO_FUZZ_EXAMPLES", "60"))
TOKEN, HELPER = bytes(range(32)), messages.Helper("actor", 3, 4)
EACH = samples.one_of_each()
ASK = EACH[messages.WeightsRequest]
MAX_BYTES = 1 << 16


class FakeService:
  """Answers every call with the sample of its kind, or as a test sets, and records the requests."""

  def __init__(self):
    self.asked = []
    self.answers = {}  # by call: what to answer, or a function of the request
    self.running = 0

  def environments(self, helper, observations):
    assert helper == HELPER
    for observation in observations:
      if (number := int(observation.arrays["reward"])) > 2:
        raise [ValueError("no"), RunFinished("over")][number - 3]
      yield messages.Actions(np.full(2, number, np.int32))

  def call(self, name, helper, request, *seconds):
    assert helper == HELPER and type(request) is CALLS[name].request
    assert seconds == ((grpc_server.POLL_SECONDS,) if CALLS[name].poll else ())
    self.asked.append((name, request))
    self.running += 1
    try:
      answer = self.answers.get(name, EACH[CALLS[name].answer])
      return answer(request) if callable(answer) else answer
    finally:
      self.running -= 1


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(grpc_server, "POLL_SECONDS", 0.2)


@pytest.fixture
def service():
  return FakeService()


def serving(service, address="127.0.0.1:0"):
  return serve(service, address, TOKEN, max_bytes=MAX_BYTES, clients=2)


@pytest.fixture
def server(service) -> Iterator[str]:
  with serving(service) as running:
    yield running


def connect(address, token=TOKEN, **options):
  return Client(address, token, HELPER, max_bytes=MAX_BYTES, **options)


@pytest.fixture
def client(server) -> Iterator[Client]:
  with connect(server) as connected:
    yield connected


@contextlib.contextmanager
def raw(server: str, token: bytes | None = TOKEN, helper: str = "actor 3 4"):
  """Calls with arbitrary bytes: call(name, data) returns (status code, text or bytes)."""
  with grpc.insecure_channel(server) as channel:

    def call(name: str, data: bytes, metadata: tuple = ()):
      metadata += () if token is None else ((grpc_server.TOKEN, token),)
      metadata += ((grpc_server.HELPER, helper),)
      try:
        return grpc.StatusCode.OK, channel.unary_unary(f"/{grpc_server.SERVICE}/{name}")(
          data, timeout=20, metadata=metadata
        )
      except grpc.RpcError as error:
        return error.code(), error.details()

    yield call


def error_of(call, *arguments) -> type[Exception] | None:
  """The type of the exception that a call raises, for use in threads."""
  try:
    call(*arguments)
  except Exception as error:
    return type(error)
  return None


@pytest.mark.parametrize("name", CALLS)
def test_every_call_carries_its_request_and_its_answer(name, service, client):
  request = EACH[CALLS[name].request]
  answer = client.call(request)
  assert samples.leaves(answer) == samples.leaves(EACH[CALLS[name].answer])
  ((asked, got),) = service.asked
  assert asked == name and samples.leaves(got) == samples.leaves(request)


def test_a_stream_is_answered_request_by_request_until_it_ends(service):
  def numbered(*numbers):
    return (messages.Observation({"reward": np.array(number)}) for number in numbers)

  with contextlib.ExitStack() as stack:
    client = connect(stack.enter_context(serving(service)))
    answers = client.stream(numbered(0, 1, 2))
    assert [answer.action.tolist() for answer in answers] == [[0, 0], [1, 1], [2, 2]]
    with pytest.raises(Refused, match="no"):
      list(client.stream(numbered(0, 3)))
    with pytest.raises(RunFinished, match="over"):
      list(client.stream(numbered(4)))
    silent = client.stream(iter(queue.SimpleQueue().get, None))
    threading.Timer(0.2, stack.close).start()
    with pytest.raises(Unreachable):
      list(silent)
    client.close()


@pytest.mark.parametrize("name", [name for name in CALLS if CALLS[name].poll])
def test_a_poll_is_asked_again_until_there_is_news(name, service, client):
  service.answers[name] = lambda _: EACH[CALLS[name].answer] if len(service.asked) == 3 else None
  begin = time.monotonic()
  client.call(EACH[CALLS[name].request])
  assert len(service.asked) == 3 and time.monotonic() - begin > 0.15  # it is not flooded
  first, *later = (len(messages.encode(request)) for _, request in service.asked)
  assert max(later) < first  # the payload is not sent again


@pytest.mark.parametrize("token", [None, b"", TOKEN[:-1], TOKEN[:-1] + b"x", TOKEN + b"x"])
@pytest.mark.parametrize("name", ["step", "nothing"])
def test_calls_without_the_token_are_refused(name, token, service, server):
  with raw(server, token) as call:
    code, text = call(name, messages.encode(EACH[messages.Step]))
  assert code is grpc.StatusCode.UNAUTHENTICATED and "token" in text and not service.asked


def test_the_token_may_not_come_twice(service, server):
  with raw(server) as call:
    code, _ = call("join", messages.encode(EACH[messages.Join]), ((grpc_server.TOKEN, TOKEN),))
  assert code is grpc.StatusCode.UNAUTHENTICATED and not service.asked


def test_a_request_without_the_token_is_not_read(service, server):
  """A message over the limit would be refused as such, had it been read."""
  with raw(server, b"x" * 32) as call:
    assert call("step", bytes(8 * MAX_BYTES))[0] is grpc.StatusCode.UNAUTHENTICATED


def test_malformed_messages_are_refused(service, server):
  with raw(server) as call:
    for data in (b"not a message of ours", messages.encode(EACH[messages.Step])):
      code, text = call("join", data)
      assert code is grpc.StatusCode.FAILED_PRECONDITION and "not a message of kind Join" in text
    assert not service.asked
    assert call("join", messages.encode(EACH[messages.Join]))[0] is grpc.StatusCode.OK


@pytest.mark.parametrize("helper", ["", "actor", "actor 1 2 3", "actor x 0"])
def test_calls_of_no_helper_are_refused(helper, service, server):
  with raw(server, helper=helper) as call:
    code, text = call("join", messages.encode(EACH[messages.Join]))
  assert code is grpc.StatusCode.FAILED_PRECONDITION and "no helper" in text and not service.asked


def test_unknown_calls_are_refused(service, server):
  for name in ("nothing", "__init__", "stop"):
    with raw(server) as call:
      assert call(name, b"")[0] is grpc.StatusCode.UNIMPLEMENTED


def test_oversized_messages_are_refused_by_their_size(service, server):
  with raw(server) as call:
    code, text = call("step", bytes(MAX_BYTES + 1))
  assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and str(MAX_BYTES) in text and not service.asked


def test_a_service_s_refusal_reaches_the_caller(service, client):
  def refuse(_):
    raise ValueError("incarnation 2 is not the newest: ä, 日本 " + 5000 * "x")

  service.answers["step"] = refuse
  with pytest.raises(Refused, match=r"FAILED.*not the newest: ä, 日本 xxx"):
    client.call(EACH[messages.Step])
  assert len(service.asked) == 1  # and is not tried again


def test_a_service_s_failure_is_logged_with_its_traceback(service, client, caplog):
  service.answers["work"] = lambda _: 1 / 0
  with pytest.raises(Refused, match=r"INTERNAL.*ZeroDivisionError"):
    client.call(EACH[messages.Results])
  client.call(EACH[messages.Join])
  assert "Traceback" in caplog.text and "lambda" in caplog.text
  assert len(service.asked) == 2


def test_an_answer_of_another_kind_is_an_error(service, client):
  service.answers["step"] = EACH[messages.Block]
  with pytest.raises(messages.WireError, match="not a message of kind Grant"):
    client.call(EACH[messages.Step])


@pytest.mark.parametrize("name", ["join", "work"])
def test_the_end_of_the_run_reaches_every_caller(name, service, client):
  def over(_):
    raise RunFinished("every learner step is taken")

  service.answers[name] = over
  with pytest.raises(RunFinished, match="every learner step is taken"):
    client.call(EACH[CALLS[name].request])


def test_messages_that_are_too_long_are_not_sent(service, client):
  with pytest.raises(Refused, match=r"RESOURCE_EXHAUSTED.*larger than max"):
    client.call(EACH[messages.Step]._replace(episodes=np.zeros(MAX_BYTES)))
  assert not service.asked
  service.answers["frames"] = EACH[messages.FramesChunk]._replace(lane=np.zeros(MAX_BYTES))
  with pytest.raises(Refused, match="RESOURCE_EXHAUSTED"):
    client.call(EACH[messages.FramesRequest])


def test_as_many_polls_wait_as_clients_may_have(service, server):
  """All of them wait at the same time, each in a thread: the pool is large enough."""
  together = threading.Barrier(2 * grpc_server._THREADS)
  service.answers["step"] = lambda _: together.wait(timeout=10) >= 0 and EACH[messages.Grant]
  clients = [connect(server) for _ in range(2)]
  threads = [
    threading.Thread(target=client.call, args=(EACH[messages.Step],))
    for client in clients
    for _ in range(grpc_server._THREADS)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(15)
  assert len(service.asked) == len(threads) and not together.broken
  for client in clients:
    client.close()


@pytest.mark.parametrize("address", ["192.0.2.1:0", "nowhere.invalid:0", None])
def test_an_address_that_cannot_be_used_is_a_clear_error(address, service, server):
  address = address or server  # which is in use
  with pytest.raises(OSError, match=f"can't listen on {address}: it is not available$"):
    serving(service, address).__enter__()


def test_answers_on_their_way_arrive_while_the_server_stops(service):
  service.answers["weights"] = lambda _: time.sleep(0.3) or EACH[messages.Weights]
  with contextlib.ExitStack() as stack:
    pool = stack.enter_context(ThreadPoolExecutor())
    with serving(service) as server:
      client = stack.enter_context(connect(server))
      answer = pool.submit(client.call, ASK)
      wait_for(lambda: service.running)
    assert answer.result(15).step == EACH[messages.Weights].step


def test_after_the_end_no_call_is_being_answered(service):
  def slow(_):
    time.sleep(0.5)

  service.answers["weights"] = slow
  with serving(service) as server, connect(server, patience=0.1) as client:
    failed = []
    thread = threading.Thread(target=lambda: failed.append(error_of(client.call, ASK)))
    thread.start()
    wait_for(lambda: service.running)
  assert not service.running
  thread.join(15)
  assert failed


# --- the client alone


def free_port() -> int:
  with socket.create_server(("127.0.0.1", 0)) as probe:
    return probe.getsockname()[1]


def test_a_missing_server_is_unreachable_after_a_while():
  begin = time.monotonic()
  with (
    connect(f"127.0.0.1:{free_port()}", patience=1.0) as client,
    pytest.raises(Unreachable, match=r"127.0.0.1:\d+ has not answered for 1 seconds"),
  ):
    client.call(EACH[messages.Join])
  assert 1 <= time.monotonic() - begin < 5


def test_a_wrong_token_is_not_retried(server):
  begin = time.monotonic()
  with (
    connect(server, bytes(32)) as client,
    pytest.raises(Refused, match="UNAUTHENTICATED"),
  ):
    client.call(EACH[messages.Step])
  assert time.monotonic() - begin < 5


# --- real processes


def start_server(port: int, role: str = "serve") -> subprocess.Popen:
  """A process with a fake service, whose grants hold its process id as the learner step."""
  process = subprocess.Popen(
    [sys.executable, __file__, role, str(port)], stdout=subprocess.PIPE, text=True,
    env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
  )  # fmt: skip
  assert process.stdout is not None and process.stdout.readline() == "serving\n"
  return process


def test_a_client_outlives_its_server():
  """The server is killed before it answers; another one on its port answers the same call."""
  port = free_port()
  first = start_server(port, "mute")
  second = None
  try:
    with connect(f"127.0.0.1:{port}") as client:
      assert client.call(EACH[messages.Step]).weights == first.pid
      answers: list[messages.Block] = []
      thread = threading.Thread(target=lambda: answers.append(client.call(EACH[messages.Results])))
      thread.start()
      assert first.stdout.readline() == "asked\n"
      first.kill()
      first.wait()
      second = start_server(port)
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
  monkeypatch.setattr(grpc_server, "KEEPALIVE_SECONDS", 0.4)
  process = start_server(port := free_port(), "busy")
  try:
    with connect(f"127.0.0.1:{port}", patience=0.1) as client:
      client.call(EACH[messages.Join])
      begin = time.monotonic()
      client.call(EACH[messages.Results])
      assert time.monotonic() - begin > 1.5
      process.send_signal(signal.SIGSTOP)
      os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until all its threads have stopped
      begin = time.monotonic()
      with pytest.raises(Unreachable):
        client.call(EACH[messages.Step])
      assert time.monotonic() - begin < client_module.CALL_SECONDS / 2
  finally:
    process.kill()
    process.wait()
    process.stdout.close()


def main(role: str, port: str) -> None:
  """Entry point of the other processes of these tests."""
  service = FakeService()
  service.answers["step"] = EACH[messages.Grant]._replace(weights=os.getpid())
  if role == "mute":
    service.answers["work"] = lambda _: print("asked", flush=True) or threading.Event().wait()
  if role == "busy":
    hold_the_lock = ctypes.PyDLL(None).sleep
    service.answers["work"] = lambda _: hold_the_lock(2) or EACH[messages.Block]
  with serving(service, f"127.0.0.1:{port}"):
    print("serving", flush=True)
    threading.Event().wait()


# --- fuzz


def test_damaged_requests_never_reach_the_service_or_harm_the_server(service, server):
  valid = {name: messages.encode(EACH[call.request]) for name, call in CALLS.items()}
  names = st.sampled_from(tuple(CALLS))
  own = names.flatmap(lambda name: st.tuples(st.just(name), samples.damaged((valid[name],))))
  other = st.tuples(names, samples.damaged(tuple(valid.values())) | st.binary(max_size=100))

  with raw(server) as call:

    @settings(max_examples=EXAMPLES)
    @given(own | other)
    def fuzz(sent):
      name, data = sent
      code, _ = call(name, data)
      assert code in (grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION)
      for asked, request in service.asked:
        assert asked == name and type(request) is CALLS[name].request
      assert bool(service.asked) == (code is grpc.StatusCode.OK)
      assert call("join", valid["join"])[0] is grpc.StatusCode.OK
      service.asked.clear()

    fuzz()


if __name__ == "__main__":
  main(*sys.argv[1:])
