"""The commands people run, as real processes: exit codes, signals, kills, and that nothing is
lost by any of them."""

import contextlib
import json
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from launch import evaluate, multihost, profile
from speedyzero_jax.cluster import supervisor
from speedyzero_jax.metrics import jsonl, progress
from speedyzero_jax.run import run_dir, train
from speedyzero_jax.run.checkpoint import Checkpoints
from speedyzero_jax.system import memory

ROOT = Path(__file__).resolve().parents[2]
CACHE = f"run.compile_cache={os.environ['JAX_COMPILATION_CACHE_DIR']}"
STEPS = 40
# A checkpoint at every other step, so that a signal at any moment is likely to come while one is
# being written.
SETTINGS = [*tiny.OVERRIDES, CACHE, f"learner.steps={STEPS}", "run.checkpoint_interval=2", "run.log_interval=1",
            "evaluation.at_end=true", "reanalyse.schedule=off", "loss.unroll_steps=1"]  # fmt: skip
NEW = ["--config", "quickstart", *SETTINGS]


def start(*arguments, devices=1, script="multihost.py", cwd=ROOT, log=None):
  """A process whose standard output goes to the file `log`, if given."""
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
  out = subprocess.PIPE if log is None else log.open("w")
  command = [sys.executable, ROOT / "launch" / script, *map(str, arguments)]
  return subprocess.Popen(
    command, cwd=cwd, env=environment, stdout=out, stderr=subprocess.PIPE, text=True
  )


def listing(folder):
  return {
    str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
  }


@pytest.fixture(scope="module")
def started(tmp_path_factory):
  """Two runs that nobody disturbs, going on while other tests work: name -> (folder, process,
  log)."""
  base = tmp_path_factory.mktemp("runs")
  runs = {
    "reference": (NEW, 1),
    "four": (
      ["--config", "quickstart", *tiny.OVERRIDES, CACHE, "learner.devices=0", "run.mode=async"],
      4,
    ),
  }
  processes = {}
  for name, (arguments, devices) in runs.items():
    folder, log = base / name, base / f"{name}.log"
    processes[name] = folder, start(*arguments, f"run.dir={folder}", devices=devices, log=log), log
  yield processes
  for _, process, _ in processes.values():
    process.kill()
    process.communicate()


def finish(started, name):
  folder, process, log = started[name]
  _, errors = process.communicate(timeout=200)
  assert process.returncode == 0, errors
  return folder, log.read_text()


@pytest.fixture(scope="module")
def finished(started):
  """Folder and output of an undisturbed run, after its end."""
  return finish(started, "reference")


def hash_in(output):
  (digest,) = re.findall(r"learner steps; parameters (\w{16})", output)
  return digest


# --- Wrong use: exit code 2, one line, nothing written


def test_a_misspelt_key_is_named_with_the_nearest(started, tmp_path):
  process = start("--config", "quickstart", "learner.batchsize=8", cwd=tmp_path)
  out, errors = process.communicate(timeout=60)
  assert process.returncode == 2 and out == ""
  assert errors == "error: unknown key 'learner.batchsize'; the nearest is learner.batch_size\n"
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--config", "quikstart"], "unknown preset 'quikstart'; the nearest: quickstart"),
    (
      [*NEW, "env.game=Brekout", "network.downsample=16"],
      "unknown game 'Brekout'; did you mean Breakout",
    ),
    ([*NEW, "env.game=Catchh"], "env.game: unknown game 'Catchh'; did you mean Catch?"),
    (
      [*NEW, "env.game=CartPole"],
      "network.support: must be at least 9 for values of up to 84, which CartPole has, got 5",
    ),
    (
      [*NEW, "evaluation.max_episode_steps=1e10"],
      "evaluation.max_episode_steps: must lie in [1, 1e9]",
    ),
    ([*NEW, "learner.batch_size=many"], "learner.batch_size: expected an integer, got 'many'"),
    ([*NEW, "refresh.max_age=3"], "refresh.max_age"),
    ([*NEW, "learner.devices=4000"], "learner.devices"),
    (
      [*NEW, "learner.devices=0", "learner.batch_size=7"],
      "learner.batch_size: must be a multiple of the",
    ),
    (["--resume", "nothing"], "nothing holds no run"),
    (
      ["--resume", "nothing", "run.dir=else"],
      "run.dir: --resume says already that the folder is nothing",
    ),
    ([*NEW, "run.dir=/proc/run"], "can't make a run in /proc/run"),
  ],
)
def test_wrong_use_is_said_in_a_line(tmp_path, monkeypatch, capsys, arguments, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trains"))
  if "learner.batch_size=7" in arguments and len(jax.local_devices()) == 1:
    pytest.skip("one device shares any batch")
  assert multihost.main(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and captured.err.count("\n") == 1
  assert captured.err.startswith("error: ") and message in captured.err
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("where", "error", "message"),
  [
    (
      "envs.make_env",
      TypeError("__init__(): incompatible\n 1. envpool"),
      "error: env: __init__(): incompatible\n",
    ),
    ("parts.make_blueprint", ZeroDivisionError("by zero"), "error: network: by zero\n"),
  ],
)
def test_what_only_the_libraries_refuse_is_said_before_training(
  tmp_path, monkeypatch, capsys, where, error, message
):
  """Also when it is the evaluation at the end that would meet it, whose environments are the
  first of these."""

  def refuse(*args, **kwargs):
    raise error

  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(f"speedyzero_jax.{where}", refuse)
  assert multihost.main(NEW) == 2
  assert capsys.readouterr().err == message and not list(tmp_path.iterdir())


def test_presets_given_one_by_one_stack_too():
  for arguments in (
    ["--config", "a", "x.y=1", "--config", "b", "x.y=2"],
    ["x.y=1", "--config", "a", "b", "x.y=2"],
  ):
    for parsed in (multihost.parse(arguments), profile.parse(arguments)):
      assert parsed.config == ["a", "b"] and parsed.overrides == ["x.y=1", "x.y=2"]


@pytest.mark.parametrize(
  "arguments", [[], ["--resume", "x", "--config", "quickstart"], ["--episodes", "1"]]
)
def test_a_command_line_that_makes_no_sense(arguments, capsys):
  with pytest.raises(SystemExit) as exited:
    multihost.main(arguments)
  assert exited.value.code == 2 and "usage:" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(started, capsys):
  folder, process, _ = started["reference"]
  deadline = time.monotonic() + 60
  while not (folder / "config.yaml").exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  for arguments in (["--resume", str(folder)], [*NEW, f"run.dir={folder}"]):
    assert process.poll() is None
    assert multihost.main(arguments) == 2
    assert "in use by another process" in capsys.readouterr().err or arguments[0] == "--config"


# --- Stopping and killing


def newest(folder):
  return max(Checkpoints(folder).steps(), default=-1)


def wait_for_checkpoint(folder, process, step):
  deadline = (
    time.monotonic() + 400
  )  # the first comes after a compilation, which takes minutes on a busy machine
  while newest(folder) < step:
    assert time.monotonic() < deadline, "no checkpoint is written"
    if process.poll() is not None:
      return False
    time.sleep(0.01)
  return True


def disturb(folder, log, signals, seed):
  """Starts a run, sends it these signals, resuming it after each, and lets it end. Returns the
  signals that got it."""
  rng, got = random.Random(seed), []
  process = start(*NEW, f"run.dir={folder}", log=log)
  for name in signals:
    before = newest(folder)
    if name == "early":  # it has begun, but has no checkpoint
      while not (folder / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.02)
    elif wait_for_checkpoint(folder, process, before + 2):
      time.sleep(rng.uniform(0, 0.5))
    if process.poll() is not None:
      break  # it was faster: the rest finds it finished
    number = {"TERM": signal.SIGTERM, "INT": signal.SIGINT}.get(name, signal.SIGKILL)
    process.send_signal(number)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == {"TERM": 143, "INT": 130}.get(name, -signal.SIGKILL), errors
    output = log.read_text()
    assert (f"resuming at learner step {before}," in output) == (before >= 0)
    if number != signal.SIGKILL:
      (saved,) = re.findall(r"stopped and saved at learner step (\d+); go on: --resume", output)
      assert int(saved) == newest(folder) > before and errors == ""
    got.append(name)
    process = start("--resume", folder, log=log)
  _, errors = process.communicate(timeout=400)
  assert process.returncode == 0, errors
  return got


@pytest.mark.timeout(1200)
def test_signals_and_kills_at_any_moment_change_nothing(started, tmp_path):
  """Runs stopped by SIGTERM and Ctrl-C and killed again and again end as the one that was left
  alone."""
  plans = [["TERM", "KILL", "INT"], ["early", "KILL", "KILL"]]
  folders, logs = ([tmp_path / f"{kind}{i}" for i in range(2)] for kind in ("run", "log"))
  with ThreadPoolExecutor(2) as pool:
    got = list(pool.map(disturb, folders, logs, plans, (3, 4)))
  assert got[0][:2] == ["TERM", "KILL"] and got[1][:2] == ["early", "KILL"]
  reference, output = finish(started, "reference")
  for folder, log in zip(folders, logs, strict=True):
    assert hash_in(log.read_text()) == hash_in(output)
    ours, theirs = (
      json.loads((path / "evaluation.json").read_text()) for path in (folder, reference)
    )
    assert ours == theirs
    rows, damaged = jsonl.read_rows(folder / "metrics.jsonl")
    assert not damaged and [row["step"] for row in rows] == [*range(1, STEPS + 1), STEPS]
    assert not (folder / "damaged").exists()
    assert Checkpoints(folder).steps() == [STEPS - 4, STEPS - 2, STEPS]


STOPPED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from launch import multihost
from speedyzero_jax.run import experiment
def stopped(function):
  def wrapper(*args, **kwargs):
    os.kill(os.getpid(), signal.Signals[sys.argv[3]])
    return function(*args, **kwargs)
  return wrapper
if sys.argv[2] == "folder":
  multihost.check_possible = stopped(multihost.check_possible)
elif sys.argv[2] == "building":
  training.make_replay = stopped(training.make_replay)
else:
  training.Training.collect = stopped(training.Training.collect)
code = multihost.main(sys.argv[4:])
sys.stdout.flush()
os._exit(code)
"""


@pytest.mark.parametrize(
  ("moment", "name", "code"),
  [("folder", "SIGINT", 130), ("building", "SIGTERM", 143), ("collecting", "SIGTERM", 143)],
)
def test_a_stop_while_a_run_is_starting(tmp_path, moment, name, code):
  """The signal comes from within the process, so that its moment is known."""
  folder = tmp_path / "run"
  command = [sys.executable, "-c", STOPPED, ROOT, moment, name, *NEW, f"run.dir={folder}"]
  done = subprocess.run(
    command,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert (done.returncode, done.stderr) == (code, ""), done.stdout
  if moment == "collecting":
    assert "stopped and saved at learner step 0" in done.stdout and Checkpoints(folder).steps() == [
      0
    ]
  else:
    assert (
      f"stopped before there was anything to save; begin again: --resume {folder}" in done.stdout
    )
    assert Checkpoints(folder).steps() == []


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(tmp_path, second):
  code = (
    "import os, signal, sys, time\nsys.path[:0] = [sys.argv[1]]\nfrom speedyzero_jax.run import train\n"
    "with train.Signals() as signals:\n  os.kill(os.getpid(), signal.SIGTERM)\n"
    "  os.kill(os.getpid(), signal.SIGTERM)\n"  # an echo, as of timeout(1)
    "  assert signals.exit_code == 143\n  time.sleep(1.1)\n  os.kill(os.getpid(), int(sys.argv[2]))\n  time.sleep(60)\n"
  )
  done = subprocess.run(
    [sys.executable, "-c", code, ROOT, str(int(second))], timeout=60, check=False
  )
  assert done.returncode == -second


ON_A_TERMINAL = """
import os, runpy, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))  # makes it this session's
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_terminal_that_is_closed_stops_and_saves(tmp_path):
  folder = tmp_path / "run"
  ours, theirs = pty.openpty()
  command = [
    sys.executable,
    "-c",
    ON_A_TERMINAL,
    ROOT / "launch/multihost.py",
    *NEW,
    f"run.dir={folder}",
  ]
  process = subprocess.Popen(
    [*map(str, command)], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "TERM": "xterm"}, cwd=ROOT,
  )  # fmt: skip
  os.close(theirs)
  os.set_blocking(ours, False)
  deadline = time.monotonic() + 120
  try:
    while newest(folder) < 4:
      assert time.monotonic() < deadline and process.poll() is None, "no checkpoint is written"
      with contextlib.suppress(BlockingIOError):
        os.read(ours, 1 << 16)
      time.sleep(0.01)
    os.close(ours)
    assert process.wait(timeout=60) == 129
  finally:
    process.kill()
    process.wait()
  assert newest(folder) >= 4


# --- Supervising


@pytest.fixture
def supervised(tmp_path, monkeypatch):
  """Has `--processes` start nothing: returns the children that it would be, after a look at
  them."""

  def supervise(look):
    children = []

    class Stub:
      def __init__(self, make, logs, report):
        children.extend(make(False))

      def run(self):
        look(children)
        return 0

    monkeypatch.setattr(supervisor, "Supervisor", Stub)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = [
      *NEW,
      "run.mode=async",
      f"run.dir={tmp_path / 'run'}",
      "--processes",
      "learner=1,actor=1",
    ]
    assert multihost.main(arguments) == 0
    return children

  return supervise


def test_nobody_else_gets_the_coordinators_port_between_two_starts(supervised):
  def look(children):
    port = int(children[0].env["JAX_COORDINATOR_BIND_ADDRESS"].removeprefix("127.0.0.1:"))
    for _ in range(2):
      with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
      with socket.socket() as coordinator:  # as gRPC does
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(("127.0.0.1", port))
        coordinator.listen()
        socket.create_connection(("127.0.0.1", port), 5).close()

  supervised(look)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_an_output_that_was_closed_before_the_start_is_no_error(supervised, monkeypatch, closed):
  monkeypatch.setattr(sys, closed, None)
  learner, actor = supervised(lambda _: None)
  assert getattr(sys, closed).writable()
  os.fstat(int(learner.env[progress.TERMINAL]))
  assert learner.files == (int(learner.env[progress.TERMINAL]),) and not actor.files


def test_learners_that_would_share_a_gpu_are_refused(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  settings = ["run.mode=async", "actor.lanes=4", f"run.dir={tmp_path / 'run'}"]
  arguments = [*NEW, *settings, "--processes", "learner=2"]
  assert multihost.main(arguments) == 2
  assert "2 learners need a GPU each, and there are 1" in capsys.readouterr().err and not list(
    tmp_path.iterdir()
  )


# --- Memory


def test_memory_that_runs_out_is_said_in_a_line(tmp_path, monkeypatch, capsys):
  """Whichever role it is that meets the end of it."""

  def more(*args):
    np.zeros(2**55, np.uint8)

  def more_on_the_device(*args):
    jax.block_until_ready(jax.numpy.zeros(2**42))

  part = "speedyzero_jax.run.experiment.Training."
  for number, (method, fail) in enumerate(
    (("collect", more), ("draw", more_on_the_device), ("learn", more))
  ):
    with monkeypatch.context() as patch:
      patch.setattr(part + method, fail)
      folder = tmp_path / str(number)
      assert multihost.main([*NEW, "run.mode=async", f"run.dir={folder}"]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: out of host memory: ") and errors.count("\n") == 1
    assert re.search(r"The replay holds [\d.]+ MB of the [\d.]+ MB that it will take", errors)
    assert all(
      key in errors for key in ("replay.capacity", "learner.batch_size", "reanalyse.block")
    )


def test_memory_that_runs_out_while_the_run_is_built(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(
    "speedyzero_jax.run.experiment.make_replay", lambda *args, **kw: np.zeros(2**55, np.uint8)
  )
  assert multihost.main([*NEW, f"run.dir={tmp_path / 'run'}"]) == 1
  assert "out of host memory: Unable to allocate" in capsys.readouterr().err


def test_what_a_device_says_otherwise_is_not_called_memory(tmp_path, monkeypatch):
  def broken(*args):
    raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

  monkeypatch.setattr("speedyzero_jax.run.experiment.Training.collect", broken)
  with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
    multihost.main([*NEW, f"run.dir={tmp_path / 'run'}"])


@pytest.mark.parametrize(("room", "warned"), [(10_000, True), (10**12, False), (None, False)])
def test_a_replay_that_will_not_fit_is_said_before_training(
  tmp_path, monkeypatch, capsys, room, warned
):
  monkeypatch.setattr(memory, "available", lambda: room)

  def end_here(*args, **kwargs):
    raise OSError("far enough")

  monkeypatch.setattr("speedyzero_jax.run.experiment.Training.__init__", end_here)
  assert multihost.main([*NEW, f"run.dir={tmp_path / 'run'}"]) == 1
  assert ("warning: the replay will take" in capsys.readouterr().out) == warned


# --- A run that is done


def test_an_undisturbed_run_leaves_everything(finished):
  folder, output = finished
  assert f"trained: 150 agent steps, {STEPS} learner steps" in output
  assert re.search(
    r"this configuration on this machine: about [\d.]+ GB of [\d.]+ GB host memory", output
  )
  assert re.search(
    r"took [\d.]+ (seconds|minutes).*, at most [\d.]+ GB of host memory \(estimated: [\d.]+ GB",
    output,
  )
  assert {
    "config.yaml",
    "metrics.jsonl",
    "tensorboard",
    "checkpoints",
    "replay",
    "evaluation.json",
    "run.lock",
  } == {path.name for path in folder.iterdir()}
  assert run_dir.read_config(folder).run.env_steps == 150
  evaluation = json.loads((folder / "evaluation.json").read_text())
  assert (evaluation["step"], evaluation["episodes"], evaluation["game"]) == (STEPS, 2, "Catch")
  rows, _ = jsonl.read_rows(folder / "metrics.jsonl")
  assert (rows[-1]["step"], rows[-1]["env_steps"]) == (STEPS, 150)
  assert rows[-1]["evaluation/mean"] == evaluation["mean"]


def test_resuming_a_finished_run_does_not_train(finished, tmp_path, capsys):
  folder, output = finished
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  (copy / "evaluation.json").unlink()
  assert multihost.main(["--resume", str(copy), "evaluation.episodes=3", CACHE]) == 0
  captured = capsys.readouterr()
  assert hash_in(captured.out) == hash_in(output) and "compiling train step" not in captured.out
  assert captured.out.startswith("topology: 1 learner\n")
  before, after = listing(folder), listing(copy)
  changed = {
    name
    for name in before | after
    if before.get(name) != after.get(name) and "tensorboard" not in name
  }
  assert changed == {"metrics.jsonl", "evaluation.json"}
  assert json.loads((copy / "evaluation.json").read_text())["episodes"] == 3


def test_another_configuration_in_its_folder_is_refused(finished, capsys):
  folder, _ = finished
  before = listing(folder)
  assert multihost.main([*NEW, f"run.dir={folder}", "run.seed=1"]) == 2
  assert "run.seed: 0 != 1" in capsys.readouterr().err
  assert multihost.main(["--resume", str(folder), "learner.steps=99"]) == 2
  assert f"learner.steps: {STEPS} != 99" in capsys.readouterr().err
  assert multihost.main([*NEW, f"run.dir={folder}"]) == 2
  assert f"--resume {folder}" in capsys.readouterr().err
  assert listing(folder) == before


def test_a_run_made_for_more_devices_is_not_resumed_on_fewer(started, monkeypatch, capsys):
  """Nor with a batch that those here can't share. Nothing is touched, and the folder is free
  again."""
  monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trains"))
  folder, _ = finish(started, "four")
  before = listing(folder)
  three = jax.local_devices() * 3
  monkeypatch.setattr(jax, "local_devices", lambda: three[:3])
  for _ in range(2):
    assert multihost.main(["--resume", str(folder)]) == 2
    assert (
      "learner.batch_size: must be a multiple of the 3 devices used, got 8"
      in capsys.readouterr().err
    )
  stored = (folder / "config.yaml").read_text()
  asked = stored.replace("devices: 0", "devices: 4")
  assert asked != stored
  try:
    (folder / "config.yaml").write_text(asked)
    assert multihost.main(["--resume", str(folder)]) == 2
  finally:
    (folder / "config.yaml").write_text(stored)
  assert "learner.devices: there are 3 here, got 4" in capsys.readouterr().err
  assert listing(folder) == before


def test_a_run_on_four_devices(started):
  folder, output = finish(started, "four")
  assert "4 x cpu" in output and "trained: 150 agent steps, 12 learner steps" in output
  assert newest(folder) == 12
  rows, _ = jsonl.read_rows(folder / "metrics.jsonl")
  assert rows[-1]["charts/samples_per_insert"] == 12 * 8 / 110


@pytest.mark.parametrize("part", ["checkpoints", "replay"])
def test_a_run_that_cannot_go_on_fails_in_a_line(finished, tmp_path, capsys, part):
  """All checkpoints damaged: exit code 1, the reason, and no traceback."""
  copy = tmp_path / "copy"
  shutil.copytree(finished[0], copy)
  for path in (copy / part).rglob("*"):
    if path.is_file():
      path.write_bytes(b"")
  assert multihost.main(["--resume", str(copy), CACHE]) == 1
  captured = capsys.readouterr()
  assert "none of the 3 checkpoints" in captured.err and captured.err.startswith("error: ")
  assert captured.out.count("is damaged or of another kind") == 3
  assert Checkpoints(copy).steps() == [
    STEPS - 4,
    STEPS - 2,
    STEPS,
  ]  # left for whoever can repair them


# --- Evaluating


def test_evaluating_a_run(finished, tmp_path):
  folder, _ = finished
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  (copy / "evaluation.json").unlink()
  before = listing(copy)
  process = start(copy, "--episodes", 5, script="evaluate.py")
  out, errors = process.communicate(timeout=120)
  assert process.returncode == 0, errors
  written = json.loads((copy / "evaluation.json").read_text())
  assert written["episodes"] == len(written["returns"]) == 5 and written["step"] == STEPS
  assert out.startswith(
    f"Catch after {STEPS} learner steps, 5 episodes: mean {written['mean']:.2f}"
  )
  assert {name for name in listing(copy) if name not in before} == {"evaluation.json"}
  assert {name: listing(copy)[name] for name in before} == before  # it only reads


def test_evaluating_as_the_run_itself_does_gives_the_same(finished, tmp_path, capsys):
  folder, _ = finished
  copy = tmp_path / "copy"
  shutil.copytree(folder, copy)
  (copy / "evaluation.json").unlink()
  assert evaluate.main([str(copy)]) == 0
  assert (copy / "evaluation.json").read_bytes() == (folder / "evaluation.json").read_bytes()
  assert evaluate.main([str(copy), "--seed", "4", "--max-episode-steps", "5"]) == 0
  assert "cap of 5" not in capsys.readouterr().out  # Catch knows no cap


INTERRUPTED = """
import os, signal, sys
sys.path[:0] = [sys.argv[1]]
from launch import evaluate
from speedyzero_jax.workers import evaluator
make_env = evaluation.make_env
def interrupted(*args, **kwargs):
  os.kill(os.getpid(), signal.SIGINT)
  return make_env(*args, **kwargs)
evaluation.make_env = interrupted
sys.exit(evaluate.main(sys.argv[2:]))
"""


def test_an_evaluation_interrupted_leaves_the_one_before(finished):
  before = listing(finished[0])
  command = [sys.executable, "-c", INTERRUPTED, ROOT, finished[0], "--episodes", "3"]
  done = subprocess.run(
    list(map(str, command)), capture_output=True, text=True, timeout=120, check=False
  )
  assert (done.returncode, done.stdout, done.stderr) == (
    130,
    "",
    "stopped; no evaluation was written\n",
  )
  assert listing(finished[0]) == before


def test_memory_that_an_evaluation_lacks_is_said_in_a_line(finished, monkeypatch, capsys):
  monkeypatch.setattr(
    "speedyzero_jax.workers.evaluator.make_env", lambda *args, **kwargs: np.zeros(2**55, np.uint8)
  )
  before = listing(finished[0])
  assert evaluate.main([str(finished[0])]) == 1
  errors = capsys.readouterr().err
  assert (
    errors.startswith("error: out of host memory: Unable to allocate") and errors.count("\n") == 1
  )
  assert listing(finished[0]) == before


def test_what_evaluation_refuses(finished, tmp_path, capsys):
  assert evaluate.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err.startswith(f"error: {tmp_path} holds no run")
  shutil.copy(finished[0] / "config.yaml", tmp_path)
  assert evaluate.main([str(tmp_path)]) == 1
  assert "there is no checkpoint in" in capsys.readouterr().err
  assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
  with pytest.raises(SystemExit) as exited:
    evaluate.main([str(tmp_path), "--episodes", "0"])
  assert exited.value.code == 2 and "must be at least 1" in capsys.readouterr().err
  with pytest.raises(SystemExit) as exited:
    evaluate.main([str(tmp_path), "--max-episode-steps", "10000000000"])
  assert exited.value.code == 2 and "at most 1000000000" in capsys.readouterr().err
