"""Runs that make experience durable before it counts, with a journal that has forgotten some, or takes no more."""

import contextlib
import shutil
import threading

import jax
import numpy as np
import pytest
import tiny

from speedyzero_jax.metrics import jsonl
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.run import loops, train
from speedyzero_jax.run.builders import game_of
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.run.experiment import WHOLE, Training, TrainingError
from speedyzero_jax.workers import local_actor
from speedyzero_jax.workers.weights import ACTOR


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)


def journal_of(config, folder):
  game = game_of(config)
  form = config.actor.lanes, game.frame_shape, game.frame_dtype, game.num_actions
  return contextlib.closing(Journal(folder / "journal.sqlite", *form))


@contextlib.contextmanager
def journalled(config, folder, resume_step=None, **of_part):
  """A training whose experience goes into a journal first. Left without saving, it is as after a kill."""
  with (
    journal_of(config, folder) as journal,
    Reporter(config, folder, "tiny", resume_step) as reporter,
  ):
    part = WHOLE._replace(journal=journal, **of_part)
    training = Training(config, folder, reporter, resume=resume_step is not None, part=part)
    try:
      yield training
    finally:
      training.close()


def test_what_the_journal_has_forgotten_is_said(tmp_path, capsys):
  """After a checkpoint that is older than what the journal was cut for, which only a damaged newer one can bring."""
  config = tiny.config("run.mode=async", "learner.steps=8", "run.env_steps=100")
  with journalled(config, tmp_path) as training:
    assert loops.run(training)
    training.save(required=True)
    heads = training.replay.heads
  (older,) = (step for step in Checkpoints(tmp_path).steps() if step < 8)
  shutil.rmtree(tmp_path / "checkpoints" / "8")
  with journalled(config, tmp_path, resume_step=older) as training:
    assert "the journal" not in capsys.readouterr().out.replace(
      "from the journal", ""
    )  # it has all
    assert training.pacer.env_steps == 100
    training.part.journal.evict(heads)
  with journalled(config, tmp_path, resume_step=older) as training:
    lost = (heads - training.replay.heads).sum()
    assert lost > 10 and training.pacer.env_steps < 100
    assert (
      f"what came right after this checkpoint: {lost} later frames of 3 lanes are lost"
      in capsys.readouterr().out
    )
    assert loops.run(training) and training.pacer.env_steps == 100


def test_games_begin_anew_also_when_only_resets_came_after_the_checkpoint(tmp_path):
  """In Catch all lanes end together: the step after takes a slot of each, and is no agent step."""
  config = tiny.config("run.mode=async")
  with journalled(config, tmp_path) as training:
    while not training.collecting.actor._shown.terminated.all():
      training.collect()
    training.save(required=True)
    steps, heads = training.pacer.env_steps, training.replay.heads
    training.collect()
    assert training.pacer.env_steps == steps
  with journalled(config, tmp_path, resume_step=0) as training:
    assert training.pacer.env_steps == steps
    training.collect()
    np.testing.assert_array_equal(training.replay.heads, heads + 2)


def test_games_that_begin_anew_are_others_each_time(tmp_path, monkeypatch):
  config, make_env, seeds = tiny.config("run.mode=async"), local_actor.make_env, []
  monkeypatch.setattr(
    local_actor,
    "make_env",
    lambda c, lanes, seed, **kw: (seeds.append(seed), make_env(c, lanes, seed, **kw))[1],
  )
  with journalled(config, tmp_path) as training:
    training.collect()
    training.save(required=True)
    training.collect()
  for _ in range(3):
    with journalled(config, tmp_path, resume_step=0) as training:
      training.collect()
  first, *again = seeds
  assert set(again[::2]) == {first} and len({*again[1::2], first}) == 4


def test_who_begins_anew_forgets_the_network_and_keeps_the_experience(tmp_path, capsys):
  """As all must when a unit has no checkpoint: another of the same moment would otherwise stand for the new one."""
  config = tiny.config("run.mode=async", "learner.steps=8", "run.env_steps=100")
  with journalled(config, tmp_path) as training:
    training.collect()
    training.state = training.state._replace(
      variables=jax.tree.map(lambda x: x + 1, training.state.variables)
    )
    training.save(required=True)
    assert loops.run(training)
  assert Checkpoints(tmp_path).steps() == [0, 4]
  with journalled(config, tmp_path, resume_step=4, agree=lambda step: [step, -1]) as training:
    assert "another learner has no checkpoint: all begin anew" in capsys.readouterr().out
    assert not Checkpoints(tmp_path).steps() and not jsonl.read_rows(tmp_path / "metrics.jsonl")[0]
    assert sorted(path.name for path in (tmp_path / "damaged").iterdir() if path.is_dir()) == [
      "0",
      "4",
    ]
    assert (training.pacer.learner_steps, training.pacer.env_steps) == (0, 100)
    training.save(required=True)
    new, heads = training.parameters_hash(), training.replay.heads
  with journalled(config, tmp_path, resume_step=0) as training:
    assert training.parameters_hash() == new
    np.testing.assert_array_equal(training.replay.heads, heads)
    assert loops.run(training) and training.pacer.learner_steps == 8


def test_learners_with_different_networks_do_not_go_on(tmp_path):
  config = tiny.config("run.mode=async")
  with journalled(config, tmp_path) as training:
    training.collect()
    training.save(required=True)

  def theirs(number):  # the same step, another network
    return [number, number if number < 1000 else number + 1]

  with (
    pytest.raises(
      TrainingError, match="checkpoints of step 0 hold different networks: move checkpoints/0 away"
    ),
    journalled(config, tmp_path, resume_step=0, agree=theirs),
  ):
    pytest.fail("opened")


@pytest.mark.parametrize("acts", [True, False])
def test_a_full_journal_ends_the_run_in_a_line(tmp_path, capsys, acts):
  """Whether an actor of this process or of another meets it."""
  config = tiny.config("run.mode=async")
  raised = []

  def act(training):
    actor = training._make_collecting().actor
    version = training.weights.latest(ACTOR)
    try:
      while True:
        training.take(
          actor.step(version, budget=10**6, progress=0.0, random=True, last=False)[0], [], granted=0
        )
    except Exception as error:
      raised.append(error)

  @contextlib.contextmanager
  def elsewhere(training):
    thread = threading.Thread(target=act, args=(training,))
    if not acts:
      thread.start()
    yield
    if not acts:
      thread.join()

  with journal_of(config, tmp_path) as journal, train.Signals() as signals:
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages + 1}")
    part = WHOLE._replace(journal=journal, acts=acts)
    code = train.train(config, tmp_path, resume=False, signals=signals, part=part, around=elsewhere)
  out, errors = capsys.readouterr()
  line = f"error: journal {tmp_path / 'journal.sqlite'} can't be written: database or disk is full"
  assert code == 1 and errors == line + "\n" and line in out.splitlines()
  assert [type(error) for error in raised] == [JournalError] * (not acts)
