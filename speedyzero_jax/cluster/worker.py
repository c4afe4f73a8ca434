"""What a process does that is one of several: meets the others, learns what it is, and is it until the run is over."""

import json
import secrets
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from speedyzero_jax.cluster.grpc_client import Client, Refused, Unreachable
from speedyzero_jax.cluster.grpc_server import MIN_TOKEN
from speedyzero_jax.cluster.rendezvous import Place, Rendezvous, RendezvousError
from speedyzero_jax.config import loader
from speedyzero_jax.config.schema import Config
from speedyzero_jax.replay.journal import JournalError
from speedyzero_jax.run import topology
from speedyzero_jax.run.run_dir import RunFolder
from speedyzero_jax.run.topology import Role, Topology
from speedyzero_jax.run.train import FAILED, Signals, train
from speedyzero_jax.workers.weights import DivergedError

_TOKEN = 32  # random bytes
_PATIENCE = 600.0  # seconds for which learners wait for each other to save


class Run(NamedTuple):
  """What process 0 tells all."""

  folder: str
  config: str  # YAML
  resume: bool
  token: str  # hexadecimal; empty: each process reads topology.token_file


def main(
  place: Place,
  open_folder: Callable[[Callable[[Config], None]], RunFolder],
  *,
  resume: bool,
  devices: Sequence[int] | None,
) -> int:
  """Runs this process' role. Returns the exit code.

  Args:
    place: of this process.
    open_folder: opens the run's folder; called by process 0 only, with what is to happen before devices are looked at.
    resume: the run has begun before; process 0's word counts.
    devices: ids of the accelerators to use; None for all.

  Raises:
    ConfigError, RunFolderError: the run is impossible.
  """
  signals = Signals()
  try:
    with Signals.at_once():
      rendezvous = Rendezvous(place, devices=devices)
      if place.process_id:
        rendezvous.share_devices(int(rendezvous.lookup("learners", _PATIENCE)))
        said = rendezvous.lookup("run", _PATIENCE)
    with signals:
      if place.process_id:
        return _run(Run(**json.loads(said)), rendezvous, signals)

      def meet(config: Config) -> None:
        learners = topology.resolve(config, place.num_processes).learners
        rendezvous.publish("learners", str(learners))
        with Signals.at_once():
          rendezvous.share_devices(learners)

      with open_folder(meet) as folder:
        token = "" if folder.config.topology.token_file else secrets.token_hex(_TOKEN)
        run = Run(str(folder.path.resolve()), loader.to_yaml(folder.config), resume, token)
        rendezvous.publish("run", json.dumps(run._asdict()))
        return _run(run, rendezvous, signals)
  except (RendezvousError, JournalError, Refused, Unreachable, DivergedError) as error:
    if signals.came():  # so it did to others, and who comes last finds nobody
      return signals.exit_code
    print(f"error: {error}", file=sys.stderr)
    return FAILED


def _token(config: Config) -> bytes:
  name = config.topology.token_file
  try:
    token = Path(name).read_bytes().strip()
  except OSError as error:
    raise loader.ConfigError(
      f"topology.token_file: can't read {name}: {error.strerror or error}"
    ) from error
  if len(token) < MIN_TOKEN:
    raise loader.ConfigError(
      f"topology.token_file: {name} must hold {MIN_TOKEN} bytes or more, got {len(token)}"
    )
  return token


def _run(run: Run, rendezvous: Rendezvous, signals: Signals) -> int:
  config = loader.from_yaml(run.config)
  shape = topology.resolve(config, rendezvous.place.num_processes)
  role = shape.role(rendezvous.place.process_id)
  if not run.token:
    run = run._replace(token=_token(config).hex())
  try:
    if role.kind == "learner":
      named = socket.gethostname() if config.topology.tls_certificate else rendezvous.address
      host = config.topology.host or named  # certificates are for names
      return _learn(config, run, shape, role, rendezvous, signals, host)
    return _serve(config, bytes.fromhex(run.token), shape, role, rendezvous)
  finally:
    rendezvous.leave()


def _learn(
  config: Config,
  run: Run,
  shape: Topology,
  role: Role,
  rendezvous: Rendezvous,
  signals: Signals,
  host: str,
) -> int:
  from speedyzero_jax.cluster import learner_process

  folder = Path(run.folder) / f"units/{role.unit}" if role.unit else Path(run.folder)
  folder.mkdir(parents=True, exist_ok=True)
  learners = range(shape.learners)
  if not role.unit:
    print(f"topology: {shape}", flush=True)
  with learner_process.part_of(config, folder, shape, role, rendezvous) as part:
    return train(
      config,
      folder,
      resume=run.resume,
      signals=signals,
      part=part,
      around=lambda training: learner_process.serving(
        training, shape, role, rendezvous, host=host, token=bytes.fromhex(run.token)
      ),
      saved=lambda: rendezvous.barrier("saved", _PATIENCE, learners),
    )


def _serve(
  config: Config, token: bytes, shape: Topology, role: Role, rendezvous: Rendezvous
) -> int:
  from speedyzero_jax.cluster import learner_process
  from speedyzero_jax.cluster.remote_actor import act
  from speedyzero_jax.cluster.remote_reanalyser import reanalyse
  from speedyzero_jax.run.builders import blueprint_of, enable_compilation_cache, game_of

  enable_compilation_cache(config)
  own = topology.unit_config(config, role.unit, shape.learners)
  form, blueprint = learner_process.form_of(config, own), blueprint_of(config, game_of(config))
  incarnation = rendezvous.count(f"incarnation/{role}")
  with Client(
    learner_process.address_of(role.unit, rendezvous),
    token,
    form,
    tls=learner_process.tls_of(config),
  ) as client:
    if role.kind == "actor":
      act(own, blueprint, client, role, incarnation)
    else:
      reanalyse(own, blueprint, client, form, role, incarnation)
  return 0
