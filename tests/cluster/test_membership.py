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


@pytest.mark.parametrize("method", ["publish", "lookup"])
def test_a_lost_learner_fails_as_in_a_collective(monkeypatch, method):
  monkeypatch.setattr(jax, "local_devices", lambda index: jax.devices()[index : index + 1])
  rendezvous = mock.Mock(**{f"{method}.side_effect": RendezvousError("gone")})
  rendezvous.has_left.return_value = method == "lookup"
  reason = "gone" if method == "publish" else "process 0 has left the run"
  with pytest.raises(jax.errors.JaxRuntimeError, match=reason):
    member(rendezvous).all_gather(1)


def test_a_slow_learner_is_waited_for_until_it_leaves(monkeypatch):
  monkeypatch.setattr(jax, "local_devices", lambda index: jax.devices()[index : index + 1])
  late = RendezvousError("timed out")
  rendezvous = mock.Mock(**{"lookup.side_effect": [late, late, "5", "6", late, late]})
  rendezvous.has_left.side_effect = [False, False, True, False, False, True]
  membership = member(rendezvous)
  assert membership.all_gather(6) == [5, 6]  # published before it left
  with pytest.raises(jax.errors.JaxRuntimeError, match="process 0 has left the run"):
    membership.all_gather(6)
