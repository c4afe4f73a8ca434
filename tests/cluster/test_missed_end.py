"""Tests of serving helpers, and of those that miss the end of the run, and so have finished."""

import contextlib

import pytest

from fake_rendezvous import FakeRendezvous
from speedyzero_jax.cluster import process
from speedyzero_jax.cluster.grpc_client import Client, Unreachable
from speedyzero_jax.cluster.learner_process import serving
from speedyzero_jax.cluster.refresher_service import RefresherService
from speedyzero_jax.run.topology import Role, Topology

TOKEN, SHAPE = bytes(range(32)), Topology(learners=1, actors=1, refreshers=1)
LEARNER = Role("learner", 0, 0)


@pytest.fixture
def help_unit(make_unit, monkeypatch):
  """Runs a helper; the service has ended before it starts, or ends before its first call."""

  def run(kind, *, at_start, announced=True):
    unit, rendezvous = make_unit(), FakeRendezvous()
    learner = contextlib.ExitStack()
    learner.enter_context(serving(unit.experiment, SHAPE, LEARNER, rendezvous, TOKEN))

    def end():
      address = rendezvous.lookup("address/0", 0)
      learner.close()
      if not announced:
        rendezvous.publish("address/0", address)

    def client(*arguments, **options):
      if not at_start:
        end()
      return Client(*arguments, **options, patience=0.2)

    if at_start:
      end()
    monkeypatch.setattr(process, "make_agent", lambda _: unit.agent)
    monkeypatch.setattr(process, "enable_compilation_cache", lambda _: None)
    monkeypatch.setattr(process, "Client", client)
    return process._serve(unit.config, TOKEN, SHAPE, Role(kind, 0, 0), rendezvous)

  return run


@pytest.mark.parametrize("kind", ["actor", "refresher"])
@pytest.mark.parametrize("at_start", [True, False])
def test_a_helper_that_misses_the_end_has_finished(help_unit, kind, at_start):
  assert help_unit(kind, at_start=at_start) == 0


def test_a_helper_that_loses_its_learner_fails(help_unit):
  with pytest.raises(Unreachable):
    help_unit("actor", at_start=False, announced=False)


def test_refreshers_recompute_the_batches_of_the_learner(make_unit):
  unit = make_unit()
  with serving(unit.experiment, SHAPE, LEARNER, FakeRendezvous(), TOKEN):
    assert isinstance(unit.experiment.execute.__self__, RefresherService)
