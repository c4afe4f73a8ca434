"""Tests of lockstep runs: reproducibility, and exact resumption from any checkpoint."""

import itertools
import shutil

import jax
import pytest

import trained
from same import assert_same
from speedyzero_jax.config import loader
from speedyzero_jax.metrics import names
from speedyzero_jax.replay.storage import NEVER
from speedyzero_jax.run import loops, snapshot, steps
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.experiment import Membership, TrainingError
from whole_runs import everything, interrupt_at, quick, rows_of, run, stopped

# Metrics that depend on the machine; checkpoints are written in the background.
MEASURED = ("time", "_per_second", "queue/", "time/", "checkpoint/")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  """Maps a reanalysis schedule to a run's final state, hash and folder; each runs once."""
  done = {}

  def of(schedule):
    if schedule not in done:
      folder = tmp_path_factory.mktemp(schedule)
      done[schedule] = *run(folder, f"reanalyse.schedule={schedule}"), folder
    return done[schedule]

  return of


def test_efficientzero_continues_bit_for_bit(tmp_path):
  """Other tests here use an agent that compiles quickly, with EfficientZero's replay."""
  agent = "agent=efficientzero", "loss.unroll_steps=1", "loss.consistency_coefficient=0"
  agent += ("refresh.enabled=false",)  # with fewer programs
  state, digest = run(tmp_path / "whole", *agent)
  step, _ = stopped(tmp_path / "parts", *agent, collects=33)  # while it collects for step 6
  assert step == 5
  final, final_digest = run(tmp_path / "parts", *agent, resume_step=step)
  assert final_digest == digest
  assert_same(state, final)


def test_parameters_begin_as_the_seed_says(tmp_path):
  begun = set()
  for seed in (0, 1):
    config = loader.load(["dqn"], ["env.game=Catch", "learner.devices=1", f"run.seed={seed}"])
    with trained.experiment(config, tmp_path / str(seed)) as experiment:
      begun.add(snapshot.hash_of(experiment.state.variables))
  assert len(begun) == 2


@pytest.fixture
def copied(uninterrupted, tmp_path):
  """A copy of the run's folder, its final state and its hash."""

  def copy(schedule="sweep"):
    state, digest, folder = uninterrupted(schedule)
    shutil.copytree(folder, tmp_path / "run")
    return tmp_path / "run", state, digest

  return copy


def test_the_same_seed_gives_the_same_run(uninterrupted, tmp_path):
  state, digest, folder = uninterrupted("sweep")
  again, digest_again = run(tmp_path / "a")
  assert digest == digest_again
  assert_same(state, again)
  plain = [
    [{k: v for k, v in row.items() if not any(t in k for t in MEASURED)} for row in rows_of(f)]
    for f in (folder, tmp_path / "a")
  ]
  assert plain[0] == plain[1]
  assert [row["step"] for row in plain[0]] == [3, 6, 9, 12] and len(plain[0][0]) > 20


def test_a_run_takes_exactly_the_configured_steps(uninterrupted):
  state, _, folder = uninterrupted("sweep")
  assert state["counters"] == [150, 12]
  row = rows_of(folder)[-1]
  assert (row["step"], row["env_steps"], row["replay/transitions"]) == (12, 150, 150)
  assert Checkpoints(folder).steps() == [4, 8, 12]
  scored = state["replay"]["priority_step"]
  assert scored[scored != NEVER].max() == 11  # by the last step, counted from 0


def test_rates_agree_with_the_steps_and_samples_between_two_lines(uninterrupted):
  _, _, folder = uninterrupted("sweep")
  for before, row in itertools.pairwise([{"step": 0, "env_steps": 0}, *rows_of(folder)]):
    learned, acted = (row[name] - before[name] for name in ("step", "env_steps"))
    seconds = learned / row[names.LEARNER_STEPS_PER_SECOND]
    assert row[names.SAMPLES_PER_SECOND] * seconds == pytest.approx(learned * 8)
    assert row[names.AGENT_STEPS_PER_SECOND] * seconds == pytest.approx(acted)


# In the random play (twice: there is a checkpoint of learner step 0 then), after a step, twice more
# before the next one, on a checkpoint, and one step before the end.
STOPS = {
  "sweep": [{"collects": 6}, {"collects": 3}, {"learner_step": 1}, {"collects": 2}, {"collects": 1},
            {"learner_step": 4}, {"learner_step": 11}],
  "batch": [{"collects": 6}, {"learner_step": 5}],
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_an_interrupted_run_continues_bit_for_bit(uninterrupted, tmp_path, schedule):
  state, digest, _ = uninterrupted(schedule)
  override = f"reanalyse.schedule={schedule}"
  step, before, saved = None, None, None
  for stop in STOPS[schedule]:
    step, ended = stopped(tmp_path, override, resume_step=step, before=before, **stop)
    # Lanes that only reset take no agent step: the checkpoint before stays, and they reset again.
    before, saved = None if ended["counters"] == saved else ended, ended["counters"]
  final, final_digest = run(tmp_path, override, resume_step=step)
  assert final_digest == digest
  assert_same(state, final)
  assert [row["step"] for row in rows_of(tmp_path)] == [3, 6, 9, 12]


@pytest.mark.parametrize(("step", "schedule"), [(4, "sweep"), (8, "batch")])
def test_a_killed_run_continues_from_its_last_checkpoint(copied, schedule, step):
  """Checkpoints are written while training continues and donates its buffers."""
  folder, state, digest = copied(schedule)
  for later in (folder / "checkpoints").iterdir():
    if int(later.name.split("-")[0]) > step:
      shutil.rmtree(later)
  final, final_digest = run(folder, f"reanalyse.schedule={schedule}", resume_step=step)
  assert final_digest == digest
  assert_same(state, final)
  assert [row["step"] for row in rows_of(folder)] == [3, 6, 9, 12]


def test_resuming_a_finished_run_changes_nothing(copied):
  folder, state, digest = copied()
  with quick(folder, resume_step=12) as experiment:
    experiment.after_step.append(pytest.fail)
    experiment.collector.collect = pytest.fail
    assert loops.run(experiment)
    snapshot.save(experiment, required=True)
    assert snapshot.hash_of(experiment.state.variables) == digest
    assert_same(state, everything(experiment))


def test_a_damaged_checkpoint_costs_steps_but_not_the_result(copied):
  folder, state, digest = copied()
  for path in (folder / "checkpoints/12-150/replay").rglob("*"):
    if path.is_file():
      path.write_bytes(path.read_bytes()[:-9])
  with quick(folder, resume_step=12) as experiment:
    assert experiment.limiter.learner_steps == 8
    assert loops.run(experiment)
    assert snapshot.hash_of(experiment.state.variables) == digest
    assert_same(state, everything(experiment))
  assert [row["step"] for row in rows_of(folder)] == [3, 6, 9, 12]


def test_environments_that_play_differently_are_an_error(copied, monkeypatch):
  folder, *_ = copied()
  shutil.rmtree(folder / "checkpoints/12-150")  # a finished run plays no more
  make_env = snapshot.make_env
  monkeypatch.setattr(
    snapshot, "make_env", lambda c, lanes, seed, **kw: make_env(c, lanes, seed + 1, **kw)
  )
  with (
    pytest.raises(TrainingError, match=r"can't continue from step 8: .*other frames"),
    quick(folder, resume_step=8),
  ):
    pytest.fail("opened")


def test_a_ring_that_forgets_continues_bit_for_bit(tmp_path):
  overrides = "replay.capacity=48", "run.checkpoint_interval=2", "run.keep_checkpoints=2"
  reference, digest = run(tmp_path / "reference", *overrides)
  step, before = None, None
  for stop in ({"collects": 4}, {"learner_step": 7}):
    step, before = stopped(tmp_path / "run", *overrides, resume_step=step, before=before, **stop)
  final, final_digest = run(tmp_path / "run", *overrides, resume_step=step)
  assert final_digest == digest
  assert_same(reference, final)
  assert Checkpoints(tmp_path / "run").steps() == [10, 12]  # as many as are to be kept
  with quick(tmp_path / "run", *overrides, resume_step=12) as experiment:
    assert_same(reference, everything(experiment))
    journal = experiment.recovery.journal
    assert (journal.tails > 0).all() and (journal.heads - journal.tails < 48).all()


def test_evaluations_do_not_change_the_run(uninterrupted, tmp_path):
  state, digest, _ = uninterrupted("sweep")
  with quick(tmp_path, "evaluation.interval=5") as experiment:
    assert loops.run(experiment)
    assert snapshot.hash_of(experiment.state.variables) == digest
    assert_same(state, everything(experiment))
    experiment.interrupt()
    assert steps.evaluate_now(experiment) is None
  # Each is in the line of its own step, so that it survives if the run resumes there.
  rows = [(row["step"], row.get("evaluation/step")) for row in rows_of(tmp_path)]
  assert rows == [(3, None), (5, 5), (6, 5), (9, 5), (10, 10), (12, 10)]


def test_one_of_several_learners_evaluates_with_the_lanes_of_its_agent(tmp_path, monkeypatch):
  lanes = []
  monkeypatch.setattr(steps, "evaluate", lambda config, *_, **__: lanes.append(config.actor.lanes))
  with quick(tmp_path, "actor.lanes=4", membership=Membership(0, 2)) as experiment:
    steps.evaluate_now(experiment)
  assert lanes == [2]


@pytest.mark.parametrize("unit", [0, 1])
def test_of_several_learners_the_first_evaluates_and_all_wait_for_it(tmp_path, monkeypatch, unit):
  done = []
  monkeypatch.setattr(steps, "evaluate_now", lambda *_: done.append("evaluated"))
  membership = Membership(unit, 2, all_gather=lambda number: done.append("met") or [number])
  overrides = "evaluation.interval=5", "run.log_interval=100", "actor.lanes=4", "run.mode=async"
  with quick(tmp_path, *overrides, membership=membership) as experiment:
    experiment.limiter.restore(75, 5)
    steps.bookkeeping(experiment)
    assert done == (["met"] if unit else ["evaluated", "met"])
    assert experiment.stop_agreed  # as the evaluation was stopped
    experiment.limiter.add_learner_step()
    steps.bookkeeping(experiment)
    assert len(done) == 2 - unit


def test_a_resumed_run_does_not_repeat_an_evaluation(tmp_path):
  override = "evaluation.interval=4"
  stopped(tmp_path, override, learner_step=4)
  run(tmp_path, override, resume_step=4)
  rows = [(row["step"], row.get("evaluation/step")) for row in rows_of(tmp_path)]
  assert rows == [(3, None), (4, 4), (6, None), (8, 8), (9, 8), (12, 8)]


def test_all_learners_know_from_the_first_what_was_evaluated(tmp_path):
  membership = Membership(1, 2, all_gather=lambda number: [number or 4, number])
  with quick(tmp_path, "actor.lanes=4", membership=membership) as experiment:
    experiment.limiter.restore(75, 5)
    snapshot.save(experiment, required=True)
  with quick(tmp_path, "actor.lanes=4", resume_step=5, membership=membership) as experiment:
    assert experiment.evaluated == 4


def test_frames_on_the_devices_change_nothing(uninterrupted, tmp_path):
  """Includes a resumed run, which copies the frames to the devices again."""
  _, digest, _ = uninterrupted("sweep")
  override = "replay.frames=device"
  with quick(tmp_path, override) as experiment:
    interrupt_at(experiment, learner_step=5)
    assert not loops.run(experiment)
    snapshot.save(experiment, required=True)
    selection = experiment.replay.select(4)
    windows = experiment.replay.windows(selection.lane, selection.time)
    assert isinstance(windows, jax.Array)
  assert run(tmp_path, override, resume_step=5)[1] == digest


@pytest.mark.skipif(len(jax.local_devices()) < 2, reason="one device has nothing to share")
def test_acting_and_tasks_use_all_devices_of_the_learner(tmp_path):
  with quick(tmp_path, "learner.devices=2") as experiment:
    mesh = experiment.inference._mesh
    assert list(mesh.devices.flat) == list(experiment.learner.mesh.devices.flat)
    assert mesh.size == 2


# --- saving


def full_disk(monkeypatch, saves):
  """Makes these saves, counted from 0, find no free space on the disk."""
  usage, calls = shutil.disk_usage, itertools.count()

  def disk_usage(path):
    return usage(path)._replace(free=0) if next(calls) in saves else usage(path)

  monkeypatch.setattr(shutil, "disk_usage", disk_usage)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
  uninterrupted, tmp_path, monkeypatch, capsys
):
  state, digest, _ = uninterrupted("sweep")
  full_disk(monkeypatch, {0})
  final, final_digest = run(tmp_path)
  assert final_digest == digest
  assert_same(state, final)
  (line,) = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
  assert "free on the disk" in line and line.endswith("earlier checkpoints are intact")
  assert Checkpoints(tmp_path).steps() == [8, 12]
  with quick(tmp_path, resume_step=12) as experiment:
    assert_same(state, everything(experiment))


def test_a_required_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys):
  full_disk(monkeypatch, {0, 1})
  with quick(tmp_path) as experiment:
    experiment.collector.collect()
    with pytest.raises(CheckpointError, match="free on the disk"):
      snapshot.save(experiment, required=True)
    snapshot.save(experiment)  # reported when the run is closed
    assert "free on the disk" not in capsys.readouterr().out
  assert capsys.readouterr().out.count("free on the disk") == 1
  assert not Checkpoints(tmp_path).steps()


def test_the_trust_ratio_of_each_layer_is_logged_with_its_name(tmp_path):
  with quick(tmp_path, "optim.name=clipped_lars") as experiment:
    steps.log(experiment)
  (row,) = rows_of(tmp_path)
  ratios = {name for name in row if name.startswith(names.TRUST_RATIO_PREFIX)}
  assert ratios == {"trust_ratio/w"}
