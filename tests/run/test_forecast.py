"""What a run will need is computed right, said at the right moment, and compared with what happened."""

from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from speedyzero_jax.config import loader
from speedyzero_jax.run import builders, forecast
from speedyzero_jax.run.forecast import Forecast
from speedyzero_jax.system import memory
from speedyzero_jax.system.compilation import Compilations, WarmUp


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)


@pytest.mark.parametrize("capacity", [0, 3000])
@pytest.mark.parametrize("collected", [500, 4000, 9999, 10000])
def test_growth_is_the_mean_over_what_is_to_come(capacity, collected):
  config = loader.load(
    ["quickstart"], ["run.env_steps=10000", f"replay.capacity={capacity}", "actor.lanes=4"]
  )
  stored = np.minimum(np.arange(collected, 10_000) + 0.5, capacity or np.inf)
  now = min(collected, capacity or collected)
  expected = (stored.mean() + 64) / (now + 64) if len(stored) else 1.0
  assert forecast.sweep_growth(config, 64, collected) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_a_batch_has_the_bytes_that_are_said_and_moved(tmp_path, schedule):
  """Frames on the host move with each batch and each search; frames on devices cost a number each."""
  moved = {}
  for where in ("host", "device"):
    config = tiny.config(f"reanalyse.schedule={schedule}", f"replay.frames={where}")
    with tiny.training(config, tmp_path / where) as training:
      while not training.replay.num_eligible:
        training.collect()
      fed = training.draw(0)
      moved[where] = fed.host_bytes
      drawn = sum(x.nbytes for x in fed.batch)
      assert drawn == forecast.batch_bytes(config, builders.game_of(config))
      before = training.host_bytes
      training.draw(1)
      moved[where, "all"] = training.host_bytes - before
      before = training.host_bytes
      training.collect()  # at random: nothing is searched
      moved[where, "acting"] = training.host_bytes - before
      before = training.host_bytes
      for sweeper in training.sweepers:
        training.sweep(sweeper)
      moved[where, "sweeps"] = training.host_bytes - before
  frames = 8 * 4  # of a batch: S + K for each sample
  assert moved["host"] == drawn and moved["device"] == drawn - 200 * frames + 4 * frames
  searched = (
    2 * frames if schedule == "batch" else 0
  )  # K+1 states to search, and as many to bootstrap from
  assert moved["host", "all"] == moved["host"] + 200 * searched
  assert moved["device", "all"] == moved["device"] + 4 * searched
  lanes, swept = (
    config.actor.lanes,
    config.agent.refresh.block + (config.agent.reanalyse.block if schedule == "sweep" else 0),
  )
  assert moved["host", "acting"] == 0 and moved["device", "acting"] == 200 * lanes
  stack = config.env.frame_stack
  assert (
    moved["host", "sweeps"] == 200 * stack * swept
    and moved["device", "sweeps"] == 4 * stack * swept
  )


class Machine:
  """A clock that only the test moves, and memory that only the test takes."""

  def __init__(self, monkeypatch, room=10**12):
    self.now, self.resident, self.peak = 0.0, 10**9, 2 * 10**9
    monkeypatch.setattr(memory, "available", lambda: room)
    monkeypatch.setattr(memory, "resident", lambda peak=False: self.peak if peak else self.resident)

  def __call__(self):
    return self.now


def spend(training, **seconds):
  """Lets the parts have taken so much time."""
  totals = {name: training.times.totals().get(name, 0.0) + s for name, s in seconds.items()}
  training.times.totals = lambda: totals


def test_a_forecast_from_the_first_line_to_the_last(tmp_path, monkeypatch):
  machine, said = Machine(monkeypatch), []
  config = tiny.config("learner.steps=1020", "run.env_steps=20000", "replay.capacity=0", "actor.random_steps=10000",
                       "learner.tail_steps=0", "refresh.enabled=false", "run.checkpoint_interval=102")  # fmt: skip
  estimate = Forecast(config, said.append, machine)
  replay = builders.replay_bytes(config)
  with Compilations() as compilations, tiny.training(config, tmp_path) as training:
    warm_up = WarmUp(compilations)
    estimate.watch(training, warm_up)
    machine.now = 40.0
    estimate.prepared(training, 0.5)
    assert said[0].startswith(
      "this configuration on this machine: about 2.2 GB of 1001.0 GB host memory"
    )
    assert "for its programs on each device: about 2.2 GB of" in said[1]
    assert said.pop().endswith(
      "; about 8.5 minutes, 0.5 s a learner step, by what each of its parts takes alone"
    )
    pacer = training.pacer = SimpleNamespace(learner_steps=0, env_steps=10_000)

    def step():
      pacer.learner_steps += 1
      machine.now += 1
      for call in training.after_step:
        call()

    machine.now = 100.0
    step()  # not warm yet
    warm_up._calm = 10**6
    spend(training, search=0.0, train=0.0, wait=0.0, evaluate=0.0)
    step()  # from here on it measures
    spend(
      training, search=10.0, train=10.0, wait=30.0, evaluate=4.0
    )  # half of the work is the sweep's
    for _ in range(19):
      step()
    assert len(said) == 1
    machine.now += 4  # the evaluation
    step()
  # One second a step; sweeps will cost 1.5 times as much on average, the buffer growing from 10,000 to 20,000 states.
  assert "this will take about 22.9 minutes, 20.8 minutes of them from now" in said[1]
  assert "1.25 s a learner step on average, 1 s now" in said[1]
  assert "about 2.0 GB of" in said[1] and replay < 10**8  # more than is held with the replay full
  machine.now, machine.peak = 1300.0, 3 * 10**9
  estimate.ended()
  assert said[2:] == [
    "took 21.7 minutes (estimated: 9.2 minutes at the start, 22.9 minutes at step 22), at most 3.0 GB of host memory "
    "(estimated: 2.2 GB at the start, 2.0 GB at step 22)"
  ]


@pytest.mark.parametrize(("room", "warned"), [(10**8, True), (10**12, False)])
def test_too_little_memory_is_said_with_the_keys_to_change(tmp_path, monkeypatch, room, warned):
  said = []
  estimate = Forecast(tiny.config(), said.append, Machine(monkeypatch, room))
  with tiny.training(tiny.config(), tmp_path) as training:
    estimate.watch(training, WarmUp(Compilations()))
  assert any("warning" in line and "replay.capacity" in line for line in said) == warned


def test_a_device_with_too_little_memory_is_said(tmp_path, monkeypatch):
  """As a GPU would say it: 1 MB of memory, and programs that need 7 MB."""
  said: list[str] = []
  monkeypatch.setattr(
    memory, "of_devices", lambda devices, what: {"bytes_limit": 10**6}.get(what, 3 * 10**6)
  )
  monkeypatch.setattr(forecast, "_devices_are_host", lambda: False)
  estimate = Forecast(tiny.config(), said.append, Machine(monkeypatch))
  with tiny.training(tiny.config(), tmp_path) as training:
    estimate.watch(training, WarmUp(Compilations()))
    assert len(said) == 1 and " of 1.0 MB on each device" in said[0]
    monkeypatch.setattr(training.learner, "update", SimpleNamespace(bytes=5 * 10**6))
    monkeypatch.setattr(training.inference, "search", SimpleNamespace(bytes=2 * 10**6))
    monkeypatch.setattr(training.inference, "value", SimpleNamespace(bytes=0))
    estimate.prepared(training, None)
  assert (
    said[1].startswith("with 7.0 MB for its programs on each device: ") and "minutes" not in said[1]
  )
  assert (
    said[2].startswith("warning")
    and "replay.frames=host" in said[2]
    and "learner.batch_size" in said[2]
  )
  estimate.ended()
  assert "3.0 MB of a device's (estimated: 7." in said[3]
