"""A service that answers every call with a sample, its server and its clients."""

import numpy as np

import samples
from speedyzero_jax.cluster import grpc_server, messages
from speedyzero_jax.cluster.grpc_client import Client
from speedyzero_jax.cluster.grpc_server import RunFinished, serve
from speedyzero_jax.cluster.messages import CALLS

TOKEN, HELPER = bytes(range(32)), messages.Helper("actor", 3, 4)
EACH = samples.one_of_each()
ASK = EACH[messages.WeightsRequest]


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


def serving(service, address="127.0.0.1:0"):
  return serve(service, address, TOKEN, clients=2)


def connect(address, token=TOKEN, **options):
  return Client(address, token, HELPER, **options)
