"""Tests of a process' errors, and of the run's token: made by process 0, or read from a file."""

import contextlib
import json
import resource
import signal

import pytest

import tiny
from fake_rendezvous import FakeRendezvous
from speedyzero_jax.cluster import process
from speedyzero_jax.cluster.grpc_client import Refused, Unreachable
from speedyzero_jax.cluster.rendezvous import Place, RendezvousError
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import topology
from speedyzero_jax.run.run_dir import RunDir
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.workers.weights import DivergedError

PLACE = Place("127.0.0.1:1", 2, 0)
SETTINGS = "topology.learners=1", "topology.actors=1", "run.mode=async"


def started(config, folder, monkeypatch, train):
  """Runs process 0 with this function as its training; returns the exit code and the rendezvous."""
  rendezvous = FakeRendezvous(PLACE)
  monkeypatch.setattr(process, "Rendezvous", lambda place, **_: rendezvous)
  monkeypatch.setattr(process, "train", train)
  monkeypatch.setattr(process, "membership_of", lambda *_: None)
  opened = contextlib.nullcontext(RunDir(folder, -1))
  code = process.main(PLACE, lambda: config, lambda _: opened, resume=False, devices=None)
  return code, rendezvous


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize(
  "error",
  [
    RendezvousError("lost"), Refused("unknown"), Unreachable("silent"),
    DivergedError(3),
  ],
)  # fmt: skip
def test_an_error_is_one_line_unless_a_signal_came_first(
  tmp_path, monkeypatch, capsys, error, stopped
):
  def train(*_, **__):
    if stopped:
      signal.raise_signal(signal.SIGTERM)
    raise error

  code, rendezvous = started(tiny.config(*SETTINGS), tmp_path, monkeypatch, train)
  assert code == (128 + signal.SIGTERM if stopped else 1) and rendezvous.failed
  assert capsys.readouterr().err == ("" if stopped else f"error: {error}\n")


def test_allows_many_open_files_and_no_core_dumps(tmp_path, monkeypatch):
  kinds = resource.RLIMIT_NOFILE, resource.RLIMIT_CORE
  before = [resource.getrlimit(kind) for kind in kinds]
  try:
    for kind, (_, hard), soft in zip(kinds, before, (256, before[1][1]), strict=True):
      resource.setrlimit(kind, (soft, hard))
    started(tiny.config(*SETTINGS), tmp_path, monkeypatch, lambda *_, **__: 0)
    (files, most), (core, _) = (resource.getrlimit(kind) for kind in kinds)
  finally:
    for kind, limits in zip(kinds, before, strict=True):
      resource.setrlimit(kind, limits)
  assert core == 0 and files >= min(most, 1 << 16)


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_learner_that_fails_counts_as_lost(tmp_path, monkeypatch, code):
  returned, rendezvous = started(
    tiny.config(*SETTINGS), tmp_path, monkeypatch, lambda *_, **__: code
  )
  assert returned == code and rendezvous.failed == (code == 1)


def tokens(config, folder, monkeypatch):
  """Values published by process 0, and the token that it uses itself."""
  used = []

  def train(config, folder, *, serving, **_):
    serving(None)
    return 0

  monkeypatch.setattr(process, "serving", lambda *arguments: used.append(arguments[-1]))
  code, rendezvous = started(config, folder, monkeypatch, train)
  assert code == 0
  return rendezvous.values, *used


def test_a_new_token_is_published_for_every_run(tmp_path, monkeypatch):
  config = tiny.config(*SETTINGS)
  (first, used), (second, _) = (tokens(config, tmp_path, monkeypatch) for _ in range(2))
  first, second = (process.Run(*json.loads(each["run"])).token for each in (first, second))
  assert bytes.fromhex(first) == used and len(used) == 32 and first != second


def test_a_token_of_a_file_is_not_published(tmp_path, monkeypatch):
  secret = tmp_path / "secret"
  secret.write_bytes(b"  sixteen bytes ok\n")
  config = tiny.config(*SETTINGS, f"topology.token_file={secret}")
  published, used = tokens(config, tmp_path, monkeypatch)
  assert used == b"sixteen bytes ok"
  text = " ".join(published.values())
  assert "sixteen" not in text and b"sixteen".hex() not in text


@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize(
  ("content", "why"), [(b"fifteen bytes..\n", "16 bytes or more, got 15"), (None, "No such file")]
)
def test_an_unusable_token_file_is_wrong_use_in_every_process(tmp_path, process_id, content, why):
  secret = tmp_path / "secret"
  if content is not None:
    secret.write_bytes(content)
  config = tiny.config(*SETTINGS, f"topology.token_file={secret}")
  shape, run = topology.resolve(config), process.Run(str(tmp_path), False, "")
  rendezvous = FakeRendezvous(PLACE._replace(process_id=process_id))
  with pytest.raises(ConfigError, match=f"topology.token_file: .*{why}"):
    process._run(config, shape, run, rendezvous, Signals())


def test_a_learner_that_does_not_see_the_run_folder_starts_no_other(tmp_path, monkeypatch):
  monkeypatch.setattr(process, "_MOUNT_TIMEOUT", 0)
  with pytest.raises(ConfigError, match="all learners must mount the same run folder"):
    process._check_mounted(tmp_path)
  (tmp_path / "config.yaml").touch()
  process._check_mounted(tmp_path)


def test_a_further_learner_creates_no_folder_of_its_own(tmp_path, monkeypatch):
  monkeypatch.setattr(process, "_MOUNT_TIMEOUT", 0)
  config = tiny.config("topology.learners=2", "actor.lanes=4", "run.mode=async")
  run = process.Run(str(tmp_path / "run"), False, "00" * 32)
  rendezvous = FakeRendezvous(PLACE._replace(process_id=1))
  with pytest.raises(ConfigError, match="same run folder"):
    process._run(config, topology.resolve(config), run, rendezvous, Signals())
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inference", ["central", "actors"])
def test_an_actor_uses_no_gpu_with_central_inference(tmp_path, monkeypatch, inference):
  rendezvous, used = FakeRendezvous(PLACE._replace(process_id=1)), []
  rendezvous.share_devices = lambda count, *, cpu=False: used.append(cpu)
  config = tiny.config(*SETTINGS, f"topology.inference={inference}")
  rendezvous.publish("config", loader.to_yaml(config))
  rendezvous.publish("run", json.dumps(process.Run(str(tmp_path), False, "")))
  monkeypatch.setattr(process, "Rendezvous", lambda *_, **__: rendezvous)
  monkeypatch.setattr(process, "_run", lambda *_: 0)
  assert process.main(rendezvous.place, None, None, resume=False, devices=None) == 0
  assert used == [inference == "central"]
