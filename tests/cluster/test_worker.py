"""What process 0 tells the others: the run's token only where there is no file to read it from."""

import contextlib
import json

import pytest
import tiny

from speedyzero_jax.cluster import worker
from speedyzero_jax.cluster.rendezvous import Place
from speedyzero_jax.config import loader
from speedyzero_jax.config.loader import ConfigError
from speedyzero_jax.run.run_dir import RunFolder
from speedyzero_jax.run.train import Signals

PLACE = Place("127.0.0.1:1", 2, 0)
SETTINGS = "topology.learners=1", "topology.actors=1", "run.mode=async"


class FakeRendezvous:
  """Remembers what is published."""

  def __init__(self, place, **_):
    self.place, self.said, self.address = place, {}, "127.0.0.1"
    FakeRendezvous.last = self

  def share_devices(self, processes):
    pass

  def publish(self, name, value):
    self.said[name] = value

  def leave(self):
    pass


def tokens(config, folder, monkeypatch):
  """What process 0 publishes of the token, and what it uses itself."""
  used = []
  monkeypatch.setattr(worker, "Rendezvous", FakeRendezvous)
  monkeypatch.setattr(
    worker, "_learn", lambda config, run, *_: used.append(bytes.fromhex(run.token)) or 0
  )

  @contextlib.contextmanager
  def open_folder(meet):
    meet(config)
    yield RunFolder(folder, config, -1)

  assert worker.main(PLACE, open_folder, resume=False, devices=None) == 0
  return json.loads(FakeRendezvous.last.said["run"])["token"], *used


def test_a_token_is_made_anew_for_every_run_and_told(tmp_path, monkeypatch):
  config = tiny.config(*SETTINGS)
  (told, used), (other, _) = (tokens(config, tmp_path, monkeypatch) for _ in range(2))
  assert bytes.fromhex(told) == used and len(used) == 32 and told != other


def test_a_token_from_a_file_is_told_to_nobody(tmp_path, monkeypatch):
  secret = tmp_path / "secret"
  secret.write_bytes(b"  sixteen bytes ok\n")
  config = tiny.config(*SETTINGS, f"topology.token_file={secret}")
  assert tokens(config, tmp_path, monkeypatch) == ("", b"sixteen bytes ok")
  assert not any(
    "sixteen" in value or b"sixteen".hex() in value for value in FakeRendezvous.last.said.values()
  )


@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize(
  ("content", "why"),
  [
    (b"fifteen bytes..\n", "must hold 16 bytes or more, got 15"),
    (None, "can't read .*No such file"),
  ],
)
def test_a_token_file_that_is_none_is_wrong_use_in_every_process(
  tmp_path, process_id, content, why
):
  secret = tmp_path / "secret"
  if content is not None:
    secret.write_bytes(content)
  config = tiny.config(*SETTINGS, f"topology.token_file={secret}")
  run = worker.Run(str(tmp_path), loader.to_yaml(config), False, "")
  with pytest.raises(ConfigError, match=f"topology.token_file: .*{why}"):
    worker._run(run, FakeRendezvous(PLACE._replace(process_id=process_id)), Signals())
