"""A learner process: its membership in the run, and the service for its actors and refreshers."""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping

import jax

from speedyzero_jax.cluster.grpc_server import POLL_SECONDS, serve
from speedyzero_jax.cluster.learner_service import LearnerService
from speedyzero_jax.cluster.rendezvous import Rendezvous, RendezvousError
from speedyzero_jax.cluster.roster import Roster
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run.experiment import Experiment, Membership
from speedyzero_jax.run.topology import Role, Topology
from speedyzero_jax.workers.learner import make_mesh

# Seconds for which units wait for each other: another unit may be reading a long journal, waiting
# for its actors, or evaluating.
UNIT_TIMEOUT = 24 * 3600.0
_DISMISSAL_SECONDS = 10.0  # for helpers to finish a step and learn that the run is over


def membership_of(
  config: Config, topology: Topology, role: Role, rendezvous: Rendezvous
) -> Membership:
  """Returns the place of this learner process in the run."""
  unit, units, rounds = role.unit, topology.learners, itertools.count(1)

  def all_gather(number: int) -> list[int]:
    name = f"all_gather/{next(rounds)}"
    try:
      rendezvous.publish(f"{name}/{unit}", str(number))
      values = [rendezvous.lookup_of(i, f"{name}/{i}", UNIT_TIMEOUT) for i in range(units)]
      return [int(value) for value in values]
    except RendezvousError as error:  # a learner is lost, as if in a collective of jax
      raise jax.errors.JaxRuntimeError(str(error)) from error

  def exchange_metrics(values: Mapping[str, float]) -> list[Mapping[str, float]]:
    with contextlib.suppress(RendezvousError):  # the learner reports a lost process
      rendezvous.publish(f"metrics/{unit}", json.dumps(dict(values)))
      if not unit:
        return [json.loads(text) for text in rendezvous.published("metrics").values()]
    return [values]

  each = config.learner.devices or min(len(jax.local_devices(other)) for other in range(units))
  devices = [device for other in range(units) for device in jax.local_devices(other)[:each]]
  return Membership(
    unit=unit,
    units=units,
    mesh=make_mesh(devices),
    runs_actor=not topology.serving("actor", unit),
    runs_sweeps=not topology.serving("refresher", unit),
    durable=True,
    all_gather=all_gather,
    exchange_metrics=exchange_metrics,
  )


@contextlib.contextmanager
def serving(
  experiment: Experiment, topology: Topology, role: Role, rendezvous: Rendezvous, token: bytes
) -> Iterator[None]:
  """Serves this unit's actors and refreshers; publishes the address on entry, and "" on exit."""
  host = experiment.config.topology.host or rendezvous.address
  actors, refreshers = (topology.serving(kind, role.unit) for kind in ("actor", "refresher"))
  if not actors + refreshers:
    yield
    return
  roster = Roster({"actor": actors, "refresher": refreshers}, experiment.logger.log_mean)
  experiment.logger.add_source(roster.summary)
  service = LearnerService(experiment, roster)
  if refreshers:
    experiment.execute = service.execute
  with serve(
    service,
    f"[{host}]:0" if ":" in host else f"{host}:0",
    token,
    clients=actors + refreshers,
  ) as address:
    rendezvous.publish(f"address/{role.unit}", address)
    try:
      yield
    finally:
      # A signal that stops the learner may have ended its helpers already.
      ended = experiment.limiter.finished
      service.finish(_DISMISSAL_SECONDS if ended else 2 * POLL_SECONDS)
      with contextlib.suppress(RendezvousError):  # process 0 may be lost; save first
        rendezvous.publish(f"address/{role.unit}", "")  # before the service closes
