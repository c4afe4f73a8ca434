"""Checkpoints on disk: what is written comes back bit for bit, and damage is noticed, named and survived."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
import weakref
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from speedyzero_jax import checkpoint
from speedyzero_jax.checkpoint import CheckpointError, Checkpoints, Snapshot
from speedyzero_jax.networks import Variables
from speedyzero_jax.replay.slot_files import SlotFile, SlotFiles

# A damaged checkpoint leaves Orbax with futures that nobody waits for.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SUBSCRIBERS = ("actor", "reanalyser")
LANES = 2
ROOT = Path(__file__).resolve().parent.parent


def variables(step):
  rng = np.random.default_rng(step)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
  return Variables({"h": {"kernel": draw(3, 4), "bias": draw(4)}, "scale": draw()}, {"mean": draw(4)})


def snapshot(step, *, since=0, head=None, tail=0, **changes):
  """What a run might hold at learner step `step`: lanes of `head` slots each (as many as steps, if not given), those
  before `tail` evicted, those from `since` on exported."""
  head = step if head is None else head
  rng = np.random.default_rng(1000 * step + head)
  network = variables(step)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(0.1, 0.0, 9)))
  state = optimizer.init(network.params)
  _, state = optimizer.update(jax.tree.map(lambda x: x * 0.1, network.params), state, network.params)
  since = max(since, tail)
  n = head - since
  fields = {
    "step": step,
    "network": network,
    "optimizer": jax.device_get(state),
    "weights": {name: variables(step - i - 1) for i, name in enumerate(SUBSCRIBERS)},
    "env_steps": 3 * head,
    "replay": {
      "head": np.full(LANES, head, np.int64),
      "tail": np.full(LANES, tail, np.int64),
      "slot_inserted": rng.integers(2**40, 2**62, (step, LANES), np.int64),
      "priority": rng.random(step),
      "rng": rng.integers(0, 2**64, 6, np.uint64, endpoint=False),
      "slot_first": rng.random(step) < 0.5,
      "slot_reward": rng.normal(size=step).astype(np.float32),
      "num_transitions": np.array(step, np.int64),
      "sweep_refresh": np.zeros(0, np.int64),
      "slot_policy": np.zeros((0, 3), np.float32),
    },
    "actor": {"actions": rng.integers(0, 5, (step, LANES)).astype(np.int16), "frames_crc": np.array([2**32 - 1])},
    "meta": {"weights": dict.fromkeys(SUBSCRIBERS, step - 1), "sweepers": {"refresh": {}}},
    "slots": {
      "start": np.full(LANES, since, np.int64),
      "count": np.full(LANES, n, np.int64),
      "frame": rng.integers(0, 256, (LANES * n, 2, 2, 3), np.uint8),
    },
    "heads": np.full(LANES, head, np.int64),
  }
  return Snapshot(**(fields | changes))


def abstract():
  one = snapshot(4)
  shape = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)  # noqa: E731
  return {name: shape(getattr(one, name)) for name in ("network", "optimizer", "weights")}


def write(folder, *steps, keep=5):
  """Checkpoints of these steps; returns the snapshots."""
  checkpoints, snapshots, since = Checkpoints(folder, keep), [], 0
  for step in steps:
    snapshots.append(snapshot(step, since=since))
    checkpoints.save(snapshots[-1])
    since = step
  checkpoints.close()
  return snapshots


def read(folder):
  """(snapshot, segments, what was reported)."""
  reported = []
  restored, segments = Checkpoints(folder).restore(abstract(), reported.append)
  return restored, list(segments), reported


def assert_same_tree(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for (path, x), (_, y) in zip(*map(jax.tree_util.tree_leaves_with_path, (a, b)), strict=True):
    x, y = np.asarray(x), np.asarray(y)
    assert (x.dtype, x.shape) == (y.dtype, y.shape), path
    assert x.tobytes() == y.tobytes(), path


def assert_restored(restored, segments, snapshots):
  """`snapshots`: those the newest of which was restored."""
  for name in ("step", "env_steps", "network", "optimizer", "weights", "replay", "actor", "meta"):
    assert_same_tree(getattr(restored, name), getattr(snapshots[-1], name))
  assert len(segments) == len(snapshots)
  for segment, written in zip(segments, snapshots, strict=True):
    assert_same_tree(segment, written.slots)
  np.testing.assert_array_equal(restored.heads, snapshots[-1].heads)


def listing(folder):
  return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
  """A folder with checkpoints 4 and 8, and their snapshots."""
  folder = tmp_path_factory.mktemp("two")
  return folder, write(folder, 4, 8)


@pytest.fixture
def copied(two, tmp_path):
  shutil.copytree(two[0], tmp_path / "run")
  return tmp_path / "run", two[1]


def test_round_trip(two):
  folder, snapshots = two
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)
  assert isinstance(restored.optimizer[1][0], optax.ScaleByAdamState)  # what optax made, not a dict


def test_who_goes_on_from_a_checkpoint_knows_what_is_saved_already(two):
  checkpoints = Checkpoints(two[0])
  assert checkpoints.heads is None
  checkpoints.restore(abstract(), print)
  np.testing.assert_array_equal(checkpoints.heads, [8, 8])


def test_the_network_alone_is_read_without_the_rest(copied):
  folder, snapshots = copied
  shutil.rmtree(folder / "replay")
  step, network = Checkpoints(folder).restore_network(abstract()["network"], pytest.fail)
  assert step == 8
  assert_same_tree(network, snapshots[-1].network)


def test_the_newest_few_are_kept_and_all_frames_with_them(tmp_path):
  snapshots = write(tmp_path, 2, 4, 6, 8, 10, keep=2)
  assert Checkpoints(tmp_path).steps() == [8, 10]
  restored, segments, _ = read(tmp_path)
  assert_restored(restored, segments, snapshots)


def test_snapshots_without_new_frames_or_weights(tmp_path):
  first = snapshot(4, weights={}, actor={})
  second = snapshot(5, since=5, weights={}, actor={})
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(first)
  checkpoints.save(second)
  checkpoints.close()
  restored, segments = Checkpoints(tmp_path).restore(abstract() | {"weights": {}}, pytest.fail)
  assert len(list(segments)) == 1 and restored.step == 5 and restored.weights == {} and restored.actor == {}
  assert_same_tree(restored.replay, second.replay)


def test_one_moment_is_saved_once(tmp_path):
  """A finished run that is resumed, or one that is stopped at once, has its checkpoint already."""
  write(tmp_path, 4)
  before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
  replace(tmp_path, snapshot(4, since=4))
  assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_segments_are_loaded_one_at_a_time(two):
  """All were checked before; at no moment are two in memory."""
  _, segments = Checkpoints(two[0]).restore(abstract(), pytest.fail)
  alive = []
  for segment in segments:
    assert not any(ref() is not None for ref in alive)
    alive.append(weakref.ref(segment["frame"]))
    del segment
  assert len(alive) == 2


# --- Replacing: a newer state of the same learner step


def replace(folder, newer):
  """Saves a newer state of the newest step."""
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(newer)
  checkpoints.close()


def test_what_came_since_is_saved_at_the_same_learner_step(copied):
  folder, snapshots = copied
  newer = [snapshot(8, since=8, head=11), snapshot(8, since=11, head=15)]
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  for one in newer:
    checkpoints.save(one)
    checkpoints.wait()
    np.testing.assert_array_equal(checkpoints.heads, one.heads)
  checkpoints.save(snapshot(12, since=15, head=20))
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported and checkpoints.steps() == [4, 8, 12]
  assert_restored(restored, segments, [*snapshots, *newer, snapshot(12, since=15, head=20)])
  shutil.rmtree(folder / "checkpoints" / "12")
  segment_file(folder, 12, 60).unlink()
  restored, segments, reported = read(folder)
  assert_restored(restored, segments, [*snapshots, *newer])


@pytest.fixture(scope="module")
def replaced(two, tmp_path_factory):
  """A folder as `two` in which 8 was replaced, and its snapshots."""
  folder = tmp_path_factory.mktemp("replaced") / "run"
  shutil.copytree(two[0], folder)
  newer = snapshot(8, since=8, head=11)
  replace(folder, newer)
  return folder, [*two[1], newer]


def killed_before_saving(folder, _):
  os.replace(folder / "checkpoints" / "8", folder / "checkpoints" / "8.replaced")


def killed_while_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8.orbax-checkpoint-tmp")
  shutil.rmtree(folder / "checkpoints" / "8.orbax-checkpoint-tmp" / "network")
  shutil.copy(segment_file(newer, 8, 33), folder / "replay")


def killed_after_saving(folder, newer):
  killed_before_saving(folder, newer)
  shutil.copytree(newer / "checkpoints" / "8", folder / "checkpoints" / "8")
  shutil.copy(segment_file(newer, 8, 33), folder / "replay")


def killed_while_removing(folder, newer):
  killed_after_saving(folder, newer)
  shutil.rmtree(folder / "checkpoints" / "8.replaced" / "network")


MOMENTS = {killed_before_saving: 2, killed_while_saving: 2, killed_after_saving: 3, killed_while_removing: 3}


@pytest.mark.parametrize(("moment", "expected"), MOMENTS.items())
def test_a_replacement_cut_short_leaves_the_older_or_the_newer_state(copied, replaced, moment, expected):
  folder, _ = copied
  newer, snapshots = replaced
  moment(folder, newer)
  before = sorted(folder.rglob("*"))
  assert Checkpoints(folder).steps() == [4, 8]
  step, network = Checkpoints(folder).restore_network(abstract()["network"], pytest.fail)
  assert step == 8
  assert_same_tree(network, snapshots[expected - 1].network)
  assert sorted(folder.rglob("*")) == before  # it only looks
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots[:expected])
  if expected == 2:
    replace(folder, snapshots[2])
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert len(list((folder / "replay").iterdir())) == 3 and not (folder / "damaged").exists()


def test_a_damaged_replacement_falls_back_to_what_it_replaced(copied, replaced):
  folder, _ = copied
  newer, snapshots = replaced
  killed_after_saving(folder, newer)
  flip(segment_file(folder, 8, 33))
  restored, segments, reported = read(folder)
  assert len(reported) == 1 and "checkpoints/8 is damaged" in reported[0]
  assert_restored(restored, segments, snapshots[:2])
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert sorted(path.name for path in (folder / "damaged").iterdir()) == ["8", segment_file(folder, 8, 33).name]
  replace(folder, snapshots[2])
  assert_restored(*read(folder)[:2], snapshots)


KILLED = """
import os, signal, sys
sys.path[:0] = sys.argv[1:3]
from pathlib import Path
import test_checkpoint as t
from speedyzero_jax import checkpoint
owner, name = {"save": (checkpoint.ocp.CheckpointManager, "save"), "rmtree": (checkpoint.shutil, "rmtree")}[sys.argv[4]]
checkpoints = checkpoint.Checkpoints(Path(sys.argv[3]))
checkpoints.restore(t.abstract(), print)
real = getattr(owner, name)
def die_after_the_rename(*args, **kwargs):
  if (Path(sys.argv[3]) / "checkpoints" / "8.replaced").exists():
    os.kill(os.getpid(), signal.SIGKILL)
  return real(*args, **kwargs)
setattr(owner, name, die_after_the_rename)
checkpoints.save(t.snapshot(8, since=8, head=11))
checkpoints.wait()
"""


@pytest.mark.parametrize(("moment", "expected"), [("save", 2), ("rmtree", 3)])
def test_a_process_killed_while_it_replaces(copied, replaced, moment, expected):
  folder, _ = copied
  done = subprocess.run(
    [sys.executable, "-c", KILLED, ROOT, ROOT / "tests", folder, moment], capture_output=True, text=True, check=False
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  assert (folder / "checkpoints" / "8.replaced").is_dir()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, replaced[1][:expected])


# --- A ring: slots are evicted


def test_segments_wholly_evicted_are_deleted_once_no_checkpoint_lists_them(tmp_path):
  """A replay of 5 slots per lane; each checkpoint stands on the segments whose end its replay still holds."""
  checkpoints, snapshots = Checkpoints(tmp_path, keep=2), []
  for step in range(2, 14, 2):
    snapshots.append(snapshot(step, since=step - 2, tail=max(0, step - 5)))
    checkpoints.save(snapshots[-1])
    checkpoints.wait()
    kept = {s for at in (step - 2, step) for s in range(2, at + 1, 2) if s > max(0, at - 5)}
    assert {path.name for path in (tmp_path / "replay").iterdir()} == {segment_file(tmp_path, s).name for s in kept}
    if step == 8:  # another process goes on
      checkpoints.close()
      checkpoints = Checkpoints(tmp_path, keep=2)
      checkpoints.restore(abstract(), pytest.fail)
  checkpoints.close()
  shutil.copytree(tmp_path, tmp_path / "copy")
  assert_restored(*read(tmp_path)[:2], snapshots[-3:])
  flip(segment_file(tmp_path / "copy", 12))
  restored, segments, reported = read(tmp_path / "copy")  # the one before has all its segments
  assert len(reported) == 1
  assert_restored(restored, segments, snapshots[-4:-1])


def test_a_segment_stays_while_a_checkpoint_that_cannot_be_read_may_list_it(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  checkpoints.save(snapshot(2))
  checkpoints.wait()
  (tmp_path / "checkpoints" / "2" / "meta" / "metadata").write_bytes(b"{")
  checkpoints.save(snapshot(9, since=2, tail=4))
  checkpoints.wait()
  assert segment_file(tmp_path, 2).exists()
  checkpoints.save(snapshot(10, since=9, tail=5))
  checkpoints.close()
  assert not segment_file(tmp_path, 2).exists()


# --- Damage


def segment_file(folder, step, env_steps=None):
  return folder / "replay" / f"slots-{step:012d}-{env_steps or 3 * step:012d}.npz"


def own_files(folder, step):
  """Files that only this checkpoint stands on."""
  own = [p for p in sorted((folder / "checkpoints" / str(step)).rglob("*")) if p.is_file()]
  return [*own, segment_file(folder, step)]


def flip(path, at=0.5):
  content = bytearray(path.read_bytes())
  if content:
    content[int(at * (len(content) - 1))] ^= 0xFF
  path.write_bytes(content)


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def assert_falls_back(folder, snapshots):
  restored, segments, reported = read(folder)
  assert restored.step == 4
  assert_restored(restored, segments, snapshots[:1])
  assert len(reported) == 1 and str(folder / "checkpoints" / "8") in reported[0] and "\n" not in reported[0]
  assert Checkpoints(folder).steps() == [4]


def parts(folder):
  """The files in which a damage must show, by what they hold."""
  newest = folder / "checkpoints" / "8"
  items = {
    name: [p for p in (newest / name).rglob("*") if p.parent.name == "d"]
    for name in ("network", "optimizer", "weights", "replay", "actor")
  }
  return items | {"meta": [newest / "meta" / "metadata"], "segment": own_files(folder, 8)[-1:]}


@pytest.mark.parametrize("part", ["network", "optimizer", "weights", "replay", "actor", "meta", "segment"])
@pytest.mark.parametrize("damage", [flip, truncate, os.unlink])
def test_damage_is_named_and_the_checkpoint_before_is_used(copied, part, damage):
  folder, snapshots = copied
  paths = parts(folder)[part]
  assert paths
  for path in paths:
    damage(path)
  assert_falls_back(folder, snapshots)


def test_no_flipped_byte_of_any_file_is_believed(copied, tmp_path):
  """Files with no bearing on the content may be damaged unnoticed; what is read is right or refused."""
  folder, snapshots = copied
  refused = 0
  for number, path in enumerate(own_files(folder, 8)):
    run = tmp_path / str(number)
    shutil.copytree(folder, run)
    flip(run / path.relative_to(folder), at=number * 0.37 % 1)
    restored, segments, reported = read(run)
    assert (restored.step == 8) == (not reported), path
    refused += bool(reported)
    assert_restored(restored, segments, snapshots[: restored.step // 4])
  assert refused >= 6


@pytest.mark.parametrize("damage", [os.unlink, truncate, lambda path: path.write_bytes(b"")])
def test_every_file_missing_or_cut_short_is_damage_and_nothing_else(copied, tmp_path, damage):
  """The readers' exceptions are of many types; each must lead to the checkpoint before, none to the end of the run."""
  folder, snapshots = copied
  refused = 0
  for path in own_files(folder, 8):
    if not {"optimizer", "weights", "actor"} & set(path.parts):  # the same reader reads them
      shutil.copytree(folder, tmp_path / "damaged")
      damage(tmp_path / "damaged" / path.relative_to(folder))
      restored, segments, reported = read(tmp_path / "damaged")
      assert (restored.step == 8) == (not reported), path
      refused += bool(reported)
      assert_restored(restored, segments, snapshots[: restored.step // 4])
      shutil.rmtree(tmp_path / "damaged")
  assert refused >= 6


def test_every_byte_of_the_json_counts(copied):
  """A digit that became another one is still JSON."""
  folder, snapshots = copied
  path = folder / "checkpoints" / "8" / "meta" / "metadata"
  text = path.read_text()
  assert '"env_steps": 24' in text
  path.write_text(text.replace('"env_steps": 24', '"env_steps": 25'))
  assert_falls_back(folder, snapshots)


def test_every_byte_of_the_frames_counts(copied):
  """NumPy, reading an archive, stops before its checksum is compared; so this is our own."""
  folder, _ = copied
  path = own_files(folder, 8)[-1]
  meta = json.loads((folder / "checkpoints" / "8" / "meta" / "metadata").read_text())
  segment = SlotFile(*meta["segments"][-1])
  assert segment.name == path.name
  content = path.read_bytes()
  for at in range(len(content)):
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ValueError, match=path.name):
      SlotFiles(folder / "replay").check(segment)


def test_frames_of_an_older_segment_missing_damage_every_checkpoint_on_top(copied):
  folder, _ = copied
  own_files(folder, 4)[-1].unlink()
  reported = []
  with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .*checkpoints can be read"):
    Checkpoints(folder).restore(abstract(), reported.append)
  assert [str(folder / "checkpoints" / step) in line for step, line in zip("84", reported, strict=True)] == [True] * 2
  assert Checkpoints(folder).steps() == [4, 8]  # nothing is moved while there is nothing better


def raising(error):
  def fail(*args, **kwargs):
    raise error

  return fail


OUT_OF_DEVICE_MEMORY = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")


@pytest.mark.parametrize(
  "error",
  [MemoryError("no memory"), OSError(errno.EIO, "I/O error"), PermissionError(errno.EACCES, "not allowed"),
   OUT_OF_DEVICE_MEMORY, ValueError("RESOURCE_EXHAUSTED: Error opening driver")],
  ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("part", ["orbax", "segment"])
def test_what_fails_for_want_of_something_is_no_damage(copied, monkeypatch, error, part):
  """The newest checkpoint may be whole: it is named, not set aside, and an older one is not taken for it."""
  folder, snapshots = copied
  before = listing(folder)
  with monkeypatch.context() as patch:
    if part == "orbax":
      patch.setattr(checkpoint.ocp.Checkpointer, "restore", raising(error))
    else:
      patch.setattr(SlotFiles, "check", raising(error))
    with pytest.raises(
      CheckpointError, match=rf"can't read checkpoint .*checkpoints/8, which may be whole: .*{re.escape(str(error))}"
    ):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert listing(folder) == before
  assert_restored(*read(folder)[:2], snapshots)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_files_that_cannot_be_opened_are_no_damage(copied):
  """As root may open all, these do it without permissions: TensorStore meets a loop of links, Python has no number left
  for another file."""
  folder, snapshots = copied
  (path,) = (folder / "checkpoints" / "8" / "network" / "d").iterdir()
  content = path.read_bytes()
  path.unlink()
  path.symlink_to(path.name)
  with pytest.raises(CheckpointError, match="which may be whole: ValueError: UNKNOWN: "):
    Checkpoints(folder).restore(abstract(), pytest.fail)
  path.unlink()
  path.write_bytes(content)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  lowest_free = min(set(range(soft)) - set(map(int, os.listdir("/proc/self/fd"))))
  resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))
  try:
    with pytest.raises(CheckpointError, match="Too many open files"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert_restored(*read(folder)[:2], snapshots)


def test_without_a_checkpoint(tmp_path):
  for folder in (tmp_path, tmp_path / "missing"):
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
      Checkpoints(folder).restore(abstract(), pytest.fail)
  assert not list(tmp_path.iterdir())


def test_a_reader_of_the_network_falls_back_too_and_moves_nothing(copied):
  folder, snapshots = copied
  for path in parts(folder)["network"]:
    flip(path)
  reported = []
  step, network = Checkpoints(folder).restore_network(abstract()["network"], reported.append)
  assert step == 4 and len(reported) == 1
  assert_same_tree(network, snapshots[0].network)
  assert Checkpoints(folder).steps() == [4, 8]


def test_a_run_goes_on_from_the_checkpoint_before(copied):
  """The damaged one is moved out of the way, and its step can be saved again."""
  folder, snapshots = copied
  flip(own_files(folder, 8)[-1])
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), lambda line: None)
  assert (folder / "damaged" / "8").is_dir() and not own_files(folder, 8)[-1].exists()
  checkpoints.save(snapshots[1])
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)


def test_another_network_is_refused_by_name(two):
  other = abstract()
  kernel = jax.ShapeDtypeStruct((5, 4), np.float32)
  other["network"] = Variables({**other["network"].params, "h": {"kernel": kernel}}, other["network"].batch_stats)
  reported = []
  with pytest.raises(CheckpointError, match="none of the 2"):
    Checkpoints(two[0]).restore(other, reported.append)
  assert len(reported) == 2


class Trap:
  """Makes a folder when it is unpickled."""

  def __init__(self, path):
    self.path = str(path)

  def __reduce__(self):
    return os.mkdir, (self.path,)


def test_nothing_is_unpickled(tmp_path):
  slots = snapshot(8, since=4).slots
  trap = np.empty(len(slots["frame"]), object)
  trap[:] = Trap(tmp_path / "sprung")
  folder = tmp_path / "run"
  good = write(folder, 4)
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  checkpoints.save(snapshot(8, since=4, slots=slots | {"frame": trap}))
  checkpoints.close()
  assert_falls_back(folder, good)
  assert not (tmp_path / "sprung").exists()


# --- Failing to write


def fail_segment(monkeypatch):
  def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(SlotFiles, "write", refuse)
  return monkeypatch.undo


def fail_replace(monkeypatch):
  def refuse(source, target):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(checkpoint.os, "replace", refuse)
  return monkeypatch.undo


def fail_orbax(monkeypatch):
  def refuse(*args, **kwargs):
    raise OSError(errno.EIO, os.strerror(errno.EIO))

  monkeypatch.setattr(checkpoint.ocp.CheckpointManager, "save", refuse)
  return monkeypatch.undo


def limit_files(size):
  """Files may not grow past `size` bytes: what a full disk looks like to Orbax's own threads."""

  def fail(monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

  return fail


def nearly_full_disk(monkeypatch):
  monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
  return monkeypatch.undo


FAILURES = {
  "nearly full disk": nearly_full_disk,
  "segment": fail_segment,
  "rename": fail_replace,
  "orbax": fail_orbax,
  "no space at all": limit_files(0),
  "little space": limit_files(600),
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_save_that_fails_harms_nothing(copied, monkeypatch, fail):
  """The error comes with the next call, earlier checkpoints stay, and the next save has the frames of both."""
  folder, snapshots = copied
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  restore = fail(monkeypatch)
  try:
    checkpoints.save(snapshot(12, since=8))
    with pytest.raises(CheckpointError, match=r"saving to .*checkpoints failed: \w+"):
      checkpoints.wait()
  finally:
    restore()
  checkpoints.wait()  # said once
  np.testing.assert_array_equal(checkpoints.heads, [8, 8])
  # Nothing half-written is left to fill the disk further.
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  assert {segment_file(folder, 4), segment_file(folder, 8)} == set((folder / "replay").iterdir())
  shutil.copytree(folder, folder.with_name("killed"))  # as if the process had ended here
  assert_restored(*read(folder.with_name("killed"))[:2], snapshots)
  for step, since in ((12, 8), (16, 12)):  # the same step may be tried again
    snapshots = [*snapshots, snapshot(step, since=since)]
    checkpoints.save(snapshots[-1])
    checkpoints.wait()
  checkpoints.close()
  restored, segments, reported = read(folder)
  assert not reported
  assert_restored(restored, segments, snapshots)


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_a_replacement_that_fails_leaves_what_was_there(copied, monkeypatch, fail):
  folder, snapshots = copied
  checkpoints = Checkpoints(folder)
  checkpoints.restore(abstract(), pytest.fail)
  restore = fail(monkeypatch)
  newer = snapshot(8, since=8, head=11)
  try:
    checkpoints.save(newer)
    with pytest.raises(CheckpointError, match="failed"):
      checkpoints.wait()
  finally:
    restore()
  assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]
  shutil.copytree(folder, folder.with_name("killed"))
  assert_restored(*read(folder.with_name("killed"))[:2], snapshots)
  checkpoints.save(newer)
  checkpoints.close()
  assert_restored(*read(folder)[:2], [*snapshots, newer])


def test_a_failure_shows_at_the_next_save_and_nothing_of_that_is_written(tmp_path, monkeypatch):
  checkpoints = Checkpoints(tmp_path)
  undo = fail_segment(monkeypatch)
  checkpoints.save(snapshot(4))
  with pytest.raises(CheckpointError):
    checkpoints.save(snapshot(8))
  undo()
  checkpoints.wait()
  assert checkpoints.steps() == []
  checkpoints.close()


def test_leftovers_of_a_killed_writer_are_no_checkpoints(copied):
  folder, snapshots = copied
  directory = folder / "checkpoints"
  os.replace(directory / "8", directory / "8.orbax-checkpoint-tmp")
  (folder / "replay" / "slots-000000000012-000000000036.tmp").write_bytes(b"PK")
  assert Checkpoints(folder).steps() == [4]
  checkpoints = Checkpoints(folder)
  restored, segments = checkpoints.restore(abstract(), pytest.fail)
  assert_restored(restored, list(segments), snapshots[:1])
  checkpoints.save(snapshots[1])
  checkpoints.close()
  restored, segments, _ = read(folder)
  assert_restored(restored, segments, snapshots)
