"""Tests of runs with durable experience, and of journals that are full or have lost experience."""

import contextlib
import shutil
import sqlite3
import threading
from unittest import mock

import jax
import numpy as np
import pytest

import tiny
from launched import listing
from same import assert_same_replays, frames_of
from speedyzero_jax.metrics import jsonl
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run import build, snapshot, train
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.experiment import Membership, TrainingError
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.workers.weights import ACTOR
from whole_runs import finish, quick, rows_of

SHORT = "run.mode=async", "learner.steps=8", "run.env_steps=100"


def durable(folder, resume_step=None, **of_membership):
  """A short experiment with durable experience. Left without saving, it is as after a kill."""
  membership = Membership(durable=True, **of_membership)
  return quick(folder, *SHORT, resume_step=resume_step, membership=membership)


@pytest.mark.parametrize("on_policy", [False, True])
def test_experience_is_on_disk_unless_a_resumed_run_discards_it(tmp_path, monkeypatch, on_policy):
  monkeypatch.setattr(tiny.ChecksumAgent, "on_policy", on_policy)
  with durable(tmp_path / "run") as experiment:
    experiment.collector.collect()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")  # the run has locked the journal
  with contextlib.closing(sqlite3.connect(tmp_path / "copy/journal.sqlite")) as journal:
    ((rows,),) = journal.execute("SELECT count(*) FROM segment")
  assert (rows == 0) == on_policy


def test_invalid_experience_of_the_local_actor_does_not_reach_the_journal(tmp_path, monkeypatch):
  """Otherwise no later start could append it to the replay."""
  with durable(tmp_path) as experiment:
    collector = experiment.collector
    collector.collect()
    heads, step = experiment.replay.heads, collector.local.step

    def broken(*args, **kwargs):
      slots, count = step(*args, **kwargs)
      slots["reward"][:] = np.nan
      return slots, count

    monkeypatch.setattr(collector.local, "step", broken)
    with pytest.raises(ValueError, match="reward"):
      collector.collect()
    for part in (experiment.replay, experiment.recovery.journal):
      np.testing.assert_array_equal(part.heads, heads)


def test_the_local_actor_gets_the_progress_of_training(tmp_path):
  with durable(tmp_path) as experiment:
    experiment.limiter.restore(50, 6)
    local = experiment.collector.local
    with mock.patch.object(local, "step", wraps=local.step) as step:
      experiment.collector.collect()
  assert step.call_args.kwargs == {"budget": 50, "progress": 0.75, "random": False}


def test_steps_of_another_process_are_counted_before_a_checkpoint(tmp_path, monkeypatch):
  """While the collector is locked, no checkpoint can be taken."""
  with durable(tmp_path) as experiment:
    collector, limiter, locked = experiment.collector, experiment.limiter, []
    version, add = experiment.weights.latest(ACTOR), limiter.add_env_steps
    slots, _ = collector.local.step(version, budget=99, progress=0.0, random=True)

    def added(*args, **kwargs):
      locked.append(collector.lock.locked())
      add(*args, **kwargs)

    monkeypatch.setattr(limiter, "add_env_steps", added)
    collector.take(slots, [], granted=0)
  assert locked == [True]


@pytest.mark.parametrize("call", ["collect", "take", "truncate"])
def test_a_call_waits_while_the_collector_is_locked(tmp_path, call):
  """As it is while a checkpoint reads actor, journal and replay, which must agree."""
  with durable(tmp_path) as experiment:
    collector, version = experiment.collector, experiment.weights.latest(ACTOR)
    collector.collect()
    steps, heads = experiment.limiter.env_steps, experiment.replay.heads
    if call == "take":
      slots, _ = collector.local.step(version, budget=99, progress=0.0, random=True)
      arguments, options = (slots, []), {"granted": 0}
    else:
      arguments, options = {"collect": (), "truncate": ([0],)}[call], {}
    thread = threading.Thread(target=getattr(collector, call), args=arguments, kwargs=options)
    with collector.lock:
      thread.start()
      thread.join(0.05)
      assert thread.is_alive() and experiment.limiter.env_steps == steps
      for part in (experiment.replay, experiment.recovery.journal):
        np.testing.assert_array_equal(part.heads, heads)
    thread.join(10)
    assert (experiment.limiter.env_steps > steps) == (call != "truncate")


def test_a_checkpoint_waits_for_a_step_that_is_in_the_journal_but_not_in_the_replay(
  tmp_path, monkeypatch
):
  with durable(tmp_path) as experiment:
    replay, recorded, go_on, saved = experiment.replay, threading.Event(), threading.Event(), []
    append = replay.append

    def appending(slots):
      recorded.set()
      assert go_on.wait(10)
      append(slots)

    monkeypatch.setattr(replay, "append", appending)
    monkeypatch.setattr(experiment.recovery, "save", lambda made, **_: saved.append(made))
    collecting = threading.Thread(target=experiment.collector.collect)
    saving = threading.Thread(target=snapshot.save, args=(experiment,))
    collecting.start()
    assert recorded.wait(10)
    saving.start()
    saving.join(0.2)
    assert not saved
    go_on.set()
    for thread in (collecting, saving):
      thread.join(10)
    (made,) = saved
    assert made.env_steps == experiment.limiter.env_steps > 0
    np.testing.assert_array_equal(made.heads, experiment.recovery.journal.heads)


def test_a_local_actor_counts_its_steps_before_a_checkpoint_and_uses_the_newest_weights(
  tmp_path, monkeypatch
):
  """A bound on the lag assumes weights as new as those published when a step begins."""
  with durable(tmp_path) as experiment:
    limiter, collector, variables = experiment.limiter, experiment.collector, experiment.state[0]
    begin, add, locked = limiter.begin_acting, limiter.add_env_steps, []

    def beginning(actor):
      begin(actor)
      experiment.weights.publish(8, variables)

    def adding(count, **options):
      locked.append(collector.lock.locked())
      add(count, **options)

    monkeypatch.setattr(limiter, "begin_acting", beginning)
    monkeypatch.setattr(limiter, "add_env_steps", adding)
    collector.collect()
    assert (experiment.replay.state_dict()["slot_step"] == 8).all() and locked == [True]


def test_recorded_steps_of_weights_that_are_lost_count_as_of_the_checkpoint(tmp_path):
  with durable(tmp_path) as experiment:
    snapshot.save(experiment, required=True)
    for _ in range(2):
      experiment.limiter.add_learner_step()
    experiment.weights.publish(2, experiment.state.variables)
    experiment.collector.collect()
    assert (experiment.replay.state_dict()["slot_step"] == 2).all()
  with durable(tmp_path, 0) as experiment:
    state = experiment.replay.state_dict()
    assert experiment.limiter.learner_steps == 0 and len(state["slot_step"]) == 3
    for name in ("step", "policy_step", "value_step"):
      assert not state[f"slot_{name}"].any()


def test_new_games_begin_also_when_only_resets_followed_the_checkpoint(tmp_path):
  """In Catch all lanes end together: the next step adds a slot to each, but no agent steps."""
  with durable(tmp_path) as experiment:
    collector, limiter = experiment.collector, experiment.limiter
    while not collector.local._current.terminated.all():
      collector.collect()
    snapshot.save(experiment, required=True)
    steps, heads = limiter.env_steps, experiment.replay.heads
    collector.collect()
    assert limiter.env_steps == steps
  with durable(tmp_path, 0) as experiment:
    assert experiment.limiter.env_steps == steps
    experiment.collector.collect()
    np.testing.assert_array_equal(experiment.replay.heads, heads + 2)


@pytest.mark.parametrize("saved", [False, True])
def test_the_replay_is_restored_exactly(tmp_path, saved):
  """From the journal alone or from a checkpoint, with episodes cut by a lost environment."""
  with durable(tmp_path) as experiment:
    collector = experiment.collector
    for actor in range(2):
      if actor:
        collector.truncate(range(3))
        collector.local = snapshot._new_actor(experiment, experiment.replay.heads)
      for _ in range(13):
        collector.collect()
    if saved:
      snapshot.save(experiment, required=True)
    collector.truncate(range(3))
  with durable(tmp_path, 0) as again:
    again.collector.truncate(range(3))
    assert_same_replays(experiment.replay, again.replay)


def test_new_games_differ_each_time(tmp_path, monkeypatch):
  make_env, seeds = snapshot.make_env, []

  def seeded(config, lanes, seed, **kwargs):
    seeds.append(seed)
    return make_env(config, lanes, seed, **kwargs)

  monkeypatch.setattr(snapshot, "make_env", seeded)
  with durable(tmp_path) as experiment:
    experiment.collector.collect()
    snapshot.save(experiment, required=True)
    experiment.collector.collect()
  for _ in range(2):
    with durable(tmp_path, 0) as experiment:
      experiment.collector.collect()
  assert len(set(seeds)) == len(seeds) == 3


def test_a_restart_from_the_beginning_keeps_the_experience(tmp_path):
  """The case of all learners if one of them has no checkpoint."""
  with durable(tmp_path) as experiment:
    experiment.collector.collect()
    changed = jax.tree.map(lambda x: x + 1, experiment.state.variables)
    experiment.state = experiment.state._replace(variables=changed)
    snapshot.save(experiment, required=True)
    assert finish(experiment) is True
  assert Checkpoints(tmp_path).steps() == [0, 4]
  with durable(tmp_path, 4, all_gather=lambda step: [step, -1]) as experiment:
    assert not Checkpoints(tmp_path).steps() and not rows_of(tmp_path)
    aside = {path.name.split("-")[0] for path in (tmp_path / "checkpoints" / "damaged").glob("*-*")}
    assert aside == {"0", "4"}
    assert (experiment.limiter.learner_steps, experiment.limiter.env_steps) == (0, 100)
    snapshot.save(experiment, required=True)
    new, heads = snapshot.hash_of(experiment.state.variables), experiment.replay.heads
  with durable(tmp_path, 0) as experiment:
    assert snapshot.hash_of(experiment.state.variables) == new
    np.testing.assert_array_equal(experiment.replay.heads, heads)
    assert finish(experiment) is True and experiment.limiter.learner_steps == 8


def test_experience_that_the_journal_has_evicted_is_collected_again(tmp_path, capsys):
  """By a restart from the beginning, when later checkpoints are missing."""
  with durable(tmp_path) as experiment:
    for _ in range(5):
      experiment.collector.collect()
    heads = experiment.replay.heads
    experiment.recovery.journal.evict(heads - 1)
  with durable(tmp_path, 0) as experiment:
    assert f"{heads.sum()} later frames in 3 lanes are lost" in capsys.readouterr().out
    assert experiment.limiter.env_steps == 0 and not experiment.replay.heads.any()
    experiment.collector.collect()
    np.testing.assert_array_equal(experiment.recovery.journal.heads, [1, 1, 1])


def test_experience_after_a_damaged_row_of_the_journal_is_collected_again(tmp_path, capsys):
  with durable(tmp_path) as experiment:
    snapshot.save(experiment, required=True)
    for _ in range(5):
      experiment.collector.collect()
    heads = experiment.replay.heads
  with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as journal, journal:
    journal.execute("UPDATE segment SET crc = crc + 1 WHERE lane = 1 AND start = 3")
  with durable(tmp_path, 0) as experiment:
    assert "lane 1, slot 3 is missing or damaged" in capsys.readouterr().out
    kept = experiment.replay.heads
    np.testing.assert_array_equal(kept, [heads[0], 3, heads[2]])
    np.testing.assert_array_equal(experiment.recovery.journal.heads, kept)
    assert finish(experiment) is True
  with durable(tmp_path, 8) as experiment:
    assert experiment.limiter.env_steps == 100


def test_learners_with_different_networks_do_not_continue(tmp_path):
  with durable(tmp_path, all_gather=lambda number: [number, number], units=2) as experiment:
    experiment.collector.collect()
    snapshot.save(experiment, required=True)

  def theirs(number):  # the same step, another network
    return [number, number if number < 1000 else number + 1]

  with (
    pytest.raises(TrainingError, match="networks of the learner processes differ"),
    durable(tmp_path, 0, all_gather=theirs, units=2),
  ):
    pytest.fail("opened")


def test_learners_whose_networks_drift_apart_stop_at_the_next_checkpoint(tmp_path):
  digests = iter(range(9))
  with durable(tmp_path, all_gather=lambda number: [number, next(digests)], units=2) as experiment:
    experiment.collector.collect()
    with pytest.raises(TrainingError, match="networks of the learner processes differ"):
      snapshot.save(experiment)
    assert not experiment.recovery.checkpoints.steps()


@pytest.mark.parametrize("acts", [True, False])
def test_a_full_journal_ends_the_run_with_one_line(tmp_path, monkeypatch, capsys, acts):
  """With experience from an actor of this process or of another."""
  journal, raised = build.Journal, []

  def limited(*args, **kwargs):
    opened = journal(*args, **kwargs)
    (pages,) = opened._db.execute("PRAGMA page_count").fetchone()
    opened._db.execute(f"PRAGMA max_page_count={pages + 1}")
    return opened

  def act(experiment):
    local = snapshot._new_actor(experiment, experiment.replay.heads)
    with contextlib.closing(local):
      version = experiment.weights.latest(ACTOR)
      try:
        while True:
          slots, _ = local.step(version, budget=10**6, progress=0.0, random=True, last=False)
          experiment.collector.take(slots, [], granted=0)
      except JournalError as error:
        raised.append(error)

  @contextlib.contextmanager
  def serving(experiment):
    thread = threading.Thread(target=act, args=(experiment,))
    if not acts:
      thread.start()
    yield
    if not acts:
      thread.join()

  monkeypatch.setattr(build, "Journal", limited)
  membership = Membership(runs_actor=acts, durable=True)
  with Signals() as signals:
    config = tiny.config("agent=quick_agent", *SHORT)
    code = train.train(
      config, tmp_path, resume=False, signals=signals, membership=membership, serving=serving
    )
  out, errors = capsys.readouterr()
  assert code == 1 and errors.startswith("error: ") and errors.count("\n") == 1
  assert str(tmp_path / "journal.sqlite") in errors and "disk is full" in errors
  assert "error" not in out and len(raised) == (not acts)


def test_a_run_that_pauses_at_its_last_step_is_evaluated(tmp_path):
  config = tiny.config("agent=quick_agent", "run.pause_at=12", "evaluation.at_end=true")
  with Signals() as signals:
    assert train.train(config, tmp_path, resume=False, signals=signals) == 0
  assert (tmp_path / "evaluation.json").exists()


def test_a_resume_that_fails_changes_no_metrics(tmp_path, monkeypatch, capsys):
  def train_to_end(resume):
    with Signals() as signals:
      return train.train(config, tmp_path, resume=resume, signals=signals)

  def refuse(*_, **__):
    raise CheckpointError("out of memory")

  config = tiny.config("agent=quick_agent")
  assert train_to_end(resume=False) == 0
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(path.read_bytes() + jsonl.line({"step": 99}))  # after the newest checkpoint
  before = listing(tmp_path)
  monkeypatch.setattr(Checkpoints, "restore", refuse)
  assert train_to_end(resume=True) == 1 and "out of memory" in capsys.readouterr().err
  after = listing(tmp_path)
  assert before.items() <= after.items()
  assert {name for name in after.keys() - before.keys() if "sqlite" not in name} == set()


def test_several_learners_pause_at_the_same_step_without_agreeing_on_it(tmp_path):
  config = tiny.config("agent=quick_agent", "run.mode=async", "run.pause_at=5", "actor.lanes=4")
  membership = Membership(0, 2, all_gather=lambda number: [number, number])
  with Signals() as signals:
    assert train.train(config, tmp_path, resume=False, signals=signals, membership=membership) == 0
  assert max(Checkpoints(tmp_path).steps()) == 5


def test_learners_whose_final_networks_differ_fail(tmp_path, capsys):
  config = tiny.config("agent=quick_agent", "run.mode=async", "run.pause_at=3", "actor.lanes=4")
  membership = Membership(0, 2, all_gather=lambda number: [number, number + (number > 10**6)])
  with Signals() as signals:
    assert train.train(config, tmp_path, resume=False, signals=signals, membership=membership) == 1
  assert "networks of the learner processes differ after learner step 3" in capsys.readouterr().err


def test_more_experience_than_the_replay_holds_is_replayed(tmp_path):
  """A journal's row may be longer than a lane of the replay."""
  small = "run.mode=async", "replay.capacity=60"
  with quick(tmp_path, *small) as experiment:
    while experiment.limiter.env_steps < 100:
      experiment.collector.collect()
    experiment.recovery.journal.flush()
    heads, steps = experiment.replay.heads, experiment.limiter.env_steps
    assert (heads > experiment.replay.store.capacity).all()
    stored = frames_of(experiment.replay)
  with quick(tmp_path, *small, resume_step=0) as experiment:
    assert experiment.limiter.env_steps == steps
    np.testing.assert_array_equal(experiment.replay.heads, heads)
    again = frames_of(experiment.replay)
    for lane, frames in stored.items():
      np.testing.assert_array_equal(again[lane], frames, err_msg=lane)


def test_steps_of_other_processes_continue_their_episodes_before_new_games_begin(tmp_path):
  """A run with remote actors, killed after its checkpoint, continues with a local actor."""
  with durable(tmp_path) as experiment:
    for _ in range(3):
      experiment.collector.collect()
    local, experiment.collector.local = experiment.collector.local, None  # as if remote
    snapshot.save(experiment, required=True)
    experiment.collector.local = local
    experiment.collector.collect()
    steps = experiment.limiter.env_steps
  with durable(tmp_path, 0) as experiment:
    assert experiment.limiter.env_steps == steps
    assert finish(experiment) is True
