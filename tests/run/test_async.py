"""Tests of runs with roles that overlap in threads: counts, resumption, and errors."""

import threading
import time
from collections import deque
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

import tiny
from same import assert_same
from speedyzero_jax.metrics import names
from speedyzero_jax.run import loops, snapshot, steps
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.run.experiment import Membership
from speedyzero_jax.run.rate_limiter import RateLimiter
from speedyzero_jax.workers.weights import ACTOR, DivergedError
from whole_runs import everything, finish, interrupt_at, quick, rows_of, stopped

ASYNC = "run.mode=async"


def counts(experiment):
  limiter = experiment.limiter
  return limiter.env_steps, limiter.learner_steps, int(experiment.state.step)


@pytest.mark.parametrize("schedule", ["sweep", "batch", "off"])
def test_overlapping_roles_take_exactly_the_configured_steps(tmp_path, monkeypatch, schedule):
  overrides = ASYNC, f"reanalyse.schedule={schedule}", "run.log_interval=1"
  if schedule == "off":
    overrides += ("refresh.enabled=false",)
  learn, due = steps.learn, []

  def checked(experiment, prepared):
    due.append(experiment.limiter.may_learn())
    return learn(experiment, prepared)

  monkeypatch.setattr(steps, "learn", checked)
  with quick(tmp_path, *overrides) as experiment:
    limiter = experiment.limiter
    assert finish(experiment) is True
    snapshot.save(experiment, required=True)
    assert due == [True] * 12 and counts(experiment) == (150, 12, 12)
    assert experiment.replay.num_transitions == 150
    ended = everything(experiment)
    # The priorities of every batch were written, the last one's too.
    scored = ended["replay"]["priority_step"]
    assert schedule != "off" or scored[scored < 2**31 - 1].max() == 11
  rows = rows_of(tmp_path)
  assert [row["step"] for row in rows] == list(range(1, 13))
  for row in rows:
    least, most = limiter.required(row["step"] - 1), limiter.required(row["step"])
    assert least <= row["env_steps"] <= min(150, most + 2 * 11 + 3)  # ratio 11, 3 lanes
  with quick(tmp_path, *overrides, resume_step=12) as experiment:
    assert_same(ended, everything(experiment))


@pytest.mark.parametrize(("most", "continued"), [(500, True), (20, False)])
def test_games_are_continued_unless_that_takes_too_many_steps(
  tmp_path, monkeypatch, most, continued
):
  monkeypatch.setattr(snapshot, "_REPEATED", most)
  with quick(tmp_path, ASYNC) as experiment:
    interrupt_at(experiment, learner_step=6)
    finish(experiment)
    snapshot.save(experiment, required=True)
    step, heads = experiment.limiter.learner_steps, experiment.replay.heads
  with quick(tmp_path, ASYNC, resume_step=step) as experiment:
    # New games begin in slots after those that truncate the open ones.
    assert (experiment.collector.local._start == 0).all() == continued
    assert continued or (experiment.collector.local._start >= heads).all()
    assert finish(experiment) is True


def test_a_checkpoint_has_the_priorities_of_every_step_before_it(tmp_path, monkeypatch):
  finish_step, save, updated, saved = steps.finish_step, snapshot.save, [], {}

  def updating(experiment, prepared, result, step):
    finish_step(experiment, prepared, result, step)
    updated.append(step)

  def saving(experiment):
    saved[experiment.limiter.learner_steps] = list(updated)
    save(experiment)

  monkeypatch.setattr(steps, "finish_step", updating)
  monkeypatch.setattr(snapshot, "save", saving)
  with quick(tmp_path, ASYNC) as experiment:
    assert finish(experiment) is True
  assert saved == {4: list(range(4)), 8: list(range(8))} and updated == list(range(12))


def test_sweeps_go_on_when_no_batch_is_ready_any_more(tmp_path):
  """At the end of a run, a queue is empty while the learner may still wait for a sweep."""
  with quick(tmp_path) as experiment:
    ready = iter([False, True, False])
    experiment.can_draw = lambda: next(ready)
    assert [experiment.sweeping() for _ in range(3)] == [False, True, True]


def test_all_tasks_of_all_learners_have_keys_of_their_own(tmp_path, monkeypatch):
  """Blocks of sweeps, and tasks of batches."""
  keys, blocks = [], 2
  with quick(tmp_path) as experiment:
    monkeypatch.setattr(experiment, "run_task", lambda work, key: keys.append(key))
    assert len(experiment.sweepers) == 2
    for unit in range(2):
      experiment.membership = Membership(unit, 2)
      for block in range(blocks):
        experiment.execute([None, None], block)  # of the batch for this learner step
        for sweeper in experiment.sweepers:
          sweeper.calls = block
          keys.append(experiment.sweep_key(sweeper))
  assert len({str(jax.random.key_data(key)) for key in keys}) == 2 * blocks * (2 + 2)


def test_the_bound_on_policy_lag_holds_with_a_slow_actor(tmp_path):
  """The actor takes its weights, and acts when the learner has to wait."""

  def lag(folder, *overrides):
    many = (
      ASYNC, "run.env_steps=100", "learner.steps=60", "actor.weights_interval=2",
      "run.checkpoint_interval=1000", *overrides,
    )  # fmt: skip
    with quick(folder, *many) as experiment:
      limiter, latest = experiment.limiter, experiment.weights.latest

      def slow(subscriber):
        version = latest(subscriber)
        if subscriber == ACTOR:
          limiter.wait_for(lambda: limiter.lag_exceeded or not limiter.may_learn(), 5)
        return version

      experiment.weights.latest = slow
      assert finish(experiment) is True
    return max(row.get(names.POLICY_LAG_MAX, 0) for row in rows_of(folder))

  assert lag(tmp_path / "free") > 3 >= lag(tmp_path / "bound", "actor.max_lag=3")


def test_an_interrupted_run_is_saved_and_continues(tmp_path, monkeypatch):
  draw, drawn = steps.draw, []

  def drawing(experiment, learner_step):
    drawn.append(learner_step)
    return draw(experiment, learner_step)

  step, before = None, None
  for stop in ({"collects": 5}, {"learner_step": 3}):
    step, before = stopped(tmp_path, ASYNC, resume_step=step, before=before, **stop)
  monkeypatch.setattr(steps, "draw", drawing)
  with quick(tmp_path, ASYNC, resume_step=step) as experiment:
    assert_same(before, everything(experiment))
    assert finish(experiment) is True
    assert counts(experiment) == (150, 12, 12) and experiment.replay.num_transitions == 150
  assert drawn == list(range(step, 12))


@pytest.mark.parametrize("failing", ["environment", "journal"])
def test_a_run_that_failed_while_acting_can_be_resumed(tmp_path, failing):
  with quick(tmp_path, ASYNC) as experiment:
    collector = experiment.collector
    for _ in range(20):
      collector.collect()
    if failing == "environment":
      collector.local._env.step = mock.Mock(side_effect=OSError)
    else:
      collector._record = mock.Mock(side_effect=OSError)
    with pytest.raises(OSError):
      collector.collect()
    snapshot.save(experiment, required=True)
    heads = experiment.replay.heads
  with quick(tmp_path, ASYNC, resume_step=0) as experiment:
    np.testing.assert_array_equal(experiment.replay.heads, heads)
    assert (experiment.collector.local._start == 0).all() == (failing == "environment")
    assert finish(experiment) is True


def test_a_run_continues_where_environments_play_differently(tmp_path, monkeypatch, capsys):
  """New games begin each time; later resumptions replay the new games."""
  make_env, machine = snapshot.make_env, 0
  monkeypatch.setattr(
    snapshot, "make_env", lambda c, lanes, seed, **kw: make_env(c, lanes, seed + machine, **kw)
  )
  step, left, previous = None, None, 0
  for machine, collects in ((0, 25), (7, 4), (7, 3), (8, None)):
    moved, previous = machine != previous, machine
    with quick(tmp_path, ASYNC, resume_step=step) as experiment:
      found, heads = everything(experiment), experiment.replay.heads
      assert ("led to other frames" in capsys.readouterr().out) == moved
      if moved:
        np.testing.assert_array_equal(found["actor"]["start"], heads)
        assert not len(found["actor"]["actions"]) and found["counters"] == left["counters"]
        newest = np.cumsum(heads - experiment.replay.tails) - 1
        ends = found["replay"]["slot_episode_end"][newest]
        np.testing.assert_array_equal(ends, heads - 1)  # no episode continues over the gap
        assert_same(left["episodes"], found["episodes"])
      elif left is not None:
        assert_same(left["actor"], found["actor"])
        assert_same(left["frames"], found["frames"])
      interrupt_at(experiment, collects=collects)
      assert finish(experiment) is (collects is None)
      snapshot.save(experiment, required=True)
      step, left = experiment.limiter.learner_steps, everything(experiment)
      assert experiment.replay.num_transitions == experiment.limiter.env_steps
  assert left["counters"] == [150, 12]


def test_collection_continues_while_the_learner_is_due_and_nothing_can_be_drawn(tmp_path):
  """Lanes with few steps of open episodes contain no eligible transitions."""
  few = "actor.random_steps=0", "run.env_steps=40", "learner.steps=20", "learner.tail_steps=0"
  with quick(tmp_path, ASYNC, *few) as experiment:
    assert finish(experiment, 60) is True
    assert counts(experiment) == (40, 20, 20)


class Broken(Exception):
  pass


@pytest.mark.parametrize(
  ("mode", "part"),
  [
    *(("async", part) for part in ("env", "sweep", "draw", "learn")),
    ("async", "finish_step"),
    ("async", "bookkeeping"),
    ("lockstep", "env"),
    ("lockstep", "learn"),
  ],
)
def test_an_error_of_any_part_is_raised_and_ends_every_thread(tmp_path, monkeypatch, mode, part):
  with quick(tmp_path, f"run.mode={mode}") as experiment:
    before = set(threading.enumerate())
    owner = experiment.collector.local._env if part == "env" else steps
    name, calls = ("step", 30) if part == "env" else (part, 3)
    function, left = getattr(owner, name), [calls]

    def broken(*args, **kwargs):
      left[0] -= 1
      if left[0] < 0:
        raise Broken
      return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)
    assert isinstance(finish(experiment), Broken)
    roles = [t for t in set(threading.enumerate()) - before if "_guard" in t.name]
    assert not roles


# With NaN weights the errors are still finite: only the update shows it. Step 3's is followed by a
# checkpoint and published to the actor; step 11 is the last.
@pytest.mark.parametrize(
  ("mode", "step", "field"),
  [("async", 3, "weight"), ("async", 11, "weight"), ("lockstep", 5, "value")],
)
def test_divergence_is_raised_and_never_saved(tmp_path, monkeypatch, mode, step, field):
  overrides, draw = (f"run.mode={mode}", "learner.tail_steps=0"), steps.draw

  def poisoned(experiment, learner_step):
    prepared = draw(experiment, learner_step)
    arrays = prepared.arrays
    if learner_step == step:
      arrays = arrays | {field: arrays[field] * np.float32(np.nan)}
    return prepared._replace(arrays=arrays)

  with quick(tmp_path, *overrides) as experiment:
    with monkeypatch.context() as patch:
      patch.setattr(steps, "draw", poisoned)
      error = finish(experiment)
    assert isinstance(error, DivergedError), error
    assert f"learner step {step + 1} " in str(error)
    with pytest.raises(DivergedError):
      snapshot.save(experiment, required=True)
  expected = [s for s in (4, 8) if s <= step]
  assert Checkpoints(tmp_path).steps() == expected
  if expected:
    with quick(tmp_path, *overrides, resume_step=expected[-1]) as experiment:
      leaves = jax.tree.leaves(jax.device_get(experiment.state.variables))
      assert all(np.isfinite(leaf).all() for leaf in leaves)


def test_a_unit_without_data_repeats_its_last_batch_to_stop_together(monkeypatch):
  config, ready = tiny.config("learner.prefetch=2", "learner.steps=9"), [True]
  limiter = RateLimiter(config, synchronous=True)
  experiment = SimpleNamespace(
    config=config, agent=SimpleNamespace(on_policy=True), membership=SimpleNamespace(units=2),
    limiter=limiter, can_draw=lambda: ready[0], batches=deque(),
  )  # fmt: skip

  def draw(*_):
    ready[0] = False
    return "batch"

  monkeypatch.setattr(steps, "draw", draw)
  roles = loops._AsyncLoops(experiment)
  thread = threading.Thread(target=roles._guard, args=(roles._draw,))
  thread.start()
  limiter.wait_for(lambda: experiment.batches, 10)
  time.sleep(0.1)
  assert list(experiment.batches) == ["batch"]
  limiter.stop_pacing()
  limiter.wait_for(lambda: len(experiment.batches) == 2, 10)
  limiter.stop()
  thread.join(10)
  assert list(experiment.batches) == ["batch"] * 2 and limiter.failure is None
