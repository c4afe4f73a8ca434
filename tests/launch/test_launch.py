"""Tests of the launcher's command line, its errors, and the processes that it would supervise."""

import os
import re
import socket
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from launch import multihost, profile_run
from launched import NEW, finish, python
from speedyzero_jax.cluster import supervisor
from speedyzero_jax.config import loader
from speedyzero_jax.config.agents import agent_names
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.metrics import progress
from speedyzero_jax.run import factories, run_dir, train
from speedyzero_jax.run.experiment import TrainingError
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.workers.weights import DivergedError

MANY = [*NEW, "run.mode=async", "actor.lanes=4"]
PLACE = ["--coordinator", "localhost:1", "--num-processes", "1", "--process-id", "0"]


# --- wrong use: exit code 2, one line, nothing written


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ([*NEW, "learner.batchsize=8"], "'learner.batchsize'; the nearest is learner.batch_size"),
    (["--config", "quikstart"], "unknown preset 'quikstart'; the nearest: quickstart"),
    ([*NEW, "env.game=Catchh"], "did you mean Catch?"),
    (["--processes", "learner=1,actor=1", *MANY, "env.game=Catchh"], "did you mean Catch?"),
    ([*NEW, "learner.devices=4000"], "learner.devices"),
    ([*NEW, "topology.actors=2", "run.mode=async"], "topology"),
    ([*NEW, "--devices", "0"], "--devices is for one of several processes"),
    (["--resume", "nothing"], "nothing holds no run"),
    ([*NEW, "run.dir=/proc/run"], "can't create a run in /proc/run"),
  ],
)
def test_wrong_use_is_reported_in_one_line(tmp_path, monkeypatch, capsys, arguments, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(train, "train", lambda *args, **kwargs: pytest.fail("trains"))
  assert multihost.main(arguments) == 2
  captured = capsys.readouterr()
  assert captured.out == "" and captured.err.count("\n") == 1
  assert captured.err.startswith("error: ") and message in captured.err
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("where", "error", "message"),
  [
    ("envs.batched_env.make_env", TypeError("incompatible\n1. envpool"), "env: incompatible\n"),
    ("run.factories.make_agent", ZeroDivisionError("by zero"), "by zero\n"),
  ],
)
def test_what_libraries_refuse_is_wrong_use(tmp_path, monkeypatch, capsys, where, error, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(f"speedyzero_jax.{where}", mock.Mock(side_effect=error))
  assert multihost.main(NEW) == 2
  assert capsys.readouterr().err == f"error: {message}" and not list(tmp_path.iterdir())


OWN = """
from typing import ClassVar
from flax import nnx
from speedyzero_jax.agents import base, impala

class AGENT_CONFIG(impala.ImpalaConfig):
  name: ClassVar[str] = "own"

class make_agent(impala.Impala):
"""


@pytest.mark.parametrize(
  ("body", "preset", "message"),
  [
    (
      "network = lambda *_, **__: nnx.LayerNorm(8)",
      "impala",
      r"LayerNorm.*'rngs' \(.*/own.py:10\)",
    ),
    (
      "subscriptions, tasks = {'x': 1}, {'x': base.Task(None, (), None, 'x', 'x', max_age=2)}",
      "impala",
      "x: max_age must be at least",
    ),
    ("target_interval = 9", "a3c", "topology.gradients: must be .* own with .* a target network"),
  ],
)
def test_problems_of_an_own_agent_are_located(tmp_path, monkeypatch, body, preset, message):
  (tmp_path / "own.py").write_text(f"{OWN}  {body}\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "own", raising=False)
  with pytest.raises(ConfigError, match=message):
    multihost.check_possible(loader.load([preset], ["agent=own", "env.game=Catch"]))


def test_presets_and_overrides_may_alternate():
  for arguments in (
    ["--config", "a", "x.y=1", "--config", "b", "x.y=2"],
    ["x.y=1", "--config", "a", "b", "x.y=2"],
  ):
    for parsed in (multihost.parse(arguments), profile_run.parse(arguments)):
      assert parsed.config == ["a", "b"] and parsed.overrides == ["x.y=1", "x.y=2"]
  parsed = multihost.parse(["--resume", "x", "a.b=1", "--devices", "0", "a.b=2"])
  assert parsed.overrides == ["a.b=1", "a.b=2"]
  parsed = multihost.parse(["--config=a", "--config=x.y=1"])
  assert parsed.config == ["a"] and parsed.overrides == ["x.y=1"]


def test_help_is_for_the_agent_of_a_preset_file(tmp_path, capsys):
  def shown(*arguments):
    with pytest.raises(SystemExit) as exited:
      multihost.main([*arguments, "--help"])
    assert exited.value.code == 0
    return re.search(r"^agent=(\w+) ", capsys.readouterr().out, re.M)[1]

  (tmp_path / "my.yaml").write_text("base: [dqn]\n")
  other = f"topology.token_file={tmp_path}/token.yaml"
  for config in (["--config", f"{tmp_path}/my.yaml"], [f"--config={tmp_path}/my.yaml"]):
    assert shown(*config, other) == "dqn"
  assert shown("--config=r2d2") == "r2d2" and shown() == "efficientzero"
  (tmp_path / "config.yaml").write_text(loader.to_yaml(loader.load(["r2d2"])))
  assert shown("--resume", str(tmp_path)) == "r2d2"
  for agent in agent_names():  # some are invalid with the default settings
    assert shown(f"agent={agent}") == agent


def test_a_platform_without_devices_is_wrong_use(tmp_path):
  for name in ("cuda", "unheard"):
    command = [sys.executable, multihost.__file__, "--config", "quickstart"]
    command.append(f"run.dir={tmp_path / 'run'}")
    result = subprocess.run(
      command, env=os.environ | {"JAX_PLATFORMS": name, "CUDA_VISIBLE_DEVICES": ""},
      capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 2 and f"error: JAX_PLATFORMS={name} can't be used" in result.stderr
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "arguments",
  [
    [], ["--resume", "x", "--config", "quickstart"], ["--episodes", "1"],
    ["sweep", *NEW], [*NEW, "--processes", "learner=1", "gpu"], ["--resume", "x", "y"],
    [*NEW, "--processes", "learner=many"], [*NEW, "--processes", "actor=1"],
    [*NEW, "--processes", "learner=1,learner=2"], [*NEW, "--processes", "learner=1", *PLACE],
    [*NEW, "--processes", "learner=1", "--devices", "0"], [*NEW, *PLACE[:2]],
    [*NEW, *PLACE, "--devices", "a"], [*NEW, *PLACE, "--coordinator", "localhost"],
    [*NEW, *PLACE, "--coordinator", "localhost:99999"], [*NEW, *PLACE, "--process-id", "7"],
  ],
)  # fmt: skip
def test_an_impossible_command_line_shows_the_usage(arguments, capsys):
  with pytest.raises(SystemExit) as exited:
    multihost.main(arguments)
  assert exited.value.code == 2 and "usage:" in capsys.readouterr().err


def test_learners_that_would_share_a_gpu_are_refused(tmp_path, monkeypatch, capsys):
  monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
  monkeypatch.setenv("JAX_PLATFORMS", "cuda")
  assert multihost.main([*MANY, f"run.dir={tmp_path / 'run'}", "--processes", "learner=2"]) == 2
  assert "2 learners need a GPU each, and there are 1" in capsys.readouterr().err
  assert not list(tmp_path.iterdir())


# --- supervising


def test_progress_is_the_newest_step_that_every_learner_has_saved(tmp_path, monkeypatch):
  found = []

  class Stub:
    def __init__(self, made, logs, report, progress):
      self.folder, self.progress = logs.parent, progress

    def run(self):
      assert self.progress() == -1
      for name in ("5-90", "12-20", "damaged/14-9", "13-9.orbax-checkpoint-tmp"):
        (self.folder / "checkpoints" / name).mkdir(parents=True)
        found.append(self.progress())
      (self.folder / "units/1/checkpoints/7-8").mkdir(parents=True)
      found.append(self.progress())
      return 0

  monkeypatch.setattr(supervisor, "Supervisor", Stub)
  settings = f"run.dir={tmp_path / 'run'}", "learner.devices=1"
  assert multihost.main([*MANY, *settings, "--processes", "learner=2"]) == 0
  assert found == [5, 12, 12, 12, 7]


@pytest.fixture
def supervised(tmp_path, monkeypatch):
  """Returns the children that `--processes` would start, after passing them to `look`."""

  def supervise(look, processes="learner=1,actor=1", gpus="", learner_devices=1):
    children = []

    class Stub:
      def __init__(self, made, logs, report, progress):
        children.extend(made)

      def run(self):
        look(children)
        return 0

    monkeypatch.setattr(supervisor, "Supervisor", Stub)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda" if gpus else "cpu")
    for former in ("", "PYTHON_"):
      monkeypatch.delenv(f"XLA_{former}CLIENT_MEM_FRACTION", raising=False)
    settings = f"run.dir={tmp_path / 'run'}", f"learner.devices={learner_devices}"
    arguments = [*MANY, *settings, "--processes", processes]
    assert multihost.main(arguments) == 0
    return children

  return supervise


def coordinator_of(child):
  return child.command[child.command.index("--coordinator") + 1]


def test_the_coordinators_port_stays_reserved_between_restarts(supervised):
  def look(children):
    port = int(coordinator_of(children[0]).removeprefix("127.0.0.1:"))
    for _ in range(2):
      with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
      with socket.socket() as coordinator:  # as gRPC does
        coordinator.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        coordinator.bind(("127.0.0.1", port))
        coordinator.listen()
        socket.create_connection(("127.0.0.1", port), 5).close()

  supervised(look)


def test_a_run_has_one_supervisor(supervised, tmp_path):
  def look(_):
    with pytest.raises(ConfigError, match="in use"):
      run_dir.supervised(tmp_path / "run")

  supervised(look)


def test_settings_of_a_resumed_run_reach_its_processes(supervised, tmp_path):
  children = supervised(lambda _: None)
  resumed = ["--resume", str(tmp_path / "run"), "--processes", "learner=1,actor=1"]
  assert multihost.main([*resumed, "evaluation.episodes=7"]) == 0
  changed = ["evaluation.episodes=7" in child.command for child in children]
  assert changed == [False] * 2 + [True] * 2


def test_only_the_first_process_inherits_the_terminal(supervised):
  learner, actor = supervised(lambda _: None)
  assert learner.files == (int(learner.env[progress.TERMINAL]),) and not actor.files


def test_processes_that_share_gpus_share_their_memory(supervised, tmp_path):
  children = supervised(lambda _: None, "learner=1,actor=2", gpus="0,1", learner_devices=2)
  address = coordinator_of(children[0])
  for process_id, (child, devices) in enumerate(zip(children, ("0,1", "1", "0"), strict=True)):
    assert child.command == [
      sys.executable, multihost.__file__, "--resume", str(tmp_path / "run"),
      "--coordinator", address, "--num-processes", "3", "--process-id", str(process_id),
      "--devices", devices,
    ]  # fmt: skip
    environment = {name: value for name, value in child.env.items() if name != progress.TERMINAL}
    assert environment == {
      "XLA_CLIENT_MEM_FRACTION": "0.45",
      "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
    }


# --- failures


@pytest.mark.parametrize("error", [DivergedError(3), TrainingError("no data")])
def test_why_a_run_cannot_go_on_is_reported_in_one_line(tmp_path, monkeypatch, capsys, error):
  def fail(*args, **kwargs):
    raise error

  monkeypatch.setattr(factories, "make_replay", fail)
  assert multihost.main([*NEW, f"run.dir={tmp_path / 'run'}"]) == 1
  assert capsys.readouterr().err == f"error: {error}\n"


def too_much(*args, **kwargs):
  np.zeros(2**55, np.uint8)


def too_much_on_the_device(*args, **kwargs):
  jax.block_until_ready(jax.numpy.zeros(2**46))


@pytest.mark.parametrize("fail", [too_much, too_much_on_the_device])
def test_a_lack_of_memory_is_reported_in_one_line(tmp_path, monkeypatch, capsys, fail):
  monkeypatch.setattr(factories, "make_replay", fail)
  assert multihost.main([*NEW, "run.mode=async", f"run.dir={tmp_path / 'run'}"]) == 1
  errors = capsys.readouterr().err
  assert errors.startswith("error: out of host memory: ") and errors.count("\n") == 1
  assert "replay.capacity" in errors and "learner.batch_size" in errors


CRASH = """
import runpy, sys
from speedyzero_jax.config import loader
loader.load = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_unexpected_error_is_a_failure(tmp_path):
  run = f"run.dir={tmp_path / 'run'}"
  code, output = finish(python("-c", CRASH, multihost.__file__, *NEW, run))
  assert code == 1 and "Traceback" in output


def test_other_errors_of_a_device_are_raised_or_abort_one_of_several(tmp_path, monkeypatch):
  def broken(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

  monkeypatch.setattr(factories, "make_replay", broken)
  with pytest.raises(jax.errors.JaxRuntimeError, match="a bug"):
    multihost.main([*NEW, f"run.dir={tmp_path / 'run'}"])
  config = loader.load(["quickstart"], [*NEW[2:], "run.mode=async", "topology.actors=1"])
  monkeypatch.setattr("os.abort", mock.Mock(side_effect=SystemExit))
  with pytest.raises(SystemExit), Signals() as signals:
    train.train(config, tmp_path / "run", resume=False, signals=signals)
