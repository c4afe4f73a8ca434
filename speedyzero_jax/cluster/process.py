"""Entry point of one of several processes: joins the run, resolves its role and runs it."""

import contextlib
import json
import os
import platform
import resource
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from speedyzero_jax.cluster.gradient_actor import send_gradients
from speedyzero_jax.cluster.grpc_client import Client, Refused, Unreachable
from speedyzero_jax.cluster.grpc_server import RunFinished
from speedyzero_jax.cluster.learner_process import UNIT_TIMEOUT, membership_of, serving
from speedyzero_jax.cluster.messages import Helper
from speedyzero_jax.cluster.remote import act, refresh, step_environments
from speedyzero_jax.cluster.rendezvous import Place, Rendezvous, RendezvousError
from speedyzero_jax.config import loader
from speedyzero_jax.config.fields import ConfigError
from speedyzero_jax.config.schema import Config
from speedyzero_jax.run import topology
from speedyzero_jax.run.factories import enable_compilation_cache, make_agent
from speedyzero_jax.run.run_dir import RunDir
from speedyzero_jax.run.signals import Signals
from speedyzero_jax.run.topology import Role, Topology, derived_seed
from speedyzero_jax.run.train import train
from speedyzero_jax.system.exit_codes import FAILED
from speedyzero_jax.workers.weights import DivergedError

_OPEN_FILES = 1 << 16
_TOKEN, _MIN_TOKEN = 32, 16  # bytes of a generated token; minimum of one read from a file
# Seconds for which a process waits for all others: on one machine, on a cluster that may be full.
_JOIN_TIMEOUT, _CLUSTER_JOIN_TIMEOUT = 300, 3600
_START_TIMEOUT = 600.0  # seconds for which processes wait for each other to start
_MOUNT_TIMEOUT = 120.0  # seconds for which network file systems may not show a new file
_LOOKUP_TIMEOUT = 10.0  # seconds for which a helper waits for a value that has been published


class Run(NamedTuple):
  """What process 0 publishes once it has opened the run folder, besides the configuration."""

  folder: str
  resume: bool
  token: str  # hexadecimal; if empty, each process reads topology.token_file


def main(
  place: Place,
  configure: Callable[[], Config],
  open_folder: Callable[[Config], RunDir],
  *,
  resume: bool,
  devices: Sequence[int] | None,
) -> int:
  """Runs this process' role. Returns the exit code.

  `configure` and then, once devices can be used, `open_folder` are called in process 0 only; they
  may raise ConfigError. The value of `resume` in process 0 counts. `devices` are the ids of the
  accelerators to use; None: all.
  """
  _set_limits()
  signals, timeout = Signals(), _JOIN_TIMEOUT if place.on_one_machine else _CLUSTER_JOIN_TIMEOUT
  try:
    with Signals.at_once():
      print(
        f"process {place.process_id} of {place.num_processes} waits up to {timeout} seconds "
        f"for the others at {place.coordinator}",
        flush=True,
      )
      rendezvous = Rendezvous(place, devices=devices, timeout=timeout)
      if place.process_id:
        config = loader.from_yaml(rendezvous.lookup("config", _START_TIMEOUT))
        shape = topology.resolve(config, place.num_processes)
        acts = shape.role(place.process_id).kind == "actor"
        only_steps = acts and config.topology.inference == "central"
        rendezvous.share_devices(shape.learners, cpu=only_steps)
        run = Run(*json.loads(rendezvous.lookup("run", _START_TIMEOUT)))
    with signals:
      if place.process_id:
        return _run(config, shape, run, rendezvous, signals)
      config = configure()
      shape = topology.resolve(config, place.num_processes)
      rendezvous.publish("config", loader.to_yaml(config))
      with Signals.at_once():
        rendezvous.share_devices(shape.learners)
      with open_folder(config) as folder:
        token = "" if config.topology.token_file else secrets.token_hex(_TOKEN)
        run = Run(str(folder.path.resolve()), resume, token)
        rendezvous.publish("run", json.dumps(run))
        return _run(config, shape, run, rendezvous, signals)
  except (RendezvousError, Refused, Unreachable, DivergedError) as error:
    if signals.received:  # other processes got it too, so losing contact with them is expected
      return signals.exit_code
    print(f"error: {error}", file=sys.stderr)
    return FAILED


def _set_limits() -> None:
  """Allows more open files, as a learner needs two for each actor, and no core dumps.

  Processes that lose another abort; a dump of the replay would delay their restart.
  """
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft != resource.RLIM_INFINITY:
    files = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, files), hard))
  resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _token(config: Config) -> bytes:
  name = config.topology.token_file
  try:
    token = Path(os.path.expanduser(name)).read_bytes().strip()
  except OSError as error:
    reason = error.strerror or error
    raise ConfigError(f"topology.token_file: can't read {name}: {reason}") from error
  if len(token) < _MIN_TOKEN:
    raise ConfigError(
      f"topology.token_file: {name} must hold {_MIN_TOKEN} bytes or more, got {len(token)}"
    )
  return token


def _run(
  config: Config, shape: Topology, run: Run, rendezvous: Rendezvous, signals: Signals
) -> int:
  role, code = shape.role(rendezvous.place.process_id), FAILED
  try:
    token = bytes.fromhex(run.token) or _token(config)
    if role.kind != "learner":
      with Signals.at_once():
        code = _serve(config, token, shape, role, rendezvous)
      return code
    folder = Path(run.folder)
    if role.unit:
      with Signals.at_once():
        _check_mounted(folder)
      folder /= f"units/{role.unit}"
    else:
      print(f"processes: {shape.counts}", flush=True)
    code = train(
      config,
      folder,
      resume=run.resume,
      signals=signals,
      membership=membership_of(config, shape, role, rendezvous),
      serving=lambda experiment: serving(experiment, shape, role, rendezvous, token),
    )
    return code
  finally:
    rendezvous.leave(failed=code == FAILED)


def _check_mounted(folder: Path) -> None:
  """Raises ConfigError unless this learner process sees what process 0 has stored there."""
  until = time.monotonic() + _MOUNT_TIMEOUT
  while True:
    try:
      (folder / "config.yaml").stat()
      return
    except OSError as error:
      if time.monotonic() > until:
        raise ConfigError(
          f"{folder} holds no run on {platform.node()} ({error.strerror}): all learners must mount "
          "the same run folder"
        ) from error
    time.sleep(1)


def _serve(
  config: Config, token: bytes, shape: Topology, role: Role, rendezvous: Rendezvous
) -> int:
  enable_compilation_cache(config)
  local_config = loader.divide(config, role.unit, shape.learners)
  agent = make_agent(local_config)
  incarnation = rendezvous.count(f"incarnation/{role}")
  name = f"address/{role.unit}"
  address = rendezvous.lookup(name, UNIT_TIMEOUT)  # the learner may read a long journal before
  if not address:
    return 0  # the run is over
  helper = Helper(role.kind, role.number, incarnation)
  try:
    with (
      contextlib.suppress(RunFinished),
      Client(address, token, helper) as client,
    ):
      if role.kind == "refresher":
        seed = derived_seed(config.run.seed, str(role), incarnation)
        refresh(local_config, agent, client, seed, shape.serving("refresher", role.unit))
      elif config.topology.gradients == "actors":
        send_gradients(local_config, agent, client)
      elif config.topology.inference == "central":
        step_environments(local_config, client)
      else:
        act(local_config, agent, client)
  except Unreachable:
    with contextlib.suppress(RendezvousError):
      if not rendezvous.lookup(name, _LOOKUP_TIMEOUT):
        return 0  # it ended while this process compiled or hung
    raise
  return 0
