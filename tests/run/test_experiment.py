"""Whole runs in this process: reproducible, resumable bit for bit, exact in both modes, and loud when they fail."""

import errno
import os
import shutil
import threading
import time

import jax
import numpy as np
import pytest
import tiny

from speedyzero_jax.metrics import jsonl, names
from speedyzero_jax.metrics.logger import Reporter
from speedyzero_jax.replay.frame_files import SlotFiles
from speedyzero_jax.run import experiment as training_module
from speedyzero_jax.run import loops
from speedyzero_jax.run.checkpoint import CheckpointError, Checkpoints
from speedyzero_jax.run.experiment import Part, Training, TrainingError
from speedyzero_jax.run.rate_limiter import Pacer
from speedyzero_jax.workers import local_actor
from speedyzero_jax.workers.weights import DivergedError

TIMES = ("time", "_per_second", "queue/", "time/")  # metrics that measure this machine


@pytest.fixture(autouse=True)
def shared(monkeypatch):
  tiny.share_compiled(monkeypatch)


def everything(training):
  """All that a run is, as arrays: two runs with equal ones go on alike."""
  state = jax.device_get(training.state)
  versions = training.weights.snapshot()
  actor = training.collecting.actor.state()
  return {
    "learner": jax.tree.leaves(state),
    "weights": [
      (name, v.step, jax.tree.leaves(jax.device_get(v.variables)))
      for name, v in sorted(versions.items())
    ],
    "replay": sorted(training.replay.state_dict().items()),
    "frames": sorted(training.replay.export_slots(np.zeros_like(training.replay.heads)).items()),
    "actor": [actor.actions, actor.frames_crc, actor.start],
    "counters": [(s.kind, s.counters()) for s in training.sweepers]
    + [training.batch_reanalyser.calls, training.pacer.env_steps, training.pacer.learner_steps],
    "episodes": training.episodes.summary(),
  }


def assert_same(a, b, where=""):
  if isinstance(a, dict):
    assert a.keys() == b.keys(), where
    for key in a:
      assert_same(a[key], b[key], f"{where}/{key}")
  elif isinstance(a, list | tuple):
    assert len(a) == len(b), where
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
      assert_same(x, y, f"{where}/{i}")
  else:
    x, y = np.asarray(a), np.asarray(b)
    assert x.dtype == y.dtype, where
    np.testing.assert_array_equal(x, y, err_msg=where)


def rows_of(folder):
  rows, damaged = jsonl.read_rows(folder / "metrics.jsonl")
  assert not damaged
  return rows


def run(config, folder, resume_step=None):
  with tiny.training(config, folder, resume_step=resume_step) as training:
    assert loops.run(training)
    training.save(required=True)
    return everything(training), training.parameters_hash()


def interrupt_at(training, *, learner_step=None, collects=None):
  """Interrupts the run right after this learner step's bookkeeping, or after so many calls of `collect`."""
  bookkeeping, collect, left = training.bookkeeping, training.collect, [collects]

  def stop_after_step():
    bookkeeping()
    if training.pacer.learner_steps == learner_step:
      training.interrupt()

  def stop_after_collect():
    collect()
    if left[0] is not None:
      left[0] -= 1
      if not left[0]:
        training.interrupt()

  training.bookkeeping, training.collect = stop_after_step, stop_after_collect


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
  """Schedule -> (configuration, what a run of it ends as, its hash, its folder); run once."""
  done = {}

  def of(schedule):
    if schedule not in done:
      with pytest.MonkeyPatch.context() as patch:
        tiny.share_compiled(patch)
        config, folder = (
          tiny.config(f"reanalyse.schedule={schedule}"),
          tmp_path_factory.mktemp(schedule),
        )
        done[schedule] = config, *run(config, folder), folder
    return done[schedule]

  return of


# --- Lockstep


def test_the_same_seed_gives_the_same_run(uninterrupted, tmp_path):
  config, state, digest, folder = uninterrupted("sweep")
  again, digest_again = run(config, tmp_path / "a")
  assert digest == digest_again
  assert_same(state, again)
  plain = [
    [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in rows_of(f)]
    for f in (folder, tmp_path / "a")
  ]
  assert plain[0] == plain[1]
  assert [row["step"] for row in plain[0]] == [3, 6, 9, 12] and len(plain[0][0]) > 20
  assert run(tiny.config("run.seed=1"), tmp_path / "b")[1] != digest


def test_a_run_ends_with_exactly_what_was_asked_for(uninterrupted):
  _, state, _, folder = uninterrupted("sweep")
  assert state["counters"][-2:] == [150, 12]
  row = rows_of(folder)[-1]
  assert (row["step"], row["env_steps"], row["replay/transitions"]) == (12, 150, 150)
  assert row["charts/samples_per_insert"] == 12 * 8 / 110
  assert Checkpoints(folder).steps() == [4, 8, 12]


# Stopped in the random play (twice: there is a checkpoint of learner step 0 then), after a step, twice more before the
# next one, on a checkpoint, and one step before the end.
STOPS = {
  "sweep": [{"collects": 6}, {"collects": 3}, {"learner_step": 1}, {"collects": 2}, {"collects": 1},
            {"learner_step": 4}, {"learner_step": 11}],
  "batch": [{"collects": 6}, {"learner_step": 5}],
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_an_interrupted_run_goes_on_bit_for_bit(uninterrupted, tmp_path, schedule):
  config, state, digest, _ = uninterrupted(schedule)
  resume_step, saved, before = None, None, None
  for stop in STOPS[schedule]:
    with tiny.training(config, tmp_path, resume_step=resume_step) as training:
      if before is not None:
        assert_same(before, everything(training))
      interrupt_at(training, **stop)
      assert not loops.run(training)
      training.save(required=True)
      resume_step, now = (
        training.pacer.learner_steps,
        (training.pacer.learner_steps, training.pacer.env_steps),
      )
      # A stop that came before any agent step has its checkpoint; lanes that only restarted do so again, and the same.
      before, saved = (None if now == saved else everything(training)), now
  final, final_digest = run(config, tmp_path, resume_step)
  assert final_digest == digest
  assert_same(state, final)
  assert [row["step"] for row in rows_of(tmp_path)] == [3, 6, 9, 12]


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
@pytest.mark.parametrize("step", [4, 8])
def test_a_killed_run_goes_on_from_its_last_checkpoint(uninterrupted, tmp_path, schedule, step):
  """The checkpoint was written while training went on and gave its buffers away; it must be of its own step."""
  config, state, digest, folder = uninterrupted(schedule)
  shutil.copytree(folder, tmp_path / "run")
  for later in Checkpoints(folder).steps():
    if later > step:
      shutil.rmtree(tmp_path / "run" / "checkpoints" / str(later))
  final, final_digest = run(config, tmp_path / "run", step)
  assert final_digest == digest
  assert_same(state, final)
  assert [row["step"] for row in rows_of(tmp_path / "run")] == [3, 6, 9, 12]


def test_resuming_a_finished_run_changes_nothing(uninterrupted, tmp_path):
  config, state, digest, folder = uninterrupted("sweep")
  shutil.copytree(folder, tmp_path / "run")
  with tiny.training(config, tmp_path / "run", resume_step=12) as training:
    training.learn = training.collect = pytest.fail
    assert loops.run(training)
    training.save(required=True)
    assert training.parameters_hash() == digest
    assert_same(state, everything(training))


def test_a_damaged_checkpoint_costs_steps_but_not_the_result(uninterrupted, tmp_path):
  """And the metrics of the steps that are taken again are not there twice."""
  config, state, digest, folder = uninterrupted("sweep")
  shutil.copytree(folder, tmp_path / "run")
  path = tmp_path / "run" / "replay" / "slots-000000000012-000000000150.npz"
  path.write_bytes(path.read_bytes()[:-9])
  said = []
  with tiny.training(config, tmp_path / "run", resume_step=12) as training:
    training.reporter.message = said.append
    assert training.pacer.learner_steps == 8
    assert loops.run(training)
    training.save(required=True)
    assert training.parameters_hash() == digest
    assert_same(state, everything(training))
  assert [row["step"] for row in rows_of(tmp_path / "run")] == [3, 6, 9, 12]


def test_without_any_readable_checkpoint(uninterrupted, tmp_path):
  config, *_, folder = uninterrupted("sweep")
  shutil.copytree(folder, tmp_path / "run")
  for path in (tmp_path / "run" / "replay").iterdir():
    path.unlink()
  with (
    pytest.raises(CheckpointError, match="none of the 3"),
    tiny.training(config, tmp_path / "run", resume_step=12),
  ):
    pytest.fail("opened")


def test_environments_that_play_differently_are_noticed(uninterrupted, tmp_path, monkeypatch):
  config, *_, folder = uninterrupted("sweep")
  shutil.copytree(folder, tmp_path / "run")
  make_env = local_actor.make_env
  monkeypatch.setattr(
    local_actor, "make_env", lambda c, lanes, seed, **kw: make_env(c, lanes, seed + 1, **kw)
  )
  with (
    pytest.raises(
      TrainingError, match=r"can't go on from step 12: .*other frames.*or start a new run"
    ),
    tiny.training(config, tmp_path / "run", resume_step=12),
  ):
    pytest.fail("opened")


def test_a_ring_that_forgets_goes_on_bit_for_bit(tmp_path):
  """Segments that were wholly evicted are gone from the disk, and nobody misses them."""
  config = tiny.config("replay.capacity=48", "run.checkpoint_interval=2", "run.keep_checkpoints=2")
  reference, digest = run(config, tmp_path / "reference")
  resume_step, before = None, None
  for stop in (
    {"collects": 4},
    {"learner_step": 3},
    {"learner_step": 6},
    {"collects": 2},
    {"learner_step": 9},
  ):
    with tiny.training(config, tmp_path / "run", resume_step=resume_step) as training:
      if before is not None:
        assert_same(before, everything(training))
      interrupt_at(training, **stop)
      assert not loops.run(training)
      training.save(required=True)
      resume_step, before = training.pacer.learner_steps, everything(training)
  final, final_digest = run(config, tmp_path / "run", resume_step)
  assert final_digest == digest
  assert_same(reference, final)
  left = sorted(path.name for path in (tmp_path / "run" / "replay").iterdir())
  assert int(left[0].split("-")[1]) >= 6  # 16 slots per lane
  with tiny.training(config, tmp_path / "run", resume_step=12) as training:
    assert_same(reference, everything(training))


def test_evaluations_do_not_change_the_run(uninterrupted, tmp_path):
  _, state, digest, _ = uninterrupted("sweep")
  config = tiny.config("evaluation.interval=5")
  evaluations = []
  with tiny.training(config, tmp_path) as training:
    evaluated = training.reporter.evaluated
    training.reporter.evaluated = lambda e: (evaluations.append(e), evaluated(e))
    assert loops.run(training)
    assert training.parameters_hash() == digest
    assert_same(state, everything(training))
    assert [e.step for e in evaluations] == [5, 10]
    assert evaluations[0].lengths == [9, 9]  # Catch
    training.interrupt()
    assert training.evaluate() is None
  assert rows_of(tmp_path)[-1]["evaluation/step"] == 10


@pytest.mark.parametrize("unit", [0, 1])
def test_of_several_units_the_first_evaluates_and_the_others_wait_for_it(tmp_path, unit):
  done = []
  config = tiny.config("evaluation.interval=5", "run.log_interval=100")
  part = Part(unit, 2, meet=lambda: done.append("met"))
  with Reporter(config, tmp_path, "", None) as reporter:
    training = Training(config, tmp_path, reporter, resume=False, part=part)
    training.evaluate = lambda: done.append("evaluated")
    training.pacer = Pacer(training.own, env_steps=75, learner_steps=5)
    training.bookkeeping()
    assert done == (["met"] if unit else ["evaluated", "met"])
    training.pacer.add_learner_step()
    training.bookkeeping()
    assert len(done) == 2 - unit
    training.close()


def test_several_units_tell_each_other_what_they_have_saved(tmp_path):
  """When they save together, and not when one is stopped."""
  told = []
  part = Part(0, 2, agree=lambda number: (told.append(number), [number, number])[1])
  with Reporter(tiny.config(), tmp_path, "", None) as reporter:
    training = Training(tiny.config(), tmp_path, reporter, resume=False, part=part)
    for step, required in enumerate((False, False, True)):
      training.pacer = Pacer(training.own, learner_steps=step)
      training.save(required=required)
    training.close()
  assert told == [-1, 0]


@pytest.mark.parametrize("schedule", ["sweep", "batch"])
def test_frames_on_the_devices_change_nothing(uninterrupted, tmp_path, schedule):
  """Nor does being stopped, when they have to be brought there again."""
  _, _, digest, _ = uninterrupted(schedule)
  config = tiny.config(f"reanalyse.schedule={schedule}", "replay.frames=device")
  with tiny.training(config, tmp_path) as training:
    interrupt_at(training, learner_step=5)
    assert not loops.run(training)
    training.save(required=True)
    lane, time, _ = training.replay.sample(4)
    assert isinstance(training.replay.windows(lane, time), jax.Array)
  assert run(config, tmp_path, 5)[1] == digest


@pytest.mark.skipif(len(jax.local_devices()) < 3, reason="needs three devices")
def test_a_batch_that_the_devices_cannot_share_is_an_error(tmp_path, monkeypatch):
  devices = jax.local_devices()[:3]
  monkeypatch.setattr(training_module.jax, "local_devices", lambda: devices)
  with (
    pytest.raises(TrainingError, match=r"learner\.batch_size=8 is not a multiple of 3 devices"),
    tiny.training(tiny.config("learner.devices=0"), tmp_path),
  ):
    pytest.fail("opened")


# --- Overlapping


def finish(training, seconds=120):
  """Runs in a thread, so that a deadlock is a failure and not a test that hangs; returns what `modes.run` did."""
  done = []

  def body():
    try:
      done.append(loops.run(training))
    except BaseException as error:
      done.append(error)

  thread = threading.Thread(target=body, daemon=True)
  thread.start()
  thread.join(seconds)
  if thread.is_alive():
    training.interrupt()
    thread.join(30)
    pytest.fail("the roles wait for one another")
  return done[0]


@pytest.mark.parametrize("schedule", ["sweep", "batch", "off"])
def test_overlapping_roles_do_exactly_what_was_asked_for(tmp_path, schedule):
  config = tiny.config("run.mode=async", f"reanalyse.schedule={schedule}", "run.log_interval=1")
  early = []
  with tiny.training(config, tmp_path) as training:
    learn = training.learn

    def checked(fed):
      pacer = training.pacer
      early.append(pacer.env_steps >= pacer.required(pacer.learner_steps))
      return learn(fed)

    training.learn = checked
    assert finish(training) is True
    training.save(required=True)
    assert early == [True] * 12
    assert (training.pacer.env_steps, training.pacer.learner_steps, int(training.state.step)) == (
      150,
      12,
      12,
    )
    assert training.replay.num_transitions == 150
    ended = everything(training)
    # Every batch's priorities were written, the last one's too.
    steps = training.replay.state_dict()["priority_step"]
    assert steps.max() == 11 or config.agent.refresh.enabled
  rows = rows_of(tmp_path)
  assert [row["step"] for row in rows] == list(range(1, 13))
  for row in rows:
    required = training.pacer.required(row["step"] - 1), training.pacer.required(row["step"])
    assert (
      required[0] <= row["env_steps"] <= min(150, required[1] + 2 * 11 + 3)
    )  # ratio 11, 3 lanes
  assert rows[-1][names.SAMPLES_PER_INSERT] == 12 * 8 / 110
  with tiny.training(config, tmp_path, resume_step=12) as training:
    assert_same(ended, everything(training))


def test_a_slow_actor_holds_the_learner_up_when_asked(tmp_path):

  def lag(folder, *overrides):
    config = tiny.config(
      "run.mode=async", "learner.steps=100", "actor.weights_interval=2", *overrides
    )
    with tiny.training(config, folder) as training:
      step = training.collecting.actor.step

      def slow(*args, **kwargs):
        time.sleep(0.05 if training.pacer.learner_steps else 0)
        return step(*args, **kwargs)

      training.collecting.actor.step = slow
      assert finish(training) is True
    return max(row.get(names.POLICY_LAG_MAX, 0) for row in rows_of(folder))

  assert (
    lag(tmp_path / "free", "learner.steps=60")
    > 3
    >= lag(tmp_path / "bound", "learner.steps=60", "actor.max_lag=3")
  )


def test_an_interrupted_overlapping_run_saves_and_goes_on(tmp_path):
  config, resume_step = tiny.config("run.mode=async"), None
  for stop in ({"collects": 5}, {"learner_step": 3}, {"learner_step": 7}):
    with tiny.training(config, tmp_path, resume_step=resume_step) as training:
      interrupt_at(training, **stop)
      assert finish(training) is False
      training.save(required=True)
      resume_step, before = training.pacer.learner_steps, everything(training)
    with tiny.training(config, tmp_path, resume_step=resume_step) as training:
      assert_same(before, everything(training))
  with tiny.training(config, tmp_path, resume_step=resume_step) as training:
    assert finish(training) is True
    assert (
      training.pacer.env_steps,
      training.replay.num_transitions,
      int(training.state.step),
    ) == (150, 150, 12)


def test_an_overlapping_run_goes_on_where_environments_play_differently(
  tmp_path, monkeypatch, capsys
):
  """Games begin anew behind what the replay holds, as often as that happens; later resumptions replay the new games."""
  config, resume_step, machine, previous, left, written = (
    tiny.config("run.mode=async"),
    None,
    0,
    0,
    {},
    False,
  )
  make_env = local_actor.make_env
  monkeypatch.setattr(
    local_actor, "make_env", lambda c, lanes, seed, **kw: make_env(c, lanes, seed + machine, **kw)
  )
  for machine, collects in ((0, 25), (0, 2), (7, 4), (7, 3), (8, 4), (8, 2), (8, None)):
    moved = machine != previous
    capsys.readouterr()
    with tiny.training(config, tmp_path, resume_step=resume_step) as training:
      found = everything(training)
      assert (
        "warning: replaying the environments' actions led to other frames"
        in capsys.readouterr().out
      ) == moved
      if moved:
        heads = training.replay.heads
        np.testing.assert_array_equal(found["actor"][2], heads)
        assert len(found["actor"][0]) == 0 and found["counters"][-2:] == left["counters"][-2:]
        replay = dict(found["replay"])
        newest = np.cumsum(heads - replay["tail"]) - 1
        np.testing.assert_array_equal(
          replay["slot_episode_end"][newest], heads - 1
        )  # no game goes on over the gap
      elif left and written:
        assert_same(left, found)
      interrupt_at(training, collects=collects)
      assert finish(training) is (collects is None)
      training.keeper.settle()
      # Unless this very moment was saved by the way: then what the sweeps have done since is not saved again.
      written = (
        training.pacer.learner_steps,
        training.pacer.env_steps,
      ) != training.keeper.checkpoints._newest
      training.save(required=True)
      resume_step, previous, left = training.pacer.learner_steps, machine, everything(training)
  assert left["counters"][-2:] == [150, 12] and dict(left["replay"])["num_transitions"] == 150


def test_a_learner_that_is_due_before_anything_can_be_drawn(tmp_path):
  """Lanes of a few open steps hold nothing eligible; the actor must go on although the learner owes steps."""
  config = tiny.config("run.mode=async", "actor.random_steps=0", "run.env_steps=40", "learner.steps=20",
                       "learner.tail_steps=0", "actor.lanes=3")  # fmt: skip
  with tiny.training(config, tmp_path) as training:
    assert finish(training, 60) is True
    assert (training.pacer.env_steps, training.pacer.learner_steps) == (40, 20)


class Broken(Exception):
  pass


def break_after(calls, function):
  left = [calls]

  def broken(*args, **kwargs):
    left[0] -= 1
    if left[0] < 0:
      raise Broken("the part broke")
    return function(*args, **kwargs)

  return broken


@pytest.mark.parametrize("part", ["env", "sweep", "draw", "learn", "bookkeeping", "learned"])
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_whatever_breaks_is_raised_and_ends_every_thread(tmp_path, mode, part):
  with tiny.training(tiny.config(f"run.mode={mode}"), tmp_path) as training:
    threads = set(threading.enumerate())
    owner, name = (training.collecting.env, "step") if part == "env" else (training, part)
    setattr(owner, name, break_after({"env": 30, "learned": 2}.get(part, 3), getattr(owner, name)))
    error = finish(training)
    assert isinstance(error, Broken)
    assert not [t for t in set(threading.enumerate()) - threads if "_guard" in t.name]  # the roles'


def poison(training, at_step, **fields):
  """Lets these fields of the batch of a learner step (from 0) be NaN."""
  draw = training.draw

  def poisoned(step):
    fed = draw(step)
    if step == at_step:
      batch = fed.batch._replace(
        **{name: getattr(fed.batch, name) * np.float32(np.nan) for name in fields}
      )
      fed = fed._replace(batch=batch)
    return fed

  training.draw = poisoned


# With NaN weights the TD errors are still finite: only the update shows it. Step 3's is followed by a checkpoint and
# published to the actor; step 11 is the last.
@pytest.mark.parametrize(("step", "field"), [(3, "weight"), (5, "value"), (11, "weight")])
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_divergence_is_said_and_never_saved(tmp_path, mode, step, field):
  with tiny.training(tiny.config(f"run.mode={mode}", "learner.tail_steps=0"), tmp_path) as training:
    poison(training, step, **{field: None})
    error = finish(training)
    assert isinstance(error, DivergedError), error
    assert f"learner step {step + 1} gave values that are not finite" in str(error)
    with pytest.raises(DivergedError, match="diverged"):
      training.save(required=True)
  expected = [s for s in (4, 8) if s <= step]
  assert Checkpoints(tmp_path).steps() == expected
  if expected:
    with tiny.training(
      tiny.config(f"run.mode={mode}", "learner.tail_steps=0"), tmp_path, resume_step=4
    ) as training:
      assert all(
        np.isfinite(leaf).all()
        for leaf in jax.tree.leaves(jax.device_get(training.state.variables))
      )


# --- Saving


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
  uninterrupted, tmp_path, monkeypatch, capsys
):
  config, state, digest, _ = uninterrupted("sweep")
  write, failed = SlotFiles.write, []

  def refuse_once(files, name, slots, heads):
    if name.startswith("slots-000000000004"):
      failed.append(name)
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(files, name, slots, heads)

  monkeypatch.setattr(SlotFiles, "write", refuse_once)
  with tiny.training(config, tmp_path) as training:
    assert loops.run(training)
    training.save(required=True)
    assert training.parameters_hash() == digest
  assert len(failed) == 1
  (line,) = [line for line in capsys.readouterr().out.splitlines() if "failed" in line]
  assert "No space left on device" in line and "training goes on" in line
  assert Checkpoints(tmp_path).steps() == [8, 12]
  with tiny.training(config, tmp_path, resume_step=12) as training:
    assert_same(state, everything(training))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path, monkeypatch, capsys):
  def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(SlotFiles, "write", refuse)
  with tiny.training(tiny.config(), tmp_path) as training:
    training.collect()
    with pytest.raises(CheckpointError, match="No space left"):
      training.save(required=True)
    training.save()  # not waited for: told when the run is closed
    assert "No space left" not in capsys.readouterr().out
  assert capsys.readouterr().out.count("No space left") == 1
