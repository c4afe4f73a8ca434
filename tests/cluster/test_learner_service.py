"""Tests of the weights that the learner's service sends, and of the notice of a run's end."""

import threading
import time

import numpy as np
import pytest

from small_unit import BATCH
from speedyzero_jax.agents.efficientzero.reanalyse import REANALYSER
from speedyzero_jax.agents.refresh import REFRESHER
from speedyzero_jax.cluster import messages
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper
from supervised import wait_for


def test_unknown_numbers_are_refused_and_not_waited_for(make_unit):
  unit = make_unit(actors=2, refreshers=2)
  for call in (
    lambda: unit.join(2),
    lambda: unit.step(actor=2),
    lambda: unit.work(2),
    lambda: unit.frames(refresher=2),
    lambda: unit.ask_weights(helper=Helper("actor", 2)),
  ):
    unit.refuses(call, "there are 2 .*, got number 2")
  begin = time.monotonic()
  unit.service.finish(10)
  assert time.monotonic() - begin < 5


def test_the_latest_version_of_each_subscription_is_sent(make_unit):
  unit = make_unit()
  assert unit.ask_weights().step == 0
  for step in (2, 4, 5):
    unit.publish(step)
  sent = unit.ask_weights()
  assert sent.step == 4
  expected = messages.named(unit.agent.published(unit.agent.init(number=4)))
  assert sent.arrays.keys() == expected.keys()
  for name, array in sent.arrays.items():
    np.testing.assert_array_equal(array, expected[name], strict=True)
  assert unit.ask_weights(REANALYSER).step == 0 and unit.ask_weights(REFRESHER).step == 4
  with pytest.raises(ValueError, match="'evaluator'"):
    unit.ask_weights("evaluator")


def test_all_helpers_hear_the_end_and_are_waited_for(make_unit):
  unit = make_unit("actor.lanes=2", actors=2, refreshers=1)
  unit.fill(4)
  unit.join(0), unit.join(1)
  assert unit.work() is None
  granted, before = unit.step(), unit.limiter.env_steps
  ended = threading.Thread(target=unit.service.finish, args=(30,), daemon=True)
  ended.start()
  wait_for(lambda: unit.roster.over)
  slots, _ = unit.play(unit.player(), granted)
  for call in (lambda: unit.step(slots, 1), lambda: unit.step(actor=1), unit.work):
    assert ended.is_alive()
    with pytest.raises(RunFinished):
      call()
  ended.join(10)
  assert not ended.is_alive() and unit.limiter.env_steps == before
  for call in (unit.frames, unit.ask_weights, lambda: unit.join(0, 1), lambda: unit.work(0, 1)):
    with pytest.raises(RunFinished):
      call()


def test_absent_helpers_are_not_waited_for_forever(make_unit):
  unit = make_unit()
  unit.join()
  begin = time.monotonic()
  unit.service.finish(0.1)
  assert 0.1 <= time.monotonic() - begin < 5


def test_a_waiting_refresher_hears_the_end_at_once(make_unit):
  unit = make_unit(*BATCH)
  heard = []

  def wait():
    with pytest.raises(RunFinished):
      unit.work(seconds=60)
    heard.append(True)

  thread = threading.Thread(target=wait, daemon=True)
  thread.start()
  thread.join(0.05)
  assert not heard
  unit.service.finish(10)
  thread.join(10)
  assert heard
