"""Tests of the run folder: exclusive use by one process and one run, and reasons for refusals."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launched import ROOT, listing
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import run_dir
from speedyzero_jax.system.files import write_atomically

SMALL = ("learner.steps=12", "run.env_steps=150", "actor.random_steps=40", "run.mode=lockstep")


def config(folder, *overrides):
  return loader.load(["quickstart"], [*SMALL, f"run.dir={folder}", *overrides])


def test_a_new_run_writes_its_configuration_and_holds_the_folder(tmp_path):
  folder = tmp_path / "deep" / "run"
  with run_dir.create(config(folder), "ignored") as opened:
    assert opened.path == folder
    assert run_dir.read_config(folder) == config(folder)
    assert sorted(listing(folder)) == ["config.yaml", "run.lock"]
    before = listing(folder)
    with pytest.raises(ConfigError, match=f"{folder} is in use by another process"):
      run_dir.open_existing(folder)
    with pytest.raises(ConfigError, match=rf"already holds a run.*--resume {folder}"):
      run_dir.create(config(folder), "x")
    assert listing(folder) == before
  opened.close()  # again
  run_dir.open_existing(folder).close()


def test_without_a_folder_the_runs_are_numbered(tmp_path, monkeypatch):
  """They may be started at the same time."""
  monkeypatch.chdir(tmp_path)
  start = threading.Barrier(3)

  def create(_):
    start.wait()
    return run_dir.create(config(""), "tiny-Catch-s0")

  with ThreadPoolExecutor(3) as pool:
    runs = list(pool.map(create, range(3)))
  assert sorted(str(run.path) for run in runs) == [
    "runs/tiny-Catch-s0",
    "runs/tiny-Catch-s0-2",
    "runs/tiny-Catch-s0-3",
  ]
  for run in runs:
    run.close()


def test_the_home_folder_can_be_abbreviated(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  with run_dir.create(config("~/mine"), "x") as run:
    assert run.path == tmp_path / "mine"


@pytest.mark.parametrize("name", ["lr[0.1]/run", "a*", "a?", "a\\b", "caf\udce9"])
def test_folders_in_which_orbax_would_lose_checkpoints_are_refused(tmp_path, name):
  folder = tmp_path / name
  for use in (lambda: run_dir.create(config(folder), "x"), lambda: run_dir.open_existing(folder)):
    with pytest.raises(ConfigError, match="can't be a run folder"):
      use()
  assert not list(tmp_path.iterdir())


def hold(folder):
  """Starts a process that holds a folder until it is killed."""
  code = (
    "import sys, time\nfrom pathlib import Path\nfrom speedyzero_jax.run import run_dir\n"
    "run = run_dir.open_existing(Path(sys.argv[1]))\n"
    "print('held', flush=True)\ntime.sleep(600)\n"
  )
  holder = subprocess.Popen(
    [sys.executable, "-c", code, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True
  )
  assert holder.stdout is not None and holder.stdout.readline() == "held\n"
  return holder


def test_another_process_is_kept_out_until_it_ends_however_it_ends(tmp_path):
  folder = tmp_path / "run"
  run_dir.create(config(folder), "x").close()
  holder = hold(folder)
  try:
    with pytest.raises(ConfigError, match="in use by another process"):
      run_dir.open_existing(folder)
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  run_dir.open_existing(folder).close()


def test_the_slower_of_two_creators_is_refused(tmp_path, monkeypatch):
  lock = run_dir._lock

  def late(path, name):
    monkeypatch.undo()
    run_dir.create(config(path, "run.seed=1"), "x").close()
    return lock(path, name)

  monkeypatch.setattr(run_dir, "_lock", late)
  with pytest.raises(ConfigError, match="already holds a run"):
    run_dir.create(config(tmp_path, "run.seed=2"), "x")
  run_dir.open_existing(tmp_path).close()  # it is not locked
  assert run_dir.read_config(tmp_path).run.seed == 1


def test_a_strangers_folder_is_left_alone(tmp_path):
  (tmp_path / "thesis.tex").write_text("x")
  with pytest.raises(ConfigError, match="not empty and holds no run"):
    run_dir.create(config(tmp_path), "x")
  assert listing(tmp_path) == {"thesis.tex": b"x"}


def test_an_empty_folder_and_one_with_only_a_lock_are_free(tmp_path):
  (tmp_path / "run.lock").touch()  # of a process that was killed before it could write more
  run_dir.create(config(tmp_path), "x").close()


@pytest.mark.parametrize("where", ["file/run", "file", "/proc/run"])
def test_where_nothing_can_be_written(tmp_path, where):
  (tmp_path / "file").write_text("x")
  with pytest.raises(ConfigError, match="can't create a run in"):
    run_dir.create(config(tmp_path / where), "x")
  assert listing(tmp_path) == {"file": b"x"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_where_writing_is_not_allowed(tmp_path):
  tmp_path.chmod(0o555)
  with pytest.raises(ConfigError, match="Permission denied"):
    run_dir.create(config(tmp_path / "run"), "x")


@pytest.mark.parametrize(
  "changes",
  [["evaluation.episodes=3", "evaluation.interval=5"], ["run.keep_checkpoints=9"],
   ["run.log_interval=1"], ["env.threads=1"], ["profile.steps=5"], ["run.compile_cache=/tmp/x"],
   ["replay.frames=host", "learner.prefetch=1"], []],
)  # fmt: skip
def test_what_may_change_when_a_run_goes_on(tmp_path, changes):
  run_dir.create(config(tmp_path), "x").close()
  assert run_dir.resumed(tmp_path, changes) == loader.override(config(tmp_path), changes)
  assert run_dir.read_config(tmp_path) == config(tmp_path)


@pytest.mark.parametrize(
  ("change", "named"),
  [("run.seed=1", "run.seed: 0 != 1"), ("learner.steps=99", "learner.steps: 12 != 99"),
   ("run.mode=async", "run.mode"), ("env.game=CartPole", "env.game"),
   ("env.game=Pong", "env.game: Catch != Pong"),
   ("run.env_steps=151", "run.env_steps"), ("evaluation.episods=1", "evaluation.episodes"),
   ("run.keep_checkpoints=0", "run.keep_checkpoints"),
   ("nonsense", "key=value")],
)  # fmt: skip
def test_what_may_not_change_is_named(tmp_path, change, named):
  run_dir.create(config(tmp_path), "x").close()
  before = listing(tmp_path)
  with pytest.raises(ConfigError, match=named):
    run_dir.resumed(tmp_path, [change])
  assert listing(tmp_path) == before


@pytest.mark.parametrize(
  "content", [None, b"", b"\xff\xfe", b"env: [", b"run: {seed: many}", b"- 1"]
)
def test_a_folder_without_a_readable_configuration(tmp_path, content):
  if content is not None:
    (tmp_path / "config.yaml").write_bytes(content)
  expected = "holds no run" if content is None else "can't read .*config.yaml with this version"
  for read in (run_dir.read_config, lambda path: run_dir.resumed(path, [])):
    with pytest.raises(ConfigError, match=expected):
      read(tmp_path)
  assert listing(tmp_path) == ({} if content is None else {"config.yaml": content})


def test_a_folder_of_an_earlier_version_says_so(tmp_path):
  run_dir.create(config(tmp_path), "x").close()
  path = tmp_path / "config.yaml"
  path.write_text(path.read_text().replace("\nrun:\n", "\nrun:\n  forgotten: 3\n"))
  with pytest.raises(ConfigError, match=r"with this version and .*: .*run\.forgotten"):
    run_dir.resumed(tmp_path, [])


def test_a_file_is_on_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
  done, fsync, replace = [], os.fsync, os.replace

  def synced(file):
    done.append(Path(os.readlink(f"/proc/self/fd/{file}")).read_text())
    fsync(file)

  def replaced(*paths):
    done.append("replaced")
    replace(*paths)

  monkeypatch.setattr(os, "fsync", synced)
  monkeypatch.setattr(os, "replace", replaced)
  write_atomically(tmp_path / "config.yaml", "new")
  assert done == ["new", "replaced"]


def test_pipes_and_links_are_written_to_and_not_replaced(tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  with ThreadPoolExecutor() as pool:
    read = pool.submit(pipe.read_text)
    write_atomically(pipe, "text")
    assert read.result(60) == "text"
  assert pipe.is_fifo()
  link, file = tmp_path / "link", tmp_path / "file"
  link.symlink_to(file)
  write_atomically(link, "text")
  assert link.is_symlink() and file.read_text() == "text"
