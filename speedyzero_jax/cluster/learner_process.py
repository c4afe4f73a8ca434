"""A learner process among others: its part of the run, and the service that its actors and reanalysers use."""

import contextlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from speedyzero_jax.cluster import codec, messages
from speedyzero_jax.cluster.grpc_server import Tls, serve
from speedyzero_jax.cluster.heartbeats import Presence
from speedyzero_jax.cluster.learner_service import Hub
from speedyzero_jax.cluster.rendezvous import Rendezvous
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.journal import Journal
from speedyzero_jax.replay.replay import Replay
from speedyzero_jax.run.builders import blueprint_of, game_of, replay_capacity
from speedyzero_jax.run.experiment import WHOLE, Part, Training
from speedyzero_jax.run.topology import Role, Topology, lanes_of_actors, unit_config
from speedyzero_jax.workers.learner import make_mesh

_PATIENCE = 600.0  # seconds in which a unit's service should be there
# Seconds for which units wait for each other: one may have a long journal to read, wait for its actors, or evaluate. If
# it dies, they hear of it at once.
_LONG = 24 * 3600.0
_FAREWELL = (
  10.0  # seconds in which actors and reanalysers should finish a step and hear that the run is over
)


def form_of(config: Config, own: Config) -> codec.Form:
  """The sizes of a unit's messages; `own` is the unit's share of the configuration."""
  game = game_of(config)
  variables = jax.eval_shape(blueprint_of(config, game).init, jax.random.key(0))
  half = config.topology.weights_dtype == "bfloat16"

  def sent(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
      x.shape, jax.numpy.bfloat16 if half and x.dtype == jax.numpy.float32 else x.dtype
    )

  weights = {name: sent(leaf) for name, leaf in messages.named(variables).items()}
  size = sum(leaf.size * leaf.dtype.itemsize for leaf in weights.values())
  return codec.Form(
    lanes=own.actor.lanes,
    capacity=replay_capacity(own),
    actions=game.num_actions,
    frame_shape=game.frame_shape,
    frame_dtype=game.frame_dtype,
    weights=weights,
    max_bytes=max(64 << 20, size + (1 << 20)),
  )


def tls_of(config: Config) -> Tls | None:
  """TLS as configured."""
  part = config.topology
  return (
    Tls(Path(part.tls_certificate), Path(part.tls_key), Path(part.tls_authority))
    if part.tls_certificate
    else None
  )


def _journal(own: Config, folder: Path) -> Journal:
  game = game_of(own)
  return Journal(
    folder / "journal.sqlite", own.actor.lanes, game.frame_shape, game.frame_dtype, game.num_actions
  )


@contextlib.contextmanager
def whole(config: Config, folder: Path) -> Iterator[Part]:
  """All of a run, in one process. If it was several once, what they made durable is kept so. Raises JournalError."""
  if not (folder / "journal.sqlite").exists():
    yield WHOLE
    return
  with contextlib.closing(_journal(config, folder)) as journal:
    yield WHOLE._replace(journal=journal)


@contextlib.contextmanager
def part_of(
  config: Config, folder: Path, topology: Topology, role: Role, rendezvous: Rendezvous
) -> Iterator[Part]:
  """This learner's part of the run.

  Args:
    config: of the run.
    folder: where this unit keeps what is its own.
    topology: of the run.
    role: of this process.
    rendezvous: with the others.

  Raises JournalError.
  """
  own, game = unit_config(config, role.unit, topology.learners), game_of(config)
  devices = rendezvous.devices(range(topology.learners))
  per_process = config.learner.devices or len(jax.local_devices())
  chosen = [
    d
    for unit in range(topology.learners)
    for d in [x for x in devices if x.process_index == unit][:per_process]
  ]
  journal = _journal(own, folder)
  reanalysers = topology.serving("reanalyser", role.unit)
  shape = (own.actor.lanes, replay_capacity(own), *game.frame_shape)
  memory = None
  with contextlib.ExitStack() as stack:
    stack.callback(journal.close)
    if reanalysers:
      memory = stack.enter_context(_shared_memory(shape, game.frame_dtype))
    yield Part(
      unit=role.unit,
      units=topology.learners,
      mesh=make_mesh(chosen),
      acts=not topology.serving("actor", role.unit),
      reanalyses=not reanalysers,
      journal=journal,
      frame_memory=memory,
      agree=_agreement(rendezvous, role.unit, topology.learners),
      share=_sharing(rendezvous, role.unit),
      meet=_meetings(rendezvous, topology.learners),
    )


@contextlib.contextmanager
def _shared_memory(shape: tuple[int, ...], dtype: np.dtype) -> Iterator[np.ndarray]:
  """An array that other processes of this machine can map, `_welcome_to` says where; it goes when all have gone."""
  descriptor = os.memfd_create(
    f"speedyzero-{secrets.token_hex()}"
  )  # no other machine has one of this name
  try:
    os.ftruncate(descriptor, int(np.prod(shape)) * dtype.itemsize)
    yield np.memmap(f"/proc/self/fd/{descriptor}", dtype, "r+", shape=shape)
  finally:
    os.close(descriptor)


def _welcome_to(memory: np.ndarray | None) -> messages.ReanalyserWelcome:
  """Says where others find it."""
  filename = getattr(memory, "filename", None)
  if filename is None:
    return messages.ReanalyserWelcome("", "")
  return messages.ReanalyserWelcome(
    f"/proc/{os.getpid()}/fd/{Path(filename).name}", os.readlink(filename)
  )


def _agreement(rendezvous: Rendezvous, unit: int, units: int) -> Callable[[int], Sequence[int]]:
  rounds = 0

  def agree(number: int) -> list[int]:
    nonlocal rounds
    rounds += 1
    rendezvous.publish(f"agree/{rounds}/{unit}", str(number))
    return [int(rendezvous.lookup(f"agree/{rounds}/{other}", _LONG)) for other in range(units)]

  return agree


def _sharing(
  rendezvous: Rendezvous, unit: int
) -> Callable[[Mapping[str, float]], Sequence[Mapping[str, float]]]:
  def share(numbers: Mapping[str, float]) -> list[Mapping[str, float]]:
    with contextlib.suppress(
      jax.errors.JaxRuntimeError
    ):  # of somebody lost, whom the learner will miss itself
      rendezvous.publish(f"numbers/{unit}", json.dumps(dict(numbers)))
      if not unit:
        return [json.loads(said) for said in rendezvous.said("numbers").values()]
    return [numbers]

  return share


def _meetings(rendezvous: Rendezvous, units: int) -> Callable[[], None]:
  number = itertools.count()
  return lambda: rendezvous.barrier(f"meeting/{next(number)}", _LONG, range(units))


@contextlib.contextmanager
def serving(
  training: Training,
  topology: Topology,
  role: Role,
  rendezvous: Rendezvous,
  *,
  host: str,
  token: bytes,
) -> Iterator[None]:
  """Serves this unit's actors and reanalysers, and tells them where.

  Args:
    training: of this process.
    topology: of the run.
    role: of this process.
    rendezvous: with the others.
    host: address to listen on and to be reached by.
    token: secret of the run.
  """
  config = training.config
  actors, reanalysers = (topology.serving(kind, role.unit) for kind in ("actor", "reanalyser"))
  if not actors + reanalysers:
    yield
    return
  presence = Presence({"actor": actors, "reanalyser": reanalysers}, training.reporter.mean)
  training.reporter.watch(presence.summary)
  hub = Hub(
    replay=training.replay,
    pacer=training.pacer,
    weights=training.weights,
    collector=training,
    sweepers=training.sweepers if reanalysers else (),
    lanes=lanes_of_actors(training.own.actor.lanes, actors) if actors else (),
    reanalysers=reanalysers,
    block_timeout=config.topology.block_timeout,
    patient=config.topology.bound_age,
    welcome=_welcome_to(training.part.frame_memory),
    half_weights=config.topology.weights_dtype == "bfloat16",
    count=training.reporter.count,
    presence=presence,
  )
  if reanalysers and training.reanalyse is not None:

    def reanalyse(replay: Replay, lane: np.ndarray, time: np.ndarray) -> None:
      hub.reanalyse(training.batch_reanalyser.works(replay, lane, time))

    training.reanalyse = reanalyse
  form = form_of(config, training.own)
  address = f"[{host}]:0" if ":" in host else f"{host}:0"
  with serve(hub, address, token, form, clients=actors + reanalysers, tls=tls_of(config)) as server:
    rendezvous.publish(f"unit/{role.unit}", json.dumps({"address": server.address}))
    try:
      yield
    finally:
      hub.finish(_FAREWELL)


def address_of(unit: int, rendezvous: Rendezvous) -> str:
  """Where a unit is served, once it is."""
  return str(json.loads(rendezvous.lookup(f"unit/{unit}", _PATIENCE))["address"])
