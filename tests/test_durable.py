"""Runs that make experience durable before it counts, with a journal that has forgotten some, or takes no more."""

import contextlib
import shutil
import threading

import pytest
import tiny

from speedyzero_jax import modes, running
from speedyzero_jax.checkpoint import Checkpoints
from speedyzero_jax.parts import game_of
from speedyzero_jax.replay.journal import Journal, JournalError
from speedyzero_jax.reporting import Reporter
from speedyzero_jax.training import WHOLE, Training
from speedyzero_jax.weights import ACTOR


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)


def journal_of(config, folder):
  game = game_of(config)
  form = config.actor.lanes, game.frame_shape, game.frame_dtype, game.num_actions
  return contextlib.closing(Journal(folder / "journal.sqlite", *form))


@contextlib.contextmanager
def journalled(config, folder, resume_step=None):
  """A training whose experience goes into a journal first."""
  with (
    journal_of(config, folder) as journal,
    Reporter(config, folder, "tiny", resume_step) as reporter,
  ):
    part = WHOLE._replace(journal=journal)
    training = Training(config, folder, reporter, resume=resume_step is not None, part=part)
    try:
      yield training
    finally:
      training.close()


def test_what_the_journal_has_forgotten_is_said(tmp_path, capsys):
  """After a checkpoint that is older than what the journal was cut for, which only a damaged newer one can bring."""
  config = tiny.config("run.mode=async", "learner.steps=8", "run.env_steps=100")
  with journalled(config, tmp_path) as training:
    assert modes.run(training)
    training.save(required=True)
    heads = training.replay.heads
  (older,) = (step for step in Checkpoints(tmp_path).steps() if step < 8)
  shutil.rmtree(tmp_path / "checkpoints" / "8")
  with journalled(config, tmp_path, resume_step=older) as training:
    assert "the journal" not in capsys.readouterr().out.replace("from the journal", "")  # it has all
    assert training.pacer.env_steps == 100
    training.part.journal.evict(heads)
  with journalled(config, tmp_path, resume_step=older) as training:
    lost = (heads - training.replay.heads).sum()
    assert lost > 10 and training.pacer.env_steps < 100
    assert f"what came right after this checkpoint: {lost} later frames of 3 lanes are lost" in capsys.readouterr().out
    assert modes.run(training) and training.pacer.env_steps == 100


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
        training.take(actor.step(version, budget=10**6, progress=0.0, random=True, last=False)[0], [], granted=0)
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

  with journal_of(config, tmp_path) as journal, running.Signals() as signals:
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages + 1}")
    part = WHOLE._replace(journal=journal, acts=acts)
    code = running.train(config, tmp_path, resume=False, signals=signals, part=part, around=elsewhere)
  out, errors = capsys.readouterr()
  line = f"error: journal {tmp_path / 'journal.sqlite'} can't be written: database or disk is full"
  assert code == 1 and errors == line + "\n" and line in out.splitlines()
  assert [type(error) for error in raised] == [JournalError] * (not acts)
