"""Test of collection by actors that die at random moments and repeat calls."""

import threading
import time

import numpy as np
import pytest

import tiny
from same import assert_same_replays
from small_unit import Direct, last_actions
from speedyzero_jax.cluster import messages, remote
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.messages import Helper

NONE = np.zeros(0)


class Killed(Exception):
  """Simulates the end of an actor's process."""


class Unlucky(Direct):
  """A client that dies at random before or after the service is called, and repeats some calls."""

  def __init__(self, service, helper, seed, danger):
    super().__init__(service, helper)
    self._rng, self._danger = np.random.default_rng(seed), danger
    self.dead, self.acknowledged = False, 0

  def _live_on(self):
    if self.dead or self._rng.random() < self._danger:
      self.dead = True
      raise Killed

  def call(self, request):
    if isinstance(request, messages.WeightsRequest):  # polled in threads of its own
      if self.dead:
        raise Killed
      return super().call(request)
    self._live_on()
    answer = super().call(request)
    if self._rng.random() < 0.2:
      answer = super().call(request)
    self._live_on()
    if isinstance(request, messages.Step):
      columns = request.slots.get("columns", {"action": NONE})
      self.acknowledged += int((columns["action"] >= 0).sum())
    time.sleep(self._rng.random() * 0.002)
    return answer


@pytest.mark.parametrize(
  ("seed", "danger"), [(0, 0.0), (1, 0.0), (0, 0.2), (1, 0.2), (2, 0.2), (3, 0.2)]
)
def test_actors_that_die_at_any_moment_collect_exactly_what_was_asked(
  make_unit, monkeypatch, seed, danger
):
  rng = np.random.default_rng(seed)
  lanes, actors, total = (int(rng.integers(a, b)) for a, b in ((3, 7), (1, 4), (40, 120)))
  overrides = f"actor.lanes={lanes}", f"run.env_steps={total}", "actor.random_steps=20"
  unit = make_unit(*overrides, actors=actors, refreshers=0, durable=True)
  monkeypatch.setattr(
    remote, "make_env", lambda _, lanes, seed, training: tiny.FakeEnv(lanes, seed)
  )
  monkeypatch.setattr(remote, "Inference", lambda *_, **__: unit.inference)
  clients, errors = [], []

  def live(number):
    for incarnation in range(10**6):
      helper = Helper("actor", number, incarnation)
      client = Unlucky(unit.service, helper, [seed, number, incarnation], danger)
      clients.append(client)
      try:
        return remote.act(unit.config, unit.agent, client)
      except Killed:
        pass
      except RunFinished:
        return None
      except BaseException as error:
        errors.append(error)
        return unit.limiter.stop()
      finally:
        client.dead = True

  threads = [threading.Thread(target=live, args=(number,), daemon=True) for number in range(actors)]
  learner = unit.learn_in_thread()
  for thread in threads:
    thread.start()
  unit.limiter.wait_for(lambda: unit.limiter.collected, 60)
  assert not errors and unit.limiter.collected
  learner.join(10)
  early = bool(seed % 2)  # while some still close their lanes
  for thread in threads if not early else ():
    thread.join(10)
  begin = time.monotonic()
  unit.service.finish(10)
  assert time.monotonic() - begin < 5
  for thread in threads:
    thread.join(10)
    assert not thread.is_alive()
  assert not errors and unit.limiter.finished and unit.limiter.pool == 0
  assert unit.limiter.env_steps == unit.replay.num_transitions == total
  acknowledged = sum(client.acknowledged for client in clients)
  assert acknowledged == total if not (danger or early) else acknowledged <= total
  assert (len(clients) > actors) == (danger > 0)
  assert early or (last_actions(unit) == -1).all()
  with unit.twin() as again:
    # The journal does not say where the last games were cut, nor the order of the lanes' steps.
    for lane in range(lanes):
      again.replay.truncate(lane), unit.replay.truncate(lane)
    assert_same_replays(unit.replay, again.replay, besides={"sweep_reanalyse", "sweep_refresh"})
    assert again.limiter.env_steps == total
