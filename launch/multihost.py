"""Trains SpeedyZero: python launch/multihost.py --config PRESET [PRESET ...] [key=value ...]

One process does it all, unless --processes, a cluster (Slurm, Open MPI, Kubernetes, ...) or --coordinator says that it
is one of several.

Exit codes: 0 finished, 1 the run failed, 2 wrong use (an unknown key, a folder that can't be used),
130 or 143 stopped by Ctrl-C or SIGTERM, after saving what there was; go on with --resume RUN_DIR.
"""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from speedyzero_jax import config_io, runfolder
from speedyzero_jax.config import Config
from speedyzero_jax.config_io import ConfigError
from speedyzero_jax.runfolder import RunFolder, RunFolderError

WRONG_USE = 2
_KINDS = {"learner": "learners", "actor": "actors", "reanalyser": "reanalysers"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command line. Overrides may stand anywhere, also right after the presets."""
  parser = argparse.ArgumentParser(
    prog="launch/multihost.py",
    description="Trains SpeedyZero: collects, reanalyses, refreshes priorities, learns, evaluates.",
    epilog=config_io.help_text(),
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument(
    "--config", nargs="+", metavar="PRESET", default=[], help="presets from configs/, the later ones win"
  )
  parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with the run in this folder")
  parser.add_argument(
    "--processes",
    metavar="KIND=N,...",
    help="start and supervise so many on this machine, e.g. learner=1,actor=1,reanalyser=2",
  )
  parser.add_argument("--coordinator", metavar="HOST:PORT", help="be one of several: where process 0 listens")
  parser.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
  parser.add_argument("--process-id", type=int, metavar="I", help="which of them this is, from 0")
  parser.add_argument("--devices", metavar="I,...", help="the accelerators of this machine to use; all by default")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, listed below")
  arguments = parser.parse_args(argv)
  overrides = {*arguments.overrides, *(text for text in arguments.config if "=" in text)}
  arguments.overrides = [text for text in argv if text in overrides]  # the later ones win
  arguments.config = [text for text in arguments.config if "=" not in text]
  if arguments.resume is None and not arguments.config:
    parser.error("say what to train with --config PRESET, or what to go on with by --resume RUN_DIR")
  if arguments.resume is not None and arguments.config:
    parser.error("--resume takes its configuration from the run folder; leave --config out")
  given = [arguments.coordinator, arguments.num_processes, arguments.process_id]
  if any(x is not None for x in given) and (None in given or arguments.processes):
    parser.error("--coordinator, --num-processes and --process-id go together, and without --processes")
  if arguments.processes:
    arguments.overrides += counts(parser, arguments.processes)
  return arguments


def counts(parser: argparse.ArgumentParser, text: str) -> list[str]:
  """`learner=1,actor=2` as settings."""
  found = {}
  for part in text.split(","):
    kind, _, count = part.partition("=")
    if kind not in _KINDS or not count.isdecimal():
      parser.error(f"--processes: expected learner=N,actor=N,reanalyser=N, got {part!r}")
    found[kind] = int(count)
  if not found.get("learner"):
    parser.error("--processes: at least one learner is needed")
  return [f"topology.{_KINDS[kind]}={found.get(kind, 0)}" for kind in _KINDS]


def open_folder(arguments: argparse.Namespace) -> RunFolder:
  """The run folder to work in. Raises ConfigError or RunFolderError."""
  if arguments.resume is not None:
    if any(text.partition("=")[0].strip() == "run.dir" for text in arguments.overrides):
      raise ConfigError(f"run.dir: --resume says already that the folder is {arguments.resume}; leave run.dir out")
    folder = runfolder.open_existing(arguments.resume, arguments.overrides)
    try:
      check_possible(folder.config)
    except ConfigError:
      folder.close()
      raise
    return folder
  config = config_io.load(arguments.config, arguments.overrides)
  check_possible(config)
  preset = "+".join(Path(name).stem for name in arguments.config)
  return runfolder.create(config, f"{preset}-{config.env.game}-s{config.run.seed}")


def check_possible(config: Config) -> None:
  """Raises ConfigError for what only this machine can tell, so that it is known before anything is touched."""
  import jax

  from speedyzero_jax.envs import make_env

  here = len(jax.local_devices())
  if config.learner.devices > here:
    raise ConfigError(f"learner.devices: there are {here} here, got {config.learner.devices}")
  devices = config.learner.devices or here
  if config.learner.batch_size % devices:
    raise ConfigError(
      f"learner.batch_size: must be a multiple of the {devices} devices used, got {config.learner.batch_size}"
    )
  try:
    make_env(config.env, 1, config.run.seed, training=True).close()
  except ValueError as error:
    raise ConfigError(f"env: {error}") from error


def supervise(arguments: argparse.Namespace) -> int:
  """Starts all processes on this machine, and again those that die. Returns the exit code."""
  from speedyzero_jax import topology
  from speedyzero_jax.cluster.supervisor import Child, Supervisor

  config = runfolder.read_config(arguments.resume) if arguments.resume else config_io.load(arguments.config, [])
  config = config_io.override(config, arguments.overrides)
  shape = topology.resolve(config)
  with _folder_for_many(arguments) as folder:
    path = folder.path
  gpus = topology.deal_devices(shape, topology.local_gpus())

  def make(_: bool) -> list[Child]:
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{probe.getsockname()[1]}"
    children = []
    for process_id in range(shape.num_processes):
      role, dealt = shape.role(process_id), gpus[process_id]
      command = [sys.executable, __file__, "--resume", str(path), "--coordinator", address]
      command += ["--num-processes", str(shape.num_processes), "--process-id", str(process_id)]
      environment = {"JAX_COORDINATOR_BIND_ADDRESS": address}
      if dealt is not None:
        command += ["--devices", ",".join(map(str, dealt.ids))]
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{dealt.memory:.2f}"
      children.append(Child(str(role), command, environment, vital=role.kind == "learner"))
    return children

  return Supervisor(make, path / "logs", lambda text: print(text, flush=True)).run()


def _folder_for_many(arguments: argparse.Namespace) -> RunFolder:
  """As `open_folder`, without a look at this machine's devices: its processes will have them."""
  if arguments.resume is not None:
    return runfolder.open_existing(arguments.resume, arguments.overrides)
  config = config_io.load(arguments.config, arguments.overrides)
  preset = "+".join(Path(name).stem for name in arguments.config)
  return runfolder.create(config, f"{preset}-{config.env.game}-s{config.run.seed}")


def be_one(arguments: argparse.Namespace) -> int:
  """Runs this process' part of the run, which may be all of it. Returns the exit code."""
  from speedyzero_jax.cluster import process, rendezvous
  from speedyzero_jax.running import Signals, train

  place = rendezvous.detect()
  if arguments.coordinator is not None:
    place = rendezvous.Place(arguments.coordinator, arguments.num_processes, arguments.process_id)
  resume = arguments.resume is not None
  with Signals() as signals:
    if place is not None:
      devices = [int(x) for x in arguments.devices.split(",")] if arguments.devices else None
      return process.main(
        place,
        lambda: open_folder(arguments),
        resume=resume,
        signals=signals,
        loopback=place.coordinator.startswith("127."),
        devices=devices,
      )
    with open_folder(arguments) as folder:
      wanted = folder.config.topology
      if wanted.learners > 1 or wanted.actors or wanted.reanalysers:
        raise ConfigError("topology: asks for several processes; start them with --processes, or on a cluster")
      return train(folder.config, folder.path, resume=resume, signals=signals)


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit code."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's notes about its cache
  os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's about servers that stop
  logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
  arguments = parse(sys.argv[1:] if argv is None else argv)
  try:
    return supervise(arguments) if arguments.processes else be_one(arguments)
  except (ConfigError, RunFolderError) as error:
    print(f"error: {error}", file=sys.stderr)
    return WRONG_USE


if __name__ == "__main__":
  code = main()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)  # all is saved and closed; a library's thread must not keep a finished run from ending
