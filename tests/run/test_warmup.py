"""Tests of the compilation of a run's programs before the run, and of the time of its parts."""

import contextlib
import threading

import jax
import pytest

from speedyzero_jax.run import loops, warmup
from speedyzero_jax.run.experiment import Membership
from speedyzero_jax.run.factories import mean_stored
from speedyzero_jax.system import compilation
from whole_runs import quick

GATHERING = {"_taken", "of_part"}


def programs(experiment):
  """Names of the functions behind the programs and behind the gathering of frames."""
  inference = experiment.inference
  made = [experiment.learner.update, inference.act, *inference.tasks.values()]
  return {program.__name__ for program in made} | GATHERING


@contextlib.contextmanager
def compilations():
  """Names of functions that jax compiles or loads from its cache, in any thread."""
  found: list[str] = []

  def heard(event, duration_secs, **details):
    if event == "/jax/core/compile/backend_compile_duration":
      found.append(str(details.get("fun_name", "?")).removeprefix("jit(").removesuffix(")"))

  jax.monitoring.register_event_duration_secs_listener(heard)
  yield found
  jax.monitoring.unregister_event_duration_listener(heard)


@pytest.mark.parametrize(
  "overrides",
  [
    ("run.mode=async", "learner.devices=2", "replay.frames=device"),
    ("run.mode=lockstep", "reanalyse.schedule=batch", "replay.frames=host"),
    ("run.mode=lockstep", "reanalyse.reuse=true", "reanalyse.simulations=1"),
  ],
)
def test_a_run_compiles_nothing_that_was_not_compiled_before_it(tmp_path, overrides):
  with (
    compilations() as names,
    quick(tmp_path, *overrides, shared=False) as experiment,
  ):
    compiled: list[int] = []  # functions compiled until each learner step
    experiment.after_step.append(lambda: compiled.append(len(names)))
    timings = warmup.prepare(experiment)
    before = len(names)
    assert {"train", "act", "refresh"} <= {timing.program for timing in timings}
    assert all(timing.seconds > 0 for timing in timings)
    assert programs(experiment) - GATHERING <= set(names)
    assert experiment.state.step == 0
    assert experiment.limiter.learner_steps == experiment.limiter.env_steps == 0
    assert loops.run(experiment)
    assert not programs(experiment) & set(names[before:])
    assert names[compiled[8] :] == []  # nor what is small, once every sweep has begun


@pytest.mark.parametrize(("others", "learned"), [(0, 0), (1, 0), (0, 12)])
def test_learners_compile_training_together_or_not_at_all(tmp_path, monkeypatch, others, learned):
  compiled, gathered = set(), []

  def all_gather(number):  # one of two learners may be interrupted
    gathered.append(number)
    return [number, others]

  monkeypatch.setattr(
    compilation.Program, "prepare", lambda program, *_, **__: compiled.add(program.__name__)
  )
  with quick(tmp_path, shared=False) as experiment:
    experiment.membership = Membership(units=2, all_gather=all_gather)
    experiment.limiter.restore(0, learned)
    warmup.prepare(experiment)
    train = experiment.learner.update.__name__
  # A learner with all its steps and experience does not prepare, so this may not gather then.
  assert gathered == ([] if learned else [0])
  assert "act" in compiled and (train in compiled) == (not others and not learned)


def test_every_size_of_batch_is_compiled_for_actors_without_a_network(tmp_path, monkeypatch):
  sizes = []

  def prepare(program, _variables, inputs, *_args, **_options):
    if program.__name__ == "act":
      sizes.append(len(inputs.lane))

  monkeypatch.setattr(compilation.Program, "prepare", prepare)
  monkeypatch.setattr(warmup, "_seconds", lambda run: 0.0)
  overrides = "topology.inference=central", "topology.actors=3", "actor.lanes=20"
  with quick(tmp_path, *overrides) as experiment:
    warmup.prepare(experiment)
  assert sorted(sizes) == [8, 16, 32]  # 6 or 7 lanes of one actor to 20 of all


@pytest.mark.parametrize(("backend", "most"), [("cpu", 2), ("gpu", 1)])
def test_programs_are_compiled_one_at_a_time_except_on_cpus(tmp_path, monkeypatch, backend, most):
  running, largest, together = 0, 0, threading.Barrier(2)

  def prepare(program, *_args, **_options):
    nonlocal running, largest
    running += 1
    largest = max(largest, running)
    with contextlib.suppress(threading.BrokenBarrierError):
      together.wait(1)
    running -= 1

  monkeypatch.setattr(compilation.Program, "prepare", prepare)
  monkeypatch.setattr(warmup, "platform", lambda: backend)
  monkeypatch.setattr(warmup, "_seconds", lambda run: 0.0)
  with quick(tmp_path) as experiment:
    warmup.prepare(experiment)
  assert min(largest, 2) == most


def per_step(folder, *overrides):
  """Calls per learner step, by program; and the experiment."""
  sizes = ("run.env_steps=1000", "actor.random_steps=200", "learner.steps=100")
  with quick(folder, *sizes, *overrides) as experiment:
    calls = {timing.program: timing.calls for timing in warmup.prepare(experiment)}
    return calls, experiment


def test_a_step_takes_its_share_of_acting_its_batch_and_the_step_itself(tmp_path):
  off = "refresh.enabled=false"
  acting = pytest.approx(800 / 3 / 100)  # agent steps after the random ones, 3 at a time
  calls, _ = per_step(tmp_path / "batch", "reanalyse.schedule=batch", off)
  assert calls == {"act": acting, "reanalyse": 1, "bootstrap": 1, "train": 1}
  calls, _ = per_step(tmp_path / "values", "reanalyse.schedule=batch", "reanalyse.ratio=0", off)
  assert calls == {"act": acting, "bootstrap": 1, "train": 1}
  calls, _ = per_step(tmp_path / "off", "reanalyse.schedule=off", off)
  assert calls == {"act": acting, "train": 1}


def test_sweeps_run_often_enough_for_their_bound_in_a_growing_replay(tmp_path):
  calls, experiment = per_step(
    tmp_path, "reanalyse.max_age=30", "refresh.max_age=20", "replay.capacity=0"
  )
  stored = mean_stored(experiment.local_config, experiment.agent, 200)
  assert stored == pytest.approx(600)  # 200 after the random steps, 1,000 in the end
  for name, age in (("reanalyse", 30), ("refresh", 20)):
    assert stored / 32 / age < calls[name] < 2 * stored / 32 / age  # blocks of 32 states


def test_an_interrupted_run_compiles_nothing_more(tmp_path):
  with compilations() as names, quick(tmp_path, shared=False) as experiment:
    experiment.interrupt()
    assert warmup.prepare(experiment) == []
    assert not programs(experiment) & set(names)
    assert not loops.run(experiment)
