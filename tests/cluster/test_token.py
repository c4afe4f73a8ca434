"""Tests of the run's token: created and published by process 0, or read from a file."""

import contextlib
import json

import pytest

import tiny
from speedyzero_jax.cluster import process
from speedyzero_jax.cluster.rendezvous import Place
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.run import topology
from speedyzero_jax.run.run_dir import RunDir
from speedyzero_jax.run.signals import Signals

PLACE = Place("127.0.0.1:1", 2, 0)
SETTINGS = "topology.learners=1", "topology.actors=1", "run.mode=async"


class FakeRendezvous:
  """Records published values."""

  def __init__(self, place, published, **_):
    self.place, self.published, self.address = place, published, "127.0.0.1"

  def share_devices(self, processes):
    pass

  def publish(self, name, value):
    self.published[name] = value

  def leave(self):
    pass


def tokens(config, folder, monkeypatch):
  """Values published by process 0, and the token that it uses itself."""
  used, published = [], {}

  def train(config, folder, *, serving, **_):
    serving(None)
    return 0

  monkeypatch.setattr(process, "Rendezvous", lambda place, **_: FakeRendezvous(place, published))
  monkeypatch.setattr(process, "train", train)
  monkeypatch.setattr(process, "membership_of", lambda *_: None)
  monkeypatch.setattr(process, "serving", lambda *arguments: used.append(arguments[-1]))
  opened = contextlib.nullcontext(RunDir(folder, -1))
  code = process.main(PLACE, lambda: config, lambda _: opened, resume=False, devices=None)
  assert code == 0
  return published, *used


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
  rendezvous = FakeRendezvous(PLACE._replace(process_id=process_id), {})
  with pytest.raises(ConfigError, match=f"topology.token_file: .*{why}"):
    process._run(config, shape, run, rendezvous, Signals())
