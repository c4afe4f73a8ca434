"""Tests of the membership of learner processes: their mesh, and the loss of one."""

from unittest import mock

import jax
import pytest

import tiny
from speedyzero_jax.cluster.learner_process import membership_of
from speedyzero_jax.cluster.rendezvous import RendezvousError
from speedyzero_jax.run.topology import Topology

SHAPE = Topology(2, 0, 0)


def member(rendezvous=None, *settings):
  return membership_of(tiny.config(*settings), SHAPE, SHAPE.role(1), rendezvous or mock.Mock())


@pytest.mark.parametrize(("setting", "each"), [(0, 2), (1, 1)])
def test_the_mesh_has_equally_many_devices_of_each_learner(monkeypatch, setting, each):
  devices = jax.devices()
  monkeypatch.setattr(jax, "local_devices", lambda index: [devices[:4], devices[4:6]][index])
  mesh = member(None, f"learner.devices={setting}").mesh
  assert mesh.devices.tolist() == [*devices[:each], *devices[4 : 4 + each]]


def test_experience_of_other_processes_is_on_disk_before_it_counts(monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda index: jax.devices()[index : index + 1])
  assert member().durable


@pytest.mark.parametrize("method", ["publish", "lookup_of"])
def test_a_lost_learner_fails_as_in_a_collective(monkeypatch, method):
  monkeypatch.setattr(jax, "local_devices", lambda index: jax.devices()[index : index + 1])
  rendezvous = mock.Mock(**{f"{method}.side_effect": RendezvousError("gone")})
  with pytest.raises(jax.errors.JaxRuntimeError, match="gone"):
    member(rendezvous).all_gather(1)
