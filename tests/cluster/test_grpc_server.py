"""Tests of the gRPC server and its clients over real sockets."""

import contextlib
import os
import queue
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
from fake_service import ASK, EACH, TOKEN, FakeService, connect, serving
from speedyzero_jax.cluster import grpc_server, messages
from speedyzero_jax.cluster.grpc_client import Client, Refused, Unreachable
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import CALLS
from supervised import wait_for

EXAMPLES = int(os.environ.get("SPEEDYZERO_FUZZ_EXAMPLES", "60"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(grpc_server, "POLL_SECONDS", 0.2)


@pytest.fixture
def service():
  return FakeService()


@pytest.fixture
def server(service) -> Iterator[str]:
  with serving(service) as running:
    yield running


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


def test_a_request_without_the_token_is_not_read(service, server):
  """It is refused before its data arrives."""
  with grpc.insecure_channel(server) as channel:
    step = channel.stream_unary(f"/{grpc_server.SERVICE}/step")
    with pytest.raises(grpc.RpcError) as refused:
      step(iter(queue.SimpleQueue().get, None), timeout=20)
  assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


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
  with pytest.raises(ValueError, match="not a message of kind Grant"):
    client.call(EACH[messages.Step])


@pytest.mark.parametrize("name", ["join", "work"])
def test_the_end_of_the_run_reaches_every_caller(name, service, client):
  def over(_):
    raise RunFinished("every learner step is taken")

  service.answers[name] = over
  with pytest.raises(RunFinished, match="every learner step is taken"):
    client.call(EACH[CALLS[name].request])


def test_messages_may_be_long(service, client):
  """By default gRPC receives at most 4 MiB."""
  long = np.arange(2_000_000)
  service.answers["frames"] = EACH[messages.FramesChunk]._replace(lane=long)
  chunk = client.call(EACH[messages.FramesRequest]._replace(heads=long))
  np.testing.assert_array_equal(chunk.lane, long)
  np.testing.assert_array_equal(service.asked[0][1].heads, long)


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


def test_answers_on_their_way_arrive_while_the_server_stops(service, monkeypatch):
  monkeypatch.setattr(grpc_server, "_GRACE_SECONDS", 10.0)
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
  assert failed and failed[0]


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
